"""Distances between the target's and the drafter's next-token distributions.

What is known of the target is a `Signal`: all of its logits, or the n likeliest tokens of a trace
with the mass of all others as one more outcome. Set against the drafter's logits it gives a `Pair`,
the log-probabilities of both over the same outcomes, and a loss is a function of that pair alone.
Over the outcomes of a trace each distance is a lower bound of the full one.

Every loss returns (weighted sum over tokens, number of tokens): whoever has the whole step divides,
so that the split into micro-batches changes nothing (case A25).

Temperature: p and q are both softened, p^(1/T) and q^(1/T) normalised again, and the distance is
that of the softened distributions, without a factor. Its gradients shrink as 1/T²; `make_loss`
multiplies by T² where cross-entropy is mixed in, so that T does not change the shares of the two
(Hinton et al. 2015, section 2). Cross-entropy itself is always at T = 1.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from draftsmith.errors import RequestError

# Least tail mass: what float16 log-probabilities can't tell from nothing.
_TAIL_FLOOR = 1e-6
# log-probability of what can't happen: its exp is zero in every dtype, its products are finite.
_NEVER = -1e4
# How fast the hybrid goes over from KL to total variation (Samarin et al. 2026, η).
_HYBRID_RATE = 3.0


@dataclass(frozen=True)
class Pair:
    """Target and drafter over the same K outcomes at A positions.

    Attributes:
        p: [A, K] log-probabilities of the target.
        q: [A, K] log-probabilities of the drafter.
        likeliest: [A] the outcome that is the target's likeliest token, -1 where the drafter has
            no such token; none: the arg max of `p`.
        weights: [A] what each position counts; none: 1.
    """

    p: Tensor
    q: Tensor
    likeliest: Tensor | None = None
    weights: Tensor | None = None

    def at(self, temperature: float) -> tuple[Tensor, Tensor]:
        """(log p, log q) at a distillation temperature.

        Raises:
            RequestError: it is not positive.
        """
        if temperature == 1.0:
            return self.p, self.q
        if not temperature > 0:
            raise RequestError(f"distillation temperature {temperature}: it must be positive")
        return _log_softmax(self.p / temperature), _log_softmax(self.q / temperature)


Loss = Callable[[Pair], tuple[Tensor, int]]
# The columns over which both are normalised: ids in rising order, or the first so many.
Columns = Tensor | int


class Signal(Protocol):
    """What is known of the target at A positions.

    Attributes:
        copies: tensors as large as the drafter's logits, in float32, that are alive at once while
            a loss and its gradient are computed.
    """

    copies: ClassVar[int]

    def __getitem__(self, rows: slice) -> Self:
        """The same at some of the positions."""

    def over(self, columns: Columns) -> Self:
        """The same for a drafter whose logits are those of `columns` alone."""

    def against(self, logits_AV: Tensor) -> Pair:
        """Target and drafter side by side."""


@dataclass(frozen=True)
class TargetLogits:
    """The target's logits over the whole vocabulary.

    Attributes:
        logits: [A, V], with -inf at ids that can't follow.
    """

    logits: Tensor
    # About 16 are alive at once; allocators keep as much again, and more, of what was freed.
    copies: ClassVar[int] = 48

    def __getitem__(self, rows: slice) -> Self:
        """The same at some of the positions."""
        return type(self)(self.logits[rows])

    def over(self, columns: Columns) -> Self:
        """Leave the other logits out, so that they have no share in the normaliser (case A26)."""
        return type(self)(select(self.logits, columns, dim=-1))

    def against(self, logits_AV: Tensor) -> Pair:
        """Every id is an outcome.

        Raises:
            RequestError: target and drafter have different numbers of ids.
        """
        ours, theirs = logits_AV.shape[-1], self.logits.shape[-1]
        if ours != theirs:
            raise RequestError(
                f"the drafter has {ours} logits and the target {theirs}; name the ids that both "
                "have as the head's columns"
            )
        with torch.no_grad():
            # In place: nothing is kept for a backward pass, and a copy is as large as all logits.
            p = _exact(self.logits).log_softmax(-1).clamp_min_(_NEVER)
        return Pair(p, _log_softmax(logits_AV))


@dataclass(frozen=True)
class Traces:
    """The target's n likeliest tokens; all others together are one more outcome.

    Attributes:
        top_ids: [A, n] columns of the drafter's logits, likeliest first. Ids that the drafter lacks
            (-1, or past its logits) fall into the tail.
        top_logprobs: [A, n] their log-probabilities at temperature 1.
    """

    top_ids: Tensor
    top_logprobs: Tensor
    copies: ClassVar[int] = 8

    @classmethod
    def of_labels(cls, labels_A: Tensor) -> Self:
        """Certainty about one token at each position: `cross_entropy` on given labels."""
        ids = labels_A[:, None]
        return cls(ids, torch.zeros(ids.shape, device=ids.device))

    def __getitem__(self, rows: slice | Tensor) -> Self:
        """The same at some of the positions."""
        return type(self)(self.top_ids[rows], self.top_logprobs[rows])

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        return type(self)(self.top_ids.to(device), self.top_logprobs.to(device))

    def over(self, columns: Columns) -> Self:
        """The ids as places in `columns`; what is not there falls into the tail."""
        return type(self)(places(self.top_ids, columns), self.top_logprobs)

    def against(self, logits_AV: Tensor) -> Pair:
        """Outcomes are the n tokens and the tail."""
        logits_AV = _exact(logits_AV)
        known = (self.top_ids >= 0) & (self.top_ids < logits_AV.shape[-1])
        picked = logits_AV.gather(-1, self.top_ids.where(known, 0))
        q = picked - logits_AV.logsumexp(-1, keepdim=True)
        p, q = (
            _with_tail(x.masked_fill(~known, _NEVER)) for x in (self.top_logprobs.to(q.dtype), q)
        )
        # Likeliest first: it is outcome 0.
        return Pair(p, q, likeliest=torch.where(known[:, 0], 0, -1))


@dataclass(frozen=True)
class Labels:
    """The tokens that the target wrote, and nothing else of what it thought: for `sequence`.

    The outcomes of a pair are the label, and all ids alike: log q of the label, and the mean of
    log q over the ids, whose shares p are 1 - smoothing and smoothing (Szegedy et al. 2016).

    Attributes:
        ids: [A] columns of the drafter's logits; those that it lacks (-1) count as zero.
        smoothing: the share of the label that is spread evenly, 0 … 1.
    """

    ids: Tensor
    smoothing: float = 0.0
    copies: ClassVar[int] = 8

    def __getitem__(self, rows: slice) -> Self:
        """The same at some of the positions."""
        return replace(self, ids=self.ids[rows])

    def over(self, columns: Columns) -> Self:
        """The ids as places in `columns`."""
        return replace(self, ids=places(self.ids, columns))

    def against(self, logits_AV: Tensor) -> Pair:
        """The label and all ids alike are the outcomes."""
        logits_AV = _exact(logits_AV)
        known_A = (self.ids >= 0) & (self.ids < logits_AV.shape[-1])
        own_A = logits_AV.gather(-1, self.ids.where(known_A, 0)[:, None])[:, 0]
        q_A2 = torch.stack([own_A, logits_AV.mean(-1)], -1) - logits_AV.logsumexp(-1, keepdim=True)
        shares = torch.tensor([1.0 - self.smoothing, self.smoothing], device=q_A2.device)
        p_A2 = shares.log().clamp_min(_NEVER).expand_as(q_A2)
        return Pair(p_A2, q_A2.where(known_A[:, None], 0.0))


def forward_kl(pair: Pair, temperature: float = 1.0) -> tuple[Tensor, int]:
    """KL(p‖q) = Σ p (log p − log q), p the target: covers all that the target may say.

    Args:
        pair: the target's and the drafter's distributions.
        temperature: distillation temperature of both.

    Returns:
        Sum over the A positions in nats, and A.
    """
    return _summed(_kl(*pair.at(temperature)), pair)


def reverse_kl(pair: Pair, temperature: float = 1.0) -> tuple[Tensor, int]:
    """KL(q‖p): keeps the drafter within what the target says. As `forward_kl`."""
    p, q = pair.at(temperature)
    return _summed(_kl(q, p), pair)


def jensen_shannon(pair: Pair, temperature: float = 1.0, beta: float = 0.5) -> tuple[Tensor, int]:
    """β KL(p‖m) + (1 − β) KL(q‖m) with m = β p + (1 − β) q (Agarwal et al. 2024, GKD).

    JSD/β → KL(p‖q) for β → 0, JSD/(1 − β) → KL(q‖p) for β → 1. Other arguments as `forward_kl`.

    Args:
        pair: the target's and the drafter's distributions.
        temperature: distillation temperature of both.
        beta: the target's share of the mixture, between 0 and 1.

    Raises:
        RequestError: beta is not between 0 and 1.
    """
    p, q = pair.at(temperature)
    mixture = _mixture(p, q, _share("beta", beta))
    return _summed(beta * _kl(p, mixture) + (1 - beta) * _kl(q, mixture), pair)


def skew_kl(pair: Pair, temperature: float = 1.0, alpha: float = 0.1) -> tuple[Tensor, int]:
    """KL(p ‖ α p + (1 − α) q): bounded where q has nothing (Ko et al. 2024, DistiLLM).

    Args:
        pair: the target's and the drafter's distributions.
        temperature: distillation temperature of both.
        alpha: p's share of the mixture, between 0 and 1.

    Raises:
        RequestError: alpha is not between 0 and 1.
    """
    p, q = pair.at(temperature)
    return _summed(_kl(p, _mixture(p, q, _share("alpha", alpha))), pair)


def skew_reverse_kl(pair: Pair, temperature: float = 1.0, alpha: float = 0.1) -> tuple[Tensor, int]:
    """KL(q ‖ α q + (1 − α) p) (Ko et al. 2024, DistiLLM). Arguments and errors as `skew_kl`."""
    p, q = pair.at(temperature)
    return _summed(_kl(q, _mixture(q, p, _share("alpha", alpha))), pair)


def total_variation(pair: Pair, temperature: float = 1.0) -> tuple[Tensor, int]:
    """½ Σ |p − q| = 1 − acceptance under sampling (Leviathan et al. 2023, corollary 3.6).

    As `forward_kl`, between 0 and 1 a position.
    """
    return _summed(_distance(*pair.at(temperature)), pair)


def hybrid(pair: Pair, temperature: float = 1.0) -> tuple[Tensor, int]:
    """λ KL(p‖q) + (1 − λ) TV with λ = exp(−3 · acceptance) at each position, λ without gradient.

    KL leads where little is accepted and TV has hardly a slope; TV, which is what acceptance
    depends on, where much is (Samarin et al. 2026, LK losses, arXiv 2602.23881). As `forward_kl`.
    """
    p, q = pair.at(temperature)
    distance = _distance(p, q)
    share = (-_HYBRID_RATE * (1 - distance.detach())).exp()
    return _summed(share * _kl(p, q) + (1 - share) * distance, pair)


def cross_entropy(pair: Pair) -> tuple[Tensor, int]:
    """−log q at the target's likeliest token: what greedy acceptance depends on.

    Positions whose likeliest token the drafter lacks count as zero. For given labels use
    `Traces.of_labels`.
    """
    likeliest = pair.p.argmax(-1) if pair.likeliest is None else pair.likeliest
    picked = pair.q.gather(-1, likeliest.clamp_min(0)[:, None])[:, 0]
    return _summed(-picked.where(likeliest >= 0, 0.0), pair)


def sequence(pair: Pair) -> tuple[Tensor, int]:
    """Cross-entropy of the tokens that the target wrote, label smoothing included.

    Sequence-level distillation (Kim and Rush 2016): the target's output is the label. Of `Labels`.
    """
    return _summed(-(pair.p.exp() * pair.q).sum(-1), pair)


LOSSES: dict[str, Callable[..., tuple[Tensor, int]]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "skew_kl": skew_kl,
    "skew_reverse_kl": skew_reverse_kl,
    "total_variation": total_variation,
    "hybrid": hybrid,
    "cross_entropy": cross_entropy,
    "sequence": sequence,
}


def make_loss(
    name: str,
    *,
    cross_entropy_share: float = 0.0,
    temperature: float = 1.0,
    beta: float = 0.5,
    alpha: float = 0.1,
) -> Loss:
    """(1 − share) · T² · the loss called `name` + share · cross-entropy; share 0: the loss itself.

    Args:
        name: one of `LOSSES`.
        cross_entropy_share: between 0 and 1.
        temperature: distillation temperature; cross-entropy has none.
        beta: of `jensen_shannon`; no other loss looks at it.
        alpha: of `skew_kl` and `skew_reverse_kl`.

    Raises:
        RequestError: there is no such loss, or a parameter of it is out of range.
    """
    if name not in LOSSES:
        raise RequestError(f"loss {name!r}: must be one of {', '.join(LOSSES)}")
    options = {"temperature": temperature, "beta": beta, "alpha": alpha}
    loss = _with_options(LOSSES[name], options)
    loss(_SAMPLE)
    if not cross_entropy_share:
        return loss
    soft_share = (1 - cross_entropy_share) * temperature**2

    def mixture(pair: Pair) -> tuple[Tensor, int]:
        soft, tokens = loss(pair)
        hard, _ = cross_entropy(pair)
        return soft_share * soft + cross_entropy_share * hard, tokens

    return mixture


def _with_options(loss: Callable[..., tuple[Tensor, int]], options: dict[str, Any]) -> Loss:
    """Bind those options that the loss takes."""
    takes = inspect.signature(loss).parameters
    return partial(loss, **{name: value for name, value in options.items() if name in takes})


def select(table: Tensor, columns: Columns, dim: int = 0) -> Tensor:
    """What `table`, with ids along `dim`, has at `columns`: a view where they are the first ids."""
    if isinstance(columns, int):
        return table.narrow(dim, 0, columns)
    return table.index_select(dim, columns.to(table.device))


def places(ids: Tensor, columns: Columns) -> Tensor:
    """Where ids stand in `columns`, -1 for those that are not there; any shape."""
    if isinstance(columns, int):
        return ids.where(ids < columns, -1)
    columns = columns.to(ids.device)
    found = torch.searchsorted(columns, ids).clamp_max(len(columns) - 1)
    return found.where(columns[found] == ids, -1)


def _exact(x: Tensor) -> Tensor:
    """At least float32: half precision can't hold a log-softmax."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _log_softmax(logits_AV: Tensor) -> Tensor:
    return _exact(logits_AV).log_softmax(-1).clamp_min(_NEVER)


