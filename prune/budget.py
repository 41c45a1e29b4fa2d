"""Pruning to milliseconds: a Lagrangian whose cost is the expected time of a pass, and its shape.

The time comes from a table that `draftsmith profile` measured. Masks share the budget out among the
axes that may be cut; axes whose count the recipe states are held to it as always.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from draftsmith.accept.latency_table import LAYER_AXES, TABLE_AXES, LatencyTable
from draftsmith.accept.profile import friendly_step
from draftsmith.checkpoints.families.base import AXES, Axis, Family
from draftsmith.checkpoints.shape import Shape, changed_axes, resolve_shape
from draftsmith.errors import RequestError
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks
from draftsmith.recipes.schema import PruneSettings

# What masks may shorten to meet a budget.
_BUDGET_AXES: tuple[Axis, ...] = ("layers", *LAYER_AXES)
# Legal counts around the expected one that are tried along each axis, all with all.
_TRIED: Mapping[str, int] = {"kv_heads": 12, "heads_per_group": 8, "ffn": 24, "hidden": 48}
# Steps in which the expected counts shrink together where nothing around them meets the budget.
_SHRINK = 0.95
# The multipliers of the budget, beside those of axes.
DRAFT_MS = "draft_ms"


@dataclass(frozen=True)
class Budget:
    """Milliseconds of a drafter's pass, and what may be cut to meet them.

    Attributes:
        draft_ms: the most.
        table: how long a shape takes.
        source: the shape that is cut.
        family: the source's table.
        start: the source with the counts that the recipe fixes: the largest drafter.
        free: the axes that share the budget.
    """

    draft_ms: float
    table: LatencyTable
    source: Shape
    family: Family
    start: Shape
    free: tuple[Axis, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that need masks."""
        fixed = changed_axes(self.source, self.start)
        return tuple(axis for axis in AXES if axis in fixed or axis in self.free)

    @classmethod
    def of(
        cls, settings: PruneSettings, source: Shape, family: Family, table: LatencyTable
    ) -> "Budget":
        """The budget of a recipe.

        Args:
            settings: with `draft_ms`.
            source: the shape that is cut.
            family: the source's table.
            table: what `settings.latency` names.

        Raises:
            RequestError: the table is not of this source or does not reach to the shape, nothing
                is left to be cut, or the budget is less than the smallest shape takes, or so large
                that nothing need be cut.
        """
        assert settings.draft_ms is not None
        if (table.family, table.source) != (family.name, source):
            raise RequestError(
                f"recipe.prune.latency: measured for {table.family} of {table.source}, but the "
                f"source is {family.name} of {source}; run `draftsmith profile` on the source"
            )
        wanted = asdict(settings.shape)
        start = resolve_shape(source, wanted, family, settings.axes)
        try:
            table.check(start)
        except RequestError as error:
            raise RequestError(f"recipe.prune.shape: {error}") from None
        free = _free_axes(settings, start, family, table)
        budget = cls(settings.draft_ms, table, source, family, start, free)
        _check_reach(budget)
        return budget


