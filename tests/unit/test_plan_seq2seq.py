"""`draftsmith plan` for encoder–decoders: what autograd keeps, both stacks, shipped recipes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import shape_of
from draftsmith.cli import app
from draftsmith.distill.activations import FLOAT
from draftsmith.distill.estimate import (
    Counts,
    Memory,
    Work,
    counts_of,
    encoder_parameters,
    masked_counts,
    moments,
    peak,
    teacher_of,
)
from draftsmith.distill.train import trainable_parameters
from draftsmith.prune.masks import LearnableMasks, applied
from draftsmith.recipes.loading import load
from draftsmith.recipes.schema import DistillSettings
from tests.conftest import kept_by_autograd, make_model, make_tokenizer, tiny_config
from tests.unit.test_plan import config_of, folder_of

READS_TEXT = sorted(
    name for name, f in families().items() if f.has_encoder and not f.config.mel_bins
)
SETTINGS = {
    "all": DistillSettings(),
    "layers": DistillSettings(train="layers"),
    "decoder": DistillSettings(train="decoder"),
    "adapters": DistillSettings(lora_rank=4, lora_axes=("kv_heads", "cross_heads", "ffn")),
}
every_family = pytest.mark.parametrize("name", READS_TEXT)
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
T, S, ROWS = 20, 17, 3
WORK = Work(rows=4, length=64, answers=4 * 63, source_length=80)


def at(moment: str, *arguments: Any) -> Memory:
    return next(memory for memory in moments(*arguments) if memory.moment == moment)


def counts(name: str = "marian", config: Any = None, **settings: Any) -> Counts:
    return counts_of(config or tiny_config(name), families()[name], DistillSettings(**settings))


# --- what autograd keeps


@contextmanager
def shortened(model: Any, decoder: int, encoder: int) -> Iterator[None]:
    """Leave so many blocks in both stacks."""
    lists = []
    for stack, count in zip(
        families()[model.config.model_type].stacks, (decoder, encoder), strict=True
    ):
        path = stack.block.removesuffix(".{layer}")
        lists.append((path, model.get_submodule(path)))
        model.set_submodule(path, lists[-1][1][:count])
    yield
    for path, whole in lists:
        model.set_submodule(path, whole)


def bytes_kept(model: Any, dtype: torch.dtype) -> int:
    """What autograd keeps of a padded batch."""
    ids, sources = torch.full((ROWS, T), 5), torch.full((ROWS, S), 7)
    mask, source_mask = torch.ones_like(ids), torch.ones_like(sources)
    mask[0, -5:] = source_mask[1, -4:] = 0
    body = model.base_model
    autocast = torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
    with kept_by_autograd(model) as kept, autocast:
        encoded = body.get_encoder()(input_ids=sources, attention_mask=source_mask)
        output = body.get_decoder()(
            input_ids=ids,
            attention_mask=mask,
            encoder_hidden_states=encoded.last_hidden_state,
            encoder_attention_mask=source_mask,
            use_cache=False,
        )
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def of_a_block(model: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that one block more of the decoder keeps, and of the encoder."""
    found = []
    for decoder, encoder in ((2, 2), (3, 2), (2, 3)):
        with shortened(model, decoder, encoder):
            found.append(bytes_kept(model, dtype))
    return found[1] - found[0], found[2] - found[0]


def predicted(counted: Counts, width: int) -> tuple[int, int]:
    """The same by the estimate; casts of weights not among them."""
    decoder = ROWS * T * counted.block.bytes_per_token(width, T, S)
    decoder += ROWS * S * counted.block.bytes_per_source_token(width)
    encoder = counted.encoder.bytes_per_token(width, S) if counted.encoder else 0
    return decoder, ROWS * S * encoder


def casts(model: Any, stack: int) -> int:
    """Bytes of half-precision copies of a block's projections."""
    block = model.get_submodule(
        families()[model.config.model_type].stacks[stack].block.format(layer=1)
    )
    return 2 * sum(p.numel() for p in block.parameters() if p.dim() > 1)


@every_family
@every_setting
@pytest.mark.parametrize("drops", [False, True])
def test_blocks_keep_what_autograd_keeps(name: str, settings: DistillSettings, drops: bool) -> None:
    rates = dict.fromkeys(("dropout", "dropout_rate", "attention_dropout"), 0.1 if drops else 0.0)
    model, family = make_model(name, **rates), families()[name]
    counted = counts_of(model.config, family, settings)
    trainable_parameters(model, family, settings, seed=0)
    model.train()
    measured = of_a_block(model, torch.float32)
    for ours, theirs in zip(predicted(counted, 4), measured, strict=True):
        assert ours == pytest.approx(theirs, rel=0.01)


