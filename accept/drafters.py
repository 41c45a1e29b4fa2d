"""What proposes tokens; anything with these three methods can be decoded with and scored."""

from collections.abc import Sequence
from typing import Protocol

from draftsmith.accept.cache import CachedModel
from draftsmith.checkpoints.pair import SharedVocabulary


class Drafter(Protocol):
    """Proposes continuations of a text."""

    context: int

    def reset(self) -> None:
        """Forget the text."""

    def propose(self, tokens: Sequence[int], lookahead: int) -> list[int]:
        """Propose up to `lookahead` tokens to follow `tokens`."""

    def rollback(self, length: int) -> None:
        """Only the first `length` tokens of the text stand; the rest was rejected."""


class AutoregressiveDrafter:
    """A causal model that proposes its arg max, token by token."""

    def __init__(
        self, model: CachedModel, vocabulary: SharedVocabulary, stop_ids: frozenset[int]
    ) -> None:
        """Draft with `model`, only ids of `vocabulary`, and nothing after one of `stop_ids`."""
        self.model = model
        self.vocabulary = vocabulary
        self.stop_ids = stop_ids
        self.context = model.context

    def reset(self) -> None:
        """Forget the text."""
        self.model.reset()

    def propose(self, tokens: Sequence[int], lookahead: int) -> list[int]:
        """Propose up to `lookahead` tokens, fewer after a proposed end of text."""
        proposals: list[int] = []
        # After full acceptance the cache lacks the last proposal as well as the target's token.
        pending = list(tokens[self.model.length :])
        while len(proposals) < lookahead:
            logits_1V = self.model.feed_list(pending, keep=1)
            token = int(self.vocabulary.restrict(logits_1V)[-1].argmax())
            proposals.append(token)
            if token in self.stop_ids:
                break
            pending = [token]
        return proposals

    def rollback(self, length: int) -> None:
        """Drop the cache of rejected tokens."""
        self.model.crop(length)
