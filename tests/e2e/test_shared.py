"""On the shared data: a RedPajama-like corpus and real prompts."""

import wave
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.loading import describe, load_config, load_model, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import resolve_shape
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.checkpoints.streaming import compact_checkpoint
from draftsmith.data.chat import read_prompts
from draftsmith.data.corpus import corpus_files, read_texts
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
    assert found["pair"]["shared_tokens"] == found["tokenizer"]["tokens"]
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
