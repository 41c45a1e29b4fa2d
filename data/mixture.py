"""Text of several domains in given shares, packed, endless, and exact when it is resumed.

Texts are read by `datasets`, whose state tells where it was in a file or a data set of the hub. Its
own shuffle buffer is not in that state: after a resume it is filled anew, so texts are lost and the
order is another. Here texts are shuffled in blocks instead. A block is read and permuted by the
seed and its number, so where it began and how much of it is used says everything.

A domain with too few texts is read again, in another order: its epochs are counted.
"""

import math
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from draftsmith.data.chat import encode_text
from draftsmith.data.corpus import corpus_dataset, corpus_files, read_texts, usable_text
from draftsmith.data.packing import PackedRow, Packer, State, pack
from draftsmith.data.seeds import derived_seed
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import DomainSettings, MixtureSettings

_HUB = "hub:"
_HUB_OPTIONS = ("config", "split", "revision")
# Up to four epochs teach about as much as new text (Muennighoff et al. 2023, arXiv 2305.16264).
_EPOCHS = 4
# Texts from which tokens per character are estimated.
_SAMPLE = 64
# Tells the draws of domains and the orders of files from others of the same seed.
_CHOICE, _FILES = 11, 13

Encode = Callable[[str], NDArray[np.int64]]


@dataclass(frozen=True)
class FilePart:
    """The texts of a file.

    Attributes:
        path: where it is.
        text_key: the field that holds the text.
    """

    path: Path
    text_key: str

    def rows(self) -> Any:
        """A `datasets.IterableDataset` of those that can be used."""
        return corpus_dataset([self.path], self.text_key)

    def text_of(self, row: Mapping[str, Any]) -> str | None:
        """The text of one of `rows`."""
        text: str = row["text"]
        return text


@dataclass(frozen=True)
class HubPart:
    """The texts of a data set of the hub, which is streamed.

    Attributes:
        spec: as the recipe names it.
        dataset: its id.
        options: config, split and revision, as far as they are given.
        text_key: the field that holds the text.
        place: where the recipe names it, for errors.
    """

    spec: str
    dataset: str
    options: Mapping[str, str]
    text_key: str
    place: str

    def rows(self) -> Any:
        """A `datasets.IterableDataset` of all.

        Raises:
            RequestError: the hub does not give it, or it has no such field.
        """
        from datasets import load_dataset

        try:
            rows = load_dataset(
                self.dataset,
                self.options.get("config"),
                split=self.options.get("split", "train"),
                revision=self.options.get("revision"),
                streaming=True,
            )
        except Exception as error:
            # The libraries below raise errors of no common kind.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(
                f"{self.place}: {self.spec}: the hub did not give it ({reason}); check name, "
                "config=, split= and network, or download its files and give their folder"
            ) from error
        # None: it is known only when rows are read.
        if rows.column_names is not None and self.text_key not in rows.column_names:
            raise RequestError(
                f"{self.place}: {self.spec}: there is no field {self.text_key!r}, only "
                f"{', '.join(rows.column_names)}; set mixture.text_key to one of them"
            )
        return rows

    def text_of(self, row: Mapping[str, Any]) -> str | None:
        """The text of one of `rows`, if it can be used."""
        return usable_text(row, self.text_key, Counter())


Part = FilePart | HubPart


@dataclass(frozen=True)
class DomainSize:
    """How much there is of a domain.

    Attributes:
        needed: tokens that a run takes, those kept to measure it included.
        tokens: tokens that there are, or as many as are needed, by an estimate from the first
            texts; None for a data set of the hub, which is not read through.
        skipped: rows and files that can't be used, by reason.
    """

    needed: int
    tokens: int | None
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def epochs(self) -> float | None:
        """How often the run reads it."""
        return None if self.tokens is None else self.needed / self.tokens


