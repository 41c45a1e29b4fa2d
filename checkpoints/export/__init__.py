"""Drafters for the runtimes that serve them: one file a runtime, each reloaded and compared."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.loading import describe, load_config
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.data.files import storage, write_json
from draftsmith.data.progress import say
from draftsmith.recipes.schema import ExportSettings

if TYPE_CHECKING:
    from draftsmith.checkpoints.export.base import Candidate, Exporter, Job, Report

FILE = "export.json"
# Launched with the folder that `hf` writes.
_OF_HF = ("vllm", "sglang", "tensorrt-llm")
# Share of positions below which a drafter is told to be another one.
_SAME = 0.9


def exporter(runtime: str) -> "Exporter":
    """The module that writes for a runtime."""
    name = runtime.replace("-", "_")
    return cast("Exporter", importlib.import_module(f"draftsmith.checkpoints.export.{name}"))


def with_needed(to: Sequence[str]) -> tuple[str, ...]:
    """The runtimes, each after what it builds on."""
    first = ("hf",) if set(to).intersection(_OF_HF) else ()
    return tuple(dict.fromkeys((*first, *to)))


def preflight(candidate: "Candidate", settings: ExportSettings) -> list[str]:
    """Refuse a drafter that a runtime of the recipe can't serve; returns notes of all.

    Raises:
        RequestError: naming the runtime, the reason and the cure.
    """
    from draftsmith.checkpoints.export.vocabulary import cost_of, expanded_candidate

    notes = []
    for runtime in with_needed(settings.to):
        taken = candidate
        if _needs_all_tokens(runtime, candidate, settings):
            taken = expanded_candidate(candidate)
            notes.append(f"export {runtime}: {cost_of(candidate)}")
        found = exporter(runtime).preflight(taken, settings)
        notes += [f"export {runtime}: {note}" for note in found]
    return notes


def export_drafter(
    drafter: ModelRef,
    target: ModelRef,
    folder: Path,
    settings: ExportSettings,
    *,
    recipe: str | None = None,
    score: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write a drafter for runtimes and compare what was written; returns `export.json`'s content.

    Args:
        drafter: what is exported.
        target: the model that it drafts for; the same, to export a target.
        folder: of the export.
        settings: the recipe's `export`.
        recipe: its name, for the model card.
        score: content of the drafter's `score.json`, for the model card.

    Raises:
        RequestError: the tokenizers differ, or a runtime can't take the model.
        DraftsmithError: an export read back wrong.
    """
    job = _checked_job(drafter, target, settings)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    reports = _write_all(job, folder, settings, recipe, score)
    report: dict[str, Any] = {
        "drafter": drafter.spec,
        "target": target.spec,
        "shape": str(job.shape),
        "pair": {"verdict": job.pair.verdict, "notes": job.pair.notes},
        **{runtime: asdict(found) for runtime, found in reports.items()},
    }
    with storage(folder):
        write_json(folder / FILE, report)
    return report


def _needs_all_tokens(runtime: str, candidate: "Candidate", settings: ExportSettings) -> bool:
    """Whether a cut vocabulary is expanded; only the folder `hf` has the map, if none shares it."""
    keeps_map = runtime == "hf" and not set(settings.to).intersection(_OF_HF)
    return candidate.token_map is not None and not keeps_map


def _doubts(report: "Report") -> Iterator[str]:
    """What a coarse number format did to the drafter, though it is no more than it explains."""
    agreement = None if report.parity is None else report.parity.top1_agreement
    if agreement is not None and agreement < _SAME:
        yield (
            f"packed so coarsely, its likeliest token is the same at {agreement:.0%} of 64 "
            "positions of random text: fewer drafts will be accepted; score it in the runtime "
            "before you serve it"
        )


def _checked_job(drafter: ModelRef, target: ModelRef, settings: ExportSettings) -> "Job":
    """The drafter in memory, once the pair and all runtimes are known to take it."""
    import torch

    from draftsmith.checkpoints.export.base import Candidate, Job
    from draftsmith.checkpoints.loading import load_model

    pair = check_pair(target, drafter)
    config = load_config(drafter)
    family, shape = describe(config, drafter)
    token_map = TokenMap.read(drafter.folder, shape.vocab)
    candidate = Candidate(config, family, shape, target, token_map)
    for note in (*pair.notes, *preflight(candidate, settings)):
        say(f"note: {note}")
    # Exactly what was trained, whatever this machine computes best.
    model = load_model(drafter, device="cpu", dtype=torch.float32, target_ids=False)
    return Job(model.config, family, shape, target, token_map, model=model, pair=pair)


def _write_all(
    job: "Job",
    folder: Path,
    settings: ExportSettings,
    recipe: str | None,
    score: Mapping[str, Any] | None,
) -> "dict[str, Report]":
    """Write for each runtime, and model cards that tell how; returns their reports."""
    from draftsmith.checkpoints.export.card import Made, write_card
    from draftsmith.checkpoints.export.vocabulary import cost_of, expanded_job

    whole, reports = None, {}
    for runtime in with_needed(settings.to):
        say(f"export {runtime}")
        write = exporter(runtime).export
        if _needs_all_tokens(runtime, job, settings):
            whole = whole or expanded_job(job)
            found = write(whole, folder, settings)
            found = replace(found, notes=(cost_of(job), *found.notes))
        else:
            found = write(job, folder, settings)
        for note in (doubts := tuple(_doubts(found))):
            say(f"note: export {runtime}: {note}")
        reports[runtime] = replace(found, notes=(*found.notes, *doubts))
    made = Made(recipe, score)
    write_card(folder, job, reports, made)
    if "hf" in reports:
        own = {name: found for name, found in reports.items() if name in ("hf", *_OF_HF)}
        write_card(folder / "hf", job, own, made)
    return reports
