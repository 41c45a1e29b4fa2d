"""Recipes for encoder–decoders: from a target's own answers to a drafter with a short decoder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import decoder_start
from draftsmith.checkpoints.loading import load_config, load_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.traces import RowKey, TraceRow, TraceStore, pack_rows, unpack_rows
from draftsmith.distill.batches import collate
from draftsmith.distill.head_loss import HeadLoss, LossHead, Projection, head_logits
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.states import (
    distance_of_reads,
    hidden_at_answers,
    states_at_answers,
)
from draftsmith.distill.teacher import Teacher
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import STAGES, Run, check, run_stages
from tests.conftest import make_model

READS_TEXT = sorted(
    name for name, f in families().items() if f.has_encoder and not f.config.mel_bins
)
SENTENCES = ("how many apples are left", "she has nine", "write a short list of words", "a")


@pytest.fixture(params=READS_TEXT)
def target(request: pytest.FixtureRequest) -> Any:
    """A tiny target of every family that reads text."""
    return make_model(request.param)


@pytest.fixture
def recipe(target: Any, save: Callable[..., Path], tmp_path: Path) -> Path:
    """A recipe of a few seconds; its file."""
    corpus, prompts = tmp_path / "corpus.jsonl", tmp_path / "prompts.jsonl"
    words = " ".join(SENTENCES).split()
    rows = [" ".join(words[i % 9 : i % 9 + 3 + i % 4] + words[: i % 5]) for i in range(48)]
    corpus.write_text("".join(json.dumps({"source": row, "target": "x"}) + "\n" for row in rows))
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in SENTENCES[:3]))
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
target: {save(target, name="target")}
threads: 1
dtype: float32
data: {{source: corpus, path: [{corpus}], text_key: source}}
trace: {{tokens: 300, batch: 8, top_n: 8, max_new_tokens: 12, workers: 1, validation_share: 0.2}}
prune: {{shape: {{layers: 2}}, steps: 12, warmup: 4, lambda_lr: 5.0, batch: 4}}
distill: {{steps: 12, batch: 4, lr: 1e-2, warmup: 2, evaluate_every: 6, save_every: 4,
  train: decoder}}
score: {{prompts: {prompts}, max_new_tokens: 12, decode_prompts: 2, replay_lookahead: 4}}
export: {{to: [hf]}}
"""
    )
    return path


def test_the_whole_road(recipe: Path, tmp_path: Path, target: Any) -> None:
    """A drafter of two decoder layers that shares the target's encoder and drafts exactly."""
    run = Run(load(str(recipe)), tmp_path / "out")
    run_stages(run, tuple(stage.name for stage in STAGES))
    family = families()[target.config.model_type]
    drafter = load_model(resolve(str(run.folder("distilled"))))
    assert shape_of(drafter.config, family).layers == 2
    assert shape_of(drafter.config, family).encoder_layers == 3
    score = json.loads((run.folder("scores") / "score.json").read_text())
    assert score["lossless"] is True
    assert all(row["identical_tokens"] == row["compared_tokens"] for row in score["decode"])
    for name, tensor in target.get_encoder().state_dict().items():
        assert torch.equal(tensor, drafter.get_encoder().state_dict()[name]), name
    curve = json.loads((run.folder("distilled") / "curve.json").read_text())
    assert curve[-1]["loss"] < curve[0]["loss"] or curve[-1]["emitted_per_round"] >= 1


