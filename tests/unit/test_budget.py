"""A budget in milliseconds: the cost that masks pay, and the shape that they come to."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.latency_table import (
    TABLE_AXES,
    LatencyTable,
    MeasuredShape,
    shapes_to_measure,
)
from draftsmith.accept.profile import full_grid
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import Shape, check_shape, resolve_shape, shape_of
from draftsmith.errors import RequestError
from draftsmith.prune.budget import (
    DRAFT_MS,
    Budget,
    BudgetLagrangian,
    expected_ms,
    shape_within,
    smallest_shape,
)
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks
from draftsmith.recipes.schema import PruneSettings, ShapeSettings
from tests.conftest import CAUSAL, tiny_config

_LLAMA = families()["llama"]
SOURCE = Shape(
    layers=16, kv_heads=8, heads_per_group=4, head_dim=8, ffn=512, hidden=256, vocab=1000
)


def true_ms(counts: Mapping[str, float]) -> float:
    """What a machine might take: products of widths, one call's cost for each layer, a head."""
    hidden, kv_heads = counts["hidden"], counts["kv_heads"]
    heads = kv_heads * counts["heads_per_group"]
    layer = 0.2 + 1e-4 * hidden * (2 * kv_heads + 2 * heads + 0.1 * counts["ffn"]) / 10
    return 0.5 + 1e-6 * hidden * counts["vocab"] + counts["layers"] * layer


def table_of(source: Shape, family: Any = _LLAMA, **asked: tuple[int, ...]) -> LatencyTable:
    grid = full_grid(source, family, asked)  # type: ignore[arg-type]
    rows = [
        MeasuredShape(**counts, ms=true_ms(counts), spread_ms=(0.0, 0.0))  # type: ignore[arg-type]
        for counts in shapes_to_measure(grid)
    ]
    return LatencyTable.of(family.name, source, rows)


TABLE = table_of(SOURCE)


def budget(draft_ms: float, source: Shape = SOURCE, **changes: Any) -> Budget:
    """A budget on the axes of `changes`, or on all."""
    asked = PruneSettings(draft_ms=draft_ms, latency="latency.json", **changes)
    return Budget.of(asked, source, _LLAMA, TABLE)


def masks_at(budget: Budget, seed: int = 0, dtype: torch.dtype = torch.float32) -> LearnableMasks:
    """Masks that are open in part, unlike from layer to layer."""
    masks = LearnableMasks(budget.axes, budget.source, 0.0).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in masks.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        parameter.data += noise - 1.0
    return masks


def reached(masks: LearnableMasks, lagrangian: Any, steps: int = 300) -> LearnableMasks:
    """Train masks that would rather stay open, each worth something else, under a constraint."""
    generator = torch.Generator().manual_seed(1)
    worth = {
        axis: torch.rand(p.shape, generator=generator) / p.numel()
        for axis, p in masks.log_alpha.items()
    }
    optimizer = torch.optim.Adam(masks.parameters(), lr=0.15, betas=(0.5, 0.95))
    for step in range(steps):
        optimizer.zero_grad()
        open_ = masks.sample(torch.Generator().manual_seed(step))
        loss = -sum((worth[axis] * z).sum() for axis, z in open_.items())
        (loss + lagrangian.penalty(masks, step)).backward()
        optimizer.step()
        masks.clamp()
        lagrangian.ascend(masks, step, 5.0)
    return masks


@torch.no_grad()
def expected(masks: LearnableMasks, source: Shape) -> dict[str, float]:
    return {a: float(masks.expected_share(a).mean()) * getattr(source, a) for a in masks.axes}


# --- the constraint


@pytest.mark.parametrize(
    ("draft_ms", "changes"),
    [
        (3.0, {"axes": ("layers",)}),
        (6.0, {"axes": ("ffn", "hidden")}),
        (3.0, {}),
        (3.0, {"shape": ShapeSettings(layers=8, hidden=128)}),
    ],
    ids=str,
)
def test_masks_reach_the_budget(draft_ms: float, changes: dict[str, Any]) -> None:
    asked = budget(draft_ms, **changes)
    masks = LearnableMasks(asked.axes, SOURCE, 2.0)
    lagrangian = BudgetLagrangian(asked, warmup=100, quadratic=1000.0)
    reached(masks, lagrangian)
    with torch.no_grad():
        assert float(expected_ms(masks, SOURCE, TABLE)) == pytest.approx(draft_ms, rel=0.03)
    counts = expected(masks, SOURCE)
    for axis in set(asked.axes) - set(asked.free):
        assert counts[axis] == pytest.approx(getattr(asked.start, axis), rel=0.03)
    shape = shape_within(counts, asked)
    assert draft_ms * 0.85 <= TABLE.ms_of(shape) <= draft_ms
    for axis in asked.free:
        assert abs(getattr(shape, axis) - counts[axis]) <= max(1.5, 0.07 * getattr(SOURCE, axis))


