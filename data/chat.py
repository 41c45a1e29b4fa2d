"""Prompts as token ids: exactly one BOS, the same in training, scoring and export (case A3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from draftsmith.data.progress import say
from draftsmith.data.sound import SUFFIXES, Sound, read_sound, sound_files
from draftsmith.data.suites import READY, Row, file_rows, hub_rows, hub_set, named_sounds
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
        source: what the target's encoder reads, if it has one; `ids` is then what its decoder
            reads before it writes.
    """

    name: str
    ids: tuple[int, ...]
    domain: str = "all"
    source: tuple[int, ...] | Sound | None = None


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


def encode_source(tokenizer: Any, text: str) -> list[int]:
    """Ids for an encoder: with the EOS that its tokenizer adds, as it was trained.

    None where there is nothing to read: no text, or signs that the tokenizer drops.
    """
    ids: list[int] = tokenizer(text)["input_ids"] if text.strip() else []
    return ids if ids != tokenizer("")["input_ids"] else []


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
    """The file or folder of a prompt set, given its path or the name of a shipped suite.

    Raises:
        RequestError: there is no such thing; or the prompts come from the hub, so there is none.
    """
    if hub_set(spec) is not None:
        raise RequestError(f"prompts {spec}: a data set of the hub is no file; give a file's path")
    path = suites().get(spec, Path(spec).expanduser())
    if not path.is_file() and not sound_files(path):
        raise RequestError(
            f"prompts {spec}: no such file, nor a folder of sounds ({', '.join(SUFFIXES)}), nor a "
            f"shipped suite ({', '.join(suites())}), nor one that is read from the hub "
            f"({', '.join(READY)}, or hub:OWNER/NAME?option=value)"
        )
    return path


def prompt_inputs(spec: str) -> dict[str, Path]:
    """The files on which a prompt set depends, by its spec and the paths of the sounds it names.

    None for a set of the hub: its spec says all that is known of it without asking the hub, so a
    finished run is recognised offline. `revision=` pins what the spec means.

    Raises:
        RequestError: as for `prompt_file`, and for a bad spec of the hub.
    """
    if hub_set(spec) is not None:
        return {}
    path = prompt_file(spec)
    return {spec: path} | {str(sound): sound for sound in named_sounds(path)}


def read_prompts(
    spec: str,
    tokenizer: Any,
    limit: int | None = None,
    start: Sequence[int] | None = None,
    listener: Path | None = None,
) -> list[Prompt]:
    """Read prompts as the target would see them.

    A row of `prompt` (or of a format of `suites.FORMATS`) is one user turn where the target has a
    chat template, else plain text; `text` is always plain; `messages` are a chat.

    Args:
        spec: a file, a shipped suite, or a set of the hub as `suites.hub_set` takes it.
        tokenizer: the target's.
        limit: use the first prompts only.
        start: for an encoder–decoder, what its decoder reads before it writes; rows are then what
            its encoder reads, and none is a chat.
        listener: for one that hears, the folder of its feature extractor; every row is then the
            `audio` of a file, or a file of the folder that `spec` is.

    Raises:
        RequestError: there is no such set, it is empty, or a row cannot be used (naming its line).
    """
    hub = hub_set(spec)
    rows = hub_rows(hub) if hub is not None else file_rows(prompt_file(spec))
    used = list(islice(rows, limit))
    if not used:
        raise RequestError(
            f"prompts {spec}: no row was left; "
            + ("check split= and max_chars=" if hub else "the file is empty")
        )
    if cut := sum(row.more_turns for row in used):
        say(f"note: prompts {spec}: {cut} of {len(used)} rows have further turns, left out")
    if start is None:
        return [Prompt(row.name, _encoded(row, tokenizer), row.domain) for row in used]
    if listener is not None:
        return [Prompt(r.name, tuple(start), r.domain, _heard(r, listener)) for r in used]
    return [
        Prompt(row.name, tuple(start), row.domain, _encoded(row, tokenizer, encoder=True))
        for row in used
    ]


def _heard(row: Row, listener: Path) -> Sound:
    if not isinstance(row.content, Path):
        raise RequestError(
            f"{row.place}: a text, and the target hears sound; give `audio`, the path of a file "
            f"({', '.join(SUFFIXES)})"
        )
    try:
        return read_sound(row.content, listener)
    except RequestError as error:
        named = row.place != str(row.content)
        raise RequestError(f"{row.place}: {error}" if named else str(error)) from None


def _encoded(row: Row, tokenizer: Any, encoder: bool = False) -> tuple[int, ...]:
    content = row.content
    try:
        if isinstance(content, Path):
            raise RequestError("a sound, and the target reads text; give `prompt` without `audio`")
        if encoder:
            ids = _row_source(content, tokenizer)
        else:
            ids = _row_ids(content, row.plain, tokenizer)
    except RequestError as error:
        raise RequestError(f"{row.place}: {error}") from None
    if not ids:
        raise RequestError(f"{row.place}: the target's tokenizer makes no token of it; take it out")
    return tuple(ids)


def _row_source(content: str | list[Any], tokenizer: Any) -> list[int]:
    if not isinstance(content, str):
        raise RequestError("messages are for chats; an encoder reads one text, as `prompt`")
    return encode_source(tokenizer, content)


def _row_ids(content: str | list[Any], plain: bool, tokenizer: Any) -> list[int]:
    if not isinstance(content, str):
        if not has_chat(tokenizer):
            raise RequestError("messages need a chat template, and the target has none")
        return encode_chat(tokenizer, content)
    if has_chat(tokenizer) and not plain:
        return encode_chat(tokenizer, [{"role": "user", "content": content}])
    return encode_text(tokenizer, content)
