"""`draftsmith inspect`: checkpoints, pairs, masks, traces and runs, as tables and as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.saving import save_model
from draftsmith.cli import app
from draftsmith.errors import RequestError
from draftsmith.recipes.inspection import inspect, render
from tests.conftest import make_model, make_tokenizer

Save = Callable[..., Path]


def shown(found: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(found))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 100
    return text


def test_a_checkpoint(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    found = inspect(str(folder))
    assert found["kind"] == "checkpoint"
    assert found["shape"]["heads_per_group"] == 2
    assert found["parameters"] == sum(p.numel() for p in tiny.parameters())
    assert found["stored"]["values_by_type"] == {"F32": found["parameters"]}
    assert found["checksums"] is False
    assert found["context"] == 256
    assert found["cache_bytes"] == 2 * 2 * 4 * 2 * 8 * 256
    assert json.loads(json.dumps(found)) == found
    text = shown(found)
    assert "heads_per_group" in text
    assert "chat template: yes" in text


def test_every_family_can_be_inspected(family_name: str, save: Save) -> None:
    folder = save(make_model(family_name, tie_word_embeddings=True))
    found = inspect(str(folder))
    assert found["family"] == family_name
    assert set(found["parameters_per_entry"]) <= set(found["shape"])
    shown(found)


def test_a_saved_checkpoint_has_checksums(save: Save, tiny: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_model(tiny, resolve(str(save(tiny))), out)
    found = inspect(str(out))
    assert found["checksums"] is True
    assert "compared, all equal" in shown(found)
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(RequestError, match=r"model\.safetensors: differs from its checksum"):
        inspect(str(out))


def test_a_pair(save: Save, tiny: Any) -> None:
    target = save(tiny, name="target")
    drafter = save(make_model(num_hidden_layers=2, max_position_embeddings=64), name="drafter")
    found = inspect(str(drafter), str(target))
    assert found["pair"]["shared_tokens"] == len(make_tokenizer())
    assert found["pair"]["target_context"] == 256
    text = shown(found)
    assert "can draft for" in text
    assert "past them the target decodes alone" in " ".join(text.split())


def test_A11_a_shorter_context_is_told_at_export(
    save: Save, tiny: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Draft positions 64, target 256: a warning, and a note in export.json."""
    from draftsmith.checkpoints.export import export_drafter

    target = resolve(str(save(tiny, name="target")))
    short = make_model(num_hidden_layers=2, max_position_embeddings=64)
    drafter = resolve(str(save(short, name="drafter")))
    report = export_drafter(drafter, target, tmp_path / "out", ("hf",), "F32")
    assert "the drafter knows 64 positions, the target 256" in report["pair"]["notes"][0]
    assert "note: the drafter knows 64 positions" in "".join(capfd.readouterr())
    written = json.loads((tmp_path / "out" / "export.json").read_text())
    assert written["pair"]["notes"] == list(report["pair"]["notes"])


def test_pairs_that_cannot_draft(save: Save, tiny: Any, tmp_path: Path) -> None:
    target = str(save(tiny, name="target"))
    reader = str(save(make_model("t5"), name="t5"))
    with pytest.raises(
        RequestError, match=r"target \(llama\) and .*t5 \(t5\) read different inputs"
    ):
        inspect(reader, target)
    other = make_tokenizer(template=None)
    state = json.loads(other.backend_tokenizer.to_str())
    vocab = state["model"]["vocab"]
    strings = {i: s for s, i in vocab.items()}
    vocab[strings[7]], vocab[strings[8]] = 8, 7
    folder = save(tiny, name="swapped")
    plain = json.loads((folder / "tokenizer.json").read_text())
    plain["model"]["vocab"] = vocab
    (folder / "tokenizer.json").write_text(json.dumps(plain))
    with pytest.raises(RequestError, match="different tokenizers: id 7 is"):
        inspect(str(folder), target)


def test_models_that_hear_differently_are_no_pair(save: Save) -> None:
    target = save(make_model("whisper", num_mel_bins=8), name="target")
    drafter = save(make_model("whisper", num_mel_bins=16), name="drafter")
    with pytest.raises(RequestError, match=r"num_mel_bins: .* hears 8 bands, .* 16; cut the"):
        inspect(str(drafter), str(target))


