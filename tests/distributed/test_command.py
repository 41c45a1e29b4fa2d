"""`draftsmith distill` in two processes: the numbers of one, killed and resumed, or refused."""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.prune.trajectory import FILE, Trajectory
from tests.e2e.test_run import command

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not importlib.util.find_spec("deepspeed"), reason="needs draftsmith[deepspeed]"
    ),
]
SETTINGS = ("-s", "distill.accumulate=2", "-s", "distill.steps=6", "-s", "distill.save_every=2")


def launched(stage: str, *arguments: object) -> list[str]:
    """The command line of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--no_local_rank"]
    launcher += ["--num_gpus", "2", "--master_port", port, "--module", "draftsmith.cli", stage]
    return [*launcher, *map(str, arguments)]


def start(words: list[str], cwd: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        words,
        cwd=cwd,
        env=os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def begun(tiny_recipe: Path, tmp_path: Path) -> Path:
    """A run whose traces and compact model are there, and the same run for one process."""
    out = tmp_path / "two"
    for stage in ("trace", "prune"):
        done = command(stage, tiny_recipe, "--out", out, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    shutil.copytree(out, tmp_path / "one")
    return out


@pytest.mark.parametrize(
    "more",
    [
        (),
        *(("weights_lr=1e-3", "clip=1.0", f"zero={zero}") for zero in (1, 2, 3)),
        ("teacher=live", "objective=acceptance", "weights_lr=1e-3", "zero=3"),
        ("race=4", "zero=3"),
    ],
)
def test_two_processes_learn_the_masks_of_one(
    tiny_recipe: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    """Losses, expected counts, the choice and the weights; killed after a save as well."""
    asked = ["accumulate=2", "batch=2", "steps=24", "mask_lr=0.15", *more]
    asked = [word for key in asked for word in ("-s", f"prune.{key}")]
    if "race=4" in more:
        # Something to judge it by.
        asked += ["-s", "trace.validation_share=0.3"]
    two, one = tmp_path / "two", tmp_path / "one"
    assert command("trace", tiny_recipe, "--out", two, *asked, cwd=tmp_path).returncode == 0
    shutil.copytree(two, one)
    alone = command("prune", tiny_recipe, "--out", one, *asked, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    words = launched("prune", tiny_recipe, "--out", two, *asked)
    first = start(words, tmp_path)
    while first.poll() is None and not list((two / "pruned.partial" / "state").glob("*.json")):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(launched("prune", tiny_recipe, "--out", two, *asked), tmp_path)
    told, _ = second.communicate(timeout=500)
    assert second.returncode == 0, told
    ours, theirs = (json.loads((out / "pruned" / "masks.json").read_text()) for out in (two, one))
    assert ours["selection"] == theirs["selection"]
    assert [e["parts"] for e in ours["raced"]] == [e["parts"] for e in theirs["raced"]]
    assert bool(ours["raced"]) == ("race=4" in more)
    told = [Trajectory.read(out / "pruned" / FILE).state() for out in (two, one)]
    assert len(told[0]["step"]) == 24
    for name, values in told[0].items():
        # Where weights learn, Adam makes much of a gradient that is rounding error.
        atol = 5e-3 if "weights_lr=1e-3" in more else 1e-5
        assert torch.allclose(values.float(), told[1][name].float(), rtol=1e-4, atol=atol), name
        assert torch.allclose(values[:3].float(), told[1][name][:3].float(), atol=2e-5), name
    found, expected = weights(two, "pruned"), weights(one, "pruned")
    for name, tensor in expected.items():
        assert torch.allclose(tensor, found[name], atol=1e-4), name


def curve(out: Path) -> list[dict[str, float]]:
    found: list[dict[str, float]] = json.loads((out / "distilled" / "curve.json").read_text())
    return found


def weights(out: Path, stage: str = "distilled") -> dict[str, Any]:
    model = load_model(resolve(str(out / stage)))
    state: dict[str, Any] = model.state_dict()
    return state


OWN = ("teacher=live", "on_policy=0.5", "hidden_matching=0.5", "position_decay=0.8", "lookahead=4")


@pytest.mark.parametrize(
    ("zero", "more"), [(2, ()), (3, ()), (2, OWN), (3, (*OWN, "shard_teacher=true"))]
)
def test_two_processes_distil_as_one(
    begun: Path, tiny_recipe: Path, tmp_path: Path, zero: int, more: tuple[str, ...]
) -> None:
    """Killed after a save as well, and gone on with; Adam magnifies what rounding leaves.

    A live target is whole in each process, or cut into the parts of both.
    """
    asked = [*SETTINGS, "-s", f"distill.zero={zero}"]
    asked += [word for setting in more for word in ("-s", f"distill.{setting}")]
    one = command("distill", tiny_recipe, "--out", tmp_path / "one", *asked, cwd=tmp_path)
    assert one.returncode == 0, one.stderr
    words = launched("distill", tiny_recipe, "--out", begun, *asked)
    first = start(words, tmp_path)
    state = begun / "distilled.partial" / "state"
    while first.poll() is None and not list(state.glob("step-*.json")):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    second = start(launched("distill", tiny_recipe, "--out", begun, *asked), tmp_path)
    told, _ = second.communicate(timeout=500)
    assert second.returncode == 0, told
    assert told.count(str(begun / "distilled")) >= 1
    assert told.count("draftsmith:") == 0
    for ours, theirs in zip(curve(begun), curve(tmp_path / "one"), strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    expected = weights(tmp_path / "one")
    for name, tensor in weights(begun).items():
        assert torch.allclose(tensor, expected[name], atol=2e-3), name
    assert not list((begun / "distilled").glob("state*"))


@pytest.mark.parametrize(
    ("stage", "settings", "message"),
    [
        ("distill", ["-s", "distill.accumulate=3"], "accumulate: 3 micro-batches a step can't be"),
        ("run", [], "trace, score, export: done by one process, and 2 were launched"),
    ],
)
def test_what_two_processes_can_not_do_is_told_once(
    tiny_recipe: Path, tmp_path: Path, stage: str, settings: list[str], message: str
) -> None:
    words = launched(stage, tiny_recipe, "--out", tmp_path / "none", *settings)
    process = start(words, tmp_path)
    told, _ = process.communicate(timeout=300)
    assert process.returncode != 0
    assert told.count("draftsmith: ") == 1
    assert message in told
    assert not (tmp_path / "none").exists()
