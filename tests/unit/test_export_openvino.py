"""OpenVINO exports: what is refused before any work, and that a wrong one is not kept."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import openvino, processes
from draftsmith.checkpoints.export.parity import Answers
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import job_of, make_model, tiny_config

SETTINGS = ExportSettings(to=("openvino",))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What OpenVINO's worker was asked; it takes everything and converts nothing."""
    log: dict[str, Any] = {"refused": None}

    def ask(runtime: str, task: str, **request: Any) -> dict[str, Any]:
        log[task] = request
        if task == "convert":
            log["config"] = json.loads((Path(request["source"]) / "config.json").read_text())
            (Path(request["path"]) / "openvino_model.xml").touch()
        return {"refused": log["refused"]}

    monkeypatch.setattr(openvino, "ask", ask)
    return log


def test_encoders_are_refused(save: Callable[..., Path], asked: dict[str, Any]) -> None:
    model = make_model("bart")
    with pytest.raises(RequestError, match=r"openvino: bart is an encoder–decoder.*export\.to"):
        openvino.preflight(job_of(model, save(model)), SETTINGS)
    assert "check" not in asked


def test_a_cut_vocabulary_is_refused(save: Callable[..., Path], asked: dict[str, Any]) -> None:
    model = make_model()
    job = replace(job_of(model, save(model)), token_map=TokenMap(96, (0, 1, 2), 0))
    with pytest.raises(RequestError, match="cut vocabulary, and OpenVINO GenAI needs the target's"):
        openvino.preflight(job, SETTINGS)
    assert "check" not in asked


def test_what_the_converter_does_not_take_is_refused(
    save: Callable[..., Path], asked: dict[str, Any]
) -> None:
    model = make_model()
    job = job_of(model, save(model))
    assert openvino.preflight(job, SETTINGS)
    assert asked["check"] == {"model_type": "llama"}
    asked["refused"] = "optimum-intel does not convert llama"
    with pytest.raises(
        RequestError, match="optimum-intel does not convert llama; run make openvino"
    ):
        openvino.preflight(job, SETTINGS)


def test_a_missing_openvino_is_told_before_any_work(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(processes._RUNTIMES, "openvino", ("no_such_module", "make openvino"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.delenv("DRAFTSMITH_OPENVINO_PYTHON", raising=False)
    model = make_model()
    with pytest.raises(RequestError, match=r"openvino: this Python has no module.*make openvino"):
        openvino.preflight(job_of(model, save(model)), SETTINGS)


@pytest.mark.parametrize(
    ("precision", "weight_format"),
    [("float32", "fp32"), ("float16", "fp16"), ("int8", "int8"), ("int4", "int4")],
)
def test_A14_the_converter_gets_the_width_of_heads(
    precision: Any,
    weight_format: str,
    save: Callable[..., Path],
    tmp_path: Path,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three heads of 8 in a hidden width of 24, and four of 8 in 24: never derived."""
    model = make_model(hidden_size=24)

    def read_back(runtime: str, path: Path, questions: Any) -> Answers:
        with torch.inference_mode():
            return Answers("openvino", model(**questions.inputs).logits[0])

    monkeypatch.setattr(openvino, "read_back", read_back)
    settings = ExportSettings(to=("openvino",), precision=precision, lookahead=5)
    report = openvino.export(job_of(model, save(make_model())), tmp_path, settings)
    assert asked["convert"]["weight_format"] == weight_format
    assert asked["convert"]["group_size"] == (-1 if precision == "int4" else None)
    assert (asked["config"]["head_dim"], asked["config"]["hidden_size"]) == (8, 24)
    assert report.files == ("openvino",)
    assert (tmp_path / "openvino" / "openvino_model.xml").is_file()
    assert "num_assistant_tokens=5" in report.launch
    assert not Path(asked["convert"]["source"]).exists()


@pytest.mark.parametrize(
    ("changes", "size"),
    [
        ({}, 32),
        ({"hidden_size": 576, "intermediate_size": 1536, "head_dim": 64}, 64),
        ({"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}, 128),
        ({"hidden_size": 40}, -1),
    ],
)
def test_four_bits_share_scales_in_groups_that_divide_every_row(
    changes: dict[str, int], size: int
) -> None:
    config = tiny_config(**changes)
    assert openvino._group_size(shape_of(config, families()["llama"])) == size


def test_a_wrong_export_is_not_kept(
    save: Callable[..., Path],
    tmp_path: Path,
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it take the place of an earlier one."""
    model, other = make_model(), make_model(seed=1)

    def read_back(runtime: str, path: Path, questions: Any) -> Answers:
        with torch.inference_mode():
            return Answers("openvino", other(**questions.inputs).logits[0])

    monkeypatch.setattr(openvino, "read_back", read_back)
    earlier = tmp_path / "openvino" / "earlier"
    earlier.parent.mkdir()
    earlier.touch()
    with pytest.raises(DraftsmithError, match=r"openvino: read back, its logits differ"):
        openvino.export(job_of(model, save(model)), tmp_path, SETTINGS)
    assert [p.name for p in tmp_path.glob("openvino*")] == ["openvino"]
    assert earlier.is_file()
