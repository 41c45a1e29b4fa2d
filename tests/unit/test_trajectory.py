"""What is recorded of masks that learn, its file, and its picture."""

import io
import json
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import AXES, Axis
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.files import sha256
from draftsmith.errors import RequestError
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks, share_open
from draftsmith.prune.plots import draw, plot_trajectory
from draftsmith.prune.trajectory import SAMPLES, Trajectory, deterministic
from tests.conftest import tiny_config

# A picture whose parts find no room is a warning.
pytestmark = pytest.mark.filterwarnings("error::UserWarning")
SOURCE = Shape(layers=6, kv_heads=2, heads_per_group=3, head_dim=8, ffn=40, hidden=16, vocab=96)
DRAFTER = Shape(layers=2, kv_heads=1, heads_per_group=2, head_dim=8, ffn=10, hidden=8, vocab=96)
AXES_CUT: tuple[Axis, ...] = (
    "layers",
    "kv_heads",
    "heads_per_group",
    "ffn",
    "hidden",
    "ffn_layers",
)


def start(axes: tuple[Axis, ...] = AXES_CUT) -> tuple[LearnableMasks, Lagrangian]:
    return LearnableMasks(axes, SOURCE, 2.0), Lagrangian(axes, SOURCE, DRAFTER, 4, 100.0)


@torch.no_grad()
def move(masks: LearnableMasks, lagrangian: Lagrangian, step: int) -> float:
    """A step that depends on its number alone; returns its loss."""
    generator = torch.Generator().manual_seed(step)
    for parameter in masks.log_alpha.values():
        parameter.add_(torch.randn(parameter.shape, generator=generator))
    masks.clamp()
    lagrangian.ascend(masks, step, 5.0)
    return 1.0 / (step + 1)


def learned(steps: int, axes: tuple[Axis, ...] = AXES_CUT) -> Trajectory:
    masks, lagrangian = start(axes)
    trajectory = Trajectory(SOURCE, steps)
    for step in range(steps):
        trajectory.record(step, masks, lagrangian, move(masks, lagrangian, step))
    return trajectory


def test_a_sample_is_what_masks_and_multipliers_were() -> None:
    """Though parameters change in place afterwards."""
    masks, lagrangian = start()
    trajectory = Trajectory(SOURCE, 10)
    loss = move(masks, lagrangian, 0)
    trajectory.record(1, masks, lagrangian, torch.tensor(loss, requires_grad=True))
    then = {axis: p.detach().clone() for axis, p in masks.log_alpha.items()}
    multipliers = {axis: pair.clone() for axis, pair in lagrangian.multipliers.items()}
    move(masks, lagrangian, 1)
    assert trajectory.axes == trajectory.constraints == AXES_CUT
    assert (trajectory.sampled.tolist(), trajectory.loss.tolist()) == ([1], [1.0])
    for axis in AXES_CUT:
        count, log_alpha = getattr(SOURCE, axis), trajectory.log_alpha(axis)
        share = share_open(then[axis])
        if axis in ("ffn", "hidden"):
            assert log_alpha is None
        else:
            exact = "layers" in axis
            assert log_alpha is not None
            assert torch.allclose(log_alpha[0].float(), then[axis], atol=0 if exact else 2e-3)
        assert trajectory.expected(axis).tolist() == pytest.approx([float(share.mean()) * count])
        by_layer = share.flatten(1).mean(-1) if share.dim() > 1 else share.mean()
        assert torch.allclose(trajectory.kept(axis)[0], by_layer * count)
        z = deterministic(then[axis])
        assert trajectory.decided()[axis] == {
            "open": pytest.approx(float((z > 0.9).float().mean())),
            "closed": pytest.approx(float((z < 0.1).float().mean())),
        }
        wanted = trajectory.wanted(axis)
        assert wanted is not None
        assert wanted.tolist() == pytest.approx([lagrangian.target(axis, 1) * count])
        found = trajectory.multipliers(axis)
        assert found is not None
        assert torch.equal(found[0], multipliers[axis])


def test_recording_waits_for_no_device() -> None:
    """Tensors without values can't be looked at, so whoever looks fails."""
    masks, lagrangian = start()
    masks = masks.to("meta")
    nowhere = Lagrangian(AXES_CUT, SOURCE, DRAFTER, 4)
    nowhere.multipliers = {axis: pair.to("meta") for axis, pair in lagrangian.multipliers.items()}
    with pytest.raises(RuntimeError, match="meta"):
        masks.log_alpha["layers"].max().item()
    Trajectory(SOURCE, 4).record(0, masks, nowhere, torch.zeros((), device="meta"))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 20_000))
