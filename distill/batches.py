"""Padded trace rows, in an order that depends on the seed and the step alone, and packed text."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.mixture import Mixture
from draftsmith.data.packing import PackedRow, State
from draftsmith.data.sound import Sound
from draftsmith.data.traces import TraceRow
from draftsmith.distill.losses import Traces
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import MixtureSettings

# Rows of similar length share a batch; a pool of this many batches is sorted at a time, so that
# batches stay random.
_POOL = 16


@dataclass(frozen=True)
class Batch:
    """B rows padded on the right to T, with A answer positions in all.

    Attributes:
        ids: [B, T].
        mask: [B, T], 1 for tokens. Padding is known by length, never by id: where EOS pads, a
            real EOS would vanish (case A27). Or [B, 1, T, T], true where a token sees another.
            None: nothing is padded, and a token sees what is before it, in its own document
            where `position_ids` begin anew with each.
        positions: [A] places in the flattened [B·T] whose states give answer tokens: those before
            them, and masks in the place of them.
        labels: [A] that token; -1 where a text has none.
        traces: what the target said there.
        weights: [A] what each position counts; none: 1.
        position_ids: [B, T] where tokens don't stand in their order; none: they do.
        sources: [B, S] what an encoder reads, padded on the right, or [B, bands, frames] what it
            hears; none without an encoder. Or [B/n, …], each for n rows side by side.
        source_mask: [B, S] or [B/n, S], 1 for its tokens; none of sound.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor
    labels: Tensor
    traces: Traces
    weights: Tensor | None = None
    position_ids: Tensor | None = None
    sources: Tensor | None = None
    source_mask: Tensor | None = None

    @property
    def tokens(self) -> int:
        """Answer tokens."""
        return len(self.positions)

    @property
    def weight(self) -> float:
        """What they count together, by which losses are divided."""
        return self.tokens if self.weights is None else float(self.weights.sum())

    def to(self, device: torch.device) -> "Batch":
        """The same on another device."""
        parts = {name: getattr(self, name) for name in self.__dataclass_fields__}
        moved: dict[str, Any] = {k: None if p is None else p.to(device) for k, p in parts.items()}
        return Batch(**moved)


def collate(
    rows: Sequence[TraceRow], max_length: int, domain_weights: Mapping[str, float] | None = None
) -> Batch:
    """Pad rows; what is past `max_length` is cut.

    Args:
        rows: B of them.
        max_length: most tokens of a row.
        domain_weights: what tokens of a domain count; 1 for those that are not named.
    """
    width = min(max_length, max(len(r.tokens) for r in rows))
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    positions, labels, top_ids, top_logprobs, weights = [], [], [], [], []
    for i, row in enumerate(rows):
        tokens = torch.from_numpy(row.tokens[:width].astype(np.int64))
        answers = max(0, len(tokens) - row.prompt_length)
        ids[i, : len(tokens)] = tokens
        mask[i, : len(tokens)] = 1
        first = i * width + row.prompt_length - 1
        positions.append(torch.arange(first, first + answers))
        labels.append(tokens[row.prompt_length :])
        top_ids.append(torch.from_numpy(row.top_ids[:answers].astype(np.int64)))
        top_logprobs.append(torch.from_numpy(row.top_logprobs[:answers].astype(np.float32)))
        weights.append(torch.full((answers,), (domain_weights or {}).get(row.domain, 1.0)))
    sources, source_mask = _padded_sources(rows)
    return Batch(
        ids,
        mask,
        torch.cat(positions),
        torch.cat(labels),
        Traces(torch.cat(top_ids), torch.cat(top_logprobs)),
        torch.cat(weights) if domain_weights else None,
        sources=sources,
        source_mask=source_mask,
    )


def _padded_sources(rows: Sequence[TraceRow]) -> tuple[Tensor | None, Tensor | None]:
    """What encoders read, [B, S], whole, and its mask; none without an encoder.

    Of sounds features, [B, bands, frames], all of one length.
    """
    sources = [r.source for r in rows if r.source is not None]
    if heard := [s.features() for s in sources if isinstance(s, Sound)]:
        return torch.stack(heard), None
    read = [torch.from_numpy(s.astype(np.int64)) for s in sources if not isinstance(s, Sound)]
    if not read:
        return None, None
    masks = [torch.ones_like(source) for source in read]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(read, batch_first=True), pad(masks, batch_first=True)


def collate_packed(rows: Sequence[PackedRow], separate_documents: bool = True) -> Batch:
    """Stack packed text; what is learned is each token that follows one of its own document.

    transformers tells documents by positions that begin anew, for attention of any kind and for
    sliding windows too.

    Args:
        rows: B of them, of one length T.
        separate_documents: no token sees another document, and each document counts its
            positions from 0; else a token sees all before it in its row.
    """
    ids = torch.from_numpy(np.stack([row.tokens for row in rows]))
    position_ids = torch.from_numpy(np.stack([row.positions for row in rows]))
    follows = torch.zeros_like(ids, dtype=torch.bool)
    follows[:, :-1] = position_ids[:, 1:] > 0
    (positions,) = follows.flatten().nonzero(as_tuple=True)
    labels = ids.flatten()[positions + 1]
    return Batch(
        ids,
        None,
        positions,
        labels,
        # What comes next is certain: it stands in the text.
        Traces.of_labels(labels),
        position_ids=position_ids if separate_documents else None,
    )


