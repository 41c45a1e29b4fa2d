"""Drafters for the runtimes that serve them: one file a runtime, each reloaded and compared."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.loading import describe, load_config, load_model
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.data.files import storage, write_json
from draftsmith.data.progress import say
from draftsmith.errors import RequestError


def export_drafter(
    drafter: ModelRef, target: ModelRef, folder: Path, to: tuple[str, ...], gguf_type: str
) -> dict[str, Any]:
    """Write a drafter for runtimes and compare what was written; returns `export.json`'s content.

    Raises:
        RequestError: the tokenizers differ, or a format can't take the model.
        DraftsmithError: an export read back wrong.
    """
    from draftsmith.checkpoints.export import gguf, hf

    pair = check_pair(target, drafter)
    for note in pair.notes:
        say(f"note: {note}")
    config = load_config(drafter)
    family, shape = describe(config, drafter)
    token_map = TokenMap.read(drafter.folder, shape.vocab)
    if "gguf" in to:
        if token_map is not None:
            raise RequestError(
                f"export gguf: {drafter.spec} has a cut vocabulary, and llama.cpp needs the "
                "target's; export it to hf"
            )
        gguf.preflight(config, family, shape, target, gguf_type)
    # Exactly what was trained, whatever this machine computes best.
    model = load_model(drafter, device="cpu", dtype=torch.float32, target_ids=False)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "drafter": drafter.spec,
        "target": target.spec,
        "shape": str(shape),
        "pair": {"verdict": pair.verdict, "notes": pair.notes},
    }
    if "hf" in to:
        report["hf"] = asdict(hf.export(model, target, folder / "hf", token_map))
    if "gguf" in to:
        path = folder / f"drafter-{gguf_type}.gguf"
        report["gguf"] = asdict(gguf.export(model, family, target, path, gguf_type))
    write_json(folder / "export.json", report)
    return report
