"""On the shared data: a RedPajama-like corpus and real prompts."""

import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from scipy.signal import resample_poly

from draftsmith.accept.cache import cached
from draftsmith.accept.decode import Limits, greedy_decode, speculative_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.replay import RoundCounts, greedy_matches, replay
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.generation import banned_ids, decoder_start, never_first, stop_ids
from draftsmith.checkpoints.loading import describe, load_config, load_model, load_tokenizer
from draftsmith.checkpoints.pair import own_vocabulary, said_vocabulary
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import resolve_shape
from draftsmith.checkpoints.slicing import Selection, compact_model, layers_of
from draftsmith.checkpoints.streaming import compact_checkpoint
from draftsmith.data.chat import read_prompts
from draftsmith.data.corpus import corpus_files, read_texts
from draftsmith.data.sound import read_sound
from draftsmith.data.traces import TraceStore
from draftsmith.prune.masks import applied, hard_masks
from draftsmith.recipes.inspection import inspect
from tests.e2e.test_real import SMOLLM2
from tests.e2e.test_run import command
from tests.matrix import random_selection

pytestmark = [pytest.mark.shared, pytest.mark.real]


def test_every_row_of_the_corpus_is_read(shared: Path) -> None:
    counts: Counter[str] = Counter()
    files = corpus_files([str(shared / "data" / "redpajama-mini")])
    assert len(files) == 7
    characters = sum(map(len, read_texts(files, counts)))
    assert set(counts) == {"rows"}
    assert counts["rows"] > 10_000
    assert characters > 40_000_000


@pytest.mark.parametrize("name", ["gsm8k", "humaneval"])
def test_real_prompts_go_through_the_template_once(shared: Path, name: str) -> None:
    tokenizer = load_tokenizer(resolve(SMOLLM2))
    prompts = read_prompts(str(shared / "data" / "prompts" / f"{name}.jsonl"), tokenizer)
    assert len(prompts) >= 100
    for prompt in prompts:
        text = tokenizer.decode(list(prompt.ids))
        assert text.count("<|im_start|>assistant") == 1
        assert text.count("<|im_start|>user") == 1


def test_A6_greedy_tokens_are_those_of_transformers_on_fifty_real_prompts(shared: Path) -> None:
    """SmolLM2 with four of its own layers: alone, with our drafts and with transformers' own."""
    reference = resolve(SMOLLM2)
    model, tokenizer = load_model(reference), load_tokenizer(reference)
    small = layers_of(model, describe(model.config, reference)[0], (0, 1, 24, 29))
    small.generation_config.update(
        num_assistant_tokens=4,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )
    vocabulary = own_vocabulary(tokenizer, model.config.vocab_size)
    limits = Limits(5, stop_ids(model))
    target = cached(model)
    drafter = AutoregressiveDrafter(cached(small), vocabulary, limits.stop_ids)
    prompts = [
        prompt
        for name in ("gsm8k", "humaneval")
        for prompt in read_prompts(
            str(shared / "data" / "prompts" / f"{name}.jsonl"), tokenizer, 25
        )
    ]
    assert len(prompts) == 50
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=small,
            max_new_tokens=5,
            do_sample=False,
        )[0, len(prompt.ids) :].tolist()
        ours = speculative_decode(target, drafter, prompt.ids, 4, limits, vocabulary)
        plain = greedy_decode(target, prompt.ids, limits, vocabulary)
        assert ours.tokens == plain.tokens == theirs, prompt.name


@pytest.fixture(scope="module")
def whisper(shared: Path) -> ModelRef:
    return resolve(str(shared / "models" / "whisper-tiny.en"))


@pytest.fixture(scope="module")
def speech(shared: Path, whisper: ModelRef) -> torch.Tensor:
    """Mel frames of a real clip, [1, 80, 3000]."""
    from transformers import AutoFeatureExtractor

    with wave.open(str(shared / "data" / "audio" / "beckett.wav")) as clip:
        samples = np.frombuffer(clip.readframes(clip.getnframes()), np.int16) / 32768
    extractor = AutoFeatureExtractor.from_pretrained(whisper.folder)
    features = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    return torch.as_tensor(features)


def transcribed(model: Any, speech: torch.Tensor) -> torch.Tensor:
    ids: torch.Tensor = model.generate(input_features=speech, max_new_tokens=40)
    return ids


def test_whisper_is_inspected(whisper: ModelRef) -> None:
    found = inspect(str(whisper.folder))
    assert (found["shape"]["layers"], found["shape"]["encoder_layers"]) == (4, 4)
    assert found["parameters"] == 37_760_256
    assert found["context"] == 448
    assert found["stored"]["values_by_type"] == {"F16": 37_760_256}


def test_whisper_is_cut_exactly(whisper: ModelRef, speech: torch.Tensor, tmp_path: Path) -> None:
    """On real speech: two decoder layers, then all axes together, against the masked model."""
    model = load_model(whisper, dtype=torch.float32)
    family, shape = describe(model.config, whisper)
    said = transcribed(model, speech)
    text = load_tokenizer(whisper).decode(said[0], skip_special_tokens=True)
    assert text.strip().startswith("Ever tried, ever failed. No matter")
    wide = {"hidden": 320, "encoder_layers": 3, "layers": 2, "ffn": 1024, "encoder_ffn": 1024}
    drafter = resolve_shape(shape, wide, family)
    for selection in (
        Selection.of_layers(shape, (0, 3)),
        random_selection(shape, drafter, family, seed=1),
    ):
        small = compact_model(model, family, selection)
        inputs = {"input_features": speech, "decoder_input_ids": said[:, :-1]}
        with torch.inference_mode():
            with applied(model, family, shape, hard_masks(selection, shape)):
                masked = model(**inputs).logits
            compact = small(**inputs).logits
        assert (masked - compact).abs().max() <= 1e-5 * masked.abs().max()