class BudgetLagrangian:
    """λ₁x + λ₂x² of the excess x over the wanted milliseconds, in units of the source's.

    The wanted milliseconds fall linearly from the source's to the budget over the warm-up. In a
    uniform drafter every layer has the mean count, so a layer's expected share is pulled to the
    mean over layers: λ₂ times its variance, on each free axis that is cut in every layer. Axes of
    fixed count have the ordinary constraint.

    Attributes:
        multipliers: `draft_ms`, a fixed axis, or `even.` and a free axis -> [λ₁, λ₂]; evenness
            has no λ₁.
    """

    def __init__(
        self,
        budget: Budget,
        warmup: int,
        quadratic: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Meet the budget.

        Args:
            budget: the milliseconds, and what may be cut.
            warmup: steps over which the wanted milliseconds fall.
            quadratic: where every λ₂ starts.
            device: of the masks, so that no step waits for it.
        """
        self.budget, self.warmup = budget, warmup
        self.source_ms = budget.table.ms_of(budget.source)
        fixed = changed_axes(budget.source, budget.start)
        self._fixed = Lagrangian(fixed, budget.source, budget.start, warmup, quadratic, device)
        self._even = tuple(axis for axis in budget.free if axis not in ("layers", "hidden"))
        self.multipliers: dict[str, Tensor] = {
            DRAFT_MS: torch.tensor([0.0, quadratic], device=device)
        }
        # The very same tensors, so that these are all.
        self.multipliers.update(self._fixed.multipliers.items())
        for axis in self._even:
            self.multipliers[_even(axis)] = torch.tensor([0.0, quadratic], device=device)

    def target(self, axis: Axis, step: int) -> float:
        """The wanted share of a fixed axis at a step."""
        return self._fixed.target(axis, step)

    def wanted_ms(self, step: int) -> float:
        """The wanted milliseconds at a step."""
        progress = min(1.0, step / self.warmup) if self.warmup else 1.0
        return self.source_ms + (self.budget.draft_ms - self.source_ms) * progress

    def penalty(self, masks: LearnableMasks, step: int) -> Tensor:
        """What is added to the loss."""
        linear, quadratic = self.multipliers[DRAFT_MS]
        excess = self._excess(masks, step)
        total = linear * excess + quadratic * excess.square()
        for axis in self._even:
            total = total + self.multipliers[_even(axis)][1] * _unevenness(masks, axis)
        if self._fixed.shares:
            total = total + self._fixed.penalty(masks, step)
        return total

    def told(self, masks: LearnableMasks, step: int) -> dict[str, tuple[Tensor, float]]:
        """What is constrained -> what is expected, and wanted at a step: milliseconds, counts."""
        budget = self.budget
        with torch.no_grad():
            expected = expected_ms(masks, budget.source, budget.table)
        return {
            DRAFT_MS: (expected, self.wanted_ms(step)),
            **self._fixed.told(masks, step),
        }

    def state(self) -> dict[str, Tensor]:
        """All that the next step depends on."""
        return dict(self.multipliers)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        for name, saved in state.items():
            self.multipliers[name].copy_(saved)

    @torch.no_grad()
    def ascend(self, masks: LearnableMasks, step: int, rate: float) -> None:
        """Move the multipliers along their gradients."""
        excess = self._excess(masks, step)
        gradients = {DRAFT_MS: torch.stack([excess, excess.square()])}
        for axis in self._even:
            uneven = _unevenness(masks, axis)
            gradients[_even(axis)] = torch.stack([torch.zeros_like(uneven), uneven])
        for name, gradient in gradients.items():
            self.multipliers[name] += rate * gradient
            self.multipliers[name].clamp_(-Lagrangian.bound, Lagrangian.bound)
        self._fixed.ascend(masks, step, rate)

    def _excess(self, masks: LearnableMasks, step: int) -> Tensor:
        expected = expected_ms(masks, self.budget.source, self.budget.table)
        return (expected - self.wanted_ms(step)) / self.source_ms


def expected_ms(masks: LearnableMasks, source: Shape, table: LatencyTable) -> Tensor:
    """Milliseconds of the uniform drafter with the masks' expected counts, differentiable.

    Widths are means over layers. Below the table's smallest a width saves nothing more.
    """
    some = next(iter(masks.parameters()))
    counts: dict[str, Tensor] = {}
    for axis in TABLE_AXES:
        whole = some.new_tensor(float(getattr(source, axis)))
        share = masks.expected_share(axis).mean() if axis in masks.axes else 1.0
        counts[axis] = whole * share
    return table.ms(counts)


def shape_within(expected: Mapping[str, float], budget: Budget) -> Shape:
    """The legal uniform shape that is nearest to the expected counts and meets the budget.

    Nearest by the sum of squared differences, each in units of the source's count; layers are
    rounded both ways. Widths are multiples that suit kernels where the source's are. If
    nothing around the expected counts meets the budget, they shrink together until something does.

    Args:
        expected: free axis -> expected count, mean over layers; what is left out stays whole.
        budget: which `Budget.of` has found possible.
    """
    whole = {axis: float(expected.get(axis, getattr(budget.start, axis))) for axis in _BUDGET_AXES}
    scale = 1.0
    while scale > 1e-3:
        wanted: dict[str, float] = {axis: count * scale for axis, count in whole.items()}
        if (found := _nearest_within(wanted, budget)) is not None:
            return found
        scale *= _SHRINK
    return smallest_shape(budget)


def smallest_shape(budget: Budget) -> Shape:
    """The quickest shape that is legal and within the table."""
    lowest: dict[str, float] = dict.fromkeys(_BUDGET_AXES, 0.0)
    tried = _grid_around(lowest, budget)
    ms = _ms(tried, budget)
    return next(_legal_by(ms, tried, budget))


def _nearest_within(wanted: Mapping[str, float], budget: Budget) -> Shape | None:
    """Of the shapes around the wanted counts that meet the budget the nearest; None: none does."""
    tried = _grid_around(wanted, budget)
    distance = torch.stack(
        [((tried[a] - wanted[a]) / getattr(budget.source, a)).square() for a in _BUDGET_AXES]
    ).sum(0)
    # A little more than the budget passes here; each shape is looked at again.
    meets = _ms(tried, budget) <= budget.draft_ms * (1 + 1e-9)
    tried = {axis: counts[meets] for axis, counts in tried.items()}
    legal = _legal_by(distance[meets], tried, budget)
    return next((s for s in legal if budget.table.ms_of(s) <= budget.draft_ms), None)


def _grid_around(centre: Mapping[str, float], budget: Budget) -> dict[str, Tensor]:
    """Counts of all shapes around `centre` along the free axes, [shapes] each."""
    near = {axis: _near(_counts(axis, budget), centre[axis], axis) for axis in _BUDGET_AXES}
    tried = torch.cartesian_prod(*(torch.tensor(n, dtype=torch.float64) for n in near.values()))
    return dict(zip(_BUDGET_AXES, tried.unbind(-1), strict=True))


def _near(counts: Sequence[int], centre: float, axis: Axis) -> list[int]:
    if axis != "layers":
        return sorted(counts, key=lambda count: abs(count - centre))[: _TRIED[axis]]
    return [n for n in counts if n in (math.floor(centre), math.ceil(centre))] or [counts[0]]


def _counts(axis: Axis, budget: Budget) -> list[int]:
    """Counts that an axis may come to, ascending."""
    most = getattr(budget.start, axis)
    if axis not in budget.free:
        return [most]
    if axis == "layers":
        return list(range(1, most + 1))
    step = friendly_step(axis, budget.source)
    if axis == "hidden":
        step = math.lcm(step, budget.family.hidden_multiple)
    least = budget.table.grid[axis][0]
    return [n for n in range(step, most, step) if n >= least] + [most]


def _ms(tried: Mapping[str, Tensor], budget: Budget) -> Tensor:
    vocab = torch.full_like(tried["layers"], budget.start.vocab)
    return budget.table.ms({**tried, "vocab": vocab})


def _legal_by(key: Tensor, tried: Mapping[str, Tensor], budget: Budget) -> Iterator[Shape]:
    """Shapes that the family allows, by ascending key."""
    for number in torch.argsort(key, stable=True).tolist():
        wanted: dict[str, int | None] = {a: int(tried[a][number]) for a in _BUDGET_AXES}
        try:
            yield resolve_shape(budget.start, wanted, budget.family)
        except RequestError:
            continue


def _free_axes(
    settings: PruneSettings, start: Shape, family: Family, table: LatencyTable
) -> tuple[Axis, ...]:
    """The axes that may be cut, whose count the recipe leaves open, and which can be cut."""
    fixed = {axis for axis, count in asdict(settings.shape).items() if count is not None}
    if "heads" in fixed:
        fixed |= {"kv_heads", "heads_per_group"}
    open_axes = [a for a in _BUDGET_AXES if a not in fixed and getattr(start, a) > 1]
    if settings.axes is not None:
        open_axes = [axis for axis in open_axes if axis in settings.axes]
        _check_measured(open_axes, table)
    free = tuple(a for a in open_axes if a == "layers" or len(table.grid[a]) > 1)
    if not free:
        raise RequestError(
            f"recipe.prune.draft_ms: {settings.draft_ms:g}: no axis is left to be cut; leave one "
            f"of {', '.join(_BUDGET_AXES)} out of prune.shape, and let prune.axes have it"
        )
    return free


def _check_measured(axes: Sequence[Axis], table: LatencyTable) -> None:
    for axis in axes:
        if axis != "layers" and len(table.grid[axis]) < 2:
            option = f"--{axis.replace('_', '-')}"
            raise RequestError(
                f"recipe.prune.axes: {axis}: the table has only {table.grid[axis][0]}; run "
                f"`draftsmith profile` with {option} and smaller counts, or leave {axis} out"
            )


def _check_reach(budget: Budget) -> None:
    """Refuse a budget that no shape meets, or every one."""
    most = budget.table.ms_of(budget.start)
    smallest = smallest_shape(budget)
    least = budget.table.ms_of(smallest)
    place = f"recipe.prune.draft_ms: {budget.draft_ms:g}"
    if budget.draft_ms < least:
        raise RequestError(
            f"{place}: the smallest shape that may be had ({smallest}) takes {least:.4g} ms; give "
            "more, allow other axes by prune.axes, or measure smaller counts with `draftsmith "
            "profile`"
        )
    if budget.draft_ms >= most:
        raise RequestError(
            f"{place}: the largest shape that is allowed ({budget.start}) takes only {most:.4g} "
            f"ms, so nothing would be cut; give less than {most:.4g}"
        )


def _even(axis: Axis) -> str:
    return f"even.{axis}"


def _unevenness(masks: LearnableMasks, axis: Axis) -> Tensor:
    """Variance over layers of the expected share."""
    return masks.expected_share(axis).var(correction=0)
