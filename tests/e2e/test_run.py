"""The whole road on a tiny model, through the command line, as a user walks it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.distill.logs import LOGS
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import STAGES, Run, run_stages
from tests.conftest import make_model

CLI = (sys.executable, "-m", "draftsmith.cli")


def command(*arguments: object, cwd: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*CLI, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        **changes,
    )


def contents(folder: Path) -> dict[str, bytes]:
    """All files but those that name times, machines and commands, logs and pictures."""
    skip = {"provenance.json", "score.json", "export.json", "masks.png", "README.md"}
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file() and p.name not in skip and ".gguf" not in p.name and LOGS not in p.parts
    }


@pytest.fixture
def in_process(tiny_recipe: Path, tmp_path: Path) -> Callable[..., Run]:
    """Run stages of the tiny recipe without a new process."""

    def go(name: str, *settings: str, stages: tuple[str, ...] | None = None) -> Run:
        run = Run(load(str(tiny_recipe), settings), tmp_path / name)
        run_stages(run, stages)
        return run

    return go


def test_one_command_makes_a_drafter(tiny_recipe: Path, tmp_path: Path) -> None:
    """All stages, a table, exports that load; a second run does nothing and says so."""
    first = command("run", tiny_recipe, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    out = tmp_path / "runs" / "tiny"
    assert sorted(p.name for p in out.iterdir()) == sorted(s.folder for s in STAGES)
    assert "Identical to the target's own greedy output" in first.stdout
    score = json.loads((out / "scores" / "score.json").read_text())
    assert score["lossless"] is True
    drafter = load_model(resolve(str(out / "export" / "hf")))
    assert drafter.config.num_hidden_layers == 2
    gguf = load_model(resolve(str(out / "export" / "drafter-F32.gguf")))
    ids = torch.arange(3, 30)[None]
    with torch.inference_mode():
        difference = (gguf(input_ids=ids).logits - drafter(input_ids=ids).logits).abs().max()
    assert difference < 1e-4
    for stage in STAGES:
        record = json.loads((out / stage.folder / "provenance.json").read_text())
        assert {"key", "settings", "inputs", "seed", "versions", "argv"} <= set(record)

    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    second = command("run", tiny_recipe, cwd=tmp_path)
    assert second.returncode == 0
    assert "Nothing was left to do" in second.stdout
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_stages_by_hand_equal_run(tiny_recipe: Path, tmp_path: Path) -> None:
    """trace, prune, distill one by one; score and export of the result on their own."""
    early = command("distill", tiny_recipe, cwd=tmp_path)
    assert early.returncode == 2
    assert "draftsmith trace" in early.stderr
    for stage in ("trace", "prune", "distill"):
        done = command(stage, tiny_recipe, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    out = tmp_path / "runs" / "tiny"
    target = load(str(tiny_recipe)).target
    prompts = tmp_path / "prompts.jsonl"
    scored = command(
        *("score", out / "distilled", "--target", target, "--prompts", prompts, "-k", "1:2"),
        *("--max-new-tokens", 8, "--json", "s.json"),
        cwd=tmp_path,
    )
    assert scored.returncode == 0, scored.stderr
    assert [r["lookahead"] for r in json.loads((tmp_path / "s.json").read_text())["decode"]] == [
        1,
        2,
    ]
    exported = command(
        *("export", out / "distilled", "--target", target, "--to", "hf", "--out", "drafter"),
        cwd=tmp_path,
    )
    assert exported.returncode == 0, exported.stderr
    compacted = command(
        *("compact", target, "--masks", out / "pruned" / "masks.json", "--out", "small"),
        cwd=tmp_path,
    )
    assert compacted.returncode == 0, compacted.stderr
    weights = [(f / "model.safetensors").read_bytes() for f in (tmp_path / "small", out / "pruned")]
    assert weights[0] == weights[1]
    whole = command("run", tiny_recipe, cwd=tmp_path)
    assert whole.returncode == 0
    assert "trace:" not in whole.stderr, "finished stages were done again"


@pytest.mark.parametrize(
    "moment", ["traces.partial/shard", "pruned.partial/state", "distilled.partial/state"]
)
def test_killed_and_resumed_equals_left_alone(
    tiny_recipe: Path, tmp_path: Path, moment: str
) -> None:
    """Kill -9 as soon as a stage has saved something; the same command then gives the same bits."""
    settings = [
        *("-s", "trace.tokens=600", "-s", "prune.steps=24", "-s", "distill.steps=40"),
        *("-s", "export.to=[hf]", "--quiet"),
    ]
    straight = command("run", tiny_recipe, *settings, "--out", "straight", cwd=tmp_path)
    assert straight.returncode == 0, straight.stderr
    process = subprocess.Popen(
        [
            *CLI,
            "run",
            str(tiny_recipe),
            *settings,
            "--out",
            "killed",
        ],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    deadline = time.monotonic() + 300
    while not list((tmp_path / "killed").glob(moment + "*")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = command("run", tiny_recipe, *settings, "--out", "killed", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    a, b = contents(tmp_path / "straight"), contents(tmp_path / "killed")
    assert a.keys() == b.keys()
    assert [name for name in a if a[name] != b[name]] == []


def test_interrupt_exits_130_and_leaves_nothing_under_a_final_name(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [
            *CLI,
            "trace",
            str(tiny_recipe),
            "-s",
            "trace.tokens=100000",
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Jobs that a script started in the background ignore interrupts, and so would this one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    out = tmp_path / "runs" / "tiny"
    while not list(out.glob("traces.partial/shard*")):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on where it stopped" in stderr
    assert not (out / "traces").exists()


def test_changed_settings_redo_what_depends_on_them(in_process: Callable[..., Run]) -> None:
    run = in_process("r", stages=("trace", "prune", "distill"))
    keys = {s: (run.out / s / "provenance.json").stat().st_mtime_ns for s in ("traces", "pruned")}
    again = in_process("r", "distill.lr=5e-3", stages=("trace", "prune", "distill"))
    assert again.seconds.keys() == {"distill"}
    assert {s: (run.out / s / "provenance.json").stat().st_mtime_ns for s in keys} == keys
    assert in_process("r", "trace.workers=2", "distill.lr=5e-3", stages=("trace",)).seconds == {}
    assert in_process("r", "seed=1", stages=("trace",)).seconds.keys() == {"trace"}


def test_logs_may_be_removed(in_process: Callable[..., Run]) -> None:
    run = in_process("a", stages=("trace", "prune", "distill"))
    assert list((run.folder("distilled") / LOGS).iterdir())
    shutil.rmtree(run.folder("distilled") / LOGS)
    assert not run_stages(run, ("trace", "prune", "distill"))


def test_a_removed_file_is_noticed(in_process: Callable[..., Run]) -> None:
    run = in_process("r", stages=("trace", "prune"))
    (run.out / "pruned" / "model.safetensors").unlink()
    assert in_process("r", stages=("trace", "prune")).seconds.keys() == {"prune"}


def test_killed_between_the_work_and_its_name(
    in_process: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished is not done again."""
    from draftsmith.recipes import run as stages

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    in_process("r", stages=("trace",))
    with monkeypatch.context() as patch:
        patch.setattr(stages, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            in_process("r", stages=("prune",))
    monkeypatch.setattr("draftsmith.prune.train.learn_masks", lambda *a, **k: pytest.fail("again"))
    run = in_process("r", stages=("prune",))
    assert (run.out / "pruned" / "model.safetensors").is_file()
    assert not (run.out / "pruned" / "state").exists()
    assert not (run.out / "pruned.partial").exists()


def test_source_may_be_another_member_of_the_family(
    tiny_recipe: Path, tmp_path: Path, save: Callable[..., Path]
) -> None:
    """The drafter is cut from a smaller model with the same tokenizer."""
    source = save(make_model(seed=5, num_hidden_layers=3, hidden_size=24), name="source")
    out = tmp_path / "other"
    done = command("run", tiny_recipe, "-s", f"source={source}", "--out", out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert load_model(resolve(str(out / "distilled"))).config.hidden_size == 24


def test_widths_are_cut_too(tiny_recipe: Path, tmp_path: Path) -> None:
    """Every axis at once, learned, exact."""
    shape = "prune.shape={layers: 3, kv_heads: 1, heads_per_group: 1, ffn: 24, hidden: 16}"
    done = command("run", tiny_recipe, "-s", shape, "--out", "wide", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = load_model(resolve(str(tmp_path / "wide" / "distilled"))).config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.num_attention_heads) == (
        3,
        1,
        1,
    )
    assert (config.intermediate_size, config.hidden_size, config.head_dim) == (24, 16, 8)


WRONG: list[tuple[str, str]] = [
    ("prune.shape.layers=9", "recipe.prune.shape.layers: 9 is not among 1, 2, 3, 4"),
    ("prune.shape.heads=3", "legal with 2 KV heads: 2, 4"),
    ("prune={shape: {hidden: 24}, axes: [kv_heads]}", "add hidden to it"),
    ("prune.stepz=3", "did you mean 'steps'?"),
    ("target=/nowhere/at/all", "no such folder or file"),
    ("score.prompts=/nowhere.jsonl", "no such file, nor a folder of sounds"),
    ("data={source: corpus, path: [/nowhere]}", "no such file or folder"),
]


@pytest.mark.parametrize(("setting", "message"), WRONG)
def test_wrong_requests_exit_2_before_anything_is_written(
    tiny_recipe: Path, tmp_path: Path, setting: str, message: str
) -> None:
    done = command("run", tiny_recipe, "-s", setting, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", ["truncated weights", "no weights", "another family"])
def test_damaged_targets_exit_2(tiny_recipe: Path, tmp_path: Path, damage: str) -> None:
    target = Path(load(str(tiny_recipe)).target)
    weights = target / "model.safetensors"
    if damage == "truncated weights":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "no weights":
        weights.unlink()
    else:
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    done = command("run", tiny_recipe, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert str(target) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_full_disk_is_told_and_loses_nothing(tiny_recipe: Path, tmp_path: Path) -> None:
    """A tmpfs too small for the drafter: exit 1, one message; with room it goes on."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("no mounting here")
    try:
        done = command("run", tiny_recipe, "--out", disk / "run", cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        assert "no space left" in done.stderr
        assert "Traceback" not in done.stderr
        finished = [p.name for p in (disk / "run").iterdir() if not p.name.endswith(".partial")]
        assert set(finished) <= {"traces", "pruned"}
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        again = command("run", tiny_recipe, "--out", disk / "run", cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    finally:
        subprocess.run(["umount", str(disk)], check=True)
