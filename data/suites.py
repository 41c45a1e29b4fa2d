"""Prompts from public suites: rows told by their fields, in files or on the hub.

The package ships nobody's data. A file is read as its authors published it, and a data set of the
hub is streamed; what a field of a row is for stands in `FORMATS`, or is said in the request.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from string import Formatter
from typing import Any
from urllib.parse import unquote

from draftsmith.data.corpus import is_unicode, lines_of, parquet_rows
from draftsmith.data.sound import sound_files
from draftsmith.errors import RequestError

_HUB = "hub:"
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_FIELD = re.compile(r"[^\[\]]+(\[\d+\])*")
# Above the test sets of the suites below, so that a seed mixes the whole of them: MMLU's rows
# are sorted by subject.
_SHUFFLED_ROWS = 20_000


@dataclass(frozen=True)
class Format:
    """What the fields of a suite's rows are for.

    Attributes:
        told_by: fields that tell its rows; with `[]`, those that hold a list.
        prompt: template of the user's turn, such as `{question}` or `{turns[0]}`; empty for a
            chat.
        plain: it is text to continue, never a user's turn.
        id: field of the row's name.
        domain: field of what kind of prompt it is.
        turns: field of the turns, of which only the first is used.
        sound: what `prompt` gives is the path of a file of sound.
    """

    told_by: tuple[str, ...]
    prompt: str
    plain: bool = False
    id: str = "id"
    domain: str = "domain"
    turns: str = ""
    sound: bool = False


_CHOICES = "".join(f"\n{letter}. {{choices[{i}]}}" for i, letter in enumerate("ABCD"))

# In order: the first that fits a row is meant.
FORMATS = (
    # A sound, whatever stands beside it: its text would give the answer away.
    Format(("audio",), "{audio}", sound=True),
    # A chat, which needs no template.
    Format(("messages",), ""),
    # MT-bench and Spec-Bench as files, and MT-bench as it is on the hub
    Format(("turns",), "{turns[0]}", id="question_id", domain="category", turns="turns"),
    Format(("prompt[]",), "{prompt[0]}", id="prompt_id", domain="category", turns="prompt"),
    # HumanEval
    Format(("task_id", "prompt"), "{prompt}", id="task_id"),
    Format(("prompt",), "{prompt}"),
    Format(("text",), "{text}", plain=True),
    # MMLU
    Format(("question", "choices[]"), "{question}" + _CHOICES + "\nAnswer:", domain="subject"),
    # HellaSwag
    Format(("ctx", "endings[]"), "{ctx}", id="ind"),
    # CNN/DailyMail
    Format(("article", "highlights"), "Summarize:\n{article}"),
    # XSum
    Format(("document", "summary"), "Summarize in one sentence:\n{document}"),
    # Pairs of sentences, of which a translator reads the first
    Format(("source", "target"), "{source}"),
    # GSM8K
    Format(("question", "answer"), "{question}"),
)


@dataclass(frozen=True)
class HubSet:
    """A data set of the hub, and what to take from it; the fields are the options of a spec.

    Attributes:
        dataset: its id.
        config: its configuration; None: the only one.
        split: which part.
        revision: commit, branch or tag; None: the newest.
        prompt: template of a user's turn; empty: the rows are told by their fields.
        text: template of plain text to continue, in place of `prompt`.
        id: field of a row's name.
        domain: field of what kind of prompt it is.
        seed: shuffles the rows; None: they come in the order of the data set.
        max_chars: longer prompts are left out.
        limit: take this many.
    """

    dataset: str
    config: str | None = None
    split: str = "test"
    revision: str | None = None
    prompt: str = ""
    text: str = ""
    id: str = ""
    domain: str = ""
    seed: int | None = None
    max_chars: int | None = None
    limit: int | None = None


READY = {
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", split="train"),
    "humaneval": HubSet("openai/openai_humaneval"),
    "gsm8k": HubSet("openai/gsm8k", "main"),
    "mmlu": HubSet("cais/mmlu", "all"),
    # The test split holds no label, and papers report on validation.
    "hellaswag": HubSet("Rowan/hellaswag", split="validation"),
    "cnn_dailymail": HubSet("abisee/cnn_dailymail", "3.0.0"),
    "xsum": HubSet("EdinburghNLP/xsum"),
}

_ANY = Format((), "")
_NOTHING = HubSet("")
_OPTIONS = tuple(f.name for f in fields(HubSet) if f.name != "dataset")
_NUMBERS = {"seed": 0, "max_chars": 1, "limit": 1}
_TEMPLATES = ("prompt", "text")


@dataclass(frozen=True)
class Row:
    """A prompt as it is written, before the target's tokenizer.

    Attributes:
        place: where it is, for errors.
        name: its id, or its number.
        domain: what kind of prompt it is.
        content: a user's turn, plain text, the messages of a chat, or a file of sound.
        plain: the text is to be continued, never a user's turn.
        more_turns: it has further turns, which are left out.
    """

    place: str
    name: str
    domain: str
    content: str | list[Any] | Path
    plain: bool = False
    more_turns: bool = False


def hub_set(spec: str) -> HubSet | None:
    """The data set of the hub that a spec names, or None if it names a file or a shipped suite.

    Args:
        spec: `NAME`, `hub:NAME` or `hub:OWNER/NAME`, then `?option=value&option=value`; a NAME
            of `READY` has its options already. `%26` stands for `&`, `%0A` for a new line.

    Raises:
        RequestError: an option is unknown, is given twice, or has a value that cannot be.
    """
    name, _, options = spec.removeprefix(_HUB).partition("?")
    if not spec.startswith(_HUB) and name not in READY:
        return None
    if not _ID.fullmatch(name):
        raise RequestError(
            f"prompts {spec}: {name!r} is no id of a data set; write hub:OWNER/NAME?option=value, "
            f"or one of {', '.join(READY)}"
        )
    changes = _options(spec, options)
    _check_mapping(spec, changes)
    return replace(READY.get(name, HubSet(name)), **changes)


def hub_rows(hub: HubSet) -> Iterator[Row]:
    """Stream the rows of a data set of the hub, `limit` at most.

    Raises:
        RequestError: the hub does not give the data set, or a row cannot be used.
    """
    label = next((n for n, ready in READY.items() if ready.dataset == hub.dataset), hub.dataset)
    taken = 0
    for number, found in enumerate(_stream(hub), start=1):
        row = _read(found, f"{_HUB}{hub.dataset}: row {number}", number, label, hub)
        if hub.max_chars is not None and _length(row.content) > hub.max_chars:
            continue
        yield row
        taken += 1
        if taken == hub.limit:
            return


def file_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a file: JSONL (plain, .gz, .zst) or parquet; or a folder of sounds.

    Raises:
        RequestError: a row cannot be used, naming its line; or the file is damaged. Unlike those
            of a corpus, rows are never left out: figures would be of other prompts than asked.
    """
    if path.is_dir():
        yield from _sounds(path)
        return
    domain = Path(path.name.removesuffix(".gz").removesuffix(".zst")).stem
    counts: Counter[str] = Counter()
    rows = _parquet(path, counts) if path.name.endswith(".parquet") else _jsonl(path, counts)
    for number, row in rows:
        yield _read(row, f"{path}:{number}", number, domain, folder=path.parent)
    if counts:
        raise RequestError(_damaged(path, counts))


