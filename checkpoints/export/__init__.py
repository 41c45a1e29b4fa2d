"""Drafters for the runtimes that serve them: one file a runtime, each reloaded and compared."""

import importlib
from collections.abc import Sequence
from dataclasses import asdict
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
    from draftsmith.checkpoints.export.base import Candidate, Exporter

FILE = "export.json"
# Launched with the folder that `hf` writes.
_OF_HF = ("vllm", "sglang", "tensorrt-llm")


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
    return [
        f"export {runtime}: {note}"
        for runtime in with_needed(settings.to)
        for note in exporter(runtime).preflight(candidate, settings)
    ]


def export_drafter(
    drafter: ModelRef, target: ModelRef, folder: Path, settings: ExportSettings
) -> dict[str, Any]:
    """Write a drafter for runtimes and compare what was written; returns `export.json`'s content.

    Args:
        drafter: what is exported.
        target: the model that it drafts for; the same, to export a target.
        folder: of the export.
        settings: the recipe's `export`.

    Raises:
        RequestError: the tokenizers differ, or a runtime can't take the model.
        DraftsmithError: an export read back wrong.
    """
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
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    job = Job(model.config, family, shape, target, token_map, model=model, pair=pair)
    report: dict[str, Any] = {
        "drafter": drafter.spec,
        "target": target.spec,
        "shape": str(shape),
        "pair": {"verdict": pair.verdict, "notes": pair.notes},
    }
    for runtime in with_needed(settings.to):
        say(f"export {runtime}")
        report[runtime] = asdict(exporter(runtime).export(job, folder, settings))
    with storage(folder):
        write_json(folder / FILE, report)
    return report