# The road is long: one family whose positions are relative, and one whose are a table.
@pytest.mark.parametrize("target", ["marian", "t5"], indirect=True)
def test_the_whole_road_of_a_drafter_of_blocks(recipe: Path, tmp_path: Path, target: Any) -> None:
    """A deep encoder of its own and a mask: exact, exported, and loadable with its own file."""
    from transformers import AutoModel

    block = ["distill.train=all", "distill.loss=sequence", "distill.label_smoothing=0.1"]
    block += ["distill.block={size: 3, prefixes: 2}", "distill.max_length=64"]
    block += ["prune.encoder_repeat=2"]
    run = Run(load(str(recipe), [*block, "score.lookahead=[3]"]), tmp_path / "out")
    run_stages(run, tuple(stage.name for stage in STAGES))
    family = families()[target.config.model_type]
    drafter = load_model(resolve(str(run.folder("distilled"))))
    shape, before = shape_of(drafter.config, family), shape_of(target.config, family)
    assert (shape.layers, shape.encoder_layers) == (2, 2 * before.encoder_layers)
    score = json.loads((run.folder("scores") / "score.json").read_text())
    assert score["lossless"] is True
    for row in score["decode"]:
        assert row["identical_tokens"] == row["compared_tokens"] > 0
    assert all(row["t_draft_ms"] for row in score["decode"])
    theirs = AutoModel.from_pretrained(run.folder("export") / "hf", trust_remote_code=True)
    start = torch.tensor([decoder_start(target)])
    assert theirs.propose(start, input_ids=torch.tensor([[3, 4, 5]])).shape == (1, 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["prune.encoder_repeat=2"], "prune.encoder_repeat: 2: with distill.train: decoder"),
        (["prune.shape.encoder_layers=2"], "shape.encoder_layers: 2: it cuts the encoder too"),
        (["distill.train=all", "distill.block={size: 3}", "score.lookahead=[4]"], "blocks have 3"),
        (
            ["distill={train: all, block: {size: 3}, max_length: 64}", "export.to=[onnx]"],
            "leave hf",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(
    recipe: Path, tmp_path: Path, keys: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        check(Run(load(str(recipe), keys), tmp_path / "out"))


def test_masks_need_places(recipe: Path, tmp_path: Path, target: Any) -> None:
    keys = ["distill.train=all", "distill.block={size: 3}", "distill.max_length=254"]
    run = Run(load(str(recipe), keys), tmp_path / "out")
    if families()[target.config.model_type].config.context is None:
        check(run)
        return
    with pytest.raises(RequestError, match=r"max_length: 254: with the 3 masks .* at most 253"):
        check(run)


def test_traces_are_what_the_target_says(recipe: Path, tmp_path: Path, target: Any) -> None:
    """Greedy rows are generate()'s, with the very log-probabilities of a plain forward pass."""
    run = Run(load(str(recipe), ["trace.sampled_share=0"]), tmp_path / "out")
    run_stages(run, ("trace",))
    rows = TraceStore(run.folder("traces")).rows("train")
    assert len(rows) > 8
    start = decoder_start(target)
    for row in rows[:6]:
        assert row.source is not None
        source = torch.from_numpy(row.source.astype(np.int64))[None]
        assert row.tokens[: row.prompt_length].tolist() == start
        # Cached, transformers' own generate() fails for T5 with fewer encoder layers.
        limits = {"max_new_tokens": 12, "do_sample": False, "num_beams": 1, "use_cache": False}
        written = target.generate(source, **limits)[0]
        assert row.tokens.tolist() == written[: len(row.tokens)].tolist()
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        logits = target(input_ids=source, decoder_input_ids=ids).logits[0, len(start) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(start) :, None])[:, 0]
        assert torch.allclose(torch.from_numpy(row.logprobs), expected, atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", READS_TEXT)
@torch.inference_mode()
def test_losses_are_those_of_the_models_own_logits(family: str, tied: bool) -> None:
    """In padded batches, with the head's scale and bias; the traces' and a live target's."""
    keys = families()[family]
    changes = {"tie_word_embeddings": tied}
    if keys.tied != "tie_word_embeddings":
        changes = {keys.tied: tied}
    model, teacher = make_model(family, **changes), make_model(family, seed=3, **changes)
    for one in (model, teacher):
        if hasattr(one, "final_logits_bias"):
            one.final_logits_bias.normal_()
    rows = [row_of(5, 3, seed=1), row_of(2, 7, seed=2), row_of(9, 1, seed=3)]
    batch = collate(rows, 64)
    logits = torch.cat([logits_of(model, row) for row in rows])
    assert torch.allclose(Projection.of(model)(hidden_at_answers(model, batch)), logits, atol=1e-5)
    assert torch.allclose(head_logits(model, hidden_at_answers(model, batch)), logits, atol=1e-5)
    said = torch.cat([logits_of(teacher, row) for row in rows])
    kl = torch.nn.functional.kl_div(
        logits.log_softmax(-1), said.log_softmax(-1), reduction="sum", log_target=True
    )
    head = LossHead.of(model, HeadLoss(forward_kl))
    lesson = Teacher(teacher)(batch)
    assert torch.allclose(head(hidden_at_answers(model, batch), lesson.signal), kl, rtol=1e-4)


@torch.inference_mode()
def test_layers_are_matched_with_those_that_the_decoder_has_of_the_target(target: Any) -> None:
    """A drafter that is cut reads, in its second layer, what the target's kept layer reads."""
    family = families()[target.config.model_type]
    source = shape_of(target.config, family)
    kept = Selection.of_layers(source, (0, 1, 3))
    batch = collate([row_of(5, 3, seed=1), row_of(2, 7, seed=2)], 64)
    reads = Teacher(target, kept=kept)(batch).reads
    drafter = compact_model(target, family, kept)
    own = states_at_answers(drafter.base_model, batch, (1, 2))[1]
    assert len(reads) == len(own) == 2
    assert torch.allclose(own[0], reads[0], atol=1e-5)
    # What the third layer reads of the target has gone through one that the drafter lacks.
    assert not torch.allclose(own[1], reads[1], atol=1e-2)
    assert float(distance_of_reads(own[:1], reads[:1]).max()) < 1e-6


def test_what_layers_read_is_matched_on_the_road(recipe: Path, tmp_path: Path) -> None:
    overrides = ["distill.teacher=live", "distill.hidden_matching=0.5", "distill.steps=6"]
    run = Run(load(str(recipe), overrides), tmp_path / "out")
    run_stages(run, ("trace", "prune", "distill"))
    shutil.copytree(tmp_path / "out", tmp_path / "without")
    without = Run(load(str(recipe), [overrides[0], overrides[2]]), tmp_path / "without")
    run_stages(without, ("distill",))
    ours, theirs = (
        json.loads((r.folder("distilled") / "curve.json").read_text())[0]["loss"]
        for r in (run, without)
    )
    assert ours > theirs


def row_of(source: int, answer: int, seed: int) -> TraceRow:
    rng = np.random.default_rng(seed)
    tokens = np.array([1, *rng.integers(3, 90, answer)], np.int32)
    top = np.tile(np.arange(8), (answer, 1)).astype(np.uint16)
    return TraceRow(
        tokens,
        1,
        False,
        np.zeros(answer, np.float32),
        top,
        np.full((answer, 8), -2.1, np.float16),
        source=rng.integers(3, 90, source).astype(np.int32),
    )


def logits_of(model: Any, row: TraceRow) -> torch.Tensor:
    assert row.source is not None
    ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
    source = torch.from_numpy(row.source.astype(np.int64))[None]
    found: torch.Tensor = model(input_ids=source, decoder_input_ids=ids).logits[0, :-1]
    return found


def test_sources_are_kept_and_tell_texts_apart() -> None:
    rows = [row_of(5, 3, seed=1), row_of(2, 7, seed=2)]
    again = list(unpack_rows(pack_rows(rows)))
    for row, copy in zip(rows, again, strict=True):
        assert np.array_equal(row.source, copy.source)
        assert np.array_equal(row.tokens, copy.tokens)
        assert RowKey.of(row) == RowKey.of(copy)
    other = TraceRow(*(getattr(rows[0], n) for n in list(rows[0].__dataclass_fields__)[:7]))
    assert RowKey.of(other) != RowKey.of(rows[0])
    assert next(unpack_rows(pack_rows([other]))).source is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data={source: self}", r"data\.source: self: .* is an encoder–decoder"),
        ("distill.on_policy=0.5", r"distill\.on_policy: .* no such thing yet"),
        ("prune.apart=true", "apart"),
        ("score.runtime=transformers", r"score\.runtime: transformers: .* no such thing yet"),
        ("export.to=[gguf]", "has no GGUF architecture"),
    ],
)
def test_what_only_decoders_can(override: str, message: str, recipe: Path, tmp_path: Path) -> None:
    overrides = [override]
    if "on_policy" in override:
        overrides.append("distill.teacher=live")
    with pytest.raises(RequestError, match=message):
        check(Run(load(str(recipe), overrides), tmp_path / "out"))


