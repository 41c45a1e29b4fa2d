"""An HF folder: transformers (`assistant_model`), vLLM and SGLang load it."""

from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.parity import Parity, compare
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.token_map import TokenMap


def export(model: Any, target: ModelRef, folder: Path, token_map: TokenMap | None = None) -> Parity:
    """Write `folder`, then load it as a user would and compare.

    Args:
        model: the drafter.
        target: whose tokenizer files are copied.
        folder: is made.
        token_map: of a drafter with a cut vocabulary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, target, folder, token_map)
    written = load_model(resolve(str(folder)), device="cpu", target_ids=False)
    return compare(written, model, "F32", str(folder))
