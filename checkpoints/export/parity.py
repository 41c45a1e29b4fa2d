"""Is what was written what was meant? The export is read back and its logits compared."""

from dataclasses import dataclass
from typing import Any

import torch

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


@torch.inference_mode()
def compare(written: Any, meant: Any, tensor_type: str, place: str) -> Parity:
    """Compare two models on the same 64 tokens.

    Raises:
        DraftsmithError: they differ by more than the tensor type explains.
    """
    generator = torch.Generator().manual_seed(0)
    length = min(_TOKENS, meant.config.max_position_embeddings)
    ids = torch.randint(meant.config.vocab_size, (1, length), generator=generator)
    a = written.float().cpu()(input_ids=ids).logits
    b = meant.float().cpu()(input_ids=ids).logits
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
