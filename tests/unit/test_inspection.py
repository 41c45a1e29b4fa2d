"""`draftsmith inspect`: checkpoints, pairs, masks, traces and runs, as tables and as JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.slicing import Selection
from draftsmith.cli import app
from draftsmith.errors import RequestError
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks
from draftsmith.prune.trajectory import Trajectory
from draftsmith.recipes.inspection import inspect, plot_masks, render
from draftsmith.recipes.schema import ExportSettings
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
    report = export_drafter(drafter, target, tmp_path / "out", ExportSettings(to=("hf",)))
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


WIDE = Shape(layers=8, kv_heads=32, heads_per_group=2, head_dim=8, ffn=64, hidden=32, vocab=96)


def masks_file(folder: Path, **changes: Any) -> Path:
    """Masks that keep layers 0, 1, 2, 6, and in the last of them other heads."""

    def choose(axis: str, place: tuple[int, ...]) -> Any:
        if axis == "layers":
            return (0, 1, 2, 6)
        if axis == "kv_heads":
            return (1, 2, 3, 9) if place[0] < 6 else (0, 8, 16, 31)
        return (0,) if axis == "heads_per_group" else range(getattr(WIDE, axis))

    plain = {
        "family": "llama",
        "source_shape": vars(WIDE),
        "method": "masks",
        "selection": Selection.choose(WIDE, choose).to_plain(),
        "expected": {"layers": 4.04, "kv_heads": 4.5, "heads_per_group": 1.25},
    }
    path = folder / "masks.json"
    path.write_text(json.dumps(plain | changes))
    return path


def course(folder: Path, loss: float = 2.0) -> Trajectory:
    """What was recorded in two steps."""
    masks = LearnableMasks(("layers",), WIDE, init=-4.0)
    with torch.no_grad():
        masks.log_alpha["layers"][:2] = 4.0
        masks.log_alpha["layers"][2] = 0.0
    trajectory = Trajectory(WIDE, steps=2)
    for step in range(2):
        lagrangian = Lagrangian(("layers",), WIDE, WIDE, warmup=1)
        trajectory.record(step, masks, lagrangian, loss - step)
    trajectory.write(folder / "trajectory.safetensors")
    return trajectory


def test_published_masks_alone(tmp_path: Path) -> None:
    """Which layers and heads survived; without a history."""
    found = inspect(str(masks_file(tmp_path)))
    assert found["layers"] == [0, 1, 2, 6]
    assert found["kv_heads"][3] == [0, 8, 16, 31]
    assert found["query_heads"] == [[2, 4, 6, 18]] * 3 + [[0, 16, 32, 62]]
    assert found["expected"]["kv_heads"] == 4.5
    assert (found["decided"], found["exchanged"], found["trajectory"]) == ({}, None, None)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    text = [line.split() for line in shown(found).splitlines()]
    assert ["layers", "kept", "0-2,", "6"] in text
    assert ["0-2", "1-3,", "9", "2,", "4,", "6,", "18"] in text
    assert ["6", "0,", "8,", "16,", "31", "0,", "16,", "32,", "62"] in text
    assert ["kv_heads", "32", "4.50", "4"] in text


def test_masks_of_old_files_and_of_baselines(tmp_path: Path) -> None:
    """They say less, and older ones had a history of their own."""
    path = masks_file(tmp_path, expected={}, history=[{"loss": 1.0}], exchanged=None)
    assert "expected" not in shown(inspect(str(path)))
    plain = json.loads(path.read_text())
    del plain["expected"], plain["exchanged"]
    path.write_text(json.dumps(plain))
    assert "0-2, 6" in shown(inspect(str(path)))


def test_how_sure_masks_were(tmp_path: Path) -> None:
    """The file says it itself, or else what was recorded beside it."""
    path = masks_file(tmp_path, decided={"layers": {"open": 0.5, "closed": 0.25}})
    course(tmp_path)
    found = inspect(str(path))
    assert found["decided"] == {"layers": {"open": 0.5, "closed": 0.25}}
    assert found["trajectory"] == {"steps": 2, "samples": 2, "first_loss": 2.0, "last_loss": 1.0}
    text = [line.split() for line in shown(found).splitlines()]
    assert ["layers", "8", "4.04", "4", "50%", "25%"] in text
    assert ["learned", "in", "2", "steps,", "loss", "2.000", "→", "1.000"] in text
    masks_file(tmp_path)
    assert inspect(str(path))["decided"] == {"layers": {"open": 2 / 8, "closed": 5 / 8}}


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    path = masks_file(tmp_path)
    course(tmp_path, loss=float("nan"))
    found = inspect(str(path))
    assert found["trajectory"]["last_loss"] is None
    assert "loss not a number" in shown(found)
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("proposed", "said"),
    [
        ([0, 1, 3, 4], "layers 3, 4 for layers 2, 6: loss 2.000 → 1.500"),
        ([0, 1, 2, 6], "nothing: no exchange lowers the loss 2.000"),
        (None, "loss 2.000 → 1.500"),
    ],
)
def test_what_exchange_changed(proposed: list[int] | None, said: str, tmp_path: Path) -> None:
    exchanged = {"before": 2.0, "after": 1.5, "proposed": proposed, "parts": [0, 1, 2, 6]}
    exchanged |= {"by": "masks", "runners_up": [[0, 1, 3, 6]]}
    found = inspect(str(masks_file(tmp_path, exchanged=exchanged)))
    assert found["exchanged"] == exchanged
    assert f"exchanged {said}" in " ".join(shown(found).split())


def test_halves_of_layers_that_were_exchanged(tmp_path: Path) -> None:
    """2 l is the attention of layer l, 2 l + 1 its FFN; an older file says losses alone."""
    path = masks_file(tmp_path)
    plain = json.loads(path.read_text())
    plain["selection"]["ffn_layers"] = [0, 1, 4, 6]
    plain["exchanged"] = {
        "proposed": [0, 1, 2, 3, 4, 5, 12, 13],
        "parts": [0, 1, 2, 3, 4, 9, 12, 13],
        "before": 2.0,
        "after": 1.5,
    }
    path.write_text(json.dumps(plain))
    text = " ".join(shown(inspect(str(path))).split())
    assert "FFNs kept 0, 1, 4, 6" in text
    assert "exchanged FFN 2 for FFN 4: loss 2.000 → 1.500" in text
    older = masks_file(tmp_path, exchanged={"layers": [0], "before": 2.0, "after": 1.5})
    assert "exchanged loss 2.000 → 1.500" in " ".join(shown(inspect(str(older))).split())


@pytest.mark.parametrize(
    "changes",
    [
        {"expected": [4]},
        {"expected": {"layers": "four"}},
        {"expected": {"layers": float("nan")}},
        {"decided": {"layers": {"open": 1.5, "closed": 0.0}}},
        {"decided": {"layers": 1}},
        {"exchanged": {"parts": [0]}},
    ],
    ids=str,
)
def test_damaged_figures_of_masks_are_one_error(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"masks\.json: not a masks file") as raised:
        inspect(str(masks_file(tmp_path, **changes)))
    assert "\n" not in str(raised.value)


def test_masks_of_every_family(family_name: str, tmp_path: Path) -> None:
    from draftsmith.checkpoints.families import families
    from draftsmith.checkpoints.shape import shape_of
    from tests.conftest import tiny_config

    source = shape_of(tiny_config(family_name), families()[family_name])
    selection = Selection.of_layers(source, (0, 2)).to_plain()
    found = inspect(str(masks_file(tmp_path, source_shape=vars(source), selection=selection)))
    assert json.loads(json.dumps(found)) == found
    assert "all 4" in shown(found)


def test_masks_beside_a_checkpoint_are_shown_with_it(save: Save, tiny: Any) -> None:
    folder = save(tiny)
    masks_file(folder)
    course(folder)
    found = inspect(str(folder))
    assert found["masks"]["trajectory"]["samples"] == 2
    assert "Masks when learning ended" in shown(found)


def test_a_picture_of_what_masks_learned(tmp_path: Path) -> None:
    """Of the folder, of its masks, or of the run."""
    folder = tmp_path / "pruned"
    folder.mkdir()
    masks = masks_file(folder)
    course(folder)
    for number, place in enumerate((folder, masks, tmp_path)):
        plot_masks(str(place), tmp_path / f"{number}.svg")
        assert "kept<" in (tmp_path / f"{number}.svg").read_text()


def test_pictures_that_cannot_be_drawn(tmp_path: Path) -> None:
    masks = masks_file(tmp_path)
    with pytest.raises(RequestError, match=r"holds no trajectory\.safetensors: masks that were"):
        plot_masks(str(masks), tmp_path / "a.png")
    with pytest.raises(RequestError, match=r"--plot .*a\.gif: \.gif is not among"):
        plot_masks(str(masks), tmp_path / "a.gif")
    course(tmp_path)
    (tmp_path / "trajectory.safetensors").write_bytes(b"half")
    for look in (lambda: plot_masks(str(masks), tmp_path / "a.png"), lambda: inspect(str(masks))):
        with pytest.raises(RequestError, match=r"trajectory\.safetensors: damaged"):
            look()
    assert not (tmp_path / "a.png").exists()