def test_long_runs_are_thinned_evenly(steps: int) -> None:
    trajectory = Trajectory(SOURCE, steps)
    due = [step for step in range(steps) if trajectory.is_due(step)]
    assert due[0] == 0
    assert due[-1] == steps - 1
    assert len(due) <= SAMPLES
    assert len(due) == steps or len(due) > SAMPLES / 2 - 1
    gaps = {b - a for a, b in pairwise(due[:-1])}
    assert len(gaps) <= 1


@pytest.mark.parametrize("stopped_after", [0, 1, 5, 7, 9])
def test_a_resumed_run_has_the_same_samples(stopped_after: int) -> None:
    """Killed two steps after a save."""
    masks, lagrangian = start()
    first = Trajectory(SOURCE, 10)
    saved = io.BytesIO()
    for step in range(min(10, stopped_after + 2)):
        if step == stopped_after:
            multipliers = {axis: pair.clone() for axis, pair in lagrangian.multipliers.items()}
            parts = {"masks": masks.state_dict(), "multipliers": multipliers}
            torch.save({**parts, "trajectory": first.state()}, saved)
        first.record(step, masks, lagrangian, move(masks, lagrangian, step))
    saved.seek(0)
    state: dict[str, Any] = torch.load(saved, weights_only=True)
    masks, lagrangian = start()
    masks.load_state_dict(state["masks"])
    lagrangian.multipliers.update(state["multipliers"])
    again = Trajectory(SOURCE, 10)
    again.restore(state["trajectory"])
    for step in range(stopped_after, 10):
        again.record(step, masks, lagrangian, move(masks, lagrangian, step))
    assert again.samples == 10
    assert again == learned(10)


def test_what_differs_is_not_equal() -> None:
    one = learned(4)
    assert one == learned(4)
    assert one != learned(5)
    assert one != learned(4, ("layers",))
    other = learned(4)
    other.state()["loss"][2] += 1
    assert one != other
    assert one != "a trajectory"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    learned(6).write(one)
    learned(6).write(two)
    assert sha256(one) == sha256(two)
    assert Trajectory.read(one) == learned(6)


def test_every_axis_of_every_family_can_be_recorded(family_name: str, tmp_path: Path) -> None:
    family = families()[family_name]
    source = shape_of(tiny_config(family_name), family)
    axes = tuple(axis for axis in AXES if getattr(source, axis) > 1)
    masks = LearnableMasks(axes, source, 1.0)
    trajectory = Trajectory(source, 1)
    trajectory.record(0, masks, Lagrangian(axes, source, source, 0), 2.0)
    trajectory.write(tmp_path / "t.safetensors")
    found = Trajectory.read(tmp_path / "t.safetensors")
    assert found == trajectory
    assert found.axes == axes


