"""The rounds of speculative decoding, computed from a finished text without decoding it.

On a text that the target produced, the events "the proposal at position i was accepted" are
independent given the text, as long as proposals depend on the prefix alone. One pass over the
text then gives the exact expected rounds for any lookahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.accept.decode import Round
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
    """

    lookahead: int
    rounds: float = 0.0
    accepted: float = 0.0
    emitted: int = 0
    full: float = 0.0
    at_position: list[float] = field(default_factory=list)

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
        )

    def __add__(self, other: "RoundCounts") -> "RoundCounts":
        """Counts of both."""
        return RoundCounts(
            self.lookahead,
            self.rounds + other.rounds,
            self.accepted + other.accepted,
            self.emitted + other.emitted,
            self.full + other.full,
            [a + b for a, b in zip(self.at_position, other.at_position, strict=True)],
        )

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
def greedy_matches(
    drafter: Any, prompt: Sequence[int], answer: Sequence[int], vocabulary: SharedVocabulary
) -> NDArray[np.bool_]:
    """Where the drafter's arg max equals the target's token: one forward pass, [N].

    Past the drafter's context nothing is drafted, so nothing matches there.
    """
    matches = np.zeros(len(answer), np.bool_)
    known = min(len(answer), drafter.config.max_position_embeddings - len(prompt))
    if known > 0:
        ids = torch.tensor([[*prompt, *answer[:known]]], device=drafter.device)
        logits_NV = drafter(input_ids=ids[:, :-1], logits_to_keep=known).logits[0]
        choices = vocabulary.restrict(logits_NV).argmax(-1)
        matches[:known] = (choices == ids[0, len(prompt) :]).cpu().numpy()
    return matches


@torch.inference_mode()
def sampling_acceptance(
    drafter: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    logprobs: Sequence[float] | NDArray[Any],
    vocabulary: SharedVocabulary,
    warping: Warping,
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
    """
    acceptance = np.zeros(len(answer))
    known = min(len(answer), drafter.config.max_position_embeddings - len(prompt))
    if known > 0:
        ids = torch.tensor([[*prompt, *answer[:known]]], device=drafter.device)
        logits_NV = drafter(input_ids=ids[:, :-1], logits_to_keep=known).logits[0]
        q_NV = warping.probabilities(vocabulary.restrict(logits_NV))
        chosen = ids[0, len(prompt) :, None]
        shared = chosen < q_NV.shape[-1]
        q = (q_NV.gather(-1, chosen.clamp_max(q_NV.shape[-1] - 1)) * shared)[:, 0]
        ratio = q.double().cpu().numpy() / np.exp(np.asarray(logprobs[:known], np.float64))
        acceptance[:known] = np.minimum(1.0, ratio)
    return acceptance


@torch.inference_mode()
def text_logprobs(
    target: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    vocabulary: SharedVocabulary,
    warping: Warping,
) -> NDArray[np.float64]:
    """Log p of each token of a text that the target drew, under that warping, [N]."""
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    logits_NV = target(input_ids=ids[:, :-1], logits_to_keep=len(answer)).logits[0]
    p_NV = warping.probabilities(vocabulary.restrict(logits_NV))
    p = p_NV.gather(-1, ids[0, len(prompt) :, None])[:, 0].double().cpu().numpy()
    # What was drawn step by step may have lost its last mass to rounding in one pass.
    logprobs: NDArray[np.float64] = np.log(np.maximum(p, np.finfo(np.float32).tiny))
    return logprobs
