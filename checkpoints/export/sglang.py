"""Arguments with which SGLang drafts by the HF folder: its standalone speculation.

SGLang 0.5. It can't be installed without a GPU, so that what is written here was not tried in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.base import HF, Candidate, Job, Report
from draftsmith.checkpoints.export.serving import (
    Serving,
    check_length,
    check_same_rows,
    length_notes,
    serving,
    target_notes,
    write_yaml,
)
from draftsmith.recipes.schema import ExportSettings

NAME = "sglang"
FILE = "sglang.yaml"
_LAUNCH = f"python -m sglang.launch_server --model-path TARGET --config {FILE}"
# Widths of a head that FlashInfer, the usual backend, has kernels for.
_FLASHINFER = (64, 128, 256)


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what SGLang refuses at start.

    Raises:
        RequestError: naming the rule and the cure.
    """
    return _notes(_checked(candidate, settings))


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the arguments beside the HF folder."""
    pair = _checked(job, settings)
    write_yaml(folder / FILE, _arguments(pair, settings))
    notes = (*_notes(pair), f"{FILE} was not tried: SGLang runs on GPUs only")
    return Report((FILE,), _LAUNCH, None, notes)


def _checked(candidate: Candidate, settings: ExportSettings) -> Serving:
    pair = serving(NAME, candidate, settings)
    check_same_rows(pair)
    # The drafter is given the target's context, and refused if its own is shorter.
    check_length(pair)
    return pair


def _notes(pair: Serving) -> list[str]:
    notes = [*target_notes(pair), *length_notes(pair)]
    if (width := pair.candidate.shape.head_dim) not in _FLASHINFER:
        notes.append(
            f"heads of {width}: FlashInfer has kernels for {', '.join(map(str, _FLASHINFER))} "
            "alone; start with --attention-backend triton"
        )
    return notes


def _arguments(pair: Serving, settings: ExportSettings) -> dict[str, Any]:
    """The arguments of `sglang.launch_server`, one draft after the other (no tree)."""
    arguments: dict[str, Any] = {
        "speculative-algorithm": "STANDALONE",
        "speculative-draft-model-path": HF,
        "speculative-num-steps": settings.lookahead,
        "speculative-eagle-topk": 1,
        # What is verified: the drafts, and the token that they follow.
        "speculative-num-draft-tokens": settings.lookahead + 1,
        "tensor-parallel-size": settings.tensor_parallel,
    }
    if pair.lengths:
        arguments["context-length"] = min(pair.lengths)
    return arguments
