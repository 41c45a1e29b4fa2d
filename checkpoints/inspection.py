"""What a checkpoint holds, from its config and headers alone: nothing is loaded."""

from collections import Counter
from dataclasses import asdict
from math import prod
from typing import Any

from draftsmith.checkpoints import checksums
from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.formats import ModelRef, stored_tensors, weight_files
from draftsmith.checkpoints.gguf_files import open_gguf
from draftsmith.checkpoints.layout import cache_bytes, layout_of, parameters_per_axis
from draftsmith.checkpoints.loading import check_files, describe, load_config
from draftsmith.checkpoints.pair import (
    PairCheck,
    context_of,
    load_checked_tokenizer,
    tokenizer_rows,
)
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.token_map import TokenMap

# The length at which keys and values are counted, as in Yan et al. 2025.
CACHE_TOKENS = 1024


def inspect_checkpoint(ref: ModelRef) -> dict[str, Any]:
    """Everything worth knowing about a model before working with it, for JSON.

    Raises:
        RequestError: its files are damaged, or don't fit its config.
    """
    config = load_config(ref)
    family, shape = describe(config, ref)
    check_files(ref, config, family)
    checksums.verify_checksums(ref.folder)
    token_map = TokenMap.read(ref.folder, shape.vocab)
    rows = token_map.target_vocab if token_map else shape.vocab
    tokenizer = load_checked_tokenizer(ref, config, family, rows)
    layout = layout_of(config, family)
    context = context_of(config, family)
    tokens = min(CACHE_TOKENS, context or CACHE_TOKENS)
    return {
        "kind": "checkpoint",
        "path": ref.spec,
        "family": family.name,
        "encoder_decoder": family.has_encoder,
        "shape": asdict(shape),
        "tied_head": family.is_tied(config),
        "context": context,
        "parameters": layout.parameters(),
        "parameters_with_head": layout.parameters(count_head=f"{family.head}.weight"),
        "parameters_per_entry": parameters_per_axis(config, family),
        "cut_together": [list(tie) for tie in family.ties],
        "stored": _stored(ref),
        "checksums": (ref.folder / checksums.FILE).is_file() and not ref.gguf,
        "cache_tokens": tokens,
        "cache_bytes": cache_bytes(
            config, family, tokens, encoder_tokens=_encoder_tokens(config, family, tokens)
        ),
        "tokenizer": {
            "tokens": len(tokenizer),
            "padding_rows": tokenizer_rows(config, family, rows) - len(tokenizer),
            "bos": tokenizer.bos_token,
            "eos": tokenizer.eos_token,
            "chat_template": bool(tokenizer.chat_template),
        },
        "cut_from": None if token_map is None else token_map.target_vocab,
        "block_drafting": None if (block := Block.of(config)) is None else asdict(block),
        "notes": _notes(shape, family),
    }


def inspect_pair(pair: PairCheck) -> dict[str, Any]:
    """The verdict on a pair, for JSON."""
    return {
        "target": pair.target,
        "drafter": pair.drafter,
        "verdict": pair.verdict,
        "shared_tokens": pair.tokens,
        "target_rows": pair.target_rows,
        "drafter_rows": pair.drafter_rows,
        "target_context": pair.target_context,
        "drafter_context": pair.drafter_context,
        "notes": list(pair.notes),
    }


def _stored(ref: ModelRef) -> dict[str, Any]:
    """Format, files, bytes, and how many numbers are stored in each type."""
    types: Counter[str] = Counter()
    if ref.gguf:
        for tensor in open_gguf(ref.path).tensors:
            types[tensor.tensor_type.name] += int(tensor.n_elements)
        files = [ref.path]
    elif ref.pickle:
        files = sorted(ref.folder.glob("pytorch_model*.bin"))
    else:
        for stored in stored_tensors(ref):
            types[stored.dtype] += prod(stored.shape)
        files = weight_files(ref.folder)
    return {
        "format": "GGUF" if ref.gguf else "pickle" if ref.pickle else "safetensors",
        "files": [file.name for file in files],
        "bytes": sum(file.stat().st_size for file in files),
        "values_by_type": dict(types.most_common()),
    }


def _encoder_tokens(config: Any, family: Family, tokens: int) -> int:
    """Positions that an encoder gives: fixed where it hears, else as many as are decoded."""
    if not family.has_encoder:
        return 0
    if family.config.mel_bins is None:
        return tokens
    return int(getattr(config, family.config.frames))


def _notes(shape: Shape, family: Family) -> list[str]:
    notes = []
    if family.config.head_dim and shape.head_dim * shape.heads != shape.hidden:
        notes.append(
            f"{shape.heads} heads of {shape.head_dim} are not hidden {shape.hidden}: head_dim is "
            "in the config, and readers that derive it from hidden / heads can't load the model"
        )
    if family.cache_of_encoder and shape.layers > shape.encoder_layers:
        notes.append(
            f"{shape.layers} decoder layers, but {shape.encoder_layers} of the encoder: "
            "transformers' generate() makes a cache for the encoder's number and fails; give it a "
            "cache"
        )
    return notes