@every_family
@pytest.mark.parametrize("train", ["all", "decoder"])
def test_blocks_keep_what_autocast_keeps(name: str, train: Any) -> None:
    settings = DistillSettings(train=train)
    model, family = make_model(name), families()[name]
    counted = counts_of(model.config, family, settings)
    trainable_parameters(model, family, settings, seed=0)
    model.train()
    decoder, encoder = of_a_block(model, torch.bfloat16)
    ours = predicted(counted, 2)
    assert ours[0] + casts(model, 0) == pytest.approx(decoder, rel=0.05)
    assert ours[1] + (casts(model, 1) if train == "all" else 0) == pytest.approx(encoder, rel=0.05)


MASKED: dict[str, tuple[Any, ...]] = {
    "layers": ("layers",),
    "encoder layers": ("encoder_layers",),
    "heads": ("kv_heads", "cross_heads", "encoder_heads"),
    "ffn": ("ffn", "encoder_ffn"),
    "hidden": ("hidden",),
}


@every_family
@pytest.mark.parametrize("axes", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize("learn", [False, True], ids=["frozen", "learning"])
def test_masked_blocks_keep_what_autograd_keeps(
    name: str, axes: tuple[Any, ...], learn: bool
) -> None:
    model, family = make_model(name), families()[name]
    counted = masked_counts(model.config, family, axes, learn=learn)
    model.requires_grad_(learn)
    source = shape_of(model.config, family)
    found = []
    for decoder, encoder in ((2, 2), (3, 2), (2, 3)):
        shape = replace(source, layers=decoder, encoder_layers=encoder)
        z = LearnableMasks(axes, shape, 2.0).sample(torch.Generator().manual_seed(0))
        with shortened(model, decoder, encoder), applied(model, family, shape, z):
            found.append(bytes_kept(model, torch.float32))
    ours = predicted(counted, 4)
    # Where attention has no fused kernel, what a mask multiplies is not kept beside the product.
    assert ours[0] == pytest.approx(found[1] - found[0], rel=0.09)
    assert ours[1] == pytest.approx(found[2] - found[0], rel=0.09)


# --- counts and bytes


@every_family
@every_setting
@pytest.mark.parametrize("tied", [False, True])
def test_counts_are_those_of_a_real_model(name: str, settings: DistillSettings, tied: bool) -> None:
    family = families()[name]
    model = make_model(name, **{family.tied: tied, "tie_word_embeddings": tied})
    counted = counts_of(model.config, family, settings)
    assert counted.parameters == sum(p.numel() for p in model.parameters())
    learning = trainable_parameters(model, family, settings, seed=0)
    assert counted.learning == sum(p.numel() for p in learning.values())
    assert counted.head_learns == model.get_output_embeddings().weight.requires_grad
    of_encoder = [p for p in model.get_encoder().parameters() if p.requires_grad]
    assert (counted.encoder is not None) == bool(of_encoder)
    blocks = model.get_submodule(family.stacks[1].block.removesuffix(".{layer}"))
    in_blocks = sum(p.numel() for p in blocks.parameters() if p.requires_grad)
    assert counted.encoder_learning == in_blocks


def test_a_frozen_encoder_keeps_its_output_alone() -> None:
    frozen, learned = counts(train="decoder"), counts()
    both = [at("loss", counted, WORK).activations for counted in (frozen, learned)]
    without = at("loss", frozen, replace(WORK, source_length=0)).activations
    output = FLOAT * WORK.source_tokens * frozen.shape.hidden
    keys = 2 * FLOAT * frozen.shape.hidden * WORK.source_tokens * frozen.shape.layers
    rows = WORK.tokens * 80 * (FLOAT * frozen.shape.layers + 1)
    assert both[0] - without == output + keys + rows
    assert frozen.encoder is None
    assert both[1] > both[0]
    assert at("gradients", frozen, WORK).optimizer == 2 * FLOAT * frozen.learning
    assert not [memory for memory in moments(frozen, WORK) if memory.moment == "encoder"]


def test_long_sources_make_the_encoders_backward_pass_the_peak() -> None:
    learned = counts()
    work = replace(WORK, length=2, answers=4, source_length=4000, device="cuda")
    assert peak(learned, work).moment in ("loss", "backward", "encoder")
    shallow = counts_of(
        tiny_config("marian", decoder_layers=1, d_model=64, encoder_ffn_dim=4096),
        families()["marian"],
        DistillSettings(),
    )
    assert peak(shallow, work).moment == "encoder"


def test_checkpointing_keeps_the_inputs_of_both_stacks() -> None:
    learned = counts()
    plain, again = (
        at("loss", learned, replace(WORK, checkpoint=on)).activations for on in (False, True)
    )
    shape, hidden = learned.shape, FLOAT * learned.shape.hidden
    assert learned.encoder is not None
    decoder = learned.block.bytes_per_token(FLOAT, WORK.length, WORK.source_length) - hidden
    keys = learned.block.bytes_per_source_token(FLOAT)
    encoder = learned.encoder.bytes_per_token(FLOAT, WORK.source_length) - hidden
    assert plain - again == (
        shape.layers * (WORK.tokens * decoder + WORK.source_tokens * keys)
        + shape.encoder_layers * WORK.source_tokens * encoder
    )


def test_rows_of_a_source_share_its_encoders_pass() -> None:
    learned = counts()
    alone = replace(WORK, rows=12)
    shared = replace(alone, rows_of_source=3)
    assert shared.source_tokens == alone.source_tokens // 3
    each = at("loss", learned, alone).activations - at("loss", learned, shared).activations
    assert learned.encoder is not None
    passes = learned.encoder.bytes_per_token(FLOAT, 80) * learned.shape.encoder_layers
    assert each > (alone.source_tokens - shared.source_tokens) * passes * 0.9


def test_dropout_is_a_byte_on_a_gpu() -> None:
    block = counts().block
    assert block.noise
    saved = block.bytes_per_token(FLOAT, 8) - block.bytes_per_token(FLOAT, 8, device="cuda")
    assert saved == 3 * block.noise


def test_a_live_target_reads_sources() -> None:
    config, family = tiny_config("marian"), families()["marian"]
    with_, without = (
        teacher_of(config, family, replace(WORK, source_length=length)) for length in (4000, 0)
    )
    assert with_.work > without.work
    assert with_.weights == without.weights


@every_family
def test_an_encoder_is_counted_without_what_the_decoder_has_too(name: str) -> None:
    model = make_model(name)
    embedding = model.get_encoder().get_input_embeddings().weight
    shared = any(embedding is p for n, p in model.named_parameters() if "encoder" not in n)
    whole = sum(p.numel() for p in model.get_encoder().parameters())
    alone = whole - (embedding.numel() if shared else 0)
    assert encoder_parameters(model.config, families()[name]) == alone
    assert encoder_parameters(tiny_config(), families()["llama"]) == 0


# --- the command


def planned(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


@pytest.fixture(params=READS_TEXT)
def bare(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A recipe for an encoder–decoder that lacks its weights; its file."""
    tiny_config(request.param).save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    corpus = tmp_path / "corpus.jsonl"
    rows = ["how many apples are left " * (1 + i % 4) for i in range(12)]
    corpus.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
target: {tmp_path / "target"}
threads: 1
dtype: float32
data: {{source: corpus, path: [{corpus}]}}
trace: {{tokens: 300, batch: 8, top_n: 8, max_new_tokens: 12, workers: 1}}
prune: {{shape: {{layers: 2}}, steps: 12, warmup: 4, batch: 4}}
distill: {{steps: 12, batch: 4, warmup: 2, train: decoder}}
export: {{to: [hf]}}
"""
    )
    return path


def figures(recipe: Path, *options: str) -> dict[str, Any]:
    file = recipe.parent / "plan.json"
    words = [word for option in options for word in ("-s", option)]
    done = planned(recipe, "--check", "--json", file, *words)
    assert done.exit_code == 0, done.output
    assert max(map(len, done.stdout.splitlines())) <= 100
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def test_a_shared_encoder_is_counted_once(bare: Path) -> None:
    shared, own = figures(bare), figures(bare, "distill.train=all")
    drafter, target = (
        shared["drafter"],
        own["drafter"]["with_target"] - own["drafter"]["parameters"],
    )
    assert drafter["shared_encoder"] > 0
    assert drafter["with_target"] == target + drafter["parameters"] - drafter["shared_encoder"]
    assert own["drafter"]["shared_encoder"] == 0
    assert shared["memory"][0]["optimizer_bytes"] < own["memory"][0]["optimizer_bytes"]
    assert shared["drafter"]["shape"]["layers"] == 2


def test_sources_are_as_long_as_the_data_have_them(bare: Path, tmp_path: Path) -> None:
    longest = len(make_tokenizer()("how many apples are left " * 4)["input_ids"])
    assert figures(bare)["batch"]["tokens_of_a_source"] == longest
    table = json.loads((tmp_path / "target" / "config.json").read_text())
    most = table.get("max_position_embeddings", 64)
    gone = figures(bare, "data.path=[nowhere]", "distill.max_length=64")
    assert gone["batch"]["tokens_of_a_source"] == most
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "she has nine"}) + "\n")
    asked = figures(bare, f"data={{source: prompts, path: [{prompts}]}}")
    assert asked["batch"]["tokens_of_a_source"] == len(
        make_tokenizer()("she has nine")["input_ids"]
    )


