"""The weights of the best evaluation are what a run with patience leaves."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.distill import train
from draftsmith.distill.best import Best
from draftsmith.distill.train import distill
from tests.conftest import make_model
from tests.unit.test_lora import SHORT, rows

LONG = replace(SHORT, lora_rank=0, steps=10, evaluate_every=1, save_every=3, patience=3)


def run(
    folder: Path, patch: pytest.MonkeyPatch, figures: list[float], settings: Any = LONG
) -> tuple[Any, list[dict[str, float]], list[dict[str, torch.Tensor]]]:
    """Training whose evaluations say `figures`; the model, the curve, and weights at each."""
    weights: list[dict[str, torch.Tensor]] = []
    said: Iterator[float] = iter(figures)

    def evaluate(model: Any, *_: Any) -> dict[str, float]:
        weights.append({name: t.clone() for name, t in model.state_dict().items()})
        return {"predicted_speedup": next(said)}

    patch.setattr(train, "evaluate", evaluate)
    model = make_model(tie_word_embeddings=True)
    curve = distill(model, families()["llama"], rows(), [], settings, seed=0, state=folder)
    return model, curve, weights


def test_training_ends_when_nothing_better_comes_and_the_best_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "not yet there"
    model, curve, weights = run(folder, monkeypatch, [1.1, 1.5, 1.4, 1.5, 1.3, 9.0])
    assert [row["step"] for row in curve] == [1, 2, 3, 4, 5]
    for name, tensor in model.state_dict().items():
        assert tensor.equal(weights[1][name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_without_patience_the_last_weights_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(LONG, patience=0, steps=4)
    model, curve, weights = run(tmp_path, monkeypatch, [1.9, 1.0, 1.0, 1.0], settings)
    assert len(curve) == 4
    assert model.model.norm.weight.equal(weights[3]["model.norm.weight"])
    assert not (tmp_path / "best.pt").exists()


def test_adapters_are_merged_into_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(LONG, lora_rank=2, patience=2)
    model, curve, weights = run(tmp_path, monkeypatch, [1.2, 1.1, 1.1, 5.0], settings)
    assert len(curve) == 3
    name = "model.layers.0.mlp.down_proj"
    kept = weights[0]
    a, b = (kept[f"{name}.lora_{x}.default.weight"] for x in "AB")
    expected = kept[f"{name}.base_layer.weight"] + (32.0 / 2) * b @ a
    assert torch.allclose(model.get_submodule(name).weight, expected, atol=1e-6)


def test_rows_without_a_figure_end_nothing_before_their_time() -> None:
    """Where no held-out greedy row can be replayed, nothing is known to be better."""
    best = Best(Path("nowhere"), patience=2)
    assert not best.is_over([])
    assert not best.is_over([{"step": 1}, {"step": 2}])
    assert not best.is_over([{"step": 1}, {"step": 2}, {"step": 3}])
