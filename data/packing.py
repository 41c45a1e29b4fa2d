"""Documents in sequences of one length: nothing is padded, nothing is cut off.

A document that does not fit goes on in the next sequence. Where each begins is kept, so that
documents which share a sequence need not see one another (Krell et al. 2021, arXiv 2107.02027).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

State = dict[str, Any]


@dataclass(frozen=True)
class PackedRow:
    """A sequence of T tokens of one domain.

    Attributes:
        tokens: [T].
        starts: where a document begins, or goes on from the sequence before; the first is 0.
        domain: what kind of text it is.
    """

    tokens: NDArray[np.int64]
    starts: tuple[int, ...]
    domain: str

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T] each token's place in its document, or in the part of it that is here."""
        lengths = np.diff([*self.starts, len(self.tokens)])
        return np.arange(len(self.tokens)) - np.repeat(self.starts, lengths)


def pack(documents: Sequence[NDArray[np.int64]], sequence: int, domain: str) -> list[PackedRow]:
    """All whole sequences of some documents, in their order; what is left at the end is not used.

    Args:
        documents: token ids of each.
        sequence: T, tokens of a sequence.
        domain: what kind of text they are.
    """
    tokens = np.concatenate([np.zeros(0, np.int64), *documents])
    begins = np.cumsum([0, *(len(document) for document in documents)])
    rows = []
    for first in range(0, len(tokens) - sequence + 1, sequence):
        inside = begins[(begins > first) & (begins < first + sequence)] - first
        starts = (0, *np.unique(inside).tolist())
        rows.append(PackedRow(tokens[first : first + sequence], starts, domain))
    return rows


class Documents(Protocol):
    """Token ids of one document after another, from any state on the same ones again."""

    def next_document(self) -> NDArray[np.int64]:
        """The next, [N] with N ≥ 1."""

    def state_dict(self) -> State:
        """What the documents still to come depend on."""

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""


class Packer:
    """Sequences as `pack` gives them, of documents without end."""

    def __init__(self, documents: Documents, sequence: int, domain: str) -> None:
        """Begin with the next document.

        Args:
            documents: where they come from.
            sequence: T, tokens of a sequence.
            domain: what kind of text it is.
        """
        self._documents, self._sequence, self._domain = documents, sequence, domain
        self._document = np.zeros(0, np.int64)
        self._used = 0
        self._before: State = {}

    def next_row(self) -> PackedRow:
        """The next sequence."""
        pieces, starts, filled = [], [], 0
        while filled < self._sequence:
            if self._used == len(self._document):
                self._open()
            piece = self._document[self._used : self._used + self._sequence - filled]
            pieces.append(piece)
            starts.append(filled)
            filled += len(piece)
            self._used += len(piece)
        return PackedRow(np.concatenate(pieces), tuple(starts), self._domain)

    def state_dict(self) -> State:
        """The documents before the one at hand, and how much of that is used."""
        if self._used == len(self._document):
            return {"documents": self._documents.state_dict(), "used": 0}
        return {"documents": self._before, "used": self._used}

    def load_state_dict(self, state: State) -> None:
        """Go on from a state; a document that was begun is read again."""
        self._documents.load_state_dict(state["documents"])
        self._document, self._used = np.zeros(0, np.int64), 0
        if state["used"]:
            self._open()
            self._used = state["used"]

    def _open(self) -> None:
        self._before = self._documents.state_dict()
        self._document, self._used = self._documents.next_document(), 0
