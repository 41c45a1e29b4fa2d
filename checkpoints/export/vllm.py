"""The configuration with which vLLM drafts by the HF folder, and that folder read back by vLLM.

The rules are vLLM 0.32's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.base import HF, Candidate, Job, Report
from draftsmith.checkpoints.export.parity import TOLERANCE, Parity, check_parity, questions_for
from draftsmith.checkpoints.export.processes import is_installed, read_back
from draftsmith.checkpoints.export.serving import Serving, serving, target_notes, write_yaml
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.recipes.schema import ExportSettings

NAME = "vllm"
FILE = "vllm.yaml"
_LAUNCH = f"vllm serve TARGET --config {FILE}"
# Widths of a head that its attention on a CPU takes. On a GPU some kernel takes any.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what vLLM refuses at start.

    Raises:
        RequestError: naming the rule and the cure.
    """
    return _notes(_checked(candidate, settings))


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the configuration beside the HF folder; have that read back where vLLM is installed."""
    pair = _checked(job, settings)
    write_yaml(folder / FILE, _configuration(pair, settings))
    notes = _notes(pair)
    if not is_installed(NAME):
        notes.append(f"{FILE} was not tried: vLLM is not installed (make vllm)")
        return Report((FILE,), _LAUNCH, None, tuple(notes))
    return Report((FILE,), _LAUNCH, _parity(job, folder / HF), tuple(notes))


def _parity(job: Job, path: Path) -> Parity | None:
    """What vLLM reads; None where it may be there for a CPU, which does not take such heads."""
    if job.shape.head_dim not in _CPU_HEAD_DIMS:
        return None
    questions = questions_for(job.config, job.family)
    answers = read_back(NAME, path, questions)
    tokenizer = load_tokenizer(job.target)
    return check_parity(answers, job.model, tokenizer, questions, TOLERANCE["F32"], str(path))


def _checked(candidate: Candidate, settings: ExportSettings) -> Serving:
    pair = serving(NAME, candidate, settings)
    _check_windows(pair)
    return pair


def _check_windows(pair: Serving) -> None:
    """All layers of a drafter share one KV cache, so that they need the same window."""
    kinds = getattr(pair.candidate.config, "layer_types", None) or ()
    # Of a drafter that is yet to be cut, nobody knows which layers will be left.
    if len(kinds) == pair.candidate.shape.layers and len(set(kinds)) > 1:
        raise pair.refuse(
            f"the drafter's layers are {' and '.join(sorted(set(kinds)))}, and vLLM drafts with "
            "layers of one kind alone; keep layers of one kind, or set export.to: [hf]"
        )


def _notes(pair: Serving) -> list[str]:
    notes = [*target_notes(pair)]
    if pair.context and min(pair.lengths) == pair.context < (pair.target_context or 0):
        notes.append(
            f"the drafter knows {pair.context} positions, the target {pair.target_context}: past "
            "them vLLM goes on by the target alone, and counts zeros as drafts"
        )
    if pair.candidate.shape.vocab != pair.target.vocab:
        notes.append(
            f"the drafter's head has {pair.candidate.shape.vocab} rows, the target's "
            f"{pair.target.vocab}: vLLM maps one to the other by their tokenizers "
            "(use_heterogeneous_vocab)"
        )
    if (width := pair.candidate.shape.head_dim) not in _CPU_HEAD_DIMS:
        notes.append(
            f"heads of {width}: vLLM has no attention for them on CPUs, and on GPUs not its "
            "quickest; it was not asked to read the drafter back"
        )
    return notes


def _configuration(pair: Serving, settings: ExportSettings) -> dict[str, Any]:
    speculative = {
        "method": "draft_model",
        "model": HF,
        "num_speculative_tokens": settings.lookahead,
        # It must be the target's.
        "draft_tensor_parallel_size": settings.tensor_parallel,
    }
    if pair.candidate.shape.vocab != pair.target.vocab:
        speculative["use_heterogeneous_vocab"] = True
    configuration: dict[str, Any] = {
        "tensor-parallel-size": settings.tensor_parallel,
        "speculative-config": speculative,
    }
    if settings.max_length:
        configuration["max-model-len"] = settings.max_length
    return configuration
