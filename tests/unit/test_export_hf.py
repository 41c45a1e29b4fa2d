"""The HF folder is asked for a greedy text too, with a cache as drafting has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.checkpoints.export import hf
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.growing import start_block_drafting
from draftsmith.checkpoints.loading import load_model
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model

Save = Callable[..., Path]


def test_every_family_says_the_same_greedy_text(
    family_name: str, save: Save, tmp_path: Path
) -> None:
    model = make_model(family_name)
    # What a user's generation settings forbid or repeat is not the model's own.
    model.generation_config.repetition_penalty = 5.0
    report = hf.export(job_of(model, save(make_model())), tmp_path, ExportSettings())
    assert report.parity is not None
    assert report.parity.max_difference == 0.0
    assert report.parity.greedy_identical == report.parity.greedy_compared == 24
    assert report.parity.tie is None


def test_how_it_is_started_is_what_it_is(save: Save, tmp_path: Path) -> None:
    """By the class that loads it; a drafter of blocks by its own file, and by no runtime."""
    model = make_model("marian")
    plain = hf.export(job_of(model, save(model, name="target")), tmp_path, ExportSettings())
    assert "AutoModelForSeq2SeqLM" in plain.launch
    assert "assistant_model" in plain.launch
    blocks = start_block_drafting(model, families()["marian"], 3, range(TINY_VOCAB - 1))
    found = hf.export(job_of(blocks, tmp_path / "target"), tmp_path, ExportSettings())
    assert "trust_remote_code=True" in found.launch
    assert "assistant_model" not in found.launch
    assert (tmp_path / "hf" / "modeling_block_drafter.py").is_file()


def test_a_text_that_is_not_greedy_fails(
    tiny: Any, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = hf._greedy
    monkeypatch.setattr(hf, "_greedy", lambda *asked: [i ^ 1 for i in greedy(*asked)])
    with pytest.raises(DraftsmithError, match="its greedy text has at token"):
        hf.export(job_of(tiny, save(tiny)), tmp_path, ExportSettings())


def test_the_weights_say_what_they_are(tiny: Any, save: Save, tmp_path: Path) -> None:
    """In the metadata of their file, without a path of the machine; checksums are of that file."""
    from safetensors import safe_open

    target = save(tiny, name="target")
    hf.export(job_of(tiny, target), tmp_path, ExportSettings())
    with safe_open(tmp_path / "hf" / "model.safetensors", framework="pt") as file:
        found = file.metadata()
        for name, tensor in tiny.state_dict().items():
            assert file.get_tensor(name).equal(tensor), name
    assert found["format"] == "pt"
    assert found["drafter_for"] == "target"
    assert "4 layers" in found["shape"]
    assert str(tmp_path) not in str(found)
    load_model(resolve(str(tmp_path / "hf")))
    again = tmp_path / "again"
    again.mkdir()
    hf.export(job_of(tiny, target), again, ExportSettings())
    name = Path("hf", "model.safetensors")
    assert (again / name).read_bytes() == (tmp_path / name).read_bytes()
    modes = {path.stat().st_mode for path in (tmp_path / "hf").iterdir() if path.is_file()}
    assert len(modes) == 1, "a server may be another user"
