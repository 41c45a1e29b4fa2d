"""Verifiers: how many proposals the target keeps, and which token it adds."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Verdict:
    """What a verification decided.

    Attributes:
        accepted: proposals kept, from the first on.
        token: the target's own token after them.
    """

    accepted: int
    token: int


def greedy(proposals_K: Tensor, logits_TV: Tensor) -> Verdict:
    """Keep proposals while they equal the target's arg max; exact (Leviathan et al. 2023, T = 0).

    Args:
        proposals_K: proposed ids, K >= 0.
        logits_TV: the target's logits before each proposal and after the last, T = K + 1, with
            -inf at ids that must not be emitted.
    """
    choices = logits_TV.argmax(-1)
    agree = (choices[:-1] == proposals_K).long()
    accepted = int(agree.cumprod(0).sum())
    return Verdict(accepted, int(choices[accepted]))
