"""The rounds of speculative decoding, computed from a finished text without decoding it.

On a text that the target produced, the events "the proposal at position i was accepted" are
independent given the text, as long as proposals depend on the prefix alone. One pass over the
text then gives the exact expected rounds for any lookahead. Where they depend on where the round
began but nothing is drawn, the drafter drafts wherever a round begins, and the text verifies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.accept.cache import CachedModel, Source
from draftsmith.accept.decode import Limits, Round
from draftsmith.accept.drafters import Drafter
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.pair import SharedVocabulary


@dataclass
class RoundCounts:
    """Rounds of one or many texts; expectations, and whole numbers for greedy.

    Attributes:
        rounds: verifications.
        accepted: proposals kept.
        emitted: tokens of the texts.
        full: rounds in which all of `lookahead` was kept.
        at_position: rounds whose i-th proposal was kept, [lookahead].
        proposed: proposals made; None where an expectation of the rounds does not tell.
        passes: of the drafter; None likewise: as many as the lookahead in each round.
    """

    lookahead: int
    rounds: float = 0.0
    accepted: float = 0.0
    emitted: int = 0
    full: float = 0.0
    at_position: list[float] = field(default_factory=list)
    proposed: int | None = None
    passes: int | None = None

    def __post_init__(self) -> None:
        """Make the positions."""
        self.at_position = self.at_position or [0.0] * self.lookahead

    @classmethod
    def of_rounds(cls, rounds: Sequence[Round], lookahead: int) -> "RoundCounts":
        """Counts of rounds that were really decoded."""
        return cls(
            lookahead,
            rounds=len(rounds),
            accepted=sum(r.accepted for r in rounds),
            emitted=sum(r.emitted for r in rounds),
            full=sum(r.accepted == lookahead for r in rounds),
            at_position=[float(sum(r.accepted > i for r in rounds)) for i in range(lookahead)],
            proposed=sum(r.proposed for r in rounds),
            passes=sum(r.passes for r in rounds),
        )

    @classmethod
    def total(cls, counts: Sequence["RoundCounts"], lookahead: int) -> "RoundCounts":
        """Counts of all texts together."""
        proposed = [c.proposed for c in counts if c.proposed is not None]
        passes = [c.passes for c in counts if c.passes is not None]
        return cls(
            lookahead,
            rounds=sum(c.rounds for c in counts),
            accepted=sum(c.accepted for c in counts),
            emitted=sum(c.emitted for c in counts),
            full=sum(c.full for c in counts),
            at_position=[sum(c.at_position[i] for c in counts) for i in range(lookahead)],
            proposed=sum(proposed) if len(proposed) == len(counts) else None,
            passes=sum(passes) if len(passes) == len(counts) else None,
        )

    def __add__(self, other: "RoundCounts") -> "RoundCounts":
        """Counts of both."""
        return RoundCounts.total([self, other], self.lookahead)

    @property
    def passes_per_round(self) -> float | None:
        """Mean drafter passes of a round."""
        return None if self.passes is None or not self.rounds else self.passes / self.rounds

    @property
    def proposed_per_round(self) -> float | None:
        """Mean proposals of a round."""
        return None if self.proposed is None or not self.rounds else self.proposed / self.rounds

    @property
    def accepted_per_round(self) -> float | None:
        """Mean proposals kept in a round."""
        return self.accepted / self.rounds if self.rounds else None

    @property
    def emitted_per_round(self) -> float | None:
        """Mean tokens emitted in a round (block efficiency)."""
        return self.emitted / self.rounds if self.rounds else None


def replay(acceptance: Sequence[float] | NDArray[Any], lookahead: int, limit: int) -> RoundCounts:
    """Expected rounds on one text.

    Args:
        acceptance: [N] probability that a proposal at each position is accepted: 0 or 1 for
            greedy, min(1, q/p) at the emitted token for sampling.
        lookahead: most proposals in a round.
        limit: the most tokens that the text could have had; N < limit means that it ended with
            an EOS, which may itself be proposed.
    """
    w = [float(a) for a in acceptance]
    length = len(w)
    counts = RoundCounts(lookahead, emitted=length)
    starts = [1.0] + [0.0] * length
    for i in range(length):
        if not starts[i]:
            continue
        counts.rounds += starts[i]
        proposals = min(lookahead, limit - i - 1, length - i)
        kept = starts[i]
        for j in range(proposals):
            starts[i + j + 1] += kept * (1.0 - w[i + j])
            kept *= w[i + j]
            counts.accepted += kept
            counts.at_position[j] += kept
        # After full acceptance the target adds a token, unless the text has just ended.
        starts[min(i + proposals + 1, length)] += kept
        counts.full += kept if proposals == lookahead else 0.0
    return counts


@torch.inference_mode()
def replay_starts(
    drafter: Drafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    lookaheads: Sequence[int],
    limit: int,
    context: int | None = None,
    source: Source | None = None,
) -> dict[int, RoundCounts]:
    """Rounds on one text of a drafter whose proposals depend on where the round began.

    Args:
        drafter: one that draws nothing, and of whose longer drafts a shorter one is the beginning.
            Given the text, its proposal was accepted where it equals the text, also where the
            target drew: what is left of p after a rejection holds no mass of that token.
        prompt: ids.
        answer: what the target wrote.
        lookaheads: for all of which rounds are counted, in one walk over the text.
        limit: as for `replay`.
        context: positions of the smaller of both models; None: any number.
        source: what an encoder reads.
    """
    drafter.reset(1, [0], () if source is None else [source])
    rounds: dict[int, list[Round]] = {k: [] for k in lookaheads}
    starts = dict.fromkeys(lookaheads, 0)
    for i in range(len(answer)):
        here = [k for k, start in starts.items() if start == i]
        if not here:
            continue
        left = limit - i - 1
        if context is not None:
            left = min(left, context - len(prompt) - i)
        text = [*prompt, *answer[:i]]
        (draft,) = drafter.propose([text], [max(0, min(max(here), left))])
        drafter.rollback([len(text)])
        agreed = common_prefix(draft.tokens, answer[i:])
        for k in here:
            proposed = min(k, len(draft.tokens))
            accepted = min(agreed, proposed)
            emitted = min(accepted + 1, len(answer) - i)
            # A shorter draft would have ended after as many passes as it has proposals.
            passes = draft.passes if len(draft.tokens) < k else min(k, draft.passes)
            rounds[k].append(Round(proposed, accepted, emitted, 0.0, 0.0, passes=passes))
            starts[k] = i + accepted + 1
    return {k: RoundCounts.of_rounds(own, k) for k, own in rounds.items()}


def common_prefix(some: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(some), len(others)))


def _logits_of_answer(
    model: CachedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocabulary: SharedVocabulary,
    source: Source | None,
) -> Tensor:
    """Logits from which each answer token would be taken, up to the model's context: [N', V]."""
    known = len(answer)
    if model.context is not None:
        known = max(0, min(known, model.context - len(prompt)))
    if not known:
        return torch.empty(0, vocabulary.size)
    model.reset(sources=() if source is None else [source])
    logits_NV = model.feed_list([*prompt, *answer[: known - 1]], keep=known)
    return vocabulary.restrict(logits_NV)


@torch.inference_mode()
def greedy_matches(
    drafter: CachedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocabulary: SharedVocabulary,
    source: Source | None = None,
) -> NDArray[np.bool_]:
    """Where the drafter's arg max equals the target's token: one forward pass, [N].

    Past the drafter's context nothing is drafted, so nothing matches there.
    """
    matches = np.zeros(len(answer), np.bool_)
    logits_NV = _logits_of_answer(drafter, prompt, answer, vocabulary, source)
    choices = logits_NV.argmax(-1).cpu().numpy()
    matches[: len(choices)] = choices == np.asarray(answer[: len(choices)])
    return matches


@torch.inference_mode()
def sampling_acceptance(
    drafter: CachedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    logprobs: Sequence[float] | NDArray[Any],
    vocabulary: SharedVocabulary,
    warping: Warping,
    source: Source | None = None,
) -> NDArray[np.float64]:
    """The probability that a proposal at each position was accepted, given the text: [N].

    A token is emitted by acceptance with probability min(p, q), and at all with p.

    Args:
        drafter: the drafter.
        prompt: ids.
        answer: what the target sampled under `warping`.
        logprobs: log p of each answer token under that warping.
        vocabulary: ids that can be proposed.
        warping: how both draw.
        source: what an encoder reads.
    """
    acceptance = np.zeros(len(answer))
    logits_NV = _logits_of_answer(drafter, prompt, answer, vocabulary, source)
    known = len(logits_NV)
    if known:
        q_NV = warping.probabilities(logits_NV)
        chosen = torch.tensor(list(answer[:known]), device=q_NV.device)[:, None]
        shared = chosen < q_NV.shape[-1]
        q = (q_NV.gather(-1, chosen.clamp_max(q_NV.shape[-1] - 1)) * shared)[:, 0]
        ratio = q.double().cpu().numpy() / np.exp(np.asarray(logprobs[:known], np.float64))
        acceptance[:known] = np.minimum(1.0, ratio)
    return acceptance


@torch.inference_mode()
def text_logprobs(
    target: CachedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocabulary: SharedVocabulary,
    warping: Warping,
    source: Source | None = None,
    limits: Limits | None = None,
) -> NDArray[np.float64]:
    """Log p of each token of a text that the target drew, under that warping, [N].

    `limits` says which ids it could not begin or end with.
    """
    logits_NV = _logits_of_answer(target, prompt, answer, vocabulary, source)
    p_NV = warping.probabilities(logits_NV if limits is None else limits.open(logits_NV, 0))
    chosen = torch.tensor(list(answer), device=p_NV.device)[:, None]
    p = p_NV.gather(-1, chosen)[:, 0].double().cpu().numpy()
    # What was drawn step by step may have lost its last mass to rounding in one pass.
    logprobs: NDArray[np.float64] = np.log(np.maximum(p, np.finfo(np.float32).tiny))
    return logprobs
