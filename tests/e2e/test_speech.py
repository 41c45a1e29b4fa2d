"""Recipes for encoder–decoders that hear: from sounds to a drafter with a short decoder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import decoder_start
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import layers_of
from draftsmith.data.sound import Sound
from draftsmith.data.traces import RowKey, TraceRow, TraceStore, pack_rows, unpack_rows
from draftsmith.distill import hearing
from draftsmith.distill.batches import collate
from draftsmith.distill.hearing import hearing_once, set_training
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.trace import write_traces
from draftsmith.distill.train import distill
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import load
from draftsmith.recipes.planning import plan
from draftsmith.recipes.run import STAGES, Run, check, run_stages
from draftsmith.recipes.schema import (
    DataSettings,
    DistillSettings,
    Recipe,
    ScoreSettings,
    TraceSettings,
)
from tests.conftest import RATE, make_extractor, make_model, sine

HEARS = sorted(name for name, f in families().items() if f.config.mel_bins)
SOUNDS = 24


@pytest.fixture(params=HEARS)
def target(request: pytest.FixtureRequest) -> Any:
    """A tiny target of every family that hears."""
    return make_model(request.param)


@pytest.fixture
def target_folder(target: Any, save: Callable[..., Path]) -> Path:
    """The target, saved with its feature extractor."""
    folder = save(target, name="target")
    make_extractor().save_pretrained(folder)
    return folder


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    """Tones of many heights and lengths, and the JSONL that names them; the JSONL."""
    (tmp_path / "tones").mkdir()
    rows = []
    for i in range(SOUNDS):
        wave = sine(200 * (i + 1), 0.3 + 0.025 * i) * (1 + i % 3) / 3
        soundfile.write(tmp_path / f"tones/{i}.wav", wave, RATE)
        rows.append({"id": f"tone {i}", "audio": f"tones/{i}.wav", "text": "never read"})
    path = tmp_path / "sounds.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def recipe(target_folder: Path, sounds: Path, tmp_path: Path) -> Path:
    """A recipe of a few seconds; its file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"""
target: {target_folder}
threads: 1
dtype: float32
data: {{source: prompts, path: [{sounds}]}}
trace: {{tokens: 9999, batch: 8, top_n: 8, max_new_tokens: 12, workers: 1, sampled_share: 0.25,
  validation_share: 0.2}}
prune: {{shape: {{layers: 2}}, steps: 8, warmup: 4, lambda_lr: 5.0, batch: 4}}
distill: {{steps: 12, batch: 4, lr: 1e-2, warmup: 2, evaluate_every: 6, save_every: 4,
  train: decoder}}
score: {{prompts: {sounds}, limit: 4, max_new_tokens: 12, decode_prompts: 3, replay_lookahead: 4}}
export: {{to: [hf]}}
"""
    )
    return path


def trace(recipe: Path, out: Path, *overrides: str) -> TraceStore:
    """The traces of a recipe."""
    run = Run(load(str(recipe), list(overrides)), out)
    run_stages(run, ("trace",))
    return TraceStore(run.folder("traces"))


def test_the_whole_road(recipe: Path, tmp_path: Path, target: Any) -> None:
    """A drafter of two decoder layers that shares the target's encoder and drafts exactly."""
    run = Run(load(str(recipe), ["trace.beams=2"]), tmp_path / "out")
    assert run_stages(run, tuple(stage.name for stage in STAGES))
    assert not run_stages(run)
    family = families()[target.config.model_type]
    drafter = load_model(resolve(str(run.folder("distilled"))))
    assert shape_of(drafter.config, family).layers == 2
    score = json.loads((run.folder("scores") / "score.json").read_text())
    assert score["lossless"] is True
    assert all(row["identical_tokens"] == row["compared_tokens"] for row in score["decode"])
    for name, tensor in target.get_encoder().state_dict().items():
        assert torch.equal(tensor, drafter.get_encoder().state_dict()[name]), name
    for folder in (run.folder("distilled"), run.folder("export") / "hf"):
        assert (folder / "preprocessor_config.json").is_file()
    # What was recorded anew under its name is traced and scored anew.
    soundfile.write(tmp_path / "tones/3.wav", sine(77), RATE)
    assert run_stages(run, ("trace",))


def test_the_plan_counts_frames(recipe: Path, tmp_path: Path, target: Any) -> None:
    """Of sounds an encoder has as many positions as of any, before there are traces and after."""
    frames = target.config.max_source_positions
    run = Run(load(str(recipe)), tmp_path / "out")
    before = plan(run)
    assert before.text.longest_source == frames
    run_stages(run, ("trace",))
    after = plan(Run(load(str(recipe)), tmp_path / "out"))
    assert after.text.measured
    assert after.text.longest_source == frames
    kept = 4 * target.config.d_model * frames * after.text.rows
    assert after.chosen.traces == after.text.memory + kept
    learns = plan(Run(load(str(recipe), ["distill.train=all"]), tmp_path / "out"), measure=False)
    assert learns.chosen.traces == learns.text.memory


