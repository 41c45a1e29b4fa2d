"""onnxruntime runs what is exported for it, with and without the cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.checkpoints.export import onnx as onnx_export
from draftsmith.checkpoints.export.onnx import export
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import ExportSettings
from tests.conftest import job_of, make_model

pytestmark = pytest.mark.runtime("onnx")


@pytest.mark.parametrize(
    ("family", "changes", "precision"),
    [
        ("llama", {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24}, "int8"),
        ("qwen2", {"hidden_size": 40, "tie_word_embeddings": True}, "float32"),
    ],
    ids=["heads-int8", "hidden-tied-biases"],
)
def test_A14_shapes_that_pruning_makes(
    family: str,
    changes: dict[str, Any],
    precision: str,
    save: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Heads 4 -> 3, hidden 32 -> 24 or wider than the heads; grouped queries."""
    model = make_model(family, head_dim=16, **changes)
    settings = ExportSettings(precision=precision)
    report = export(job_of(model, save(model)), tmp_path, settings)
    parity = report.parity
    assert parity is not None
    assert parity.max_difference is not None
    # Packed weights differ, and by little.
    assert (parity.max_difference > 1e-4) == (precision == "int8")
    assert parity.greedy_compared == 24
    assert parity.reader.startswith("onnxruntime ")
    assert (tmp_path / "onnx" / "model.onnx").is_file()


def test_a_wrong_export_is_not_kept(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's weights are noticed."""
    model, save_model = make_model(head_dim=16), onnx_export.save_model
    other = make_model(head_dim=16, seed=1)
    monkeypatch.setattr(onnx_export, "save_model", lambda _, *rest: save_model(other, *rest))
    with pytest.raises(DraftsmithError, match="read back, its logits differ"):
        export(job_of(model, save(model)), tmp_path / "out", ExportSettings())
    assert not (tmp_path / "out").exists()
