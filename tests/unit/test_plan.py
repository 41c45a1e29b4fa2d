"""`draftsmith plan`: counts are those of real models, bytes follow from them, nothing is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftsmith.checkpoints.families import families
from draftsmith.cli import app
from draftsmith.distill.estimate import (
    BUCKET,
    FLOAT,
    LIVE,
    Memory,
    Work,
    counts_of,
    moments,
    peak,
    teacher_of,
)
from draftsmith.distill.train import trainable_parameters
from draftsmith.recipes import planning
from draftsmith.recipes.planning import Device, Plan, PlannedRun, plan
from draftsmith.recipes.schema import DistillSettings
from tests.conftest import CAUSAL, make_model, make_tokenizer, tiny_config

SETTINGS = {
    "all": DistillSettings(),
    "layers": DistillSettings(train="layers"),
    "adapters": DistillSettings(lora_rank=4),
    "adapters of the FFN": DistillSettings(lora_rank=3, lora_axes=("ffn",)),
}
WORK = Work(rows=4, length=64, answers=4 * 63)
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def at(moment: str, *arguments: Any) -> Memory:
    return next(memory for memory in moments(*arguments) if memory.moment == moment)


# --- counts


@every_setting
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_a_real_model(
    causal_family: str, settings: DistillSettings, tied: bool
) -> None:
    model = make_model(causal_family, tie_word_embeddings=tied)
    family = families()[causal_family]
    counts = counts_of(model.config, family, settings)
    assert counts.parameters == sum(p.numel() for p in model.parameters())
    learning = trainable_parameters(model, family, settings, seed=0)
    assert counts.learning == sum(p.numel() for p in learning.values())
    assert counts.adapters == (counts.learning if settings.lora_rank else 0)
    assert counts.tied == tied
    assert counts.head_learns == model.get_output_embeddings().weight.requires_grad


def bytes_kept(model: Any, layers: int, dtype: torch.dtype) -> int:
    """What autograd keeps of a padded batch of 3 x 20 tokens behind so many layers."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    body, whole = model.base_model, model.base_model.layers
    body.layers, body.config.num_hidden_layers = whole[:layers], layers
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, -5:] = 0
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        output = body(input_ids=mask + 3, attention_mask=mask, use_cache=False)
    body.layers, body.config.num_hidden_layers = whole, len(whole)
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@every_setting
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 0.005), (torch.bfloat16, 0.05)], ids=str
)
def test_a_block_keeps_what_autograd_keeps(
    causal_family: str, settings: DistillSettings, dtype: torch.dtype, tolerance: float
) -> None:
    model, family = make_model(causal_family), families()[causal_family]
    counts = counts_of(model.config, family, settings)
    trainable_parameters(model, family, settings, seed=0)
    model.train()
    measured = bytes_kept(model, 3, dtype) - bytes_kept(model, 2, dtype)
    casts = 0
    if dtype != torch.float32:
        casts = (
            (counts.projections + counts.adapters)
            * dtype.itemsize
            // model.config.num_hidden_layers
        )
    predicted = 60 * counts.block.bytes_per_token(dtype.itemsize, 20) + casts
    assert predicted == pytest.approx(measured, rel=tolerance)


def test_adapters_along_no_axis_are_refused() -> None:
    settings = DistillSettings(lora_rank=2, lora_axes=("cross_heads",))
    with pytest.raises(planning.RequestError, match=r"recipe\.distill\.lora_axes: no projection"):
        counts_of(tiny_config(), families()["llama"], settings)


# --- bytes


def counts(**settings: Any) -> Any:
    return counts_of(tiny_config(), families()["llama"], DistillSettings(**settings))


def test_one_process_holds_weights_gradients_and_two_states() -> None:
    tiny = counts()
    memory = at("gradients", tiny, WORK)
    assert memory.weights == memory.gradients == FLOAT * tiny.parameters
    assert memory.optimizer == 2 * FLOAT * tiny.learning
    assert at("loss", tiny, WORK).gradients == 0
    again = replace(WORK, micro_batches=2)
    assert at("loss", tiny, again).gradients == FLOAT * tiny.learning


def test_a_tied_embedding_counts_once_and_has_two_gradients() -> None:
    tied = counts_of(tiny_config(tie_word_embeddings=True), families()["llama"], DistillSettings())
    memory = at("gradients", tied, WORK)
    assert memory.weights == FLOAT * (counts().parameters - tied.head)
    assert memory.gradients == FLOAT * (tied.learning + tied.head)