def test_an_encoder_that_is_repeated_is_as_deep(bare: Path) -> None:
    twice = figures(
        bare, "prune.encoder_repeat=2", "prune.shape.encoder_layers=2", "distill.train=all"
    )
    assert twice["drafter"]["shape"]["encoder_layers"] == 4
    assert twice["drafter"]["shared_encoder"] == 0
    once = figures(bare, "prune.shape.encoder_layers=2", "distill.train=all")
    assert twice["drafter"]["parameters"] > once["drafter"]["parameters"]
    assert twice["prune"]["axes"] == ["layers", "encoder_layers"]


def test_blocks_are_rows_of_a_beginning_and_masks(bare: Path) -> None:
    few, many = (
        figures(
            bare,
            f"distill.block={{size: 5, prefixes: {n}}}",
            "distill.train=all",
            "distill.max_length=64",
        )
        for n in (1, 6)
    )
    assert many["memory"][0]["activations_bytes"] > few["memory"][0]["activations_bytes"]
    assert many["drafter"]["parameters"] == few["drafter"]["parameters"]
    # All rows of the tiny vocabulary are taken; the mask needs one more.
    plain = figures(bare, "distill.train=all")["drafter"]["shape"]["vocab"]
    assert few["drafter"]["shape"]["vocab"] == plain + 1


