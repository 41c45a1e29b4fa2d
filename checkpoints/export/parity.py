"""Is what was written what was meant? The export is read back and its logits compared."""

from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import shape_of
from draftsmith.errors import DraftsmithError

# Largest difference of logits, relative to their scale, that a tensor type explains.
TOLERANCE = {"F32": 1e-5, "F16": 2e-2, "Q8_0": 0.2}
_TOKENS = 64


@dataclass(frozen=True)
class Parity:
    """Result of the comparison.

    Attributes:
        max_difference: largest difference of logits.
        scale: largest logit.
        top1_agreement: share of positions with the same arg max.
        tolerance: largest allowed difference, relative to `scale`.
    """

    max_difference: float
    scale: float
    top1_agreement: float
    tolerance: float


def example_inputs(config: Any, family: Family, tokens: int) -> dict[str, Any]:
    """Random inputs of one text, always the same: ids [1, T], and what an encoder reads."""
    generator = torch.Generator().manual_seed(0)
    length = min(tokens, context_of(config, family) or tokens)
    ids = torch.randint(shape_of(config, family).vocab, (1, length), generator=generator)
    if not family.has_encoder:
        return {"input_ids": ids}
    if family.config.mel_bins is None:
        source = torch.randint(config.vocab_size, (1, length), generator=generator)
        return {"input_ids": source, "decoder_input_ids": ids}
    bands = getattr(config, family.config.mel_bins)
    frames = 2 * getattr(config, family.config.frames)
    features = torch.randn(1, bands, frames, generator=generator)
    return {"input_features": features, "decoder_input_ids": ids}


@torch.inference_mode()
def compare(written: Any, meant: Any, tensor_type: str, place: str) -> Parity:
    """Compare two models on the same 64 tokens.

    Raises:
        DraftsmithError: they differ by more than the tensor type explains.
    """
    family = family_of(meant.config.model_type, place)
    inputs = example_inputs(meant.config, family, _TOKENS)
    a = written.float().cpu()(**inputs).logits
    b = meant.float().cpu()(**inputs).logits
    parity = Parity(
        max_difference=float((a - b).abs().max()),
        scale=float(b.abs().max()),
        top1_agreement=float((a.argmax(-1) == b.argmax(-1)).float().mean()),
        tolerance=TOLERANCE[tensor_type],
    )
    if not parity.max_difference <= parity.tolerance * parity.scale:
        raise DraftsmithError(
            f"{place}: read back, its logits differ by {parity.max_difference:.3g} "
            f"(largest logit {parity.scale:.3g}); the export is wrong and was not kept"
        )
    return parity
