"""Hard-concrete masks, their constraint, and learning them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import Shape, changed_axes, shape_of
from draftsmith.errors import DraftsmithError
from draftsmith.prune import masks as masks_module
from draftsmith.prune import train
from draftsmith.prune.baselines import select_by_position
from draftsmith.prune.exchange import exchange_parts
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import (
    LOG_ALPHA_BOUND,
    LearnableMasks,
    applied,
    probability_open,
    sample,
    share_open,
)
from draftsmith.recipes.schema import PruneSettings, ShapeSettings
from tests.conftest import make_model
from tests.matrix import both, cuts
from tests.unit.test_batches import trace_rows

SHAPE = Shape(layers=4, kv_heads=2, heads_per_group=2, head_dim=8, ffn=64, hidden=32, vocab=96)


def test_open_probability_is_that_of_the_draws() -> None:
    """P(z ≠ 0) in closed form against many draws."""
    for log_alpha in (-2.0, 0.0, 1.5):
        noise = torch.rand(200_000, generator=torch.Generator().manual_seed(1))
        z = sample(torch.full((200_000,), log_alpha), noise)
        expected = float(probability_open(torch.tensor(log_alpha)))
        assert float((z != 0).float().mean()) == pytest.approx(expected, abs=5e-3)
        assert 0 <= float(z.min()) <= float(z.max()) <= 1


def test_a_decided_choice_meets_its_count() -> None:
    """Four masks at the upper bound and 26 at the lower count for four."""
    decided = torch.tensor([LOG_ALPHA_BOUND] * 4 + [-LOG_ALPHA_BOUND] * 26)
    assert float(share_open(decided).sum()) == pytest.approx(4.0, abs=1e-4)
    between = share_open(torch.linspace(-LOG_ALPHA_BOUND, LOG_ALPHA_BOUND, 50))
    assert (between.diff() > 0).all()


@given(st.floats(0, 1))
def test_noise_at_its_ends_gives_no_nan(u: float) -> None:
    z = sample(torch.tensor([0.0, 4.6, -4.6]), torch.full((3,), u))
    assert torch.isfinite(z).all()


def test_a_hand_computed_draw() -> None:
    """U = ½, log α = 0: s = ½, stretched to ½ · 1.2 − 0.1 = ½."""
    assert float(sample(torch.zeros(()), torch.tensor(0.5))) == pytest.approx(0.5)


def test_select_is_exact_and_breaks_ties_by_index() -> None:
    masks = LearnableMasks(("layers", "kv_heads", "ffn"), SHAPE, init=0.0)
    with torch.no_grad():
        masks.log_alpha["layers"][3] = 1.0
        masks.log_alpha["kv_heads"][0, 1] = 1.0
    drafter = Shape(2, 1, 2, 8, 10, 32, 96)
    selection = masks.select(SHAPE, drafter)
    assert selection.layers == (0, 3)
    assert selection.kv_heads == ((1,), (0,))
    assert selection.ffn[0] == tuple(range(10))
    assert selection.shape(SHAPE) == drafter


def test_gradients_reach_every_open_mask() -> None:
    model = make_model()
    family = families()["llama"]
    axes = ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")
    masks = LearnableMasks(axes, SHAPE, init=0.0)
    # Noise at which every mask is strictly between 0 and 1.
    z = {a: sample(masks.log_alpha[a], torch.full(masks.log_alpha[a].shape, 0.6)) for a in axes}
    with applied(model, family, SHAPE, z):
        model(input_ids=torch.arange(3, 20)[None]).logits.square().sum().backward()
    for axis in axes:
        assert (masks.log_alpha[axis].grad != 0).all(), axis


@pytest.mark.parametrize("size", [(), (6,)])
def test_a_product_that_keeps_its_result_has_the_gradients_of_any_other(
    size: tuple[int, ...],
) -> None:
    """In float64; and where z is 0, none for z."""
    x = torch.randn(3, 4, 6, dtype=torch.float64, requires_grad=True)
    z = (torch.rand(size, dtype=torch.float64) + 0.1).requires_grad_()
    assert torch.autograd.gradcheck(masks_module._scaled, (x, z))
    closed = torch.zeros(size, dtype=torch.float64, requires_grad=True)
    masks_module._scaled(x, closed).sum().backward()
    assert closed.grad is not None
    assert not closed.grad.any()


def test_hooks_and_skipped_blocks_leave_no_trace() -> None:
    model = make_model()
    tokens = torch.arange(3, 20)[None]
    before = model(input_ids=tokens).logits
    with applied(model, families()["llama"], SHAPE, {"layers": torch.zeros(4)}):
        assert not torch.allclose(model(input_ids=tokens).logits, before)
    assert torch.equal(model(input_ids=tokens).logits, before)
    assert "forward" not in vars(model.model.layers[0])


def test_skipping_a_closed_block_equals_computing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model().requires_grad_(False)
    tokens = torch.arange(3, 20)[None]
    z = {"layers": torch.tensor([1.0, 0.0, 0.4, 0.0])}
    left_out = []

    def logits() -> torch.Tensor:
        with applied(model, families()["llama"], SHAPE, z):
            left_out.append(["forward" in vars(block) for block in model.model.layers])
            return model(input_ids=tokens).logits

    skipped = logits()
    assert left_out == [[False, True, False, True]]
    monkeypatch.setattr("draftsmith.prune.masks._skipped", lambda *args: False)
    assert torch.equal(skipped, logits())


def test_weights_of_closed_blocks_get_a_gradient_of_zero() -> None:
    """None at all would be taken for that of an earlier step under ZeRO 3, and for rest without."""
    model = make_model()
    with applied(model, families()["llama"], SHAPE, {"layers": torch.tensor([1.0, 0.0, 1.0, 0.0])}):
        model(input_ids=torch.arange(3, 20)[None]).logits.square().sum().backward()
    closed = model.model.layers[1].parameters()
    assert all(p.grad is not None and not p.grad.any() for p in closed)


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_lagrangian_drives_the_count_to_the_shape_and_not_past_it(scale: float) -> None:
    """Against a loss that holds on to every layer, with a run as short as the quickstart's."""
    source = Shape(30, 2, 2, 8, 64, 32, 96)
    drafter = Shape(4, 2, 2, 8, 64, 32, 96)
    worth = scale * torch.linspace(0.01, 1.0, 30)
    masks = LearnableMasks(("layers",), source, init=2.0)
    lagrangian = Lagrangian(("layers",), source, drafter, warmup=40, quadratic=1000.0)
    optimizer = torch.optim.Adam(masks.parameters(), lr=0.15, betas=(0.5, 0.95))
    counts = []
    for step in range(72):
        optimizer.zero_grad()
        z = masks.sample(torch.Generator().manual_seed(step))["layers"]
        loss = ((1 - z) * worth).sum()
        (loss + lagrangian.penalty(masks, step)).backward()
        optimizer.step()
        masks.clamp()
        lagrangian.ascend(masks, step, rate=20.0)
        counts.append(train.expected_counts(masks, source)["layers"])
    assert counts[-1] == pytest.approx(4.0, abs=0.7)
    assert min(counts) > 3.0
    # The noise of 72 steps leaves neighbours in doubt, not more.
    assert min(masks.select(source, drafter).layers) > 15


