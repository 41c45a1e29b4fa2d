"""Models out: safetensors, the target's own tokenizer files, a config for readers of any age."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.blocks import MODULE, Block, describe_block_drafting
from draftsmith.checkpoints.checksums import FILE as CHECKSUMS
from draftsmith.checkpoints.checksums import write_checksums
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.formats import UNFINISHED, ModelRef
from draftsmith.checkpoints.generation import repair_generation_config
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.checkpoints.token_map import FILE as TOKEN_MAP
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.data.files import storage, write_file, write_json

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
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "normalizer.json",
    "preprocessor_config.json",
    "processor_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
# Templates besides the one that is used by default.
_TEMPLATES = "additional_chat_templates"
_MODEL_FILES = ("config.json", "generation_config.json", "model*.safetensors*", f"{MODULE}.py")


def save_model(
    model: Any,
    tokenizer_from: ModelRef,
    folder: Path,
    token_map: TokenMap | None = None,
    about: Mapping[str, str] | None = None,
) -> None:
    """Write a strictly loadable HF folder, whole or marked as unfinished.

    Args:
        model: a transformers model; tied weights are stored once (case A18).
        tokenizer_from: the model whose tokenizer it shares; its files are copied unchanged.
        folder: an existing folder; stages give a `.partial` one and rename it when all is done.
        token_map: of a drafter with a cut vocabulary.
        about: metadata for the weights' files; transformers writes none of its user's, so they are
            then written twice.
    """
    # What needs torch is imported when there is a model: a finished run is recognised without.
    from draftsmith.checkpoints.tying import match_tied_flag

    family = family_of(model.config.model_type, str(folder))
    repair_generation_config(model)
    match_tied_flag(model, family)
    with storage(folder):
        mark = folder / UNFINISHED
        mark.touch()
        (folder / CHECKSUMS).unlink(missing_ok=True)
        if Block.of(model.config) is not None:
            describe_block_drafting(model, folder)
        with _saving_everything(model):
            model.save_pretrained(folder)
        if about:
            _describe_weights(folder, about)
        for path in folder.glob("model*.safetensors"):
            # safetensors lets nobody else read its files; a server may be another user.
            path.chmod((folder / "config.json").stat().st_mode)
        _write_config_for_all_ages(folder / "config.json", family.is_tied(model.config))
        save_tokenizer(tokenizer_from, folder)
        (folder / TOKEN_MAP).unlink(missing_ok=True)
        if token_map is not None:
            token_map.save(folder)
        written = {p.name for pattern in _MODEL_FILES for p in folder.glob(pattern)}
        extra = {name for name in (*TOKENIZER_FILES, TOKEN_MAP) if (folder / name).is_file()}
        write_checksums(folder, written | extra)
        mark.unlink()


def save_tokenizer(ref: ModelRef, folder: Path) -> None:
    """Copy the tokenizer files of a model; from a GGUF they are written anew."""
    if ref.gguf:
        load_tokenizer(ref).save_pretrained(folder)
        return
    for name in TOKENIZER_FILES:
        if (ref.folder / name).is_file():
            shutil.copyfile(ref.folder / name, folder / name)
    if (ref.folder / _TEMPLATES).is_dir():
        shutil.copytree(ref.folder / _TEMPLATES, folder / _TEMPLATES, dirs_exist_ok=True)


def _describe_weights(folder: Path, about: Mapping[str, str]) -> None:
    """Write the weights' files anew, with metadata beside what readers look for."""
    from safetensors.torch import load_file, save_file

    for path in folder.glob("model*.safetensors"):
        write_file(path, partial(save_file, load_file(path), metadata={"format": "pt", **about}))
        _sort_metadata(path)


def _sort_metadata(path: Path) -> None:
    """Put the keys of a file's metadata in order: safetensors draws one, and equal is to be equal.

    The header is JSON behind its length in eight bytes, padded with spaces; no byte moves.
    """
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


@contextmanager
def _saving_everything(model: Any) -> Iterator[None]:
    """Save position tables too that transformers would rebuild, since it does so by the width."""
    left_out = model._keys_to_ignore_on_save
    model._keys_to_ignore_on_save = set()
    try:
        yield
    finally:
        model._keys_to_ignore_on_save = left_out


def _write_config_for_all_ages(config_file: Path, tied: bool) -> None:
    """State in old keys too what readers would otherwise replace by a default.

    The rotary base stood at the top level before `rope_parameters`, with a second one for
    windowed layers where there are two kinds; older readers scale logits of a tied head only.
    """
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = tied
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict) and "rope_theta" in local:
        config["rope_local_base_freq"] = local["rope_theta"]
        rope = rope.get("full_attention") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    write_json(config_file, config)