def test_a_head_dim_of_its_own_is_noted(save: Save) -> None:
    found = inspect(str(save(make_model("qwen3", head_dim=6))))
    assert "4 heads of 6 are not hidden 32" in found["notes"][0]
    assert inspect(str(save(make_model("qwen3"), name="other")))["notes"] == []


def test_what_is_nothing_known(tmp_path: Path, save: Save, tiny: Any) -> None:
    with pytest.raises(RequestError, match=r"no config\.json, so not an HF model folder"):
        inspect(str(tmp_path))
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(RequestError, match="not a masks file"):
        inspect(str(tmp_path / "a.json"))


def test_the_command(save: Save, tiny: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tiny)
    app(["inspect", str(folder), "--json"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["family"] == "llama"
    app(["inspect", str(folder)], standalone_mode=False)
    assert "What can be cut" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        app(["inspect", str(folder), "--target", "not there"], standalone_mode=False)
    assert stopped.value.code == 2


def test_pickles_are_inspected_only_when_asked(save: Save, tiny: Any) -> None:
    import torch

    folder = save(tiny)
    (folder / "model.safetensors").unlink()
    torch.save(tiny.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(RequestError, match="read only with --allow-pickle: pytorch_model"):
        inspect(str(folder))
    found = inspect(str(folder), allow_pickle=True)
    assert found["stored"]["format"] == "pickle"
    assert found["stored"]["files"] == ["pytorch_model.bin"]


def test_a_short_context_bounds_what_is_counted(save: Save) -> None:
    """Both sides of an encoder–decoder with 64 positions."""
    model = make_model("bart", tie_word_embeddings=True, max_position_embeddings=64)
    found = inspect(str(save(model)))
    assert (found["cache_tokens"], found["cache_bytes"]) == (64, 2 * 2 * 4 * 4 * 8 * (64 + 64))


def test_a_cache_that_transformers_makes_too_short_is_noted(save: Save) -> None:
    model = make_model("t5", tie_word_embeddings=True, num_decoder_layers=4, num_layers=3)
    assert "4 decoder layers, but 3 of the encoder" in inspect(str(save(model)))["notes"][0]


def test_a_tokenizer_of_the_source_language_is_compared_with_the_encoder(save: Save) -> None:
    """Marian with two vocabularies: the decoder's rows are fewer than the tokenizer's ids."""
    model = make_model(
        "marian",
        tie_word_embeddings=True,
        share_encoder_decoder_embeddings=False,
        vocab_size=96,
        decoder_vocab_size=40,
    )
    folder = str(save(model))
    found = inspect(folder, folder)
    assert found["tokenizer"]["padding_rows"] == 96 - found["tokenizer"]["tokens"]
    assert found["pair"]["shared_tokens"] == 40


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("provenance.json", "{"),
        ("provenance.json", "[]"),
        ("provenance.json", '{"versions": []}'),
        ("token_map.json", '{"target_vocab": Infinity, "target_ids": [1], "fallback": 0}'),
        ("generation_config.json", "{"),
    ],
)
def test_damaged_side_files_are_one_error_or_none(
    name: str, text: str, save: Save, tiny: Any
) -> None:
    folder = save(tiny)
    (folder / name).write_text(text)
    if name == "generation_config.json":
        shown(inspect(str(folder)))
        return
    with pytest.raises(RequestError, match=rf"{name}: damaged"):
        inspect(str(folder))


@pytest.mark.parametrize("text", ["{", "[]", "null", "{}"])
def test_a_damaged_trace_index_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(RequestError, match=r"index\.json"):
        inspect(str(tmp_path))


@pytest.mark.parametrize("spec", ["x" * 5000, "~nosuchuser/model", "a\0b"])
def test_what_can_be_no_path_is_refused(spec: str) -> None:
    with pytest.raises(RequestError):
        inspect(spec)


def test_a_checkpoint_with_a_folder_of_scores_is_a_checkpoint(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    (folder / "scores").mkdir()
    assert inspect(str(folder))["kind"] == "checkpoint"


def test_quantised_checkpoints_are_refused(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(RequestError, match=r"quantised weights can't be cut or trained"):
        inspect(str(folder))