def changed(
    path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object]
) -> None:
    """Write the file anew with other arrays or another description."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["trajectory"])
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(arrays, about)
    save_file(arrays, path, {"trajectory": json.dumps(about)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda arrays, about: about.update(version=2), "version 2"),
        (lambda arrays, about: about.update(format="x"), "format 'x'"),
        (lambda arrays, about: about.update(steps="6"), "steps"),
        (lambda arrays, about: about["source_shape"].update(layers=7), "log_alpha.layers: shape"),
        (lambda arrays, about: about["source_shape"].pop("layers"), "layers"),
        (lambda arrays, about: arrays.pop("step"), "step"),
        (lambda arrays, about: arrays.pop("loss"), "loss"),
        (lambda arrays, about: arrays.pop("log_alpha.layers"), "log_alpha.layers"),
        (lambda arrays, about: arrays["step"].fill_(3), "step: not ascending"),
        (lambda arrays, about: arrays.update(loss=torch.ones(3)), "loss: shape"),
        (lambda arrays, about: arrays["decided.ffn"].fill_(math.nan), "decided.ffn: no shares"),
    ],
)
def test_a_damaged_file_is_one_error(
    change: Callable[..., object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.safetensors"
    learned(6).write(path)
    changed(path, lambda arrays, about: None)
    Trajectory.read(path)
    changed(path, change)
    with pytest.raises(RequestError, match=r"t\.safetensors: damaged, or not") as raised:
        Trajectory.read(path)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_that_was_cut_is_one_error(kept: int, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    learned(6).write(path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RequestError, match="damaged"):
        Trajectory.read(path)
    path.unlink()
    with pytest.raises(RequestError, match="there is no such file"):
        Trajectory.read(path)


@settings(max_examples=40, deadline=None)
@given(st.floats(-4.6, 4.6))
def test_z_without_noise(log_alpha: float) -> None:
    z = float(deterministic(torch.tensor(log_alpha)))
    expected = 1.2 / (1 + math.exp(-log_alpha)) - 0.1
    assert z == pytest.approx(min(1.0, max(0.0, expected)), abs=1e-5)


@pytest.mark.parametrize("suffix", ["png", "svg", "PNG"])
def test_pictures_of_both_kinds(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"one.{suffix}"
    plot_trajectory(learned(8), path, Selection.of_layers(SOURCE, (1, 4)))
    start = path.read_bytes()[:8]
    assert start.startswith(b"\x89PNG" if suffix.lower() == "png" else b"<?xml")
    if suffix == "svg":
        text = path.read_text()
        assert "<dc:date>" not in text
        words = (">loss<", ">KV heads<", ">FFN<", ">hidden<", ">wanted<", ">step<", "kept<")
        missing = [word for word in words if word not in text]
        assert not missing


def test_the_picture_shows_what_was_recorded() -> None:
    trajectory = learned(8)
    figure = draw(trajectory, Selection.of_layers(SOURCE, (1, 4)))
    panels = {panel.get_ylabel(): panel for panel in figure.axes}
    log_alpha = trajectory.log_alpha("layers")
    assert log_alpha is not None
    shown = panels["layer"].collections[0].get_array()
    assert shown is not None
    z_LS = torch.as_tensor(shown.data).reshape(SOURCE.layers, 8)
    assert torch.allclose(z_LS.float(), deterministic(log_alpha).T)
    top, bottom = panels["layer"].get_ylim()[::-1]
    assert top < bottom, "the first layer is at the top"
    (marks,) = panels["layer"].lines
    assert marks.get_ydata().tolist() == [1, 4]  # type: ignore[union-attr]
    expected, wanted = panels["FFN"].lines
    assert torch.allclose(torch.as_tensor(expected.get_ydata()), trajectory.expected("ffn"))
    assert torch.as_tensor(wanted.get_ydata())[-1] == DRAFTER.ffn
    assert [text.get_text() for text in panels["FFN"].texts] == ["10"]


def test_pictures_without_layers_of_one_sample_and_of_lost_runs(tmp_path: Path) -> None:
    plot_trajectory(learned(3, ("ffn",)), tmp_path / "widths.png")
    plot_trajectory(learned(1), tmp_path / "one.png")
    lost = learned(5)
    lost.state()["loss"].fill_(math.nan)
    plot_trajectory(lost, tmp_path / "lost.png")
    many = Shape(**{**vars(SOURCE), "layers": 60})
    masks = LearnableMasks(("layers",), many, 2.0)
    trajectory = Trajectory(many, 1)
    trajectory.record(0, masks, Lagrangian(("layers",), many, SOURCE, 0), 1.0)
    plot_trajectory(trajectory, tmp_path / "many.png", Selection.of_layers(many, (0, 59)))
    assert len(list(tmp_path.glob("*.png"))) == 4


class Budget:
    """Milliseconds instead of counts."""

    def __init__(self) -> None:
        self.multipliers: Mapping[str, torch.Tensor] = {"draft_ms": torch.tensor([1.0, 2.0])}

    def target(self, axis: Axis, step: int) -> float:
        raise AssertionError("no axis has a wanted count of its own")


def test_a_budget_is_recorded_beside_the_axes(tmp_path: Path) -> None:
    masks, _ = start(("layers", "ffn"))
    trajectory = Trajectory(SOURCE, 2)
    for step in range(2):
        also = {"draft_ms": (torch.tensor(4.0 - step), 3.5)}
        trajectory.record(step, masks, Budget(), 1.0, also)
    trajectory.write(tmp_path / "t.safetensors")
    found = Trajectory.read(tmp_path / "t.safetensors")
    assert found.constraints == ("layers", "ffn", "draft_ms")
    assert found.expected("draft_ms").tolist() == [4.0, 3.0]
    assert found.wanted("ffn") is None
    panels = {panel.get_ylabel(): panel for panel in draw(found).axes}
    assert len(panels["draft ms"].lines) == 2
    assert len(panels["FFN"].lines) == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.pdf", r"\.pdf is not among \.png, \.svg"),
        ("a", "no suffix is not among"),
        ("no/a.png", "there is no folder"),
    ],
)
def test_pictures_that_cannot_be_written(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=reason):
        plot_trajectory(learned(2), tmp_path / name)
