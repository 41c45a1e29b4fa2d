"""The constraint that drives masks to a shape: a Lagrangian with a target that tightens."""

from collections.abc import Mapping

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
        device: torch.device | str = "cpu",
    ) -> None:
        """Constrain `axes` to the counts of `drafter`, fully after `warmup` steps.

        Args:
            axes: those that are cut.
            source: the shape that is cut.
            drafter: the shape to reach.
            warmup: steps over which the wanted share falls.
            quadratic: where λ₂ starts. Large, it makes the count follow at once and damps λ₁.
            device: of the masks, so that no step waits for it.
        """
        self._whole = {axis: getattr(source, axis) for axis in axes}
        self.shares = {axis: getattr(drafter, axis) / getattr(source, axis) for axis in axes}
        self.warmup = warmup
        start = torch.tensor([0.0, quadratic], device=device)
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

    def told(self, masks: LearnableMasks, step: int) -> dict[str, tuple[Tensor, float]]:
        """What is constrained -> the expected count, and the one that is wanted at a step."""
        told: dict[str, tuple[Tensor, float]] = {}
        for axis, whole in self._whole.items():
            expected = masks.expected_share(axis).detach().mean() * whole
            told[axis] = expected, self.target(axis, step) * whole
        return told

    def state(self) -> dict[Axis, Tensor]:
        """All that the next step depends on."""
        return dict(self.multipliers)

    def restore(self, state: Mapping[Axis, Tensor]) -> None:
        """Go on from what `state` gave."""
        for axis, saved in state.items():
            self.multipliers[axis].copy_(saved)

    @torch.no_grad()
    def ascend(self, masks: LearnableMasks, step: int, rate: float) -> None:
        """Move the multipliers along their gradients."""
        for axis, multipliers in self.multipliers.items():
            excess = masks.expected_share(axis) - self.target(axis, step)
            multipliers += rate * torch.stack([excess.mean(), excess.square().mean()])
            multipliers.clamp_(-self.bound, self.bound)
