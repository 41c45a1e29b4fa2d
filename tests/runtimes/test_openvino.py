"""Models in OpenVINO: they compute what was meant, and draft without changing the text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import openvino
from draftsmith.checkpoints.export.base import Report
from draftsmith.checkpoints.export.processes import ask
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model, make_tokenizer

pytestmark = pytest.mark.runtime("openvino")

# A14: heads that the hidden width does not imply; A11: a drafter that knows fewer positions.
DRAFTER = {
    "hidden_size": 40,
    "head_dim": 6,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "tie_word_embeddings": True,
    "attention_bias": True,
    "mlp_bias": True,
    "max_position_embeddings": 64,
}


def write(model: Any, target: Path, folder: Path, **settings: Any) -> Report:
    folder.mkdir(exist_ok=True)
    return openvino.export(job_of(model, target), folder, ExportSettings(**settings))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An HF folder of the tiny model."""
    folder = tmp_path_factory.mktemp("target")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def exported(target: Path) -> Report:
    """What was said of its export, which lies within."""
    model = make_model()
    assert openvino.preflight(job_of(model, target), ExportSettings())
    return write(model, target, target)


def check_exact(report: Report) -> None:
    parity = report.parity
    assert parity is not None
    assert parity.max_difference is not None
    assert parity.max_difference > 0.0
    assert (parity.greedy_identical, parity.greedy_compared) == (24, 24)
    assert parity.strings_compared


def test_A14_A11_a_pair_of_odd_shapes_writes_what_its_target_does(
    target: Path, exported: Report, tmp_path: Path
) -> None:
    """Prompts of 60 tokens and 20 new ones, of which the drafter knows 64 positions."""
    model = make_model()
    check_exact(exported)
    check_exact(write(make_model(seed=1, **DRAFTER), target, tmp_path))
    prompts = torch.randint(3, TINY_VOCAB, (2, 60), generator=torch.Generator().manual_seed(3))
    found = ask(
        "openvino",
        "speculate",
        target=str(target / "openvino"),
        drafter=str(tmp_path / "openvino"),
        prompts=prompts.tolist(),
        lookaheads=[1, 4],
        max_new_tokens=20,
        stop_ids=[2],
        threads=1,
    )
    meant = [
        model.generate(p[None], max_new_tokens=20, do_sample=False)[0, 60:].tolist()
        for p in prompts
    ]
    for texts in found["texts"].values():
        assert [text["tokens"] for text in texts] == meant
    for text in found["texts"]["4"]:
        assert text["accepted"] + text["passes"] == len(text["tokens"])
        assert text["accepted"] < text["drafted"] <= 4 * text["passes"]


@pytest.mark.usefixtures("exported")
def test_drafts_by_the_target_itself_are_all_accepted(target: Path) -> None:
    """Counts by hand: the first token has no draft, then seven rounds of 4 + 1, then 3 + 1."""
    own = str(target / "openvino")
    found = ask(
        "openvino",
        "speculate",
        target=own,
        drafter=own,
        prompts=[[5, 6, 7, 8, 9, 10, 11, 12]],
        lookaheads=[4],
        max_new_tokens=40,
        stop_ids=[],
        threads=1,
    )
    alone, drafted = found["texts"]["0"][0], found["texts"]["4"][0]
    assert drafted["tokens"] == alone["tokens"]
    assert (alone["drafted"], alone["accepted"]) == (None, None)
    assert (drafted["drafted"], drafted["accepted"], drafted["passes"]) == (31, 31, 9)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {"num_key_value_heads": 3}),
        ("gemma3_text", {"num_key_value_heads": 1, "hidden_size": 24, "head_dim": 6}),
    ],
)
def test_A14_three_heads_of_four(
    family: str, changes: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    """With a width of 8 in 32, or of 6 in 24, and windows shorter than the text, if any."""
    model = make_model(family, num_attention_heads=3, sliding_window=8, **changes)
    check_exact(write(model, target, tmp_path))


def test_packed_weights_stay_close(target: Path, tmp_path: Path) -> None:
    """At four bits, whose usual groups of 128 do not divide these rows."""
    report = write(make_model(), target, tmp_path, precision="int4")
    assert report.parity is not None
    assert report.parity.max_difference is not None
    assert report.parity.max_difference > 1e-3


def test_what_is_not_converted_is_told(tmp_path: Path) -> None:
    """Before any work where it is asked; a failure's reason is the last that the worker says."""
    refused = ask("openvino", "check", model_type="nothing")["refused"]
    assert refused.startswith("optimum-intel does not convert nothing")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    with pytest.raises(DraftsmithError, match=r"'convert'(.|\n)*`nothing`"):
        ask("openvino", "convert", source=str(tmp_path), path=str(tmp_path), weight_format="fp32")
