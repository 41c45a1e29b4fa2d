"""Decoding prompts every way that a score compares: alone, with drafts, one by one or together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Generation, Limits, decode_batch, plain_decode
from draftsmith.accept.drafters import (
    AutoregressiveDrafter,
    BlockDrafter,
    Drafter,
    PromptLookup,
)
from draftsmith.accept.energy import measure_energy
from draftsmith.accept.heads import HeadsDrafter
from draftsmith.accept.verify import Verification
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.data.chat import Prompt
from draftsmith.data.progress import Progress


@dataclass(frozen=True)
class Proposing:
    """A loaded drafter and what it may say.

    Attributes:
        model: None: prompt lookup, or heads.
        vocabulary: ids that can be proposed.
        stop_ids: ids that end a text.
        confidence: stop drafting below it; 0: never.
        block: how it drafts in one pass; None: token by token.
        sources: whether an encoder reads the tokens that are written, so that they can be copied.
        heads: what drafts with heads on the target; None: something else does.
    """

    model: CachedModel | None
    vocabulary: SharedVocabulary
    stop_ids: frozenset[int]
    confidence: float = 0.0
    block: Block | None = None
    sources: bool = True
    heads: HeadsDrafter | None = None

    def drafter(self, warping: Warping) -> Drafter:
        """What proposes, drawing as the target does."""
        if self.heads is not None:
            return self.heads
        if self.model is None:
            return PromptLookup(self.stop_ids, self.vocabulary, sources=self.sources)
        if self.block is None:
            return AutoregressiveDrafter(
                self.model, self.vocabulary, self.stop_ids, warping, self.confidence
            )
        return BlockDrafter(
            self.model, self.vocabulary, self.stop_ids, self.block.size, self.block.mask_id
        )


@dataclass(frozen=True)
class Pair:
    """A loaded target and drafter, and what they may say.

    Attributes:
        target: the target.
        proposing: the drafter.
        allowed: ids that the target may say.
        limits: when a text ends.
        text: ids -> string.
    """

    target: CachedModel
    proposing: Proposing
    allowed: SharedVocabulary
    limits: Limits
    text: Callable[[Sequence[int]], str]

    @property
    def drafter(self) -> CachedModel | None:
        """The drafting model; None: prompt lookup."""
        return self.proposing.model

    def proposer(self, verification: Verification) -> Drafter:
        """What proposes, drawing as the target does."""
        return self.proposing.drafter(verification.warping)


@dataclass(frozen=True)
class Texts:
    """What was decoded.

    Attributes:
        plain: by the target alone, prompt by prompt, one at a time.
        speculative: lookahead -> groups of texts that were decoded together.
        alone_seconds: of each group, decoded together by the target alone.
        alone_tokens: what it wrote in that time.
        joules: way of decoding -> energy, where the machine tells.
    """

    plain: list[Generation] = field(default_factory=list)
    speculative: dict[int, list[list[Generation]]] = field(default_factory=dict)
    alone_seconds: list[float] = field(default_factory=list)
    alone_tokens: list[int] = field(default_factory=list)
    joules: dict[str, float] = field(default_factory=dict)

    def of(self, lookahead: int) -> list[Generation]:
        """All texts of a lookahead, in the order of the prompts."""
        return [text for group in self.speculative[lookahead] for text in group]

    def seconds(self, lookahead: int) -> float:
        """Of decoding with a lookahead; what is decoded together takes its time once."""
        groups = self.speculative[lookahead]
        return sum(group[0].prefill_seconds + group[0].seconds for group in groups)


def decode_all(
    pair: Pair,
    prompts: Sequence[Prompt],
    decoded: int,
    lookaheads: Sequence[int],
    verification: Verification,
    batch: int,
) -> Texts:
    """Plain and speculative decoding in turn, so that both meet the same state of the machine."""
    texts = Texts(speculative={k: [] for k in lookaheads})
    proposer = pair.proposer(verification)
    with Progress("score", len(prompts), "prompts") as progress:
        for group in _groups(prompts, decoded, batch):
            if not texts.plain:
                # Warm-up: the first pass pays for allocations and code paths.
                few = replace(pair, limits=Limits(8))
                _together(few, proposer, prompts, group, max(lookaheads, default=0), verification)
                _alone(few, prompts, group, verification)
            with measure_energy(pair.target.device) as energy:
                plain = _alone(pair, prompts, group, verification)
            texts.plain.extend(plain)
            real = bool(lookaheads) and group[0] < decoded
            if real and batch > 1:
                # Without proposals, a round is a plain step of all rows.
                none = PromptLookup(pair.limits.stop_ids)
                with measure_energy(pair.target.device) as energy:
                    plain = _together(pair, none, prompts, group, 0, verification)
            if real:
                # What is decoded together takes its time once.
                timed = plain if batch == 1 else plain[:1]
                texts.alone_seconds.append(sum(t.prefill_seconds + t.seconds for t in timed))
                texts.alone_tokens.append(sum(len(t.tokens) for t in plain))
                _add(texts.joules, "target alone", energy.joules)
                for k in lookaheads:
                    with measure_energy(pair.target.device) as energy:
                        made = _together(pair, proposer, prompts, group, k, verification)
                    _add(texts.joules, f"lookahead {k}", energy.joules)
                    texts.speculative[k].append(made)
            progress.update(len(group))
    return texts


def _groups(prompts: Sequence[Prompt], decoded: int, batch: int) -> Iterator[range]:
    """Numbers of the prompts that are decoded together; those that are only replayed, alone."""
    for start in range(0, decoded, batch):
        yield range(start, min(start + batch, decoded))
    yield from (range(i, i + 1) for i in range(decoded, len(prompts)))


def _alone(
    pair: Pair, prompts: Sequence[Prompt], group: range, verification: Verification
) -> list[Generation]:
    """The target's own texts, one at a time."""
    return [
        plain_decode(
            pair.target,
            prompts[i].ids,
            pair.limits,
            pair.allowed,
            verification.warping,
            verification.plain_seed(i),
            prompts[i].source,
        )
        for i in group
    ]


def _together(
    pair: Pair,
    proposer: Drafter,
    prompts: Sequence[Prompt],
    group: range,
    lookahead: int,
    verification: Verification,
) -> list[Generation]:
    return decode_batch(
        pair.target,
        proposer,
        [prompts[i].ids for i in group],
        lookahead,
        pair.limits,
        pair.allowed,
        verifiers=[verification.verifier(i) for i in group],
        seeds=[verification.draft_seed(i) for i in group],
        sources=[s for i in group if (s := prompts[i].source) is not None],
    )


def _add(joules: dict[str, float], way: str, amount: float | None) -> None:
    if amount is not None:
        joules[way] = joules.get(way, 0.0) + amount
