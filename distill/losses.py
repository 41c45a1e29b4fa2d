"""Distances between the target's and the drafter's next-token distributions.

The teacher is known by its n likeliest tokens and the mass of all others: the tail is one more
outcome, so each distance is that of the two distributions over n + 1 outcomes, a lower bound of
the full one. Every loss returns (sum over tokens, number of tokens): whoever has the whole step
divides, so that the split into micro-batches changes nothing (case A25).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Least tail mass: what float16 log-probabilities can't tell from nothing.
_TAIL_FLOOR = 1e-6

TopLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, int]]


def _with_tail(logprobs_An: Tensor) -> Tensor:
    """Append the log of the remaining mass: [A, n] -> [A, n + 1]."""
    rest = 1.0 - logprobs_An.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs_An, rest.clamp_min(_TAIL_FLOOR).log()], -1)


def _pair(logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of teacher and student over the same n + 1 outcomes.

    Ids of -1 are outcomes that the student's head does not have; they fall into the tail.
    """
    logits_AV = logits_AV.float()
    known = top_ids_An >= 0
    gathered = logits_AV.gather(-1, top_ids_An.clamp_min(0))
    student = gathered - logits_AV.logsumexp(-1, keepdim=True)
    nothing = torch.finfo(torch.float32).min / 4
    teacher = top_logprobs_An.float().masked_fill(~known, nothing)
    student = student.masked_fill(~known, nothing)
    return _with_tail(teacher), _with_tail(student)


def forward_kl(
    logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor
) -> tuple[Tensor, int]:
    """KL(p‖q) = Σ p (log p − log q), p the target: covers all that the target may say.

    Args:
        logits_AV: the drafter's logits at A positions.
        top_ids_An: the target's likeliest ids, as columns of `logits_AV`; -1: not among them.
        top_logprobs_An: their log-probabilities.
    """
    p, q = _pair(logits_AV, top_ids_An, top_logprobs_An)
    return (p.exp() * (p - q)).sum(), len(p)


def reverse_kl(
    logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor
) -> tuple[Tensor, int]:
    """KL(q‖p): keeps the drafter within what the target says. Arguments as `forward_kl`."""
    p, q = _pair(logits_AV, top_ids_An, top_logprobs_An)
    return (q.exp() * (q - p)).sum(), len(p)


def total_variation(
    logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor
) -> tuple[Tensor, int]:
    """½ Σ |p − q| = 1 − acceptance under sampling (Leviathan et al. 2023).

    Arguments as `forward_kl`.
    """
    p, q = _pair(logits_AV, top_ids_An, top_logprobs_An)
    return 0.5 * (p.exp() - q.exp()).abs().sum(), len(p)


def cross_entropy(
    logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor
) -> tuple[Tensor, int]:
    """−log q at the target's likeliest token: what greedy acceptance depends on.

    Arguments as `forward_kl`; positions whose likeliest token the head lacks count as zero.
    """
    likeliest = top_ids_An[:, 0]
    total = nn.functional.cross_entropy(
        logits_AV.float(), likeliest, ignore_index=-1, reduction="sum"
    )
    return total, len(top_ids_An)


def mixed(loss: TopLoss, weight: float) -> TopLoss:
    """(1 − weight) · loss + weight · cross-entropy."""
    if not weight:
        return loss

    def mixture(
        logits_AV: Tensor, top_ids_An: Tensor, top_logprobs_An: Tensor
    ) -> tuple[Tensor, int]:
        soft, tokens = loss(logits_AV, top_ids_An, top_logprobs_An)
        hard, _ = cross_entropy(logits_AV, top_ids_An, top_logprobs_An)
        return (1 - weight) * soft + weight * hard, tokens

    return mixture


LOSSES: dict[str, TopLoss] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}