class Texts:
    """The texts of a domain: all of its parts, in an order of each epoch, without end."""

    def __init__(self, parts: Sequence[Part], seed: int, skip: Sequence[int]) -> None:
        """Begin with the first epoch.

        Args:
            parts: files and data sets.
            seed: of the order of the parts.
            skip: how many texts at the start of each part are left out.
        """
        self._parts, self._seed, self._skip = parts, seed, skip
        self._epoch, self._place = 0, 0
        self._rows: Any = None
        self._texts: Iterator[str] = iter(())

    def next_block(self, count: int) -> list[str]:
        """The next texts, `count` of them; at the end of an epoch fewer, but one at least.

        Raises:
            DraftsmithError: a whole epoch has none.
        """
        # What is left of this epoch, or else the next, which is whole.
        for _ in range(2):
            if block := self._rest_of_epoch(count):
                return block
            self._epoch, self._place, self._rows = self._epoch + 1, 0, None
        raise DraftsmithError(
            f"{_names(self._parts)}: no text is left to learn from; files must not change while "
            "a run reads them"
        )

    def state_dict(self) -> State:
        """Epoch, part, and where in it `datasets` is."""
        rows = None if self._rows is None else self._rows.state_dict()
        return {"epoch": self._epoch, "part": self._place, "rows": rows}

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        self._epoch, self._place, self._rows = state["epoch"], state["part"], None
        if state["rows"] is not None:
            self._open(state["rows"])

    def _rest_of_epoch(self, count: int) -> list[str]:
        block: list[str] = []
        while self._place < len(self._parts):
            if self._rows is None:
                self._open()
            block += islice(self._texts, count - len(block))
            if len(block) == count:
                break
            self._place, self._rows = self._place + 1, None
        return block

    def _open(self, state: State | None = None) -> None:
        rng = np.random.default_rng((self._seed, self._epoch, _FILES))
        number = int(rng.permutation(len(self._parts))[self._place])
        part = self._parts[number]
        self._rows = part.rows()
        skip = self._skip[number]
        if state is not None:
            self._rows.load_state_dict(state)
            skip = 0
        self._texts = islice(_usable(part, self._rows), skip, None)


class ShuffledDocuments:
    """The texts of a domain as token ids, shuffled in blocks."""

    def __init__(self, texts: Texts, encode: Encode, block: int, seed: int) -> None:
        """Begin with the next block.

        Args:
            texts: where they come from.
            encode: token ids of a text; none: it is left out.
            block: texts that are shuffled together.
            seed: of their order.
        """
        self._texts, self._encode, self._size, self._seed = texts, encode, block, seed
        self._number, self._used = -1, 0
        self._block: list[str] = []
        self._before: State = {}

    def next_document(self) -> NDArray[np.int64]:
        """The next with any token, [N]."""
        while True:
            if self._used == len(self._block):
                self._number += 1
                self._read()
            text = self._block[self._used]
            self._used += 1
            if len(ids := self._encode(text)):
                return ids

    def state_dict(self) -> State:
        """Where the block begins, and how much of it is used."""
        if self._used == len(self._block):
            return {"texts": self._texts.state_dict(), "block": self._number + 1, "used": 0}
        return {"texts": self._before, "block": self._number, "used": self._used}

    def load_state_dict(self, state: State) -> None:
        """Go on from there; the block is read again."""
        self._texts.load_state_dict(state["texts"])
        self._number, self._block, self._used = state["block"] - 1, [], 0
        if state["used"]:
            self._number += 1
            self._read()
            self._used = state["used"]

    def _read(self) -> None:
        self._before = self._texts.state_dict()
        texts = self._texts.next_block(self._size)
        order = np.random.default_rng((self._seed, self._number)).permutation(len(texts))
        self._block, self._used = [texts[i] for i in order], 0


