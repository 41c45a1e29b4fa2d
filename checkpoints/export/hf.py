"""An HF folder: transformers (`assistant_model`), vLLM and SGLang load it."""

from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.parity import Parity, compare
from draftsmith.checkpoints.loading import ModelRef, load_model, resolve
from draftsmith.checkpoints.saving import save_model


def export(model: Any, target: ModelRef, folder: Path) -> Parity:
    """Write `folder`, then load it as a user would and compare.

    Args:
        model: the drafter.
        target: whose tokenizer files are copied.
        folder: is made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, target, folder)
    return compare(load_model(resolve(str(folder)), device="cpu"), model, "F32", str(folder))