def _with_tail(logprobs_An: Tensor) -> Tensor:
    """Append the log of the remaining mass: [A, n] -> [A, n + 1]."""
    logprobs_An = logprobs_An.clamp_min(_NEVER)
    rest = 1.0 - logprobs_An.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs_An, rest.clamp_min(_TAIL_FLOOR).log()], -1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p‖q) at each position, [A]."""
    return (p.exp() * (p - q)).sum(-1)


def _distance(p: Tensor, q: Tensor) -> Tensor:
    """Total variation at each position, [A]."""
    return 0.5 * (p.exp() - q.exp()).abs().sum(-1)


def _mixture(p: Tensor, q: Tensor, share: float) -> Tensor:
    """log(share · p + (1 − share) · q)."""
    return torch.logaddexp(p + math.log(share), q + math.log1p(-share))


def _share(name: str, value: float) -> float:
    if not 0 < value < 1:
        raise RequestError(f"{name} {value}: it must lie between 0 and 1, both excluded")
    return value


def _summed(loss_A: Tensor, pair: Pair) -> tuple[Tensor, int]:
    weighted_A = loss_A if pair.weights is None else loss_A * pair.weights
    return weighted_A.sum(), len(loss_A)


# Two outcomes on which `make_loss` tries its parameters, before any training.
_SAMPLE = Pair(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.5, 0.5]]).log())