def test_layers_come_to_the_same_counts() -> None:
    asked = budget(7.0, axes=("ffn", "kv_heads"))
    masks = masks_at(asked)
    before = {axis: float(masks.expected_share(axis).detach().std()) for axis in asked.axes}
    reached(masks, BudgetLagrangian(asked, warmup=0, quadratic=1000.0))
    for axis in asked.axes:
        assert float(masks.expected_share(axis).detach().std()) < min(0.05, before[axis])


def test_the_wanted_milliseconds_fall_to_the_budget() -> None:
    lagrangian = BudgetLagrangian(budget(2.0), warmup=10)
    whole = TABLE.ms_of(SOURCE)
    assert lagrangian.wanted_ms(0) == whole
    assert lagrangian.wanted_ms(5) == pytest.approx((whole + 2.0) / 2)
    assert lagrangian.wanted_ms(10) == lagrangian.wanted_ms(99) == pytest.approx(2.0)
    assert BudgetLagrangian(budget(2.0), warmup=0).wanted_ms(0) == pytest.approx(2.0)


@pytest.mark.parametrize("changes", [{}, {"shape": ShapeSettings(hidden=128)}], ids=str)
def test_gradients_of_the_penalty(changes: dict[str, Any]) -> None:
    asked = budget(2.0, **changes)
    masks = masks_at(asked, dtype=torch.float64)
    lagrangian = BudgetLagrangian(asked, warmup=4, quadratic=7.0)
    for multipliers in lagrangian.multipliers.values():
        multipliers += 3.0
    found = torch.autograd.grad(lagrangian.penalty(masks, 3), list(masks.parameters()))
    for parameter, gradient in zip(masks.parameters(), found, strict=True):
        values = parameter.data.view(-1)
        # A few entries of each stand for all.
        for place in (0, len(values) // 2, len(values) - 1):
            slope = _slope(lambda: lagrangian.penalty(masks, 3), values, place)
            assert float(gradient.view(-1)[place]) == pytest.approx(slope, rel=1e-4, abs=1e-9)
            assert slope != 0.0


@torch.no_grad()
def _slope(function: Callable[[], torch.Tensor], values: torch.Tensor, place: int) -> float:
    """By central difference, with one of the values moved."""
    here, step = float(values[place]), 1e-5
    values[place] = here + step
    up = function()
    values[place] = here - step
    down = function()
    values[place] = here
    return float(up - down) / (2 * step)


def test_more_milliseconds_than_wanted_raise_the_multiplier_and_fewer_lower_it() -> None:
    asked = budget(2.0, axes=("layers",))
    lagrangian = BudgetLagrangian(asked, warmup=0)
    for start, sign in ((4.0, 1), (-4.0, -1)):
        before = lagrangian.multipliers[DRAFT_MS].clone()
        lagrangian.ascend(LearnableMasks(asked.axes, SOURCE, start), 0, 1.0)
        change = lagrangian.multipliers[DRAFT_MS] - before
        assert math.copysign(1, float(change[0])) == sign
        assert float(change[1]) > 0


def test_restored_multipliers_go_on_the_same() -> None:
    asked = budget(2.0, shape=ShapeSettings(hidden=128))
    masks = masks_at(asked)
    first = BudgetLagrangian(asked, warmup=4, quadratic=10.0)
    first.ascend(masks, 0, 20.0)
    again = BudgetLagrangian(asked, warmup=4, quadratic=10.0)
    again.restore({name: saved.clone() for name, saved in first.state().items()})
    for step in (1, 2):
        assert first.penalty(masks, step).equal(again.penalty(masks, step))
        first.ascend(masks, step, 20.0)
        again.ascend(masks, step, 20.0)
    assert set(first.multipliers) == {
        DRAFT_MS,
        "hidden",
        "even.ffn",
        "even.kv_heads",
        "even.heads_per_group",
    }
    for name, multipliers in first.multipliers.items():
        assert multipliers.equal(again.multipliers[name])


def test_a_fixed_axis_has_the_ordinary_constraint() -> None:
    asked = budget(2.0, shape=ShapeSettings(hidden=128), axes=("layers", "hidden"))
    masks = masks_at(asked)
    whole = BudgetLagrangian(asked, warmup=4, quadratic=5.0)
    alone = Lagrangian(("hidden",), SOURCE, asked.start, 4, 5.0)
    excess = (expected_ms(masks, SOURCE, TABLE) - whole.wanted_ms(2)) / TABLE.ms_of(SOURCE)
    together = alone.penalty(masks, 2) + 5.0 * excess.square()
    torch.testing.assert_close(whole.penalty(masks, 2), together)


# --- the shape


@st.composite
def sources(draw: st.DrawFn, family: str) -> Shape:
    """The shape of some small model of a family."""
    kv_heads, per_group = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    config = tiny_config(
        family,
        num_hidden_layers=draw(st.integers(2, 12)),
        num_attention_heads=kv_heads * per_group,
        num_key_value_heads=kv_heads,
        hidden_size=kv_heads * per_group * draw(st.sampled_from([2, 8, 16])),
        intermediate_size=draw(st.one_of(st.integers(1, 200), st.just(128))),
    )
    return shape_of(config, families()[family])


@settings(max_examples=15, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", CAUSAL)
def test_a_shape_is_legal_and_within_the_budget(name: str, data: st.DataObject) -> None:
    family = families()[name]
    source = data.draw(sources(name))
    table = table_of(source, family)
    fixed = data.draw(st.sampled_from([None, table.grid["hidden"][0]]))
    start = resolve_shape(source, {"hidden": fixed}, family)
    most = table.ms_of(start)

    def within(draft_ms: float) -> Budget:
        shape = ShapeSettings(hidden=fixed)
        asked = PruneSettings(draft_ms=draft_ms, latency="t", shape=shape)
        return Budget.of(asked, source, family, table)

    least = table.ms_of(smallest_shape(within(most * 0.9999)))
    draft_ms = data.draw(st.floats(least, most, exclude_max=True))
    allowed = within(draft_ms)
    shares = {axis: data.draw(st.floats(0, 1)) for axis in allowed.free}
    shape = shape_within({a: s * getattr(source, a) for a, s in shares.items()}, allowed)
    check_shape(shape, family)
    assert resolve_shape(source, {a: getattr(shape, a) for a in TABLE_AXES}, family) == shape
    assert table.ms_of(shape) <= draft_ms
    assert fixed in (None, shape.hidden)
    assert shape.ffn % 16 == 0 or source.ffn % 16


def test_whole_counts_within_the_budget_stay() -> None:
    counts = {"layers": 5, "kv_heads": 4, "heads_per_group": 2, "ffn": 256, "hidden": 128}
    exact = resolve_shape(SOURCE, counts, _LLAMA)
    asked = budget(TABLE.ms_of(exact))
    assert shape_within(counts, asked) == exact
    assert shape_within({axis: count + 0.01 for axis, count in counts.items()}, asked) == exact


def test_fixed_counts_stay_whatever_is_expected() -> None:
    asked = budget(2.5, shape=ShapeSettings(layers=6, hidden=128))
    shape = shape_within({"layers": 2.0, "hidden": 70.0, "ffn": 200.0}, asked)
    assert (shape.layers, shape.hidden) == (6, 128)
    assert TABLE.ms_of(shape) <= 2.5


def test_layers_are_rounded_both_ways() -> None:
    """Up where widths then come nearer; down where a whole layer does not fit."""
    asked = budget(3.0, axes=("layers",))
    fits = max(n for n in range(17) if true_ms({**vars(SOURCE), "layers": n}) <= 3.0)
    assert shape_within({"layers": fits + 0.9}, asked).layers == fits
    assert shape_within({"layers": fits - 0.4}, asked).layers == fits
    assert shape_within({"layers": fits - 0.6}, asked).layers == fits - 1


def test_counts_far_over_the_budget_shrink_together() -> None:
    asked = budget(2.0)
    shape = shape_within({}, asked)
    assert TABLE.ms_of(shape) <= 2.0
    assert TABLE.ms_of(shape) > 1.5
    shares = [getattr(shape, axis) / getattr(SOURCE, axis) for axis in ("layers", "ffn", "hidden")]
    assert max(shares) - min(shares) < 0.35


def test_the_smallest_shape_meets_a_budget_that_is_just_its_own() -> None:
    smallest = smallest_shape(budget(2.0))
    assert shape_within({}, budget(TABLE.ms_of(smallest))) == smallest


# --- refusals


@pytest.mark.parametrize(
    ("draft_ms", "changes", "message"),
    [
        (0.1, {}, r"draft_ms: 0\.1: the smallest shape .* takes 0\.7\d+ ms; give more"),
        (99.0, {}, r"draft_ms: 99: the largest shape .* takes only [\d.]+ ms, so nothing"),
        (
            2.0,
            {"shape": ShapeSettings(layers=4, heads=32, ffn=256, hidden=128)},
            "draft_ms: 2: no axis is left to be cut",
        ),
        (2.0, {"shape": ShapeSettings(ffn=64)}, r"shape: ffn 64 lies outside .* --ffn 64"),
        (
            2.0,
            {"shape": ShapeSettings(hidden=128), "axes": ("layers",)},
            "recipe.prune.axes has only layers",
        ),
    ],
)
def test_impossible_budgets(draft_ms: float, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        budget(draft_ms, **changes)


def test_a_table_of_another_source() -> None:
    other = resolve_shape(SOURCE, {"layers": 8}, _LLAMA)
    with pytest.raises(RequestError, match=r"prune\.latency: measured for llama of 16 layers"):
        budget(2.0, source=other)


def test_an_axis_that_was_not_measured() -> None:
    table = table_of(SOURCE, ffn=(512,))
    asked = PruneSettings(draft_ms=2.0, latency="t", axes=("layers", "ffn"))
    with pytest.raises(RequestError, match=r"axes: ffn: the table has only 512; .* --ffn"):
        Budget.of(asked, SOURCE, _LLAMA, table)
    free = Budget.of(PruneSettings(draft_ms=2.0, latency="t"), SOURCE, _LLAMA, table).free
    assert "ffn" not in free
    assert "hidden" in free
