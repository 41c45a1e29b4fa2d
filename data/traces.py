"""The store of target traces: what the target wrote, and how probable it found each token.

A store is a folder of safetensors shards and an index. A shard holds rows one after another:

    tokens          int32   [T]     prompt and answer of every row
    row_lengths     int32   [R]     tokens of each row
    prompt_lengths  int32   [R]     of which prompt
    sampled         uint8   [R]     1: the answer was sampled, 0: greedy
    logprobs        float32 [A]     log p of each answer token, under the warping it was drawn with
    top_ids         uint16 or int32 [A, n]   the target's n likeliest tokens at each answer position
    top_logprobs    float16 [A, n]  and their log-probabilities at temperature 1
    sources         int32   [S]     what the encoder of an encoder–decoder read, of every row
    sounds          int16   [S]     in place of `sources`: what an encoder heard, as samples
    source_lengths  int32   [R]     tokens or samples of each; left out without an encoder
    beams           uint16  [R]     beams by which the answer was searched, 1: none; left out if all
                                    are 1
    domains         uint16  [R]     what kind of prompt, as a number in the names that the shard's
                                    metadata hold (JSON under `domains`); left out if none has one

Beside shards with sounds lie the settings of the feature extractor through which they are heard.
"""

import hashlib
import json
import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.files import sha256, write_file, write_json
from draftsmith.data.sound import Sound
from draftsmith.errors import DraftsmithError, RequestError

FORMAT = "draftsmith-traces"
VERSION = 1
INDEX = "index.json"
Split = Literal["train", "validation"]


@dataclass(frozen=True)
class TraceRow:
    """One text of the target.

    Attributes:
        tokens: int32 [T], prompt and answer.
        prompt_length: tokens of the prompt; the answer has A = T - prompt_length.
        sampled: whether the answer was sampled.
        logprobs: float32 [A].
        top_ids: [A, n] ids, likeliest first.
        top_logprobs: float16 [A, n].
        domain: what kind of prompt it is; empty if that isn't known.
        source: int32 [S], what the target's encoder read, if it has one, or the sound that it
            heard; the prompt is then what its decoder began with.
        beams: by so many the answer was searched; 1: it was not.
    """

    tokens: NDArray[np.int32]
    prompt_length: int
    sampled: bool
    logprobs: NDArray[np.float32]
    top_ids: NDArray[Any]
    top_logprobs: NDArray[np.float16]
    domain: str = ""
    source: NDArray[np.int32] | Sound | None = None
    beams: int = 1

    @property
    def greedy(self) -> bool:
        """Whether each token of the answer is the target's likeliest, as replay needs it."""
        return not self.sampled and self.beams == 1

    @property
    def read(self) -> tuple[int, ...] | Sound | None:
        """What the target's encoder takes in: ids, or a sound."""
        if self.source is None or isinstance(self.source, Sound):
            return self.source
        return tuple(self.source.tolist())

    @property
    def answer(self) -> NDArray[np.int32]:
        """The tokens that the target wrote."""
        return self.tokens[self.prompt_length :]

    @property
    def content(self) -> NDArray[np.int32] | Sound:
        """By which it is held out: the source, which is known before it is answered; else all."""
        return self.tokens if self.source is None else self.source

    def is_empty(self, stop_ids: Container[int]) -> bool:
        """Whether the target ended at once."""
        return len(self.answer) == 1 and int(self.answer[0]) in stop_ids

    def is_cut(self, stop_ids: Container[int]) -> bool:
        """Whether the answer has no end."""
        return int(self.answer[-1]) not in stop_ids


def stored(read: tuple[int, ...] | Sound | None) -> NDArray[np.int32] | Sound | None:
    """What an encoder takes in, as a row keeps it: the other way of `TraceRow.read`."""
    return np.array(read, np.int32) if isinstance(read, tuple) else read


@dataclass(frozen=True)
class RowKey:
    """By what a text is known to have been written before.

    Attributes:
        answer_tokens: its length.
        digest: of prompt and answer if it was drawn; of the prompt and the number of beams else,
            since the answer follows from those but for numeric ties.
    """

    answer_tokens: int = field(compare=False)
    digest: bytes

    @classmethod
    def of(cls, row: TraceRow) -> "RowKey":
        """The key of a row."""
        text = row.tokens if row.sampled else row.tokens[: row.prompt_length]
        read = b"" if row.source is None else row.source.tobytes()
        kind = np.array([row.sampled, row.beams], np.uint16).tobytes()
        digest = hashlib.blake2b(kind + text.tobytes() + read, digest_size=16)
        return cls(len(row.answer), digest.digest())


