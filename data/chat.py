"""Prompts as token ids: exactly one BOS, the same in training, scoring and export (case A3)."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from draftsmith.data.corpus import is_unicode, read_rows
from draftsmith.errors import RequestError

# A text that no template would contain or change, to see what a template writes around it.
_MARK = "draftsmith-mark"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the target's tokens.

    Attributes:
        name: its id in the file, or its number.
        ids: token ids, at least one.
        domain: what kind of prompt it is, for figures by domain.
    """

    name: str
    ids: tuple[int, ...]
    domain: str = "all"


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of plain text: BOS where the tokenizer adds one, never twice, and no EOS at the end."""
    ids: list[int] = tokenizer(text)["input_ids"]
    if len(ids) > 1 and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    if (
        len(ids) > 1
        and ids[-1] == tokenizer.eos_token_id
        and not text.endswith(tokenizer.eos_token)
    ):
        ids = ids[:-1]
    return ids


def encode_chat(tokenizer: Any, messages: Sequence[dict[str, str]]) -> list[int]:
    """Ids of a chat up to where the assistant begins; special tokens are the template's alone.

    Raises:
        RequestError: the template does not take these messages.
    """
    try:
        text = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
    except (TemplateError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"the target's chat template does not take these messages ({error}); a message has "
            "role and content"
        ) from None
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def has_chat(tokenizer: Any) -> bool:
    """Whether the tokenizer carries a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


@dataclass(frozen=True)
class UserTurn:
    """What a chat template writes around the text of a first user turn.

    Attributes:
        opening: ids before the text.
        end: the id that ends the turn.
    """

    opening: tuple[int, ...]
    end: int


def user_turn(tokenizer: Any) -> UserTurn:
    """The surroundings of a user turn, so that an instruct target can write prompts itself.

    Raises:
        RequestError: no chat template, or one that puts nothing after the user's text.
    """
    if not has_chat(tokenizer):
        raise RequestError(
            "data.source: self: the target has no chat template, so it cannot write user turns; "
            "use data.source: corpus with data.path"
        )
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    before, mark, after = text.partition(_MARK)
    closing = tokenizer(after, add_special_tokens=False)["input_ids"] if mark else []
    if not closing:
        raise RequestError(
            "data.source: self: the target's chat template does not show where a user turn ends; "
            "use data.source: prompts or corpus with data.path"
        )
    opening = tokenizer(before, add_special_tokens=False)["input_ids"]
    return UserTurn(opening=tuple(opening), end=closing[0])


def suites() -> dict[str, Path]:
    """Names and files of the prompt suites that come with the package."""
    folder = Path(__file__).parent / "prompts"
    return {path.stem: path for path in sorted(folder.glob("*.jsonl"))}


def prompt_file(spec: str) -> Path:
    """The file of a prompt set, given its path or the name of a shipped suite."""
    path = suites().get(spec, Path(spec).expanduser())
    if not path.is_file():
        raise RequestError(
            f"prompts {spec}: no such file, nor a shipped suite ({', '.join(suites())})"
        )
    return path


def read_prompts(spec: str, tokenizer: Any, limit: int | None = None) -> list[Prompt]:
    """Read JSONL prompts as the target would see them.

    A row has `prompt` (one user turn where the target has a chat template, else plain text),
    `text` (always plain) or `messages` (a chat); `id` and `domain` are optional.

    Raises:
        RequestError: the file is missing, or has no usable row; or a chat without a template.
    """
    path = prompt_file(spec)
    counts: Counter[str] = Counter()
    prompts: list[Prompt] = []
    for number, row in read_rows(path, counts):
        try:
            ids = _row_ids(row, tokenizer)
        except RequestError as error:
            raise RequestError(f"{path}:{number}: {error}") from None
        if not ids:
            counts["no_prompt"] += 1
            continue
        name = str(row.get("id", number))
        prompts.append(Prompt(name, tuple(ids), str(row.get("domain", path.stem))))
        if len(prompts) == limit:
            break
    if not prompts:
        reasons = ", ".join(f"{reason}: {n}" for reason, n in counts.items()) or "it is empty"
        raise RequestError(
            f"prompts {path}: no usable row ({reasons}); a row has prompt, text or messages"
        )
    return prompts


def _row_ids(row: dict[str, Any], tokenizer: Any) -> list[int]:
    messages, prompt, text = row.get("messages"), row.get("prompt"), row.get("text")
    if not is_unicode(json.dumps([messages, prompt, text], ensure_ascii=False)):
        return []
    if isinstance(messages, list) and messages:
        if not has_chat(tokenizer):
            raise RequestError("messages need a chat template, and the target has none")
        return encode_chat(tokenizer, messages)
    if isinstance(prompt, str) and prompt.strip():
        if has_chat(tokenizer):
            return encode_chat(tokenizer, [{"role": "user", "content": prompt}])
        return encode_text(tokenizer, prompt)
    if isinstance(text, str) and text.strip():
        return encode_text(tokenizer, text)
    return []
