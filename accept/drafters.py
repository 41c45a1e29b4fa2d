"""What proposes tokens; anything with these methods can be decoded with and scored."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.verify import Draft
from draftsmith.accept.warping import Warping, draw
from draftsmith.checkpoints.pair import SharedVocabulary

Texts = Sequence[Sequence[int]]


class Drafter(Protocol):
    """Proposes continuations of the texts of a batch.

    Attributes:
        context: positions that it can tell apart; None: any number.
        prefix_alone: whether a proposal depends on the text before it alone, and not on where the
            round began; replay needs it.
    """

    context: int | None
    prefix_alone: bool

    def reset(self, rows: int, seeds: Sequence[int]) -> None:
        """Forget the texts and start with so many empty ones, each with the seed of its draws."""

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Propose up to so many tokens to follow each text; 0 leaves a text alone."""

    def rollback(self, lengths: Sequence[int]) -> None:
        """Only the first tokens of each text stand, so many of each; the rest was rejected."""

    def select(self, rows: Sequence[int]) -> None:
        """Only some texts go on, in the given order."""


class AutoregressiveDrafter:
    """A causal model that proposes token by token, by its arg max or by sampling."""

    def __init__(
        self,
        model: CachedModel,
        vocabulary: SharedVocabulary,
        stop_ids: frozenset[int],
        warping: Warping | None = None,
        confidence: float = 0.0,
    ) -> None:
        """Draft with `model`, only ids of `vocabulary`, and nothing after one of `stop_ids`.

        Args:
            model: the drafter.
            vocabulary: ids that can be proposed.
            stop_ids: ids that end a text.
            warping: how proposals are drawn; None: the likeliest.
            confidence: stop where the likeliest token's unwarped probability is below this. What
                is drawn has no say in it, so the output stays the target's.
        """
        self.model = model
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids
        self.warping = warping or Warping()
        self.confidence = confidence
        self.context: int | None = model.context
        self.prefix_alone = confidence == 0.0
        self._generators: list[torch.Generator] = []

    def reset(self, rows: int, seeds: Sequence[int]) -> None:
        """Forget the texts."""
        self.model.reset(rows)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Propose up to so many tokens, fewer after a proposed end of text."""
        proposals: list[list[int]] = [[] for _ in texts]
        drawn_from: list[list[Tensor]] = [[] for _ in texts]
        # After full acceptance the cache lacks the last proposal as well as the target's token.
        pending = [
            list(text[known:]) if k else []
            for text, known, k in zip(texts, self.model.lengths, lookaheads, strict=True)
        ]
        while any(pending):
            logits = self.model.feed_rows(pending, keep=1)
            for row, given in enumerate(pending):
                pending[row] = []
                if not given:
                    continue
                logits_V = self.vocabulary.restrict(logits[row])[-1]
                if self._unsure(logits_V):
                    continue
                token = self._choose(row, logits_V, drawn_from[row])
                proposals[row].append(token)
                if len(proposals[row]) < lookaheads[row] and token not in self.stop_ids:
                    pending[row] = [token]
        return [
            Draft(tokens, torch.stack(q) if q else None)
            for tokens, q in zip(proposals, drawn_from, strict=True)
        ]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop the cache of rejected tokens."""
        self.model.truncate(
            [min(own, length) for own, length in zip(self.model.lengths, lengths, strict=True)]
        )

    def select(self, rows: Sequence[int]) -> None:
        """Drop the caches of other texts."""
        self.model.select(rows)
        self._generators = [self._generators[row] for row in rows]

    def _choose(self, row: int, logits_V: Tensor, drawn_from: list[Tensor]) -> int:
        if self.warping.greedy:
            return int(logits_V.argmax())
        q_V = self.warping.probabilities(logits_V[None])[0]
        drawn_from.append(q_V)
        return int(draw(q_V[None], self._generators[row]))

    def _unsure(self, logits_V: Tensor) -> bool:
        return self.confidence > 0.0 and float(logits_V.softmax(-1).max()) < self.confidence


class PromptLookup:
    """Proposes what followed the last occurrence of the text's own ending (Saxena 2023)."""

    context: int | None = None
    # Where nothing is found nothing is proposed, so rounds differ in length.
    prefix_alone = False

    def __init__(self, stop_ids: frozenset[int], longest: int = 3) -> None:
        """Look for endings of `longest` tokens first, then of fewer."""
        self.stop_ids = stop_ids
        self.longest = longest

    def reset(self, rows: int, seeds: Sequence[int]) -> None:
        """Nothing is remembered."""

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Copy from earlier in each text."""
        return [Draft(self._copy(text, k)) for text, k in zip(texts, lookaheads, strict=True)]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Nothing is remembered."""

    def select(self, rows: Sequence[int]) -> None:
        """Nothing is remembered."""

    def _copy(self, text: Sequence[int], lookahead: int) -> list[int]:
        for size in range(min(self.longest, len(text) - 1), 0, -1):
            ending = list(text[-size:])
            for start in range(len(text) - size - 1, -1, -1):
                if list(text[start : start + size]) == ending:
                    return self._until_end(list(text[start + size :][:lookahead]))
        return []

    def _until_end(self, tokens: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tokens) if token in self.stop_ids), len(tokens))
        return tokens[: end + 1]