def test_time_is_measured_with_random_sources(bare: Path, tmp_path: Path) -> None:
    done = planned(bare, "--json", tmp_path / "plan.json")
    assert done.exit_code == 0, done.output
    took = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))["time"]
    assert 0 < took["total_low"] <= took["total_high"]


def test_the_time_of_blocks_is_not_measured(bare: Path) -> None:
    options = ("distill.block={size: 4}", "distill.train=all", "distill.max_length=64")
    done = planned(bare, *(word for option in options for word in ("-s", option)))
    assert done.exit_code == 0, done.output
    assert "time was not measured" in done.stdout


# --- the papers' recipes


def layer(width: int, ffn: int, attentions: int) -> int:
    """Parameters of a block: attentions and FFN with biases, and a norm for each of them."""
    attention = 4 * (width * width + width)
    return attentions * attention + 2 * width * ffn + ffn + width + (attentions + 1) * 2 * width


@pytest.mark.parametrize(
    ("name", "parameters", "target"),
    [
        ("wmt14-ende-spec-drafter", 76_508_672, 74_410_496),
        ("cnndm-bart-base-spec-drafter", 144_140_544, 139_420_416),
    ],
)
def test_the_papers_drafters_are_twelve_and_two(
    name: str, parameters: int, target: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From configs alone, with a tokenizer that leaves a row for the mask."""
    monkeypatch.chdir(tmp_path)
    recipe, file = load(name), tmp_path / "plan.json"
    config = config_of(recipe.target)
    folder = folder_of(recipe.target, tmp_path)
    done = planned(name, "--check", "-s", f"target={folder}", "--json", file)
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text(encoding="utf-8"))
    shape = found["drafter"]["shape"]
    assert (shape["encoder_layers"], shape["layers"]) == (12, 2)
    width, ffn = config.d_model, config.decoder_ffn_dim
    blocks = 12 * layer(width, ffn, 1) + 2 * layer(width, ffn, 2)
    less = target - 6 * layer(width, ffn, 1) - 6 * layer(width, ffn, 2)
    assert found["drafter"]["parameters"] == less + blocks == parameters
    assert found["drafter"]["with_target"] == parameters + target
    assert found["batch"]["tokens_of_a_source"] == config.max_position_embeddings
    assert found["prune"]["axes"] == ["layers"]


@pytest.mark.parametrize("name", ["wmt14-ende-spec-drafter", "cnndm-bart-base-spec-drafter"])
def test_the_papers_recipes_are_the_papers(name: str) -> None:
    recipe = load(name)
    block, score = recipe.distill.block, recipe.score
    assert block is not None
    assert (block.size, block.glancing, block.glancing_end) == (25, 0.5, 0.3)
    assert (recipe.distill.loss, recipe.distill.label_smoothing) == ("sequence", 0.1)
    assert (recipe.trace.beams, recipe.trace.sampled_share) == (5, 0.0)
    assert (score.verify, score.beta, score.tau, score.lookahead) == ("top_beta", 3, 1.0, (25,))
    assert "lossy" in recipe.description
    assert recipe.prune.encoder_repeat == 2
