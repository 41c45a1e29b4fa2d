"""The constraint that drives masks to a shape: a Lagrangian with a target that tightens."""

import torch
from torch import Tensor

from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.shape import Shape
from draftsmith.prune.masks import LearnableMasks


class Lagrangian:
    """λ₁(ŝ − s*) + λ₂(ŝ − s*)² for each axis, averaged over layers (Xia et al. 2024, eq. 2).

    ŝ is the expected kept share. s* falls linearly from 1 to the shape's share over the warm-up.
    Masks descend on the penalty, multipliers ascend; they are bounded, for on a short run an
    unbounded λ₁ goes on pushing long after the constraint holds.

    Attributes:
        multipliers: axis -> [λ₁, λ₂].
    """

    bound = 10_000.0

    def __init__(
        self,
        axes: tuple[Axis, ...],
        source: Shape,
        drafter: Shape,
        warmup: int,
        quadratic: float = 0.0,
    ) -> None:
        """Constrain `axes` to the counts of `drafter`, fully after `warmup` steps.

        Args:
            axes: those that are cut.
            source: the shape that is cut.
            drafter: the shape to reach.
            warmup: steps over which the wanted share falls.
            quadratic: where λ₂ starts. Large, it makes the count follow at once and damps λ₁.
        """
        self.shares = {axis: getattr(drafter, axis) / getattr(source, axis) for axis in axes}
        self.warmup = warmup
        start = torch.tensor([0.0, quadratic])
        self.multipliers: dict[Axis, Tensor] = {axis: start.clone() for axis in axes}

    def target(self, axis: Axis, step: int) -> float:
        """The wanted share at a step."""
        progress = min(1.0, step / self.warmup) if self.warmup else 1.0
        return 1.0 + (self.shares[axis] - 1.0) * progress

    def penalty(self, masks: LearnableMasks, step: int) -> Tensor:
        """What is added to the loss."""
        terms = []
        for axis, (linear, quadratic) in self.multipliers.items():
            excess = masks.expected_share(axis) - self.target(axis, step)
            terms.append((linear * excess + quadratic * excess.square()).mean())
        return torch.stack(terms).sum()

    @torch.no_grad()
    def ascend(self, masks: LearnableMasks, step: int, rate: float) -> None:
        """Move the multipliers along their gradients."""
        for axis, multipliers in self.multipliers.items():
            excess = (masks.expected_share(axis) - self.target(axis, step)).cpu()
            multipliers += rate * torch.stack([excess.mean(), excess.square().mean()])
            multipliers.clamp_(-self.bound, self.bound)
