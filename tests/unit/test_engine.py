"""Saves survive a kill at any moment, and a resumed run equals one that was never stopped."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from draftsmith.checkpoints.families import families
from draftsmith.data import files
from draftsmith.distill.engine import TorchEngine
from draftsmith.distill.train import distill
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import DistillSettings
from tests.conftest import make_model
from tests.unit.test_batches import trace_rows
from tests.unit.test_masks import learn


def engine(folder: Path, value: float = 0.0) -> TorchEngine:
    parameter = nn.Parameter(torch.full((3,), value))
    return TorchEngine({"p": parameter}, torch.optim.AdamW([parameter], lr=0.1), folder)


def advance(e: TorchEngine, steps: int) -> None:
    for _ in range(steps):
        e.backward((e.parameters["p"] - 1).square().sum())
        e.step()


def test_load_gives_back_all_that_the_next_step_needs(tmp_path: Path) -> None:
    straight, stopped = engine(tmp_path / "a"), engine(tmp_path / "b")
    advance(straight, 6)
    advance(stopped, 3)
    stopped.save({"note": [1.5]})
    again = engine(tmp_path / "b", value=9.0)
    assert again.load() == {"note": [1.5]}
    advance(again, 3)
    assert torch.equal(again.parameters["p"], straight.parameters["p"])
    assert again.steps_done == 6


def saves(folder: Path, count: int = 2) -> TorchEngine:
    e = engine(folder)
    for _ in range(count):
        advance(e, 1)
        e.save({"at": e.steps_done})
    return e


@pytest.mark.parametrize("damage", ["truncate", "empty", "no mark", "other bytes"])
def test_A22_a_damaged_newest_save_is_passed_over(tmp_path: Path, damage: str) -> None:
    saves(tmp_path)
    newest = tmp_path / "step-0000002.pt"
    if damage == "truncate":
        newest.write_bytes(newest.read_bytes()[:-20])
    elif damage == "empty":
        newest.write_bytes(b"")
    elif damage == "no mark":
        newest.with_suffix(".json").unlink()
    else:
        newest.write_bytes(b"x" * newest.stat().st_size)
    again = engine(tmp_path)
    assert again.load() == {"at": 1}
    assert again.steps_done == 1


def test_A22_nothing_whole_is_a_fresh_start(tmp_path: Path) -> None:
    saves(tmp_path, count=1)
    (tmp_path / "step-0000001.json").unlink()
    assert engine(tmp_path).load() == {}
    assert engine(tmp_path / "never").load() == {}


def test_A22_kill_in_the_middle_of_a_save(tmp_path: Path) -> None:
    """A process that saves without pause is killed; what is left can be resumed."""
    script = (
        "import sys; from pathlib import Path; from tests.unit.test_engine import engine, advance\n"
        "import torch; e = engine(Path(sys.argv[1]))\n"
        "e.parameters['p'].data = torch.zeros(400_000)\n"
        "while True:\n    advance(e, 1); e.save({'at': e.steps_done})\n"
    )
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root}:{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment)
    while len(list(tmp_path.glob("*.json"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = engine(tmp_path)
    again.parameters["p"].data = torch.zeros(400_000)
    extra = again.load()
    assert extra == {"at": again.steps_done}
    assert again.steps_done >= 1


def test_two_saves_are_kept(tmp_path: Path) -> None:
    saves(tmp_path, count=5)
    assert sorted(p.name for p in tmp_path.glob("*.pt")) == ["step-0000004.pt", "step-0000005.pt"]


def test_a_full_disk_is_one_error_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(DraftsmithError, match=r"no space left.*start the same command again"):
        saves(tmp_path, count=1)
    assert not list(tmp_path.glob("*.pt*"))


SETTINGS: dict[str, Any] = {
    "steps": 9,
    "batch": 3,
    "lr": 1e-2,
    "warmup": 2,
    "evaluate_every": 4,
    "save_every": 3,
    "max_length": 32,
}


def run(folder: Path, stop_at: int | None = None, **changes: Any) -> tuple[Any, Any]:
    """Distil a tiny drafter; `stop_at` breaks off inside that step, as a kill would."""
    model = make_model(seed=1, num_hidden_layers=2)
    rows = trace_rows(20, model=make_model())
    calls = 0
    step = TorchEngine.step

    def counted(self: TorchEngine) -> float:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return step(self)

    TorchEngine.step = counted  # type: ignore[method-assign]
    try:
        curve = distill(
            model,
            families()["llama"],
            rows[:16],
            rows[16:],
            DistillSettings(**(SETTINGS | changes)),
            seed=2,
            state=folder,
        )
    finally:
        TorchEngine.step = step  # type: ignore[method-assign]
    return model.state_dict(), curve


@pytest.mark.parametrize("stop_at", [1, 4, 8])
def test_resumed_distillation_equals_one_that_was_left_alone(tmp_path: Path, stop_at: int) -> None:
    """Bit for bit, and the learning curve too."""
    weights, curve = run(tmp_path / "straight")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", stop_at=stop_at)
    again, curve_again = run(tmp_path / "stopped")
    assert curve == curve_again
    for name, tensor in weights.items():
        assert torch.equal(tensor, again[name]), name


def test_resumed_masks_equal_ones_that_were_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = learn(make_model(), tmp_path / "straight", save_every=3)
    step, calls = TorchEngine.step, 0

    def counted(self: TorchEngine) -> float:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", counted)
        with pytest.raises(KeyboardInterrupt):
            learn(make_model(), tmp_path / "stopped", save_every=3)
    assert learn(make_model(), tmp_path / "stopped", save_every=3) == straight


def test_distillation_learns(tmp_path: Path) -> None:
    _, curve = run(tmp_path, steps=60, evaluate_every=30)
    assert curve[-1]["loss"] < 0.7 * run(tmp_path / "short", steps=2, warmup=0)[1][0]["loss"]


def test_golden_losses(tmp_path: Path) -> None:
    """The first steps of a fixed run; a change here is a change of the training itself."""
    import json

    golden = json.loads((Path(__file__).parents[1] / "golden" / "distill.json").read_text())
    _, curve = run(tmp_path, evaluate_every=1)
    assert [point["loss"] for point in curve] == pytest.approx(golden["loss"], rel=1e-3)
    assert [point["tokens"] for point in curve] == golden["tokens"]


def test_embeddings_and_head_may_stay_the_targets(tmp_path: Path) -> None:
    fresh = make_model(seed=1, num_hidden_layers=2).state_dict()
    weights, _ = run(tmp_path, train="layers", vocab_limit=50)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], fresh[name])
    changed = [n for n, w in weights.items() if not torch.equal(w, fresh[n])]
    assert len(changed) == len(fresh) - 2


def test_accumulation_equals_a_larger_batch(tmp_path: Path) -> None:
    """The same rows in one micro-batch or two: the same first step (case A25)."""
    one, _ = run(tmp_path / "one", steps=1, warmup=0, batch=16)
    two, _ = run(tmp_path / "two", steps=1, warmup=0, batch=8, accumulate=2)
    for name, tensor in one.items():
        assert torch.allclose(tensor, two[name], atol=2e-4), name


def test_a_diverged_run_stops_and_its_saves_stay_sound(tmp_path: Path) -> None:
    e = saves(tmp_path, count=1)
    before = e.parameters["p"].detach().clone()
    e.backward((e.parameters["p"] * float("nan")).sum())
    with pytest.raises(DraftsmithError, match=r"step 2: .* lower the learning rate \(now 0\.1\)"):
        e.step()
    assert torch.equal(e.parameters["p"], before)
    assert engine(tmp_path).load() == {"at": 1}
