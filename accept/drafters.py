"""What proposes tokens; anything with these methods can be decoded with and scored."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.accept.cache import CachedModel, Source
from draftsmith.accept.verify import Draft
from draftsmith.accept.warping import Warping, draw
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.data.sound import Sound
from draftsmith.errors import RequestError

Texts = Sequence[Sequence[int]]


class Drafter(Protocol):
    """Proposes continuations of the texts of a batch.

    Attributes:
        context: positions that it can tell apart; None: any number.
        prefix_alone: whether a proposal depends on the text before it alone, and not on where the
            round began.
        deterministic: whether the same round always proposes the same; only then, or with
            `prefix_alone`, can rounds be replayed.
        most: proposals that a round can have; None: any number.
    """

    context: int | None
    prefix_alone: bool
    deterministic: bool
    most: int | None

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Forget the texts and start with so many empty ones.

        Args:
            rows: texts of the batch.
            seeds: of each text's draws.
            sources: what the encoder of each reads, if there is one.
        """

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
        self.deterministic = self.warping.greedy
        self.most: int | None = None
        self._generators: list[torch.Generator] = []

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Forget the texts."""
        self.model.reset(rows, sources)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Propose up to so many tokens, fewer after a proposed end of text."""
        proposals: list[list[int]] = [[] for _ in texts]
        drawn_from: list[list[Tensor]] = [[] for _ in texts]
        passes = [0] * len(texts)
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
                passes[row] += 1
                logits_V = self.vocabulary.restrict(logits[row])[-1]
                if self._unsure(logits_V):
                    continue
                token = self._choose(row, logits_V, drawn_from[row])
                proposals[row].append(token)
                if len(proposals[row]) < lookaheads[row] and token not in self.stop_ids:
                    pending[row] = [token]
        return [
            Draft(tokens, torch.stack(q) if q else None, n)
            for tokens, q, n in zip(proposals, drawn_from, passes, strict=True)
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


class BlockDrafter:
    """A model that proposes a whole block in one pass, a token at each of its masks.

    Xia et al. 2022, section 3.2: the text so far and k [MASK] go in; the text is read causally and
    its keys are kept, the masks see all of it and one another, and each gives the token of its own
    place. The block is always as long as in training; of its tokens as many are proposed as asked.
    """

    # What a mask sees is the whole block, so it matters where the round began.
    prefix_alone = False
    deterministic = True

    def __init__(
        self,
        model: CachedModel,
        vocabulary: SharedVocabulary,
        stop_ids: frozenset[int],
        size: int,
        mask_id: int,
    ) -> None:
        """Draft with `model`.

        Args:
            model: the drafter; its attention must not have windows.
            vocabulary: ids that can be proposed.
            stop_ids: ids that end a text.
            size: masks in a block.
            mask_id: their id.

        Raises:
            RequestError: the model has windows, which blocks can't respect.
        """
        if getattr(model.model.config, "sliding_window", None):
            raise RequestError(
                "drafter: its attention has windows, within which blocks can't be drafted; use a "
                "model without"
            )
        self.model, self.vocabulary, self.stop_ids = model, vocabulary, stop_ids
        self.size, self.mask_id = size, mask_id
        self.most: int | None = size
        # The masks need places too.
        self.context: int | None = None if model.context is None else model.context - size

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Forget the texts."""
        self.model.reset(rows, sources)

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Propose up to so many tokens, fewer after a proposed end of text."""
        masks = [self.mask_id] * self.size
        fed = [
            [*text[known:], *masks] if k else []
            for text, known, k in zip(texts, self.model.lengths, lookaheads, strict=True)
        ]
        if not any(fed):
            return [Draft([]) for _ in texts]
        logits = self.model.feed_rows(fed, keep=self.size, block=self.size)
        drafts = []
        for logits_KV, k in zip(logits, lookaheads, strict=True):
            tokens = self.vocabulary.restrict(logits_KV[:k]).argmax(-1).tolist() if k else []
            drafts.append(Draft(until_end(tokens, self.stop_ids), passes=int(k > 0)))
        # The keys of masks are of no use to later rounds.
        self.rollback([len(text) for text in texts])
        return drafts

    def rollback(self, lengths: Sequence[int]) -> None:
        """Drop the cache of rejected tokens."""
        self.model.truncate(
            [min(own, length) for own, length in zip(self.model.lengths, lengths, strict=True)]
        )

    def select(self, rows: Sequence[int]) -> None:
        """Drop the caches of other texts."""
        self.model.select(rows)


class PromptLookup:
    """Proposes what followed the last occurrence of the text's own ending (Saxena 2023).

    What an encoder reads counts as the beginning of the text, if it is made of the same tokens.
    """

    context: int | None = None
    most: int | None = None
    # Where nothing is found nothing is proposed, so rounds differ in length.
    prefix_alone = False
    deterministic = True

    def __init__(
        self,
        stop_ids: frozenset[int],
        vocabulary: SharedVocabulary | None = None,
        longest: int = 3,
        sources: bool = True,
    ) -> None:
        """Set up.

        Args:
            stop_ids: ids that end a text.
            vocabulary: ids that may be said; a copy ends before any other. None: all.
            longest: look for endings of so many tokens first, then of fewer.
            sources: whether an encoder reads the tokens that are written.
        """
        self.stop_ids, self.vocabulary = stop_ids, vocabulary
        self.longest, self._copies_sources = longest, sources
        self._sources: list[list[int]] = []

    def reset(self, rows: int, seeds: Sequence[int], sources: Sequence[Source] = ()) -> None:
        """Remember what can be copied from besides the texts."""
        known = self._copies_sources
        tokens = [[] if isinstance(s, Tensor | Sound) or not known else list(s) for s in sources]
        self._sources = tokens or [[] for _ in range(rows)]

    def propose(self, texts: Texts, lookaheads: Sequence[int]) -> list[Draft]:
        """Copy from earlier in each text."""
        sources = self._sources or [[] for _ in texts]
        return [
            Draft(self._copy([*source, *text], min(self.longest, len(text)), k))
            for source, text, k in zip(sources, texts, lookaheads, strict=True)
        ]

    def rollback(self, lengths: Sequence[int]) -> None:
        """Nothing is remembered of the texts."""

    def select(self, rows: Sequence[int]) -> None:
        """Only some texts go on."""
        self._sources = [self._sources[row] for row in rows]

    def _copy(self, text: Sequence[int], longest: int, lookahead: int) -> list[int]:
        for size in range(min(longest, len(text) - 1), 0, -1):
            ending = list(text[-size:])
            for start in range(len(text) - size - 1, -1, -1):
                if list(text[start : start + size]) == ending:
                    return self._sayable(list(text[start + size :][:lookahead]))
        return []

    def _sayable(self, tokens: list[int]) -> list[int]:
        """Up to an end of text, and short of what must not be said."""
        tokens = until_end(tokens, self.stop_ids)
        if self.vocabulary is None:
            return tokens
        banned = (i for i, token in enumerate(tokens) if not self.vocabulary.has(token))
        return tokens[: next(banned, len(tokens))]


def until_end(tokens: list[int], stop_ids: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends a text, itself included."""
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[: end + 1]
