"""Options with which TensorRT-LLM drafts by the HF folder: its draft–target decoding.

TensorRT-LLM 1.3 with its PyTorch backend. It can't be installed without a GPU, so that what is
written here was not tried in it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.base import HF, Candidate, Job, Report
from draftsmith.checkpoints.export.serving import (
    Serving,
    check_length,
    length_notes,
    serving,
    target_notes,
    write_yaml,
)
from draftsmith.recipes.schema import ExportSettings

NAME = "tensorrt-llm"
FILE = "tensorrt-llm.yaml"
# Older releases call the option --extra_llm_api_options.
_LAUNCH = f"trtllm-serve TARGET --config {FILE}"
# Widths of a head that its attention over the cache is compiled for; others end the process.
_HEAD_DIMS = (32, 48, 64, 80, 96, 104, 112, 128, 144, 160, 192, 224, 256)


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what TensorRT-LLM can't run.

    Raises:
        RequestError: naming the rule and the cure.
    """
    return _notes(_checked(candidate, settings))


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the options beside the HF folder."""
    pair = _checked(job, settings)
    write_yaml(folder / FILE, _options(pair, settings))
    notes = (*_notes(pair), f"{FILE} was not tried: TensorRT-LLM runs on GPUs only")
    return Report((FILE,), _LAUNCH, None, notes)


def _checked(candidate: Candidate, settings: ExportSettings) -> Serving:
    pair = serving(NAME, candidate, settings)
    check_length(pair)
    width = candidate.shape.head_dim
    if width not in _HEAD_DIMS:
        raise pair.refuse(
            f"heads of {width}: its attention takes {', '.join(map(str, _HEAD_DIMS))}; "
            "set export.to: [vllm]"
        )
    rows, known = candidate.shape.vocab, pair.target.vocab
    if rows > known:
        raise pair.refuse(
            f"the drafter's head has {rows} rows, the target's {known}: a drafted padding id would "
            "have no row in the target; cut the drafter from the target itself"
        )
    return pair


def _notes(pair: Serving) -> list[str]:
    return [*target_notes(pair), *length_notes(pair)]


def _options(pair: Serving, settings: ExportSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "backend": "pytorch",
        "tensor_parallel_size": settings.tensor_parallel,
        "speculative_config": {
            # DraftTarget in releases before 1.2.
            "decoding_type": "Draft_Target",
            "max_draft_len": settings.lookahead,
            "speculative_model": HF,
        },
        # The scheduler that overlaps steps does not wait for a draft model.
        "disable_overlap_scheduler": True,
    }
    if pair.lengths:
        options["max_seq_len"] = min(pair.lengths)
    return options