@dataclass(frozen=True)
class Shard:
    """A line of the index."""

    file: str
    rows: int
    answer_tokens: int
    sha256: str


def id_dtype(vocabulary: int) -> type[np.integer[Any]]:
    """The smallest type that holds every id."""
    return np.uint16 if vocabulary <= 1 << 16 else np.int32


def domain_names(rows: Sequence[TraceRow]) -> list[str]:
    """The domains of `rows` in the order of their first rows."""
    return list(dict.fromkeys(row.domain for row in rows))


def pack_rows(rows: Sequence[TraceRow]) -> dict[str, NDArray[Any]]:
    """The arrays of a shard that holds `rows`; domains are numbers in `domain_names`."""
    arrays: dict[str, NDArray[Any]] = {
        "tokens": np.concatenate([r.tokens for r in rows]).astype(np.int32),
        "row_lengths": np.array([len(r.tokens) for r in rows], np.int32),
        "prompt_lengths": np.array([r.prompt_length for r in rows], np.int32),
        "sampled": np.array([r.sampled for r in rows], np.uint8),
        "logprobs": np.concatenate([r.logprobs for r in rows]).astype(np.float32),
        "top_ids": np.concatenate([r.top_ids for r in rows]),
        "top_logprobs": np.concatenate([r.top_logprobs for r in rows]).astype(np.float16),
    }
    sources = [r.source for r in rows if r.source is not None]
    if sources:
        arrays["source_lengths"] = np.array([len(s) for s in sources], np.int32)
        sounds = [s.samples for s in sources if isinstance(s, Sound)]
        read = [s.astype(np.int32) for s in sources if not isinstance(s, Sound)]
        arrays["sounds" if sounds else "sources"] = np.concatenate(sounds or read)
    if any(row.beams > 1 for row in rows):
        arrays["beams"] = np.array([row.beams for row in rows], np.uint16)
    if (names := domain_names(rows)) != [""]:
        arrays["domains"] = np.array([names.index(r.domain) for r in rows], np.uint16)
    return arrays


def unpack_rows(
    arrays: dict[str, NDArray[Any]], domains: Sequence[str] = ("",), listener: Path = Path()
) -> Iterator[TraceRow]:
    """The rows of a shard, as views of its arrays.

    Args:
        arrays: as `pack_rows` makes them.
        domains: names for the numbers of the array `domains`; without one all are the first.
        listener: of sounds, as of `Sound`.
    """
    token_at = answer_at = 0
    rows = len(arrays["row_lengths"])
    sources: list[NDArray[np.int32] | Sound | None] = [None] * rows
    if "source_lengths" in arrays:
        ends = arrays["source_lengths"].cumsum()[:-1]
        if "sounds" in arrays:
            sources = [Sound(own, listener) for own in np.split(arrays["sounds"], ends)]
        else:
            sources = list(np.split(arrays["sources"], ends))
    for length, prompt, sampled, domain, source, beams in zip(
        arrays["row_lengths"].tolist(),
        arrays["prompt_lengths"].tolist(),
        arrays["sampled"].tolist(),
        arrays.get("domains", np.zeros(rows, np.uint16)).tolist(),
        sources,
        arrays.get("beams", np.ones(rows, np.uint16)).tolist(),
        strict=True,
    ):
        answers = slice(answer_at, answer_at + length - prompt)
        yield TraceRow(
            tokens=arrays["tokens"][token_at : token_at + length],
            prompt_length=prompt,
            sampled=bool(sampled),
            logprobs=arrays["logprobs"][answers],
            top_ids=arrays["top_ids"][answers],
            top_logprobs=arrays["top_logprobs"][answers],
            domain=domains[domain],
            source=source,
            beams=beams,
        )
        token_at += length
        answer_at = answers.stop


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:05d}.safetensors"


def write_shard(folder: Path, number: int, rows: Sequence[TraceRow]) -> None:
    """Write a shard atomically: it is there when it is whole."""
    from safetensors.numpy import save_file

    arrays = pack_rows(rows)
    # One key alone: the format does not fix the order of several, and equal rows are equal bytes.
    about = {"domains": json.dumps(domain_names(rows))} if "domains" in arrays else None
    write_file(folder / shard_name(number), lambda partial: save_file(arrays, partial, about))


