"""What onnxruntime can't run is refused before any weight is loaded, by onnx and by ort-genai."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.export import exporter
from draftsmith.checkpoints.export import onnx as onnx_export
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import TINY_VOCAB, job_of, make_model

# The narrowest head that onnxruntime's attention takes.
HEAD_DIM = 16


@pytest.fixture(autouse=True)
def builder(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The builder is there, and lacks nothing; no process is started."""
    found: dict[str, list[str]] = {"modules": []}
    monkeypatch.setattr(onnx_export, "ask", lambda runtime, task: found)
    return found


def preflight(runtime: str, model: Any, target: Path, **settings: Any) -> list[str]:
    return list(exporter(runtime).preflight(job_of(model, target), ExportSettings(**settings)))


@pytest.mark.parametrize("runtime", ["onnx", "ort-genai"])
@pytest.mark.parametrize(
    ("family", "changes", "settings", "message"),
    [
        ("t5", {}, {}, "t5 has an encoder.*decoders alone"),
        ("llama", {"head_dim": 8}, {}, "head_dim 8 is not a multiple of 16"),
        ("mistral", {"sliding_window": 8}, {}, r"windows \(here of 8 tokens\)"),
        ("gemma3_text", {"sliding_window": None}, {}, "rotary scaling 'by kind of layer'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "rotary scaling 'linear'",
        ),
        ("llama", {"intermediate_size": TINY_VOCAB}, {}, r"as wide as the vocabulary \(96\)"),
        ("llama", {}, {"precision": "float16"}, "export.precision: float16 is not computed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_built_right_is_known_before_training(
    runtime: str,
    family: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    save: Callable[..., Path],
) -> None:
    changes = changes if family == "t5" else {"head_dim": HEAD_DIM} | changes
    model = make_model(family, **changes)
    with pytest.raises(RequestError, match=f"export {runtime}: .*{message}"):
        preflight(runtime, model, save(model), **settings)


def test_A14_heads_that_do_not_fill_the_hidden_width_pass(save: Callable[..., Path]) -> None:
    """Heads 4 -> 3 of 16 at hidden 24: the builder reads head_dim itself."""
    model = make_model(num_attention_heads=3, num_key_value_heads=1, hidden_size=24, head_dim=16)
    assert preflight("onnx", model, save(model)) == []


def test_a_builder_that_lacks_a_package_is_told(
    builder: dict[str, list[str]], save: Callable[..., Path]
) -> None:
    model = make_model(head_dim=HEAD_DIM)
    builder["modules"] = ["onnx_ir"]
    with pytest.raises(RequestError, match=r"needs onnx_ir; pip install 'draftsmith\[onnx\]'"):
        preflight("onnx", model, save(model))


def test_pairs_that_the_runtime_does_not_load_are_refused(save: Callable[..., Path]) -> None:
    model = make_model(head_dim=HEAD_DIM)
    target = save(make_model(head_dim=HEAD_DIM, vocab_size=TINY_VOCAB + 8), name="padded")
    with pytest.raises(RequestError, match="head has 96 rows and the target's 104"):
        preflight("ort-genai", model, target)
    with pytest.raises(RequestError, match=r"export\.lookahead: 17 is more than the 16"):
        preflight("ort-genai", model, save(model), lookahead=17)


def test_A11_a_shorter_context_is_told_before_training(save: Callable[..., Path]) -> None:
    """The drafter knows 64 positions, the target 256."""
    target = save(make_model(head_dim=HEAD_DIM), name="target")
    drafter = make_model(head_dim=HEAD_DIM, max_position_embeddings=64)
    (note,) = preflight("ort-genai", drafter, target)
    assert "64 positions, the target 256" in note
    with pytest.raises(RequestError, match=r"export\.max_length: 80 is more than the 64"):
        preflight("ort-genai", drafter, target, max_length=80)


def test_A17_uneven_layers_are_refused_by_name(save: Callable[..., Path], tmp_path: Path) -> None:
    """FFN widths [64, 48, 64, 64]; the layer is named and nothing is left."""
    model = make_model(head_dim=HEAD_DIM)
    target = save(model)
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    message = r"layers\.1\.mlp\.down_proj\.weight is \(32, 48\), but the config says \(32, 64\)"
    with pytest.raises(DraftsmithError, match=message):
        exporter("onnx").export(job_of(model, target), tmp_path / "out", ExportSettings())
    assert not (tmp_path / "out").exists()