class Mixture:
    """Sequences of all domains, in shares that may change while they are drawn.

    The same seed, shares and number of sequences drawn give the same next one, in every process.

    Attributes:
        held_out: domain -> the sequences that are kept to measure it.
        drawn: domain -> sequences drawn so far.
    """

    def __init__(
        self,
        settings: MixtureSettings,
        tokenizer: Any,
        seed: int,
        place: str = "recipe.prune.mixture",
    ) -> None:
        """Read what is held out, and begin after it.

        Args:
            settings: domains, and how they are packed.
            tokenizer: of the source; BOS where it adds one, EOS after each document.
            seed: of every order.
            place: of `settings` in the recipe, for errors.

        Raises:
            RequestError: a domain is missing or has too few texts; the tokenizer has no EOS.
        """
        encode = document_encoder(tokenizer)
        parts = {n: domain_parts(n, d, settings, place) for n, d in settings.domains.items()}
        self._seed = seed
        self._packers: dict[str, Packer] = {}
        self.held_out: dict[str, list[PackedRow]] = {}
        for name in settings.domains:
            rows, skip = _hold_out(parts[name], encode, settings, name, place)
            # By its name: a domain's texts come in the same order beside any others.
            own_seed = derived_seed(seed, zlib.crc32(name.encode()))
            texts = Texts(parts[name], own_seed, skip)
            documents = ShuffledDocuments(texts, encode, max(1, settings.shuffle_buffer), own_seed)
            self._packers[name] = Packer(documents, settings.sequence, name)
            self.held_out[name] = rows
        self.drawn = dict.fromkeys(settings.domains, 0)
        self.shares = initial_shares(settings)

    @property
    def shares(self) -> dict[str, float]:
        """Domain -> its share of the sequences to come; they sum to 1."""
        return dict(self._shares)

    @shares.setter
    def shares(self, shares: Mapping[str, float]) -> None:
        total = sum(shares.values())
        legal = all(share >= 0 for share in shares.values()) and 0 < total < math.inf
        if set(shares) != set(self._packers) or not legal:
            raise DraftsmithError(
                f"shares {dict(shares)}: give a share of 0 or more for each of "
                f"{', '.join(self._packers)}, and not 0 for all"
            )
        self._shares = {name: shares[name] / total for name in self._packers}

    def next_row(self) -> PackedRow:
        """Draw a domain by its share, and take its next sequence."""
        # A generator for each draw: the domain depends on nothing but number, seed and shares.
        rng = np.random.default_rng((self._seed, sum(self.drawn.values()), _CHOICE))
        names = list(self._shares)
        name = names[int(rng.choice(len(names), p=list(self._shares.values())))]
        self.drawn[name] += 1
        return self._packers[name].next_row()

    def state_dict(self) -> State:
        """All that the sequences to come depend on: numbers and names alone, no text."""
        return {
            "drawn": dict(self.drawn),
            "shares": self.shares,
            "domains": {name: packer.state_dict() for name, packer in self._packers.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Go on from there: no sequence comes twice, and none is lost.

        Raises:
            DraftsmithError: it is the state of other domains.
        """
        if set(state["domains"]) != set(self._packers):
            raise DraftsmithError(
                f"the saved state is of the domains {', '.join(state['domains'])}, the recipe has "
                f"{', '.join(self._packers)}; start the run anew with another --out"
            )
        for name, packer in self._packers.items():
            packer.load_state_dict(state["domains"][name])
        self.drawn = dict(state["drawn"])
        self.shares = state["shares"]


def check_mixture(
    settings: MixtureSettings, tokenizer: Any, tokens: int, place: str = "recipe.prune.mixture"
) -> dict[str, DomainSize]:
    """Compare what there is of each domain with what a run takes, before it starts.

    Files are read until there is enough. It warns of domains that are read more than four times.

    Args:
        settings: domains, and how they are packed.
        tokenizer: as for `Mixture`.
        tokens: of the whole run; each domain gives its first share of them.
        place: of `settings` in the recipe, for errors.

    Raises:
        RequestError: a domain is missing or has too few texts; the tokenizer has no EOS.
    """
    encode, shares = document_encoder(tokenizer), initial_shares(settings)
    kept = settings.held_out * settings.sequence
    sizes = {}
    for name, domain in settings.domains.items():
        parts = domain_parts(name, domain, settings, place)
        _hold_out(parts, encode, settings, name, place)
        needed = kept + round(shares[name] * tokens)
        sizes[name] = size = _size_of(parts, encode, needed)
        if size.tokens is not None and size.epochs is not None and size.epochs > _EPOCHS:
            warnings.warn(
                f"{place}.domains.{name}: the run reads its {size.tokens:,} tokens "
                f"{size.epochs:.1f} times; past {_EPOCHS} times a text teaches little: give it "
                "more text or less weight",
                stacklevel=2,
            )
    return sizes


def initial_shares(settings: MixtureSettings) -> dict[str, float]:
    """The weights over their sum."""
    total = sum(domain.weight for domain in settings.domains.values())
    return {name: domain.weight / total for name, domain in settings.domains.items()}


def document_encoder(tokenizer: Any) -> Encode:
    """Text -> its ids and EOS, [N]; empty where the text has no token.

    Raises:
        RequestError: the tokenizer has no EOS.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise RequestError(
            "the tokenizer has no eos_token, which ends the documents of a mixture; set it in "
            "tokenizer_config.json"
        )

    def encode(text: str) -> NDArray[np.int64]:
        ids = encode_text(tokenizer, text)
        return np.array([*ids, end] if ids else [], np.int64)

    return encode


def domain_parts(
    name: str, domain: DomainSettings, settings: MixtureSettings, place: str
) -> list[Part]:
    """The files and data sets of a domain, in the order of the recipe; those of a folder sorted.

    Raises:
        RequestError: one is not there, or can't be understood.
    """
    place = f"{place}.domains.{name}.path"
    parts: list[Part] = []
    for path in domain.path:
        if path.startswith(_HUB):
            parts.append(_hub_part(path, settings.text_key, place))
        else:
            parts += [FilePart(file, settings.text_key) for file in corpus_files([path], place)]
    return parts


def local_files(settings: MixtureSettings, place: str = "recipe.prune.mixture") -> list[Path]:
    """The files of all domains on this machine. Raises as `domain_parts`."""
    parts = [domain_parts(n, d, settings, place) for n, d in settings.domains.items()]
    return [part.path for listed in parts for part in listed if isinstance(part, FilePart)]


def _hub_part(spec: str, text_key: str, place: str) -> HubPart:
    dataset, mark, query = spec.removeprefix(_HUB).partition("?")
    try:
        pairs = parse_qsl(query, strict_parsing=bool(mark))
    except ValueError:
        pairs = [("", query)]
    options = dict(pairs)
    if not dataset or len(options) < len(pairs) or not set(options) <= set(_HUB_OPTIONS):
        raise RequestError(
            f"{place}: {spec}: write hub:OWNER/NAME, then ? and what is needed of "
            "config=C&split=S&revision=R, each once"
        )
    return HubPart(spec, dataset, options, text_key, place)


def _usable(part: Part, rows: Any) -> Iterator[str]:
    for row in rows:
        text = part.text_of(row)
        if text is not None:
            yield text


def _hold_out(
    parts: Sequence[Part], encode: Encode, settings: MixtureSettings, name: str, place: str
) -> tuple[list[PackedRow], list[int]]:
    """The first sequences of a domain, and how many texts of each part they use.

    Training leaves those texts out in every epoch, the last one's rest too.
    """
    documents: list[NDArray[np.int64]] = []
    taken, missing = [0] * len(parts), settings.held_out * settings.sequence
    for number, part in enumerate(parts):
        for text in _usable(part, part.rows()):
            ids = encode(text)
            if missing <= 0 and len(ids):
                return pack(documents, settings.sequence, name)[: settings.held_out], taken
            documents.append(ids)
            taken[number] += 1
            missing -= len(ids)
    raise RequestError(
        f"{place}.domains.{name}: {_names(parts)}: {sum(taken)} usable texts are too few for "
        f"{settings.held_out} held-out sequences of {settings.sequence} tokens and a text more to "
        f"learn from{_reasons(parts)}; give it more text, or lower {place}.held_out or "
        f"{place}.sequence"
    )


def _size_of(parts: Sequence[Part], encode: Encode, needed: int) -> DomainSize:
    files = [part for part in parts if isinstance(part, FilePart)]
    if len(files) < len(parts):
        return DomainSize(needed, None)
    counts: Counter[str] = Counter()
    texts = read_texts([part.path for part in files], counts, files[0].text_key)
    sample = list(islice(texts, _SAMPLE))
    tokens, characters = sum(len(encode(t)) for t in sample), sum(map(len, sample))
    rate = tokens / characters
    while characters * rate < needed and (text := next(texts, None)) is not None:
        characters += len(text)
    del counts["rows"]
    return DomainSize(needed, round(characters * rate), dict(counts))


def _names(parts: Sequence[Part]) -> str:
    names = [str(p.path) if isinstance(p, FilePart) else p.spec for p in parts]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reasons(parts: Sequence[Part]) -> str:
    """Why rows of files are not used."""
    counts: Counter[str] = Counter()
    for part in parts:
        if isinstance(part, FilePart):
            for _ in read_texts([part.path], counts, part.text_key):
                pass
    del counts["rows"]
    return f" (not used: {', '.join(f'{k}: {n}' for k, n in counts.items())})" if counts else ""