def test_traces_are_what_the_target_says(recipe: Path, tmp_path: Path, target: Any) -> None:
    """Greedy rows are generate()'s, with the log-probabilities of a plain forward pass."""
    rows = trace(recipe, tmp_path / "out", "trace.sampled_share=0").rows("train")
    assert len(rows) > 8
    start = decoder_start(target)
    for row in rows[:6]:
        assert isinstance(row.source, Sound)
        heard = row.source.features()[None]
        # Drafts begin as ours do, whatever the tiny model's config says of timestamps.
        written = target.generate(
            input_features=heard, max_new_tokens=12, do_sample=False, num_beams=1
        )[0]
        assert row.tokens[: row.prompt_length].tolist() == start
        words = [t for t in written.tolist() if t not in start]
        assert [t for t in row.answer.tolist() if t not in start][: len(words)] == words
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        logits = target(input_features=heard, decoder_input_ids=ids).logits[0, len(start) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(start) :, None])[:, 0]
        assert torch.allclose(torch.from_numpy(row.logprobs), expected, atol=1e-4)


def test_a_store_needs_neither_files_nor_target(
    recipe: Path, sounds: Path, tmp_path: Path, target_folder: Path
) -> None:
    store = trace(recipe, tmp_path / "out")
    files = [soundfile.read(p, dtype="int16")[0] for p in (tmp_path / "tones").iterdir()]
    shutil.rmtree(target_folder)
    shutil.rmtree(tmp_path / "tones")
    rows = [*store.rows("train"), *store.rows("validation")]
    assert len(rows) == SOUNDS
    for row in rows:
        assert isinstance(row.source, Sound)
        assert row.source.samples.dtype == np.int16
        assert any(np.array_equal(row.source.samples, samples) for samples in files)
        assert row.source.features().shape == (8, 40)


def test_a_killed_run_goes_on_with_the_same_bytes(recipe: Path, tmp_path: Path) -> None:
    run = Run(load(str(recipe)), tmp_path / "out")
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_traces(run.recipe, run.target, tmp_path / name)
    shard = tmp_path / "killed" / "shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    (tmp_path / "killed" / "index.json").unlink()
    write_traces(run.recipe, run.target, tmp_path / "killed")
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / path.name).read_bytes(), path.name


def row_of(hertz: float, answer: int, listener: Path) -> TraceRow:
    rng = np.random.default_rng(answer)
    return TraceRow(
        np.array([1, *rng.integers(3, 90, answer)], np.int32),
        1,
        False,
        np.zeros(answer, np.float32),
        np.tile(np.arange(8), (answer, 1)).astype(np.uint16),
        np.full((answer, 8), -2.1, np.float16),
        source=Sound((sine(hertz, hertz / 1000) * 32767).astype(np.int16), listener),
    )


def test_sounds_are_kept_and_tell_texts_apart(target_folder: Path) -> None:
    rows = [row_of(500, 3, target_folder), row_of(700, 7, target_folder)]
    arrays = pack_rows(rows)
    assert "sources" not in arrays
    assert arrays["sounds"].dtype == np.int16
    for row, copy in zip(rows, unpack_rows(arrays, listener=target_folder), strict=True):
        assert isinstance(row.source, Sound)
        assert isinstance(copy.source, Sound)
        assert np.array_equal(row.source.samples, copy.source.samples)
        assert torch.equal(row.source.features(), copy.source.features())
        assert RowKey.of(row) == RowKey.of(copy)
    other = replace(rows[0], source=rows[1].source)
    assert RowKey.of(other) != RowKey.of(rows[0])


@torch.inference_mode()
def test_batches_hold_what_the_encoder_hears(target: Any, target_folder: Path) -> None:
    """States of padded rows are those of each row alone."""
    rows = [row_of(500, 3, target_folder), row_of(700, 7, target_folder)]
    batch = collate(rows, 64)
    assert batch.source_mask is None
    states = hidden_at_answers(target, batch)
    logits = target.get_output_embeddings()(states)
    expected = []
    for row in rows:
        assert isinstance(row.source, Sound)
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        heard = row.source.features()[None]
        expected.append(target(input_features=heard, decoder_input_ids=ids).logits[0, :-1])
    assert torch.allclose(logits, torch.cat(expected), atol=1e-4)


def learnt(model: Any, rows: list[TraceRow], state: Path, train: str) -> tuple[Any, list[int]]:
    """The curve of a short distillation, and how many sounds the encoder heard in each pass."""
    settings = DistillSettings(
        steps=6, batch=2, train=train, lr=1e-2, warmup=1, evaluate_every=3, save_every=6
    )
    heard: list[int] = []

    def count(module: Any, inputs: Any, output: torch.Tensor) -> None:
        heard.append(len(inputs[0]))
        # No graph is made for an encoder that stays as it is.
        assert output.requires_grad is (train == "all" and torch.is_grad_enabled())

    hook = model.get_encoder().conv1.register_forward_hook(count)
    family = families()[model.config.model_type]
    curve = distill(model, family, rows[:4], rows[4:], settings, seed=0, state=state)
    hook.remove()
    return curve, heard


