"""Models out: safetensors, the target's own tokenizer files, a config for readers of any age."""

import json
import shutil
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.loading import ModelRef, load_tokenizer, repair_generation_config
from draftsmith.data.files import storage, write_json
from draftsmith.errors import RequestError

# Copied byte for byte: a tokenizer that was loaded and saved again is no longer recognised by
# converters, or has grown a token (case A32).
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)


def save_model(model: Any, tokenizer_from: ModelRef, folder: Path) -> None:
    """Write a strictly loadable HF folder.

    Args:
        model: a transformers model; tied weights are stored once (case A18).
        tokenizer_from: the model whose tokenizer it shares; its files are copied unchanged.
        folder: an existing folder; stages give a `.partial` one and rename it when all is done.
    """
    repair_generation_config(model)
    with storage(folder):
        model.save_pretrained(folder)
        _write_rope_for_all_ages(folder / "config.json")
        save_tokenizer(tokenizer_from, folder)


def save_tokenizer(ref: ModelRef, folder: Path) -> None:
    """Copy the tokenizer files of a model; from a GGUF they are written anew."""
    if ref.gguf:
        load_tokenizer(ref).save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:
        if (ref.folder / name).is_file():
            shutil.copyfile(ref.folder / name, folder / name)


def check_tokenizer_rows(tokenizer: Any, vocab: int, place: str) -> None:
    """Refuse a tokenizer that knows ids for which the model has no row (case A32).

    Raises:
        RequestError: naming the first such id.
    """
    strings = {i: s for s, i in tokenizer.get_vocab().items()}
    if extra := sorted(i for i in strings if i >= vocab):
        raise RequestError(
            f"{place}: the tokenizer has {len(strings)} tokens, but the model only {vocab} rows; "
            f"id {extra[0]} ({strings[extra[0]]!r}) has none: use the target's own tokenizer files"
        )


def _write_rope_for_all_ages(config_file: Path) -> None:
    """State the rotary base in the old keys too: readers before `rope_parameters` use a default."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return
    config["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    write_json(config_file, config)
