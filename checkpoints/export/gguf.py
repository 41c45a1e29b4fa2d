"""A GGUF file for llama.cpp, with the target's own vocabulary so that it takes the pair."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.checkpoints.export.base import Candidate, Job, Report
from draftsmith.checkpoints.export.parity import check_readable
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.gguf_files import gguf_names, open_gguf
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.loading import load_model, load_tokenizer
from draftsmith.checkpoints.pair import check_tokenizer_rows
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import write_file
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings

# llama.cpp splits text by a named rule before merging. These are the names of the rules of
# tokenizer.json that it knows, by their steps; a Split is told by its expression.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    ("ByteLevel",): "gpt-2",
    ("Digits", "ByteLevel"): "smollm",
    (_WORDS % r"\p{N}", "ByteLevel"): "qwen2",
    (_WORDS % r"\p{N}{1,3}", "ByteLevel"): "llama-bpe",
}

_LAUNCH = "llama-server -m TARGET.gguf -md {file} --spec-type draft-simple --draft-max {lookahead}"


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the file, then read it back and compare.

    Raises:
        DraftsmithError: shapes differ between layers, or the file reads back wrong.
    """
    kind = settings.gguf_type
    path = folder / f"drafter-{kind}.gguf"
    write(job, path, kind)
    written = resolve(str(path))
    # How text is split is asked of the runtime itself: transformers reads some rules otherwise.
    model = load_model(written, device="cpu")
    parity = check_readable(model, job.model, kind, str(path), (None, None))
    launch = _LAUNCH.format(file=path.name, lookahead=settings.lookahead)
    return Report((path.name,), launch, parity)


def write(job: Job, path: Path, tensor_type: str) -> None:
    """Write the file alone.

    Args:
        job: the drafter, and the target whose vocabulary is written.
        path: the file.
        tensor_type: of the matrices; norms stay F32.

    Raises:
        DraftsmithError: shapes differ between layers.
    """
    _check_uniform(job.model, job.family)
    write_file(
        path,
        lambda partial: _write(job.model, job.family, job.shape, job.target, partial, tensor_type),
    )


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what can't be written.

    Raises:
        RequestError: naming what has no GGUF form here, and what to do instead.
    """
    import gguf

    config, family, shape = candidate.config, candidate.family, candidate.shape
    target, tensor_type = candidate.target, settings.gguf_type
    if candidate.token_map is not None:
        raise RequestError(
            "export gguf: the drafter has a cut vocabulary, and llama.cpp needs the target's; "
            "export it to hf"
        )
    if family.gguf is None:
        raise RequestError(f"export gguf: family {family.name} has no GGUF architecture here")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        raise RequestError(
            f"export gguf: attention windows (here of {window} tokens) are not written; "
            "set export.to: [hf]"
        )
    if (kind := _rope(config).get("rope_type", "default")) not in ("default", "linear"):
        raise RequestError(
            f"export gguf: rotary scaling {kind!r} is not written yet; set export.to: [hf]"
        )
    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor_type]][0]
    for width in (shape.hidden, shape.ffn, shape.heads * shape.head_dim):
        if width % block:
            raise RequestError(
                f"export gguf: rows of {width} can't be packed as {tensor_type} in blocks of "
                f"{block}; set export.gguf_type: F16 or F32"
            )
    tokenizer = load_tokenizer(target)
    check_tokenizer_rows(tokenizer, shape.vocab, target.spec)
    if target.gguf:
        _check_copied_rows(target, shape.vocab)
    else:
        _bpe(tokenizer, target)
    return ()


def _check_uniform(model: Any, family: Family) -> None:
    """Compare every tensor with the shape that the config states (case A17)."""
    expected_shapes = layout_of(model.config, family).shapes
    for name, tensor in model.state_dict().items():
        expected = expected_shapes.get(name)
        if tuple(tensor.shape) != expected:
            raise DraftsmithError(
                f"export gguf: {name} is {tuple(tensor.shape)}, but the config says {expected}; "
                "GGUF needs the same shape in every layer"
            )


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _write(
    model: Any, family: Family, shape: Shape, target: ModelRef, path: Path, tensor_type: str
) -> None:
    import gguf

    assert family.gguf is not None
    writer = gguf.GGUFWriter(path, family.gguf.architecture)
    _write_config(writer, model.config, shape, tensor_type)
    _write_vocabulary(writer, target, shape.vocab)
    quantisation = gguf.GGMLQuantizationType[tensor_type]
    for name, array in _tensors(model, family, shape):
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else quantisation
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: Any, shape: Shape, tensor_type: str) -> None:
    import gguf

    rope = _rope(config)
    writer.add_name("draftsmith drafter")
    writer.add_file_type(int(gguf.LlamaFileType[_file_type(tensor_type)]))
    writer.add_block_count(shape.layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(shape.vocab)
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))


def _file_type(tensor_type: str) -> str:
    return {"F32": "ALL_F32", "F16": "MOSTLY_F16", "Q8_0": "MOSTLY_Q8_0"}[tensor_type]


def _tensors(model: Any, family: Family, shape: Shape) -> Iterator[tuple[str, NDArray[np.float32]]]:
    assert family.gguf is not None
    names = gguf_names(family, shape.layers)
    tied = bool(model.config.tie_word_embeddings)
    for name, tensor in model.state_dict().items():
        if tied and name == f"{family.head}.weight":
            continue
        if name not in names:
            raise DraftsmithError(f"export gguf: {name} has no GGUF name; set export.to: [hf]")
        array = tensor.detach().float().cpu().numpy()
        if family.gguf.interleaved and template_of(name)[0] in family.rotated:
            array = _interleave(array, shape.head_dim)
        yield names[name], np.ascontiguousarray(array)


def _interleave(array: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of each head from (first half, second half) to neighbouring rotary pairs."""
    heads = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)