def test_a_frozen_encoder_hears_each_sound_once(
    target: Any, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is learnt is the same as if it heard them all again in every step."""
    rows = [row_of(300 + 100 * i, 4 + i, target_folder) for i in range(5)]
    curve, heard = learnt(make_model(target.config.model_type), rows, tmp_path / "a", "decoder")
    assert heard == [1] * 5
    monkeypatch.setattr(hearing, "launched_processes", lambda: 2)
    again, heard = learnt(make_model(target.config.model_type), rows, tmp_path / "b", "decoder")
    assert sum(heard) == 6 * 2 + 2
    for own, other in zip(curve, again, strict=True):
        assert own == pytest.approx(other, rel=1e-4)


def test_what_is_remembered_was_heard_without_dropout(target: Any, target_folder: Path) -> None:
    model = make_model(target.config.model_type, dropout=0.5)
    batch = collate([row_of(300, 4, target_folder)], 64)
    expected = model.get_encoder()(input_features=batch.sources).last_hidden_state
    model.requires_grad_(False)
    set_training(model, True)
    assert model.training
    with hearing_once(model):
        heard = model.get_encoder()(input_features=batch.sources).last_hidden_state
    assert torch.allclose(heard, expected, atol=1e-5)


def test_an_encoder_that_learns_hears_every_time(
    target: Any, target_folder: Path, tmp_path: Path
) -> None:
    rows = [row_of(300 + 100 * i, 4 + i, target_folder) for i in range(5)]
    _, heard = learnt(target, rows, tmp_path / "a", "all")
    assert sum(heard) == 6 * 2 + 2


def test_what_does_not_fit_is_heard_again(target: Any, target_folder: Path) -> None:
    target.requires_grad_(False)
    batch = collate([row_of(300, 4, target_folder), row_of(500, 4, target_folder)], 64)
    expected = hidden_at_answers(target, batch)
    heard: list[int] = []
    target.get_encoder().conv1.register_forward_hook(lambda *_: heard.append(1))
    room = 20 * 32 * 4
    with hearing_once(target, most_bytes=room):
        for passes in (2, 3):
            assert torch.allclose(hidden_at_answers(target, batch), expected, atol=1e-5)
            assert len(heard) == passes
    assert "forward" not in vars(target.get_encoder())


@pytest.mark.parametrize("name", ["t5", *HEARS])
def test_traces_are_replayed_as_the_texts_that_they_are(
    name: str, save: Callable[..., Path], sounds: Path, tmp_path: Path
) -> None:
    """Of text and of sound: the rounds of the store are those of the target's texts now."""
    model = make_model(name)
    folder = save(model, name="target")
    drafter = save(layers_of(model, families()[name], (0, 3)), name="drafter")
    prompts = sounds
    if families()[name].config.mel_bins:
        make_extractor().save_pretrained(folder)
        make_extractor().save_pretrained(drafter)
    else:
        prompts = tmp_path / "texts.jsonl"
        words = ("how many", "apples are left", "she has nine", "write a short list of words")
        prompts.write_text("".join(json.dumps({"prompt": w, "domain": "d"}) + "\n" for w in words))
    made = Recipe(
        target=str(folder),
        dtype="float32",
        data=DataSettings(source="prompts", path=(str(prompts),)),
        trace=TraceSettings(
            batch=8, max_new_tokens=12, workers=1, sampled_share=0.0, validation_share=0.0
        ),
    )
    (tmp_path / "traces").mkdir()
    write_traces(made, resolve(str(folder)), tmp_path / "traces")
    store = TraceStore(tmp_path / "traces")
    settings = ScoreSettings(prompts=str(prompts), max_new_tokens=12, mode="replay")
    pair = resolve(str(folder)), resolve(str(drafter))
    kept = score_drafter(*pair, settings, traces=store)
    fresh = score_drafter(*pair, settings)
    for own, other in zip(kept.replay, fresh.replay, strict=True):
        assert own.emitted == other.emitted > 12
        assert own.rounds == other.rounds
    assert kept.by_domain.keys() == fresh.by_domain.keys()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("score.prompts=quick", r"quick\.jsonl:1: a text, and the target hears sound"),
        ("data={source: corpus, path: [x.jsonl]}", r"data\.source: corpus: .* hears sound"),
        ("data={source: prompts, path: [quick]}", r"quick\.jsonl:1: a text"),
    ],
)
def test_texts_are_refused_before_any_work(
    override: str, message: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "how many"}\n')
    with pytest.raises(RequestError, match=message):
        run_stages(Run(load(str(recipe), [override]), tmp_path / "out"), ("trace",))
    assert not list((tmp_path / "out").rglob("shard*"))


def test_a_missing_sound_is_refused_before_any_weight(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "tones" / "2.wav").unlink()
    with pytest.raises(RequestError, match=r"sounds\.jsonl:3: .*2\.wav: there is no such file"):
        check(Run(load(str(recipe)), tmp_path / "out"))