def named_sounds(path: Path) -> list[Path]:
    """The files of sound that the rows of a JSONL name, as far as they exist; none for texts."""
    if path.is_dir() or path.name.endswith(".parquet"):
        return []
    # All rows of a file are for one target; of texts no more than the first is looked at.
    named = takewhile(
        lambda content: isinstance(content, Path), (r.content for r in file_rows(path))
    )
    return [content for content in named if isinstance(content, Path) and content.is_file()]


def _sounds(folder: Path) -> Iterator[Row]:
    for path in sound_files(folder):
        name = path.relative_to(folder).with_suffix("").as_posix()
        yield Row(place=str(path), name=name, domain=folder.name, content=path)


def _options(spec: str, options: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for option in options.split("&") if options else ():
        key, _, value = option.partition("=")
        if key not in _OPTIONS:
            raise RequestError(
                f"prompts {spec}: there is no option {key!r}; there are {', '.join(_OPTIONS)} "
                "(inside a value, write & as %26)"
            )
        if key in found:
            raise RequestError(f"prompts {spec}: {key} is given twice; leave one out")
        if not value:
            raise RequestError(f"prompts {spec}: {key} has no value; write {key}=… or leave it out")
        value = unquote(value)
        found[key] = _number(spec, key, value) if key in _NUMBERS else value
    return found


def _number(spec: str, key: str, value: str) -> int:
    least = _NUMBERS[key]
    if not (value.isascii() and value.isdigit() and int(value) >= least):
        raise RequestError(f"prompts {spec}: {key}={value}: give a whole number from {least} up")
    return int(value)


def _check_mapping(spec: str, changes: dict[str, Any]) -> None:
    for key in _TEMPLATES:
        if key in changes:
            _check_template(spec, key, changes[key])
    if all(key in changes for key in _TEMPLATES):
        raise RequestError(f"prompts {spec}: prompt and text exclude each other; leave one out")
    for key in ("id", "domain"):
        if key in changes and ("{" in changes[key] or not _FIELD.fullmatch(changes[key])):
            raise RequestError(
                f"prompts {spec}: {key}={changes[key]}: give the name of one field, without braces"
            )


def _check_template(spec: str, key: str, template: str) -> None:
    cure = "write fields of a row as {question} or {choices[0]}, and braces of the text as {{ }}"
    try:
        parsed = [part[1:] for part in Formatter().parse(template) if part[1] is not None]
    except ValueError as error:
        raise RequestError(f"prompts {spec}: {key}={template}: {error}; {cure}") from None
    if not parsed:
        raise RequestError(f"prompts {spec}: {key}={template}: it names no field; {cure}")
    for name, form, conversion in parsed:
        if form or conversion or not _FIELD.fullmatch(str(name)):
            raise RequestError(
                f"prompts {spec}: {key}={template}: {{{name}}} is no plain field; {cure}"
            )


def _stream(hub: HubSet) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    try:
        rows = load_dataset(
            hub.dataset, hub.config, split=hub.split, revision=hub.revision, streaming=True
        )
        if hub.seed is not None:
            rows = rows.shuffle(seed=hub.seed, buffer_size=_SHUFFLED_ROWS)
        yield from rows
    except Exception as error:
        # A wrong name, a config that is missing, a login that is needed, a broken line or file:
        # the libraries below raise errors of no common kind.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(
            f"prompts {_HUB}{hub.dataset} (config {hub.config or 'none'}, split {hub.split}): the "
            f"hub did not give it ({reason}); check name, config=, split= and network, for a data "
            "set with a loading script try revision=refs/convert/parquet, or download its file "
            "and give the path of that"
        ) from error