def read_shard(path: Path) -> list[TraceRow]:
    """Read a shard.

    Raises:
        DraftsmithError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            domains = json.loads((file.metadata() or {}).get("domains", '[""]'))
        return list(unpack_rows(arrays, domains, path.parent))
    except (SafetensorError, OSError, LookupError, ValueError) as error:
        raise DraftsmithError(
            f"{path}: damaged trace shard ({error}); delete it and start the same command again"
        ) from error


def write_index(folder: Path, numbers: Sequence[int], about: dict[str, Any]) -> None:
    """Describe the shards `numbers`.

    Args:
        folder: of the store.
        numbers: of its shards.
        about: at least `validation_share` and `top_n`; with the `stop_ids` of an encoder–decoder
            empty and cut answers are counted too.
    """
    shards = []
    stop_ids = about.get("stop_ids")
    ends = {} if stop_ids is None else {"empty_answers": 0, "cut_answers": 0}
    domains: set[str] = set()
    for number in numbers:
        path = folder / shard_name(number)
        rows = read_shard(path)
        domains.update(domain_names(rows))
        if stop_ids is not None:
            ends["empty_answers"] += sum(row.is_empty(stop_ids) for row in rows)
            ends["cut_answers"] += sum(row.is_cut(stop_ids) for row in rows)
        shards.append(
            Shard(
                file=path.name,
                rows=len(rows),
                answer_tokens=sum(len(r.answer) for r in rows),
                sha256=sha256(path),
            )
        )
    write_json(
        folder / INDEX,
        {
            "format": FORMAT,
            "version": VERSION,
            **about,
            **ends,
            "domains": sorted(domains),
            "shards": [asdict(s) for s in shards],
        },
    )


class TraceStore:
    """A finished store, opened for reading."""

    def __init__(self, folder: Path) -> None:
        """Open the store in `folder`.

        Raises:
            RequestError: there is no store of a known version.
        """
        index = folder / INDEX
        if not index.is_file():
            raise RequestError(f"{folder}: no trace store here; `draftsmith trace` makes one")
        try:
            self.about: dict[str, Any] = dict(json.loads(index.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"{index}: damaged ({error}); delete {folder} and trace again"
            ) from None
        if self.about.get("format") != FORMAT or self.about.get("version") != VERSION:
            raise RequestError(
                f"{index}: format {self.about.get('format')!r} version "
                f"{self.about.get('version')!r}; this draftsmith reads {FORMAT!r} version {VERSION}"
            )
        self.folder = folder
        self.shards = [Shard(**shard) for shard in self.about.pop("shards")]

    def rows(self, split: Split) -> list[TraceRow]:
        """All rows of a split, checked against the index.

        Empty answers to a source teach nothing, and are left out of training.

        Raises:
            DraftsmithError: a shard is missing, damaged, or not the one that was written.
        """
        rows: list[TraceRow] = []
        for shard in self.shards:
            path = self.folder / shard.file
            if not path.is_file() or sha256(path) != shard.sha256:
                raise DraftsmithError(
                    f"{path}: missing, or not the shard that the index describes; delete "
                    f"{self.folder} and start the same command again"
                )
            rows += read_shard(path)
        share = float(self.about["validation_share"])
        if split == "validation":
            return [row for row in rows if is_held_out(row.content, share)]
        stop_ids = self.about.get("stop_ids", ())
        return [
            row
            for row in rows
            if not is_held_out(row.content, share) and not row.is_empty(stop_ids)
        ]

    @property
    def answer_tokens(self) -> int:
        """Answer tokens in the store."""
        return sum(s.answer_tokens for s in self.shards)

    @property
    def domains(self) -> tuple[str, ...]:
        """The domains of its rows, sorted."""
        return tuple(self.about.get("domains", ("",)))

    @property
    def bytes_per_token(self) -> float:
        """Bytes on disk for each answer token, prompts included."""
        sizes = ((self.folder / s.file).stat().st_size for s in self.shards)
        return sum(sizes) / max(1, self.answer_tokens)


def notes_on(about: Mapping[str, Any]) -> list[str]:
    """What was counted of the sources and answers of an encoder–decoder, where it is not 0.

    Args:
        about: of a store.
    """
    left_out, most = about.get("left_out", {}), about.get("max_new_tokens")
    counted = {
        "sources are longer than the encoder can hold, and left out": left_out.get("too_long"),
        "sources are empty, and left out": left_out.get("empty"),
        "answers are empty, and left out of training": about.get("empty_answers"),
        f"answers are cut at the limit of {most} tokens, and kept without an end": about.get(
            "cut_answers"
        ),
    }
    return [f"{count:,} {what}" for what, count in counted.items() if count]


def is_held_out(content: NDArray[np.int32] | Sound, share: float) -> bool:
    """Whether a row is for validation: by its `content`, so equal rows are never on both sides.

    Nor are two answers to one source.
    """
    return zlib.crc32(content.tobytes()) < share * 2**32