def test_wanted_share_falls_linearly() -> None:
    lagrangian = Lagrangian(("layers",), SHAPE, Shape(1, 2, 2, 8, 64, 32, 96), warmup=20)
    assert lagrangian.target("layers", 0) == 1.0
    assert lagrangian.target("layers", 10) == pytest.approx(1 - 0.75 / 2)
    assert lagrangian.target("layers", 99) == 0.25
    at_once = Lagrangian(("layers",), SHAPE, Shape(1, 2, 2, 8, 64, 32, 96), warmup=0)
    assert at_once.target("layers", 0) == 0.25


def test_exchange_finds_what_single_exchanges_can_reach() -> None:
    """And stops where none helps, or where the rounds end."""
    worth = {0: 5.0, 3: 4.0, 7: 3.0}

    def loss(layers: tuple[int, ...]) -> float:
        return 20.0 - sum(worth.get(layer, 0.0) for layer in layers)

    found = exchange_parts({"masks": (1, 2, 7)}, count=8, loss=loss, rounds=5)
    assert (found.parts, found.before, found.after) == ((0, 3, 7), 17.0, 8.0)
    one = exchange_parts({"masks": (1, 2, 7)}, count=8, loss=loss, rounds=1)
    assert one.parts in {(0, 1, 7), (0, 2, 7)}
    assert exchange_parts({"masks": (0, 3, 7)}, count=8, loss=loss, rounds=5).parts == (0, 3, 7)
    two = exchange_parts({"masks": (1, 2, 7), "other": (0, 1, 3)}, count=8, loss=loss, rounds=0)
    assert (two.by, two.proposed, two.parts, two.before) == ("other", (0, 1, 3), (0, 1, 3), 11.0)


