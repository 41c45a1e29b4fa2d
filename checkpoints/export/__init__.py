"""Drafters for the runtimes that serve them: one file a runtime, each reloaded and compared."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoints.loading import (
    ModelRef,
    describe,
    load_config,
    load_model,
    load_tokenizer,
)
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.saving import check_tokenizer_rows
from draftsmith.data.files import storage, write_json


def export_drafter(
    drafter: ModelRef, target: ModelRef, folder: Path, to: tuple[str, ...], gguf_type: str
) -> dict[str, Any]:
    """Write a drafter for runtimes and compare what was written; returns `export.json`'s content.

    Raises:
        RequestError: the tokenizers differ, or a format can't take the model.
        DraftsmithError: an export read back wrong.
    """
    from draftsmith.checkpoints.export import gguf, hf

    config = load_config(drafter)
    family, shape = describe(config, drafter)
    vocab = describe(load_config(target), target)[1].vocab
    tokenizer = load_tokenizer(target)
    check_pair(tokenizer, load_tokenizer(drafter), vocab, shape.vocab)
    check_tokenizer_rows(tokenizer, shape.vocab, drafter.spec)
    # Exactly what was trained, whatever this machine computes best.
    model = load_model(drafter, device="cpu", dtype=torch.float32)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"drafter": drafter.spec, "target": target.spec, "shape": str(shape)}
    if "hf" in to:
        report["hf"] = asdict(hf.export(model, target, folder / "hf"))
    if "gguf" in to:
        path = folder / f"drafter-{gguf_type}.gguf"
        report["gguf"] = asdict(gguf.export(model, family, target, path, gguf_type))
    write_json(folder / "export.json", report)
    return report