def test_sources_that_the_encoder_cannot_hold_are_counted(
    save: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftsmith.distill.trace import write_traces

    model = make_model("bart", max_position_embeddings=24)
    corpus = tmp_path / "corpus.jsonl"
    rows = ["how many", "write a short list of words and first we find the total " * 4, "she has"]
    corpus.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    path = tmp_path / "r.yaml"
    path.write_text(
        f"target: {save(model)}\ndata: {{source: corpus, path: [{corpus}]}}\n"
        "trace: {tokens: 400, batch: 2, top_n: 8, max_new_tokens: 8, workers: 1}\n"
        "prune: {shape: {layers: 2}}\n"
    )
    run = Run(load(str(path)), tmp_path / "out")
    (tmp_path / "traces").mkdir()
    write_traces(run.recipe, run.target, tmp_path / "traces")
    assert "1 sources are longer than the encoder can hold" in capsys.readouterr().err


def test_the_decoder_learns_with_its_last_norm_and_nothing_else() -> None:
    """Encoder and embeddings stay; what stands around the decoder's blocks is the decoder's."""
    from draftsmith.distill.train import trainable_parameters
    from draftsmith.recipes.schema import DistillSettings

    for name in READS_TEXT:
        model, family = make_model(name), families()[name]
        learning = set(trainable_parameters(model, family, DistillSettings(train="decoder"), 0))
        sides = {
            key: "decoder" in key and "embed_" not in key for key in dict(model.named_parameters())
        }
        assert learning == {key for key, of_decoder in sides.items() if of_decoder}, name


def test_what_a_checkpoint_does_not_hold_never_learns() -> None:
    """Sinusoids are made anew when a model is loaded: had they learned, that would be lost."""
    from draftsmith.distill.train import trainable_parameters
    from draftsmith.recipes.schema import DistillSettings

    model, family = make_model("marian"), families()["marian"]
    learning = trainable_parameters(model, family, DistillSettings(), 0)
    kept = {name for name, _ in model.named_parameters() if "embed_positions" not in name}
    assert set(learning) == kept


def test_a_decoders_setting_is_refused_where_there_is_no_encoder(
    tiny_recipe: Path, tmp_path: Path
) -> None:
    run = Run(load(str(tiny_recipe), ["distill.train=decoder"]), tmp_path / "out")
    with pytest.raises(RequestError, match=r"distill\.train: decoder: .* has no encoder"):
        check(run)


def test_importance_is_refused_where_it_does_not_look(recipe: Path, tmp_path: Path) -> None:
    overrides = ["prune.method=importance", "prune.shape={layers: 2, ffn: 32}"]
    run = Run(load(str(recipe), overrides), tmp_path / "out")
    if ("ffn", "encoder_ffn") in families()[load_config(run.source).model_type].ties:
        with pytest.raises(RequestError, match=r"importance: it looks at .* cuts encoder_ffn"):
            check(run)
    else:
        check(run)


ENCODER_SHAPE = "prune.shape={layers: 2, ffn: 32, encoder_layers: 2, encoder_ffn: 32}"


@pytest.mark.parametrize(
    ("target", "method"),
    [
        *((family, "masks") for family in READS_TEXT),
        ("bart", "first"),
        ("t5", "last"),
        ("marian", "uniform"),
        ("t5", "random"),
    ],
    indirect=["target"],
)
def test_the_encoder_is_cut_too(
    method: str, recipe: Path, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By learned masks, and by what looks at nothing; an even choice is even in both stacks."""
    from draftsmith.data.traces import write_index, write_shard
    from draftsmith.prune.compact import read_masks

    def few_traces(recipe: Any, target: Any, folder: Path) -> None:
        write_shard(folder, 0, [row_of(4 + i, 3 + i, seed=i) for i in range(8)])
        write_index(folder, [0], {"validation_share": 0.0, "top_n": 8})

    monkeypatch.setattr("draftsmith.distill.trace.write_traces", few_traces)
    overrides = [ENCODER_SHAPE, f"prune.method={method}", "prune.steps=6", "prune.warmup=2"]
    run = Run(load(str(recipe), [*overrides, "distill.train=all"]), tmp_path / "out")
    run_stages(run, ("trace", "prune"))
    family = families()[target.config.model_type]
    shape = shape_of(load_config(resolve(str(run.folder("pruned")))), family)
    assert (shape.layers, shape.ffn, shape.encoder_layers, shape.encoder_ffn) == (2, 32, 2, 32)
    kept = read_masks(run.folder("pruned") / "masks.json").selection
    if method in ("uniform", "last"):
        assert kept.layers == ((0, 3) if method == "uniform" else (2, 3))
        assert kept.encoder_layers == ((0, 2) if method == "uniform" else (1, 2))


@pytest.mark.parametrize("method", ["block-influence", "importance"])
def test_activations_choose_nothing_of_an_encoder(
    method: str, recipe: Path, tmp_path: Path
) -> None:
    shape = "prune.shape={layers: 2, encoder_layers: 2}"
    run = Run(load(str(recipe), [shape, f"prune.method={method}"]), tmp_path / "out")
    with pytest.raises(RequestError, match=rf"{method}: .* encoder_layers as well; use masks"):
        check(run)


def test_blank_texts_are_no_sources(recipe: Path, tmp_path: Path) -> None:
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"source": "   "}\n{"source": ""}\n{"source": "she has nine"}\n')
    overrides = [f"data.path=[{blank}]", "trace.validation_share=0"]
    run = Run(load(str(recipe), overrides), tmp_path / "out")
    run_stages(run, ("trace",))
    (row,) = TraceStore(run.folder("traces")).rows("train")
    assert row.source is not None
    assert len(row.source) > 3


def test_the_encoder_stays_out_of_a_race() -> None:
    from draftsmith.prune.race import Track
    from draftsmith.recipes.schema import PruneSettings

    settings = PruneSettings(race=2, max_length=24)
    track = Track.of([], [row_of(4, 6, 1)], settings, 0, torch.float32)
    assert track is not None
    assert track.settings.train == "decoder"