def learn(
    model: Any, folder: Path, steps: int = 8, ffn: int = 64, own: bool = False, **changes: Any
) -> train.Pruning:
    """Keep two layers, by some texts or by the model's own."""
    family = families()[model.config.model_type]
    source = shape_of(model.config, family)
    fixed: dict[str, Any] = {"warmup": 2, "batch": 2, "max_length": 24, "steps": steps}
    settings = PruneSettings(shape=ShapeSettings(layers=2), **(fixed | changes))
    drafter = Shape(**{**vars(source), "layers": 2, "ffn": ffn})
    rows = trace_rows(16, model=model) if own else trace_rows(12)
    return train.learn_masks(model, family, source, drafter, rows, settings, seed=3, state=folder)


def test_learning_is_deterministic_and_weights_stay(tmp_path: Path) -> None:
    model = make_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    a, b = learn(model, tmp_path / "a"), learn(model, tmp_path / "b")
    assert a == b
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("changes", [{}, {"checkpoint_activations": True, "accumulate": 2}])
def test_weights_may_learn_beside_the_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """At a rate of their own; stopped and gone on with, they are the same bit for bit."""
    changes = {"save_every": 3, "weights_lr": 1e-3, "clip": 1.0, "attention_dropout": 0.1} | changes
    dropout = {"attention_dropout": changes.pop("attention_dropout")}
    straight, stopped = make_model(**dropout), make_model(**dropout)
    torch.manual_seed(5)
    result = learn(straight, tmp_path / "straight", **changes)
    before = make_model().state_dict()
    moved = {k: (v - before[k]).abs().max() for k, v in straight.state_dict().items()}
    assert all(0 < float(m) < 0.02 for m in moved.values()), moved
    step, calls = train.TorchEngine.step, iter(range(100))

    def deadly(self: train.TorchEngine) -> float:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return step(self)

    torch.manual_seed(5)
    with monkeypatch.context() as patch:
        patch.setattr(train.TorchEngine, "step", deadly)
        with pytest.raises(KeyboardInterrupt):
            learn(stopped, tmp_path / "stopped", **changes)
    torch.manual_seed(6)
    again = make_model(**dropout)
    assert learn(again, tmp_path / "stopped", **changes) == result
    for name, tensor in straight.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_activations_that_are_computed_again_are_masked_again(tmp_path: Path, family: str) -> None:
    """Every weight and every mask is as without."""
    models = [make_model(family), make_model(family)]
    results = [
        learn(model, tmp_path / str(again), ffn=40, weights_lr=1e-3, checkpoint_activations=again)
        for model, again in zip(models, (False, True), strict=True)
    ]
    told = [result.trajectory.state() for result in results if result.trajectory]
    for name, values in told[0].items():
        assert torch.allclose(values.float(), told[1][name].float(), rtol=1e-5), name
    for name, tensor in models[0].state_dict().items():
        assert torch.allclose(tensor, models[1].state_dict()[name], atol=1e-5), name


