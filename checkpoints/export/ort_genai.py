"""Folders for ONNX Runtime GenAI, which drafts with a model that the target's folder names."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from draftsmith.checkpoints.export.base import Candidate, Job, Report
from draftsmith.checkpoints.export.onnx import build, check_buildable, tolerance
from draftsmith.checkpoints.export.parity import check_parity, questions_for
from draftsmith.checkpoints.export.processes import ask, read_back
from draftsmith.checkpoints.export.serving import (
    check_length,
    check_same_rows,
    length_notes,
    serving,
)
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.data.files import new_folder
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings

_RUNTIME = "ort-genai"
# What ONNX Runtime GenAI takes as speculative.max_draft_tokens.
_MOST_DRAFTED = 16
_LAUNCH = f"""\
draftsmith export TARGET --target TARGET --to {_RUNTIME} --out TARGET-export
from draftsmith.checkpoints.export.ort_genai import join
join("TARGET-export/{_RUNTIME}", "{_RUNTIME}", "pair", lookahead={{lookahead}})
model = onnxruntime_genai.Model("pair")"""


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what the builder can't write, and pairs that the runtime doesn't load.

    Raises:
        RequestError: with the reason and the cure.
    """
    check_buildable(_RUNTIME, candidate, settings)
    if settings.lookahead > _MOST_DRAFTED:
        raise RequestError(
            f"export {_RUNTIME}: export.lookahead: {settings.lookahead} is more than the "
            f"{_MOST_DRAFTED} tokens that it drafts at most; set it to that or less"
        )
    # Sharing layers is for others; here one device runs all.
    pair = serving(_RUNTIME, candidate, replace(settings, tensor_parallel=1))
    check_same_rows(pair)
    check_length(pair)
    return tuple(length_notes(pair))


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Build the folder, have the runtime read it back, compare.

    Raises:
        DraftsmithError: the builder failed, or what it wrote computes something else.
    """
    final = folder / _RUNTIME
    with new_folder(final) as path:
        build(job, path, settings.precision)
        questions = questions_for(job.config, job.family)
        answers = read_back(_RUNTIME, path, questions)
        allowed, tokenizer = tolerance(settings.precision), load_tokenizer(job.target)
        parity = check_parity(answers, job.model, tokenizer, questions, allowed, str(final))
    return Report((_RUNTIME,), _LAUNCH.format(lookahead=settings.lookahead), parity)


def join(target: str | Path, drafter: str | Path, folder: str | Path, lookahead: int = 4) -> None:
    """Write a small folder from which ONNX Runtime GenAI loads a target with its drafter.

    Its `genai_config.json` is the target's with the drafter in it, and limits texts to what both
    can read; models are linked, not copied.

    Args:
        target: a folder that was exported to ort-genai.
        drafter: likewise.
        folder: is made, and must not exist.
        lookahead: tokens proposed in a round, 16 at most.

    Raises:
        RequestError: the runtime is not installed.
        DraftsmithError: a folder is no such export, or `folder` exists.
    """
    given = {"target": target, "drafter": drafter, "folder": folder}
    paths = {name: str(Path(path).resolve()) for name, path in given.items()}
    ask(_RUNTIME, "join", lookahead=lookahead, **paths)
