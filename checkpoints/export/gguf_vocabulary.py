"""The vocabulary of a GGUF file: the target's, in the one of llama.cpp's two forms that it has.

Byte-level vocabularies are merged by rank after a split that llama.cpp knows by name;
sentencepiece's are merged by the score of what comes out, without a split.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.gguf_files import open_gguf
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.checkpoints.pair import check_tokenizer_rows
from draftsmith.errors import RequestError

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How text is split (see `_step`), and whether words of the vocabulary are left whole -> llama.cpp's
# name of the rule.
_PRE_TOKENIZERS = {
    (("words",), False): "gpt-2",
    (("digits", "words"), False): "smollm",
    ((_WORDS % r"\p{N}", "bytes"), False): "qwen2",
    ((_WORDS % r"\p{N}{1,3}", "bytes"), True): "llama-bpe",
    ((_WORDS % r"\p{N}{1,3}", "bytes"), False): "smaug-bpe",
    ((_CASES, "bytes"), True): "tekken",
}


def check_vocabulary(target: ModelRef, rows: int) -> None:
    """Refuse a target whose vocabulary llama.cpp would not read as its tokenizer does.

    Raises:
        RequestError: naming what there is no form for.
    """
    tokenizer = load_tokenizer(target)
    check_tokenizer_rows(tokenizer, rows, target.spec)
    if not target.gguf:
        _form(_backend(tokenizer), target)
        return
    tokens = len(open_gguf(target.path).fields["tokenizer.ggml.tokens"].data)
    if tokens != rows:
        raise RequestError(
            f"export gguf: {target.spec} lists {tokens} tokens, but the drafter has {rows} rows; "
            "llama.cpp needs as many; cut the drafter from the target itself"
        )


def write_vocabulary(writer: Any, target: ModelRef, rows: int) -> None:
    """Copy the vocabulary of a GGUF target field by field, or write that of a tokenizer."""
    if target.gguf:
        _copy(writer, target)
        return
    tokenizer = load_tokenizer(target)
    backend = _backend(tokenizer)
    rule, merges = _form(backend, target), _merges(backend["model"])
    strings = {i: s for s, i in tokenizer.get_vocab().items()}
    tokens = [strings.get(i, f"[PAD{i}]") for i in range(rows)]
    if rule is None:
        _write_scored(writer, tokens, _scores(merges), backend)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(_types(tokens, set(strings), backend, tokenizer.unk_token_id))
    _write_special_tokens(writer, tokenizer)


def comparable(target: ModelRef, strings: Sequence[str]) -> tuple[str, ...]:
    """The strings that llama.cpp and transformers split alike, if the vocabulary was written well.

    llama.cpp does not normalise Unicode, and it puts a space before every text of sentencepiece,
    where transformers leaves it out before spaces and, mostly, after special tokens. None of a
    GGUF target's: transformers reads some of its rules otherwise than llama.cpp.
    """
    if target.gguf:
        return ()
    tokenizer = load_tokenizer(target)
    backend = _backend(tokenizer)
    if _is_scored(backend):
        special = [token["content"] for token in backend["added_tokens"]]
        return tuple(s for s in strings if s[:1] != " " and not any(t in s for t in special))
    # What does not come out as it went in was normalised, or the vocabulary can't write it.
    return tuple(s for s in strings if _back_and_forth(tokenizer, s) == s)


def _back_and_forth(tokenizer: Any, string: str) -> str:
    ids = tokenizer(string, add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _backend(tokenizer: Any) -> dict[str, Any]:
    backend: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return backend


def _form(backend: Mapping[str, Any], target: ModelRef) -> str | None:
    """llama.cpp's name of how text is split; None for sentencepiece, which has none.

    Raises:
        RequestError: it knows no such tokenizer.
    """
    model, steps = backend["model"], tuple(map(_step, _steps(backend)))
    if model["type"] == "BPE":
        if _is_scored(backend):
            _check_ranks(model, target)
            return None
        normalizer = (backend["normalizer"] or {}).get("type")
        rule = _PRE_TOKENIZERS.get((steps, bool(model.get("ignore_merges"))))
        if rule is not None and normalizer in (None, "NFC"):
            return rule
    raise RequestError(
        f"export gguf: {target.spec} has a {model['type']} tokenizer that splits text by "
        f"{' + '.join(steps) or 'nothing'}, for which llama.cpp's name isn't known here; give the "
        "target as .gguf file, or set export.to: [hf]"
    )


def _steps(backend: Mapping[str, Any]) -> list[dict[str, Any]]:
    pre = backend["pre_tokenizer"] or {}
    steps: list[dict[str, Any]] = pre.get("pretokenizers", [pre] if pre else [])
    return steps


def _step(step: Mapping[str, Any]) -> str:
    """A step before merging: an expression, or a word for those that have none."""
    kind: str = step["type"]
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", kind))
    if kind == "Digits" and step["individual_digits"]:
        return "digits"
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return "words" if step["use_regex"] else "bytes"
    return kind


def _is_scored(backend: Mapping[str, Any]) -> bool:
    """Whether it is sentencepiece's: bytes stand for what is unknown, spaces for themselves."""
    return bool(backend["model"].get("byte_fallback")) and (
        [step["type"] for step in _steps(backend)] == ["Metaspace"]
        and not _steps(backend)[0]["split"]
        and not backend["normalizer"]
    )