def test_whisper_is_cut_from_its_file(whisper: ModelRef, tmp_path: Path) -> None:
    """In half precision as stored, with its feature extractor, and read back."""
    selection = Selection.of_layers(describe(load_config(whisper), whisper)[1], (0, 3))
    out = tmp_path / "small"
    out.mkdir()
    save_model(compact_checkpoint(whisper, selection), whisper, out)
    found = inspect(str(out), str(whisper.folder))
    assert found["shape"]["layers"] == 2
    assert set(found["stored"]["values_by_type"]) == {"F16"}
    # Times have no string in this tokenizer, and are said all the same.
    assert found["pair"]["shared_tokens"] == found["shape"]["vocab"]
    assert (out / "preprocessor_config.json").is_file()


def test_the_corpus_recipe_runs(shared: Path, tmp_path: Path) -> None:
    """`smollm2-redpajama` with a path: beginnings of its texts, continued by the target."""
    done = command(
        *("trace", "smollm2-redpajama", "-s", f"data.path=[{shared / 'data' / 'redpajama-mini'}]"),
        *("-s", "trace.tokens=200", "-s", "trace.batch=8", "-s", "trace.max_new_tokens=16"),
        *("-s", "trace.workers=1"),
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = TraceStore(tmp_path / "runs" / "smollm2-redpajama" / "traces").rows("train")
    assert sum(len(r.answer) for r in rows) >= 150


def test_whisper_is_drafted_for_by_two_of_its_decoder_layers(
    whisper: ModelRef, speech: torch.Tensor
) -> None:
    """One encoder, which reads once; the transcription is the target's own, and transformers'."""
    model, tokenizer = load_model(whisper), load_tokenizer(whisper)
    family, _ = describe(model.config, whisper)
    small = cached(layers_of(model, family, (0, 3)))
    target = cached(model)
    assert small.borrow_encoder(target)
    passes: list[int] = []
    hook = model.get_encoder().register_forward_hook(lambda *_: passes.append(1))
    vocabulary = own_vocabulary(tokenizer, model.config.vocab_size)
    limits = Limits(40, stop_ids(model), never_first=never_first(model))
    start, source = decoder_start(model), speech[0]
    plain = greedy_decode(target, start, limits, vocabulary, source)
    assert "Ever tried, ever failed. No matter, try again." in tokenizer.decode(plain.tokens)
    words = [t for t in transcribed(model, speech)[0].tolist() if t not in (*start, 50256)]
    assert [t for t in plain.tokens if t != 50256][: len(words)] == words
    passes.clear()
    drafter = AutoregressiveDrafter(small, vocabulary, limits.stop_ids)
    for k in (1, 4):
        drafted = speculative_decode(target, drafter, start, k, limits, vocabulary, source=source)
        assert drafted.tokens == plain.tokens
        matches = greedy_matches(small, start, plain.tokens, vocabulary, source)
        assert replay(matches, k, 40).rounds == RoundCounts.of_rounds(drafted.rounds, k).rounds
    hook.remove()
    # Once for each text: its replay takes the same pass too.
    assert len(passes) == 2


@pytest.mark.parametrize(
    ("clip", "begin"),
    [
        ("beckett", " Ever tried, ever failed. No matter, try again. Fail again. Fail better."),
        ("endgame_nagg_nell", ""),
        ("two_cities", " It was the best of times"),
    ],
)
def test_whisper_writes_what_transformers_makes_it_write(
    clip: str, begin: str, shared: Path, whisper: ModelRef, tmp_path: Path
) -> None:
    """Every real clip, at the encoder's rate and no longer than it hears."""
    samples, rate = soundfile.read(shared / "data" / "audio" / f"{clip}.wav")
    heard = resample_poly(samples, 16_000, rate)[: 30 * 16_000]
    soundfile.write(tmp_path / "clip.wav", heard, 16_000)
    sound = read_sound(tmp_path / "clip.wav", whisper.folder)
    model, tokenizer = load_model(whisper), load_tokenizer(whisper)
    start, end = decoder_start(model), stop_ids(model)
    family, shape = describe(model.config, whisper)
    # Times are among what it says, though this tokenizer doesn't name them.
    vocabulary = said_vocabulary(tokenizer, model.config, family, shape.vocab)
    vocabulary = vocabulary.without(banned_ids(model))
    limits = Limits(120, end, never_first=never_first(model))
    ours = greedy_decode(cached(model), start, limits, vocabulary, sound).tokens
    features = sound.features()[None]
    theirs = model.generate(input_features=features, max_new_tokens=120)[0].tolist()
    words = [t for t in theirs if t not in (*start, *end)]
    assert ours == [*words, *end]
    assert tokenizer.decode(words, skip_special_tokens=True).startswith(begin)
    assert len(words) > 10