def _parquet(path: Path, counts: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    return enumerate(parquet_rows(path, counts), start=1)


def _jsonl(path: Path, counts: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines_of(path, counts), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            # The last line of a file that was cut off is not the line to mend.
            if counts:
                raise RequestError(_damaged(path, counts)) from None
            raise RequestError(
                f"{path}:{number}: not JSON ({getattr(error, 'msg', error)}); a file of prompts "
                "has one object a line: mend the line or take it out"
            ) from None
        if not isinstance(row, dict):
            raise RequestError(
                f"{path}:{number}: a JSON {type(row).__name__}, not an object; a file of prompts "
                "has one object a line"
            )
        yield number, row


def _damaged(path: Path, counts: Counter[str]) -> str:
    how = "cut off" if counts["truncated_files"] else "damaged"
    return f"{path}: the file is {how}; get it anew"


def _read(
    row: dict[str, Any],
    place: str,
    number: int,
    domain: str,
    asked: HubSet = _NOTHING,
    folder: Path = Path(),
) -> Row:
    """A row by what was asked of it, and for the rest by its format; sounds start at `folder`."""
    form = next((f for f in FORMATS if _fits(f, row)), None)
    if template := asked.prompt or asked.text:
        form = replace(form or _ANY, prompt=template, plain=bool(asked.text), turns="", sound=False)
    try:
        if form is None:
            raise RequestError(
                "no prompt, text or messages, no audio, and of no known format "
                f"({_fields_of(row)}); name the field `prompt`, or for a set of the hub give "
                "prompt={field}"
            )
        return Row(
            place=place,
            name=_label(row, asked.id, "id", form.id) or str(number),
            domain=_label(row, asked.domain, "domain", form.domain) or domain,
            content=_content(row, form, folder),
            plain=form.plain,
            more_turns=bool(form.turns) and len(row[form.turns]) > 1,
        )
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from None


def _content(row: dict[str, Any], form: Format, folder: Path) -> str | list[Any] | Path:
    if not form.prompt:
        return _messages(row["messages"])
    text = _text(row, form)
    return folder / Path(text).expanduser() if form.sound else text


def _text(row: dict[str, Any], form: Format) -> str:
    parts = Formatter().parse(form.prompt)
    text = "".join(
        literal + ("" if field is None else _value(row, field)) for literal, field, _, _ in parts
    )
    if not text.strip():
        raise RequestError(f"{form.prompt} is empty; fill it in or take the row out")
    _check_unicode(text)
    return text


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list):
        raise RequestError(
            f"messages: {type(messages).__name__}, not a list of objects with role and content"
        )
    _check_unicode(json.dumps(messages, ensure_ascii=False, default=str))
    return messages


def _check_unicode(text: str) -> None:
    if not is_unicode(text):
        raise RequestError("half a surrogate pair, which no tokenizer takes; mend the text")


def _fits(form: Format, row: dict[str, Any]) -> bool:
    """Whether the row has the fields; a table's rows have all fields, the unused ones empty."""
    for field in form.told_by:
        value = row.get(field.removesuffix("[]"))
        if _missing(value) or (field.endswith("[]") and not isinstance(value, list)):
            return False
    return True


def _missing(value: Any) -> bool:
    """Null, an empty list, or the NaN that tables have where there is nothing."""
    return value is None or value == [] or (isinstance(value, float) and math.isnan(value))


def _label(row: dict[str, Any], asked: str, *usual: str) -> str | None:
    """The field that was asked for, which must be there, or the first usual one that is."""
    if asked:
        return _value(row, asked)
    found = (row[field] for field in usual if not _missing(row.get(field)))
    return next(map(str, found), None)


def _value(row: dict[str, Any], field: str) -> str:
    """A field as text: `question`, or `choices[0]` of a list.

    `str.format` would do it but for reaching into objects, and taking a letter of a text for
    an item of a list.
    """
    name, *indices = field.replace("]", "").split("[")
    value = row.get(name)
    for index in map(int, indices):
        value = value[index] if isinstance(value, list) and index < len(value) else None
    if _missing(value):
        raise RequestError(f"there is no {field} ({_fields_of(row)})")
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise RequestError(f"{field} is a {type(value).__name__}, not text")
    return str(value)


def _fields_of(row: dict[str, Any]) -> str:
    return f"the row's fields: {', '.join(row) or 'none'}"


def _length(content: str | list[Any] | Path) -> int:
    return len(content if isinstance(content, str) else json.dumps(content, default=str))