def _check_ranks(model: Mapping[str, Any], target: ModelRef) -> None:
    """Merging by the score of what comes out is merging by rank only where ranks allow it.

    All ways to a token must be known, and stand beside one another.
    """
    merges = _merges(model)
    made, known, vocab = ["".join(m) for m in merges], set(merges), model["vocab"]
    changes = sum(a != b for a, b in pairwise(made))
    ways = {(t[:i], t[i:]) for t in made for i in range(1, len(t))}
    missing = any(a in vocab and b in vocab for a, b in ways - known)
    if missing or changes >= len(set(made)):
        raise RequestError(
            f"export gguf: {target.spec} merges in an order that no scores of tokens give; give "
            "the target as .gguf file, or set export.to: [hf]"
        )


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Both sides of each; older files have them in one string."""
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    return [(left, right) for left, right in pairs]


def _scores(merges: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Token -> its score, the better the earlier it is merged."""
    scores: dict[str, float] = {}
    for merge in merges:
        scores.setdefault("".join(merge), -float(len(scores)))
    return scores


def _write_scored(
    writer: Any, tokens: Sequence[str], scores: Mapping[str, float], backend: Mapping[str, Any]
) -> None:
    import gguf

    writer.add_tokenizer_model(gguf.SentencePieceVocab.tokenizer_model)
    writer.add_tokenizer_pre("default")
    # What no merge makes must never be merged to.
    writer.add_token_scores([scores.get(token, -float(len(scores))) for token in tokens])
    writer.add_add_space_prefix(_steps(backend)[0]["prepend_scheme"] != "never")


def _types(
    tokens: Sequence[str], known: set[int], backend: Mapping[str, Any], unknown: int | None
) -> list[int]:
    from gguf import TokenType

    added = {t["id"]: t["special"] for t in backend["added_tokens"]}
    bytes_ = {f"<0x{b:02X}>" for b in range(256)} if _is_scored(backend) else set()
    types = []
    for i, token in enumerate(tokens):
        kind = TokenType.NORMAL
        if i not in known:
            kind = TokenType.UNUSED
        elif i == unknown and bytes_:
            kind = TokenType.UNKNOWN
        elif i in added:
            kind = TokenType.CONTROL if added[i] else TokenType.USER_DEFINED
        elif token in bytes_:
            kind = TokenType.BYTE
        types.append(kind)
    return types


def _copy(writer: Any, target: ModelRef) -> None:
    from gguf import GGUFValueType

    for key, field in open_gguf(target.path).fields.items():
        if not key.startswith("tokenizer."):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kind, sub_type)


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