class MixtureStream:
    """The micro-batches of a mixture, step after step, and its held-out ones.

    Attributes:
        mixture: where the sequences come from; its shares may be set between steps.
        batch: sequences of a micro-batch.
        held_out: domain -> the batches that measure it.
    """

    def __init__(self, settings: MixtureSettings, tokenizer: Any, batch: int, seed: int) -> None:
        """Begin at the first step. Arguments and errors as for `Mixture`.

        Args:
            settings: the recipe's mixture.
            tokenizer: of the source.
            batch: sequences of a micro-batch.
            seed: of every order.
        """
        self.mixture, self.batch = Mixture(settings, tokenizer, seed), batch
        self._collate = partial(collate_packed, separate_documents=settings.separate_documents)
        self.held_out = {
            domain: [self._collate(rows[i : i + batch]) for i in range(0, len(rows), batch)]
            for domain, rows in self.mixture.held_out.items()
        }

    def step(self, micro_batches: int) -> list[Batch]:
        """All micro-batches of the next step, the same in every process, which takes its share."""
        return [
            self._collate([self.mixture.next_row() for _ in range(self.batch)])
            for _ in range(micro_batches)
        ]

    @property
    def shares(self) -> dict[str, float]:
        """Domain -> its share of the sequences to come."""
        return self.mixture.shares

    @shares.setter
    def shares(self, shares: Mapping[str, float]) -> None:
        self.mixture.shares = dict(shares)

    def state_dict(self) -> State:
        """What the steps to come depend on."""
        return self.mixture.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Go on after the step that the state was taken at. Raises as `Mixture`."""
        self.mixture.load_state_dict(state)


class BatchStream:
    """An endless, reproducible stream: batch `i` is the same whenever it is asked for."""

    def __init__(
        self,
        rows: Sequence[TraceRow],
        batch: int,
        max_length: int,
        seed: int,
        domain_weights: Mapping[str, float] | None = None,
    ) -> None:
        """Take the rows that have an answer within `max_length`; count the others.

        Args:
            rows: of the traces.
            batch: rows of a batch.
            max_length: most tokens of a row.
            seed: of the order.
            domain_weights: as for `collate`.

        Raises:
            DraftsmithError: no row is left.
            RequestError: weights name a domain that no row has.
        """
        self.rows = [r for r in rows if 0 < r.prompt_length < min(len(r.tokens), max_length)]
        self.dropped = len(rows) - len(self.rows)
        if not self.rows:
            raise DraftsmithError(
                f"none of {len(rows)} trace rows has an answer within max_length {max_length}; "
                "raise max_length or shorten data.prompt_tokens"
            )
        if self.dropped:
            warnings.warn(
                f"{self.dropped} of {len(rows)} trace rows have no answer within max_length "
                f"{max_length} and are left out",
                stacklevel=2,
            )
        _check_domains(domain_weights or {}, rows)
        self.batch, self.max_length, self.seed = batch, max_length, seed
        self.domain_weights = domain_weights
        self.batches_per_epoch = -(-len(self.rows) // batch)
        self._order = lru_cache(maxsize=2)(self._epoch_order)

    def __getitem__(self, number: int) -> Batch:
        """The `number`-th batch since the start of training."""
        epoch, at = divmod(number, self.batches_per_epoch)
        rows = [self.rows[i] for i in self._order(epoch)[at]]
        return collate(rows, self.max_length, self.domain_weights)

    def _epoch_order(self, epoch: int) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, epoch))
        shuffled = rng.permutation(len(self.rows)).tolist()
        pool = self.batch * _POOL
        batches = []
        for start in range(0, len(shuffled), pool):
            by_length = sorted(shuffled[start : start + pool], key=lambda i: _length(self.rows[i]))
            batches += [by_length[i : i + self.batch] for i in range(0, len(by_length), self.batch)]
        return [batches[i] for i in rng.permutation(len(batches)).tolist()]


def _length(row: TraceRow) -> int:
    """By which rows are sorted: tokens of both sides; the features of sounds are of one length."""
    read = row.source if isinstance(row.source, np.ndarray) else ()
    return len(row.tokens) + len(read)


def _check_domains(weights: Mapping[str, float], rows: Sequence[TraceRow]) -> None:
    known = sorted({row.domain for row in rows})
    if unknown := sorted(set(weights) - set(known)):
        raise RequestError(
            f"recipe.distill.domain_weights: no trace is of {', '.join(unknown)}; "
            f"the traces have {', '.join(map(repr, known))}"
        )