@pytest.mark.parametrize("processes", [2, 4])
def test_zero_shares_out_state_gradients_and_weights(processes: int) -> None:
    tiny = counts()
    part = tiny.learning // processes
    one, two, three = (at("gradients", tiny, WORK, zero, processes) for zero in (1, 2, 3))
    assert one.optimizer == two.optimizer == three.optimizer == 2 * FLOAT * part
    bucket = FLOAT * tiny.learning
    assert one.gradients == FLOAT * tiny.learning + bucket
    assert two.gradients == three.gradients == FLOAT * part + bucket
    # Each rank has a copy of the part that it updates.
    assert one.weights == two.weights == FLOAT * (tiny.parameters + part)


def test_zero_3_cuts_large_tensors_and_keeps_what_is_gathered() -> None:
    large = replace(counts(), parameters=5 * LIVE, learning=5 * LIVE, whole=1000)
    memory = at("loss", large, WORK, 3, 4)
    assert memory.weights == FLOAT * (1000 + (5 * LIVE - 1000) // 4 + LIVE)
    on_gpu = replace(WORK, device="cuda")
    assert at("gradients", counts(), on_gpu, 2, 2).gradients > FLOAT * BUCKET


def test_checkpointing_keeps_block_inputs_only() -> None:
    tiny = counts()
    plain, again = (
        at("loss", tiny, replace(WORK, checkpoint=on)).activations for on in (False, True)
    )
    each = tiny.block.bytes_per_token(FLOAT, WORK.length) - FLOAT * tiny.shape.hidden
    assert plain - again == WORK.tokens * tiny.shape.layers * each


def test_a_frozen_head_is_cut_and_has_no_gradient() -> None:
    frozen, learned = counts(train="layers"), counts()
    some = replace(WORK, columns=10)
    extra = at("loss", frozen, some).weights - at("loss", frozen, WORK).weights
    assert extra == FLOAT * 10 * frozen.shape.hidden
    assert at("loss", learned, some).weights == at("loss", learned, WORK).weights
    assert at("loss", learned, WORK).head - at("loss", frozen, WORK).head == FLOAT * learned.head


def test_a_live_target_is_whole_or_cut() -> None:
    family, config = families()["llama"], tiny_config()
    half = replace(WORK, width=2)
    whole, cut = (teacher_of(config, family, half, parts) for parts in (1, 4))
    parameters, head = counts().parameters, counts().head
    assert whole.weights == 2 * parameters
    body = parameters - head
    assert cut.weights == 2 * (-(-body // 4) + body + head)
    assert at("teacher", counts(), replace(half, teacher=whole)).teacher > whole.weights


def test_the_peak_is_the_largest_moment() -> None:
    totals = [memory.total for memory in moments(counts(), WORK)]
    assert peak(counts(), WORK).total == max(totals)


# --- the command


def planned(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture
def bare(tiny_recipe: Path, tmp_path: Path) -> Path:
    """The tiny recipe, with a target that has lost its weights."""
    for file in (tmp_path / "target").glob("*.safetensors"):
        file.unlink()
    return tiny_recipe


@pytest.mark.parametrize("family", CAUSAL)
def test_check_needs_config_and_tokenizer_only(
    family: str, tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_config(family).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    done = planned(bare, "--check", "-s", "target=other", "-s", "export.to=[hf]")
    assert done.exit_code == 0, done.output
    assert "one process: fits" in done.stdout
    assert "time:" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert sorted(tmp_path.rglob("*")) == before


def test_time_is_measured_on_random_weights(bare: Path, tmp_path: Path) -> None:
    done = planned(bare, "--json", tmp_path / "plan.json", "--out", tmp_path / "run")
    assert done.exit_code == 0, done.output
    assert "time: " in done.stdout
    figures = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert set(figures) == {
        *("schema", "target", "dtype", "drafter", "device", "batch", "text", "memory"),
        *("changes", "time", "warnings"),
    }
    took = figures["time"]
    assert took["total_low"] <= took["total_median"] <= took["total_high"]
    assert took["total_median"] == pytest.approx(12 * took["step_median"])
    (row,) = figures["memory"]
    parts = ("weights", "gradients", "optimizer", "activations", "head", "teacher", "traces")
    assert row["total_bytes"] == sum(row[f"{part}_bytes"] for part in parts)
    assert row["fits"] is True
    assert figures["drafter"]["shape"]["layers"] == 2
    assert not (tmp_path / "run").exists()


def test_processes_are_compared_by_stage(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = planned(bare, "--check", "--gpus", 2, "-s", "distill.accumulate=2", "--json", file)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 100
    rows = json.loads(file.read_text(encoding="utf-8"))["memory"]
    assert [(r["zero"], r["processes"]) for r in rows] == [(0, 1), (1, 2), (2, 2), (3, 2)]
    assert [r["zero"] for r in rows if r["chosen"]] == [2]
    assert json.loads(file.read_text(encoding="utf-8"))["time"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-s", "prune.shape.layers=9"), "recipe.prune.shape.layers: 9 is not among"),
        (("--gpus", "2"), "recipe.distill.accumulate: 1 micro-batches a step can't be shared"),
        (("--json", "nowhere/plan.json"), "there is no folder nowhere"),
        (("-s", "target=nowhere"), "nowhere: there is no such folder or file"),
        (("-s", "target=no/where"), "no/where: no such folder, and the hub did not give its"),
        (("-s", "distill.lora_rank=2", "-s", "distill.lora_axes=[cross_heads]"), "lora_axes"),
        (("-s", "distill.stepz=2"), "recipe.distill.stepz: unknown key"),
    ],
)
def test_a_wrong_request_is_refused(bare: Path, options: tuple[str, ...], message: str) -> None:
    done = planned(bare, "--check", *options)
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_damaged_weights_are_refused(tiny_recipe: Path, tmp_path: Path) -> None:
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = planned(tiny_recipe, "--check")
    assert done.exit_code == 2
    assert "damaged" in done.stderr


# --- what does not fit


def with_memory(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, available: int, *overrides: str
) -> Plan:
    from draftsmith.recipes.loading import load

    device = Device("cuda", "a GPU", 80 * 10**9, available, 10**12, 0)
    monkeypatch.setattr(planning, "device_now", lambda: device)
    run = PlannedRun(load(str(recipe), overrides), recipe.parent / "run")
    return plan(run, measure=False)


def test_what_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    enough = with_memory(monkeypatch, bare, 10**9).chosen
    assert enough.fits
    found = with_memory(monkeypatch, bare, enough.total - 1)
    assert not found.chosen.fits
    names = [change.name for change in found.changes]
    assert any("checkpoint_activations" in name for name in names)
    assert any("distill.batch: 1, accumulate: 4" in name for name in names)
    assert all(change.fits for change in found.changes)
    nothing = with_memory(monkeypatch, bare, 1000)
    assert not nothing.changes
    assert any("smaller prune.shape" in warning for warning in nothing.warnings)


def test_a_tight_fit_is_told(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    enough = with_memory(monkeypatch, bare, 10**9).chosen
    assert not enough.tight
    found = with_memory(monkeypatch, bare, enough.total)
    assert found.chosen.fits
    assert found.chosen.tight
    assert found.changes
    assert any("allocators" in warning for warning in found.warnings)


def test_a_cpu_is_shared_by_its_processes() -> None:
    host = Device("cpu", "CPU", 100, 60, 60, 20)
    assert [host.share(n) for n in (1, 2, 4)] == [60, 20, 0]
    assert replace(host, kind="cuda").share(4) == 60


def test_too_many_epochs_are_told(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    few = with_memory(monkeypatch, bare, 10**9, "distill.steps=2", "distill.warmup=0")
    assert few.text.epochs < planning.MOST_EPOCHS
    assert not few.warnings
    many = with_memory(monkeypatch, bare, 10**9, "distill.steps=500")
    assert many.text.epochs > planning.MOST_EPOCHS
    assert any("raise trace.tokens" in warning for warning in many.warnings)


def test_traces_that_are_there_are_counted(
    monkeypatch: pytest.MonkeyPatch, tiny_recipe: Path, tmp_path: Path
) -> None:
    from draftsmith.recipes.loading import load
    from draftsmith.recipes.run import Run, run_stages

    assert not with_memory(monkeypatch, tiny_recipe, 10**9).text.measured
    run_stages(Run(load(str(tiny_recipe)), tiny_recipe.parent / "run"), ("trace",))
    text = with_memory(monkeypatch, tiny_recipe, 10**9).text
    assert text.measured
    assert text.rows > 0
    assert text.answer_tokens == round(text.rows * text.mean_answer)
    # Others than the recipe asks for don't count.
    assert not with_memory(monkeypatch, tiny_recipe, 10**9, "seed=9").text.measured