def _write_vocabulary(writer: Any, target: ModelRef, vocab: int) -> None:
    """Copy the vocabulary of a GGUF target field by field, or write a byte-level BPE."""
    if target.gguf:
        _copy_vocabulary(writer, target)
    else:
        _write_bpe(writer, target, vocab)


def _check_copied_rows(target: ModelRef, vocab: int) -> None:
    tokens = len(open_gguf(target.path).fields["tokenizer.ggml.tokens"].data)
    if tokens != vocab:
        raise RequestError(
            f"export gguf: {target.spec} lists {tokens} tokens, but the drafter has {vocab} rows; "
            "llama.cpp needs as many; cut the drafter from the target itself"
        )


def _copy_vocabulary(writer: Any, target: ModelRef) -> None:
    from gguf import GGUFValueType

    for key, field in open_gguf(target.path).fields.items():
        if not key.startswith("tokenizer."):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type)


def _write_bpe(writer: Any, target: ModelRef, vocab: int) -> None:
    from gguf import TokenType

    tokenizer = load_tokenizer(target)
    backend, pre_tokenizer = _bpe(tokenizer, target)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    strings = {i: s for s, i in tokenizer.get_vocab().items()}
    special = {t["id"]: t["special"] for t in backend["added_tokens"]}
    tokens, types = [], []
    for i in range(vocab):
        tokens.append(strings.get(i, f"[PAD{i}]"))
        if i not in strings:
            types.append(TokenType.UNUSED)
        elif i in special:
            types.append(TokenType.CONTROL if special[i] else TokenType.USER_DEFINED)
        else:
            types.append(TokenType.NORMAL)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(
        [m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]]
    )
    _write_special_tokens(writer, tokenizer)


def _write_special_tokens(writer: Any, tokenizer: Any) -> None:
    for add, token_id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if token_id is not None:
            add(token_id)
    first = tokenizer("a")["input_ids"][:1]
    writer.add_add_bos_token(first == [tokenizer.bos_token_id])
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _bpe(tokenizer: Any, target: ModelRef) -> tuple[dict[str, Any], str]:
    """The tokenizer as JSON, and llama.cpp's name of how it splits text."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    pre = backend.get("pre_tokenizer") or {}
    steps = tuple(
        s["pattern"].get("Regex", "") if s["type"] == "Split" else s["type"]
        for s in pre.get("pretokenizers", [pre])
        if s
    )
    if backend["model"]["type"] != "BPE" or steps not in _PRE_TOKENIZERS:
        raise RequestError(
            f"export gguf: {target.spec} has a {backend['model']['type']} tokenizer that splits "
            f"text by {' + '.join(steps) or 'nothing'}, for which llama.cpp's name isn't known "
            "here; give the target as .gguf file, or set export.to: [hf]"
        )
    return backend, _PRE_TOKENIZERS[steps]