def test_a_small_gradient_norm_is_all_that_clipping_leaves(tmp_path: Path) -> None:
    free, clipped = make_model(), make_model()
    learn(free, tmp_path / "free", weights_lr=1e-3)
    learn(clipped, tmp_path / "clipped", weights_lr=1e-3, clip=1e-9)
    before = make_model().state_dict()["model.norm.weight"]
    assert (clipped.model.norm.weight - before).norm() < (free.model.norm.weight - before).norm()


def test_every_family_is_cut_on_all_axes_at_once(tmp_path: Path, causal_family: str) -> None:
    """A wide shape, masks and weights learned together; what comes out computes what was masked."""
    model, family = make_model(causal_family), families()[causal_family]
    source = shape_of(model.config, family)
    drafter = dict(cuts(source, family))["all"]
    settings = PruneSettings(steps=6, warmup=2, batch=2, max_length=24, weights_lr=1e-3)
    rows = trace_rows(12, model=model)
    found = train.learn_masks(
        model, family, source, drafter, rows, settings, seed=1, state=tmp_path
    )
    masked, compact, small = both(model, found.selection)
    assert shape_of(small.config, family) == drafter
    assert set(found.expected) == set(changed_axes(source, drafter))
    assert (masked - compact).abs().max() <= 1e-5 * max(1.0, float(compact.abs().max()))


def test_masks_that_diverge_end_the_run(tmp_path: Path) -> None:
    """Named with the step and the rate, in the first one as well."""
    model = make_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(DraftsmithError, match=r"step 1: .* learning rate \(now 0.5\)"):
        learn(model, tmp_path)


def test_noise_depends_on_seed_and_step_alone() -> None:
    def draw(seed: int, step: int) -> list[float]:
        return torch.rand(4, generator=train._generator(seed, step, torch.device("cpu"))).tolist()

    assert draw(1, 2) == draw(1, 2)
    assert len({tuple(draw(seed, step)) for seed in range(3) for step in range(3)}) == 9


def test_masks_close_the_useless_layers(tmp_path: Path) -> None:
    """Two blocks that add nothing are cut; the model's own text is the teacher."""
    model = make_model(initializer_range=0.3)
    with torch.no_grad():
        for layer in (1, 2):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    result = learn(model, tmp_path, 60, own=True, warmup=30, batch=4, lambda_lr=2.0, exchange=0)
    assert result.selection.layers == (0, 3)


def test_A16_masks_that_have_not_converged_fail_with_numbers(tmp_path: Path) -> None:
    """Or, where the recipe allows it, are cut to the exact shape."""
    with pytest.raises(DraftsmithError, match=r"layers: \d\.\d\d expected, 2 wanted"):
        learn(make_model(), tmp_path / "strict", steps=2, snap=False)
    assert len(learn(make_model(), tmp_path / "snap", steps=2).selection.layers) == 2


def test_position_baselines() -> None:
    drafter = Shape(3, 2, 2, 8, 10, 32, 96)
    source = Shape(30, 2, 2, 8, 64, 32, 96)
    assert select_by_position("first", source, drafter).layers == (0, 1, 2)
    uniform = select_by_position("uniform", source, drafter)
    assert uniform.layers in {(0, 14, 29), (0, 15, 29)}
    assert uniform.shape(source) == drafter


def test_log_alpha_stays_in_bounds() -> None:
    masks = LearnableMasks(("layers",), SHAPE, init=2.0)
    with torch.no_grad():
        masks.log_alpha["layers"].fill_(99.0)
    masks.clamp()
    assert float(masks.log_alpha["layers"].detach().max()) == pytest.approx(math.log(100))
