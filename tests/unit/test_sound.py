"""Sound: read from files, refused where it would be heard as something else, made into features."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.data.chat import prompt_inputs, read_prompts
from draftsmith.data.sound import Sound, feature_extractor, read_sound
from draftsmith.errors import RequestError
from tests.conftest import RATE, make_extractor, make_tokenizer, sine


@pytest.fixture
def listener(tmp_path: Path) -> Path:
    """A folder with the settings of a feature extractor that hears one second."""
    folder = tmp_path / "listener"
    make_extractor().save_pretrained(folder)
    return folder


def test_samples_are_those_of_the_file_whatever_holds_them(tmp_path: Path, listener: Path) -> None:
    wave = sine(440, seconds=0.5)
    read = []
    for name, subtype in (("a.wav", "PCM_16"), ("b.flac", "PCM_16"), ("c.wav", "FLOAT")):
        soundfile.write(tmp_path / name, wave, RATE, subtype=subtype)
        read.append(read_sound(tmp_path / name, listener).samples)
    assert read[0].dtype == np.int16
    for samples in read:
        assert len(samples) == RATE // 2
        assert np.abs(samples / 32768 - wave).max() <= 1 / 32768


def test_the_loudest_samples_do_not_turn_round(tmp_path: Path, listener: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([1.0, -1.0, 1.5, -1.5]), RATE, subtype="FLOAT")
    samples = read_sound(tmp_path / "a.wav", listener).samples
    assert samples.tolist() == [32767, -32768, 32767, -32768]


def test_features_are_the_extractors_own(listener: Path) -> None:
    sound = Sound((sine(300) * 32767).astype(np.int16), listener)
    expected = make_extractor()(
        sound.samples / 32768, sampling_rate=RATE, return_tensors="pt"
    ).input_features[0]
    assert sound.features().shape == (8, 40)
    assert torch.allclose(sound.features(), expected, atol=1e-5)


def test_a_checkpoint_without_extractor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"feature extractor.*preprocessor_config\.json"):
        feature_extractor(tmp_path)


def _write(path: Path, seconds: float = 0.5, rate: int = RATE, channels: int = 1) -> Path:
    wave = sine(440, seconds=seconds, rate=rate)
    soundfile.write(path, np.stack([wave] * channels, axis=1), rate)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "there is no such file"),
        (lambda p: p.write_bytes(b"no sound") and p, "no sound that can be read.*ffmpeg"),
        (lambda p: _write(p, rate=24_000), "24000 samples a second.*hears 16000.*-ar 16000"),
        (lambda p: _write(p, channels=2), "2 channels.*-ac 1"),
        (lambda p: _write(p, seconds=0), "0 samples.*take it out"),
        (lambda p: _write(p, seconds=1.25), r"1\.2 s, .*hears 1 s at most; cut it"),
    ],
)
def test_what_cannot_be_heard_is_refused(
    make: Callable[[Path], Path], message: str, tmp_path: Path, listener: Path
) -> None:
    path = tmp_path / "a.wav"
    make(path)
    with pytest.raises(RequestError, match=message):
        read_sound(path, listener)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"audio": "a.wav"}\n')
    with pytest.raises(RequestError, match=rf"rows\.jsonl:1: .*a\.wav: {message}"):
        read_prompts(str(rows), make_tokenizer(), start=(1,), listener=listener)


def test_samples_that_are_not_numbers_are_refused(tmp_path: Path, listener: Path) -> None:
    soundfile.write(tmp_path / "a.wav", np.array([0.0, np.nan]), RATE, subtype="FLOAT")
    with pytest.raises(RequestError, match="not numbers"):
        read_sound(tmp_path / "a.wav", listener)


def test_rows_and_folders_of_sounds_are_prompts(tmp_path: Path, listener: Path) -> None:
    folder = tmp_path / "speech"
    (folder / "deep").mkdir(parents=True)
    _write(folder / "b.wav")
    _write(folder / "deep" / "a.FLAC")
    (folder / "notes.txt").write_text("no sound")
    rows = tmp_path / "rows.jsonl"
    row = {"id": "one", "audio": "speech/b.wav", "text": "what is said", "domain": "spoken"}
    rows.write_text(json.dumps(row) + "\n" + json.dumps({"audio": str(folder / "b.wav")}) + "\n")
    by_row = read_prompts(str(rows), make_tokenizer(), start=(1, 5), listener=listener)
    by_file = read_prompts(str(folder), make_tokenizer(), start=(1, 5), listener=listener)
    assert [(p.name, p.domain) for p in by_row] == [("one", "spoken"), ("2", "rows")]
    assert [(p.name, p.domain) for p in by_file] == [("b", "speech"), ("deep/a", "speech")]
    for prompt in (*by_row, *by_file):
        assert prompt.ids == (1, 5)
        assert isinstance(prompt.source, Sound)
        assert len(prompt.source) == RATE // 2


def test_text_and_sound_are_not_mistaken_for_each_other(tmp_path: Path, listener: Path) -> None:
    _write(tmp_path / "a.wav")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"audio": "a.wav", "text": "how many"}\n')
    for start in (None, (1,)):
        with pytest.raises(RequestError, match=r"rows\.jsonl:1: a sound, .* reads text"):
            read_prompts(str(rows), make_tokenizer(), start=start)
    rows.write_text('{"prompt": "how many"}\n')
    with pytest.raises(RequestError, match=r"rows\.jsonl:1: a text, .* hears sound; give `audio`"):
        read_prompts(str(rows), make_tokenizer(), start=(1,), listener=listener)


def test_an_empty_folder_is_refused(tmp_path: Path, listener: Path) -> None:
    with pytest.raises(
        RequestError, match=r"no such file, nor a folder of sounds \(\.wav, \.flac\)"
    ):
        read_prompts(str(tmp_path), make_tokenizer(), start=(1,), listener=listener)


def test_a_set_depends_on_the_sounds_that_it_names(tmp_path: Path) -> None:
    """A recording that changed under its name makes a finished stage due again."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"audio": "a.wav"}\n{"audio": "missing.wav"}\n')
    sound = _write(tmp_path / "a.wav")
    assert prompt_inputs(str(rows)) == {str(rows): rows, str(sound): sound}
    rows.write_text('{"text": "a"}\n')
    assert prompt_inputs(str(rows)) == {str(rows): rows}
    assert prompt_inputs(str(tmp_path)) == {str(tmp_path): tmp_path}


@given(st.lists(st.integers(-32768, 32767), min_size=1, max_size=50))
def test_a_file_gives_back_what_was_written(values: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_extractor().save_pretrained(folder)
        samples = np.array(values, np.int16)
        soundfile.write(folder / "a.wav", samples, RATE)
        assert np.array_equal(read_sound(folder / "a.wav", folder).samples, samples)
