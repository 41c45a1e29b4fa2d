"""The drafter's own rounds on the target's texts, and what it proposes after a mistake.

A text of the target is what speculative decoding would emit, so the rounds on it need no decoding:
they begin where the drafter's likeliest tokens, compared with the text, let them begin. What is
proposed past the first mistake of a round stands in no text. It is appended behind the text as a
branch that sees the text up to the mistake, and itself: one pass then covers all rounds of a row.

In a chain of proposals nothing counts after a mistake; learning there is what on-policy
distillation adds to the states that the target's own texts give (Agarwal et al. 2024, GKD; Zhou et
al. 2024, DistillSpec).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.distill.batches import Batch
from draftsmith.distill.losses import Traces

# The drafter's likeliest ids at a batch's positions, [A].
Propose = Callable[[Batch], Tensor]


def rounds_of(matches: Sequence[bool], lookahead: int) -> Iterator[tuple[int, int]]:
    """Where each round begins on a text, and how many proposals it keeps.

    Args:
        matches: [N] whether the drafter's likeliest token is the text's.
        lookahead: most proposals of a round.
    """
    start = 0
    while start < len(matches):
        kept = 0
        while kept < min(lookahead, len(matches) - start) and matches[start + kept]:
            kept += 1
        yield start, kept
        start += kept + 1


@dataclass
class Branch:
    """What a round proposes past its first mistake.

    Attributes:
        row: of the batch.
        parent: column of the text whose prediction was the mistake.
        place: of the mistake in its round, from 0.
        room: tokens whose successors are still proposed.
        column: where its first token stands in the row.
        tokens: the mistake, and what was proposed after it.
    """

    row: int
    parent: int
    place: int
    room: int
    column: int = 0
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OwnRounds:
    """Finds the rounds of a batch.

    Attributes:
        propose: the drafter.
        lookahead: most proposals of a round.
        stop_ids: a proposed one ends its draft.
        decay: what a position counts against the one before it in its round.
    """

    propose: Propose
    lookahead: int
    stop_ids: frozenset[int] = frozenset()
    decay: float = 1.0

    def weigh(self, batch: Batch) -> Batch:
        """The batch with its positions weighted by their place in their round."""
        places_A, _ = self._walk(batch)
        return self._weighted(batch, places_A)

    def extend(self, batch: Batch) -> Batch:
        """The batch with what is proposed after each mistake; traces know nothing there.

        The drafter runs lookahead - 1 times, whatever it proposes: where its weights are cut into
        parts, all processes must do the same.
        """
        places_A, branches = self._walk(batch)
        width = batch.ids.shape[1]
        room = _place(branches, width)
        longer = _with_columns(batch, branches, room)
        for depth in range(1, self.lookahead - 1):
            growing = [b for b in branches if b.room > depth == len(b.tokens)]
            states = [(b.row, b.column + depth - 1) for b in growing]
            chosen = self.propose(_at(longer, states)).tolist()
            for branch, token in zip(growing, chosen, strict=True):
                if token not in self.stop_ids:
                    branch.tokens.append(token)
                    longer.ids[branch.row, branch.column + depth] = token
        return self._joined(batch, longer, places_A, branches)

    def _walk(self, batch: Batch) -> tuple[NDArray[np.int64], list[Branch]]:
        """Each position's place in its round, [A], and the rounds that a mistake ends early."""
        chosen_A = self.propose(batch).cpu().numpy()
        matches_A = chosen_A == batch.labels.cpu().numpy()
        rows_A, columns_A = np.divmod(batch.positions.cpu().numpy(), batch.ids.shape[1])
        places_A = np.zeros(len(rows_A), np.int64)
        branches = []
        for row in np.unique(rows_A):
            own = np.flatnonzero(rows_A == row)
            for start, kept in rounds_of(matches_A[own].tolist(), self.lookahead):
                here = own[start : start + kept + 1]
                places_A[here] = np.arange(len(here))
                room = self.lookahead - kept - 1
                # Past the text's end nothing is proposed, nor after a proposed end.
                if len(here) <= kept or room < 1 or int(chosen_A[here[-1]]) in self.stop_ids:
                    continue
                branch = Branch(int(row), int(columns_A[here[-1]]), kept, room)
                branch.tokens.append(int(chosen_A[here[-1]]))
                branches.append(branch)
        return places_A, branches

    def _joined(
        self, batch: Batch, longer: Batch, places_A: NDArray[np.int64], branches: Sequence[Branch]
    ) -> Batch:
        """Text and branches: all positions from which something is proposed."""
        states = [(b.row, b.column + i) for b in branches for i in range(len(b.tokens))]
        places = [b.place + 1 + i for b in branches for i in range(len(b.tokens))]
        both = torch.cat([longer.positions, _at(longer, states).positions])
        unknown = batch.labels.new_full((len(states),), -1)
        weights = None
        if batch.weights is not None:
            rows = (longer.positions // longer.ids.shape[1]).tolist()
            of_row = dict(zip(rows, batch.weights.tolist(), strict=True))
            own = batch.weights.new_tensor([of_row[row] for row, _ in states])
            weights = torch.cat([batch.weights, own])
        joined = replace(
            longer, positions=both, labels=torch.cat([batch.labels, unknown]), weights=weights
        )
        return self._weighted(joined, np.concatenate([places_A, np.array(places, np.int64)]))

    def _weighted(self, batch: Batch, places_A: NDArray[np.int64]) -> Batch:
        if self.decay == 1.0:
            return batch
        factors_A = torch.from_numpy(self.decay**places_A).to(batch.ids.device, torch.float32)
        return replace(
            batch, weights=factors_A if batch.weights is None else factors_A * batch.weights
        )


def _place(branches: Sequence[Branch], width: int) -> int:
    """Give each branch its columns behind the text; returns how many the fullest row needs."""
    used: dict[int, int] = {}
    for branch in branches:
        branch.column = width + used.get(branch.row, 0)
        used[branch.row] = used.get(branch.row, 0) + branch.room
    return max(used.values(), default=0)


def _with_columns(batch: Batch, branches: Sequence[Branch], room: int) -> Batch:
    """The batch with columns for its branches, and a mask that says what each token sees."""
    rows, width = batch.ids.shape
    device, all_columns = batch.ids.device, width + room
    ids = torch.cat([batch.ids, batch.ids.new_zeros(rows, room)], 1)
    position_ids = torch.arange(all_columns).repeat(rows, 1)
    # The text sees what is before it, as ever; columns that no branch uses see themselves.
    sees = torch.eye(all_columns, dtype=torch.bool).repeat(rows, 1, 1)
    sees[:, :width, :width] |= torch.ones(width, width, dtype=torch.bool).tril()
    for b in branches:
        own = slice(b.column, b.column + b.room)
        ids[b.row, b.column] = b.tokens[0]
        position_ids[b.row, own] = b.parent + 1 + torch.arange(b.room)
        sees[b.row, own, : b.parent + 1] = True
        sees[b.row, own, own] |= torch.ones(b.room, b.room, dtype=torch.bool).tril()
    row_A, column_A = batch.positions // width, batch.positions % width
    return replace(
        batch,
        ids=ids,
        mask=sees[:, None].to(device),
        positions=row_A * all_columns + column_A,
        traces=Traces(batch.ids.new_zeros(0, 1), torch.zeros(0, 1, device=device)),
        position_ids=position_ids.to(device),
    )


def _at(batch: Batch, states: Sequence[tuple[int, int]]) -> Batch:
    """The batch with other positions: (row, column) each."""
    width = batch.ids.shape[1]
    places = [row * width + column for row, column in states]
    return replace(batch, positions=batch.positions.new_tensor(places), weights=None)
