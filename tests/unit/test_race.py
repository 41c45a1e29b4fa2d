"""Choices of layers that are distilled for a few steps; what learns best is kept."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import shape_of
from draftsmith.errors import DraftsmithError
from draftsmith.prune import train
from draftsmith.prune.race import Track, race
from draftsmith.recipes.inspection import inspect, render
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages
from draftsmith.recipes.schema import PruneSettings, ShapeSettings
from tests.conftest import CAUSAL, make_model
from tests.unit.test_batches import trace_rows

FAMILY = families()["llama"]


def settings_of(**changes: Any) -> PruneSettings:
    fixed: dict[str, Any] = {"warmup": 2, "batch": 2, "max_length": 24, "steps": 4, "race": 3}
    return PruneSettings(shape=ShapeSettings(layers=2), **(fixed | changes))


def learn(model: Any, folder: Path, track: Track | None, **changes: Any) -> train.Pruning:
    """Keep two of four layers."""
    family = families()[model.config.model_type]
    source = shape_of(model.config, family)
    drafter = replace(source, layers=2)
    rows, settings = trace_rows(12), settings_of(**changes)
    return train.learn_masks(
        model, family, source, drafter, rows, settings, seed=3, state=folder, track=track
    )


def track_of(model: Any, **changes: Any) -> Track:
    rows = trace_rows(16, model=model)
    track = Track.of(rows[4:], rows[:4], settings_of(**changes), 1, torch.float32)
    assert track is not None
    return track


class Scripted:
    """A track on which drafters are worth what is written down."""

    def __init__(self, worth: dict[tuple[int, ...], tuple[float, float]]) -> None:
        self.worth, self.ran = worth, []

    def run(self, drafter: tuple[int, ...], family: Any) -> dict[str, float]:
        self.ran.append(drafter)
        emitted, top1 = self.worth[drafter]
        return {"emitted_per_round": emitted, "top1": top1}


def test_drafters_race_in_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the source is loaded in: a step of bfloat16 weights is mostly rounded away."""
    kinds = []

    def run(self: Track, drafter: Any, family: Any) -> dict[str, float]:
        kinds.append(drafter.dtype)
        return {"emitted_per_round": 1.0, "top1": 0.0}

    monkeypatch.setattr(Track, "run", run)
    learn(make_model().bfloat16(), tmp_path, track_of(make_model()), exchange=0)
    assert set(kinds) == {torch.float32}


def test_what_emits_most_comes_first_and_ties_go_by_agreement() -> None:
    worth = {(0, 1): (1.2, 0.1), (0, 2): (1.4, 0.2), (1, 3): (1.4, 0.3)}
    track: Any = Scripted(worth)
    proposals = {"masks": (0, 1), "uniform": (0, 2), "exchange, 1": (1, 3), "again": (0, 2)}
    found = race(proposals, lambda parts: parts, FAMILY, track)
    assert [entrant.parts for entrant in found] == [(1, 3), (0, 2), (0, 1)]
    assert [entrant.by for entrant in found] == ["exchange, 1", "uniform", "masks"]
    assert track.ran == [(0, 1), (0, 2), (1, 3)], "what several propose runs once"


def test_the_race_overrules_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, cheap choices, the polished set and its runners-up run; the winner is cut out."""
    ran = []

    def run(self: Track, drafter: Any, family: Any) -> dict[str, float]:
        ran.append(drafter)
        return {"emitted_per_round": float(len(ran)), "top1": 0.0}

    monkeypatch.setattr(Track, "run", run)
    model = make_model()
    found = learn(model, tmp_path, track_of(model))
    assert found.exchanged is not None
    assert len(found.raced) == len(ran) >= 4
    assert found.raced[0].parts == found.selection.layers
    assert found.raced[0].parts != found.exchanged.parts, "the loss would have kept another"
    by = {entrant.by for entrant in found.raced}
    assert {"masks", "block-influence"} <= by
    assert any(name.startswith("exchange, ") for name in by)


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in CAUSAL), ("llama", {"apart": True}), ("llama", {"exchange": 0})],
)
def test_a_real_race(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """The same numbers each time; the source's weights stay, and every drafter is distilled."""
    model = make_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = [
        learn(model, tmp_path / str(i), track_of(model, **changes), **changes) for i in range(2)
    ]
    assert found[0].raced == found[1].raced
    assert found[0].selection == found[1].selection
    assert len({e.emitted_per_round for e in found[0].raced} | {e.top1 for e in found[0].raced}) > 1
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_drafter_learns_on_the_track_but_for_its_embeddings() -> None:
    track = track_of(make_model())
    drafter, before = (make_model(seed=1, num_hidden_layers=2) for _ in range(2))
    track.run(drafter, FAMILY)
    for name, tensor in drafter.state_dict().items():
        whole_vocabulary = len(tensor) == len(drafter.get_input_embeddings().weight)
        assert torch.equal(tensor, before.state_dict()[name]) == whole_vocabulary, name


def test_without_held_out_greedy_texts_there_is_no_race() -> None:
    rows = trace_rows(8)
    drawn = [row for row in rows if row.sampled]
    long = [replace(row, prompt_length=min(24, len(row.tokens))) for row in rows if not row.sampled]
    for validation in ([], drawn, long):
        with pytest.raises(DraftsmithError, match=r"prune\.race: 3: .* raise trace\.validation_"):
            Track.of(rows, validation, settings_of(), 1, torch.float32)
    assert Track.of(rows, [], settings_of(race=0), 1, torch.float32) is None


def raced(recipe: Path, out: Path) -> Run:
    overrides = ["prune.race=3", "trace.validation_share=0.3"]
    run = Run(load(str(recipe), overrides), out)
    run_stages(run, ("trace", "prune"))
    return run


def test_a_recipe_races_and_tells(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted in the race goes on to the same result."""
    whole = raced(tiny_recipe, tmp_path / "whole").folder("pruned")
    plain = json.loads((whole / "masks.json").read_text())
    assert plain["raced"][0]["parts"] == plain["selection"]["layers"]
    found = inspect(str(whole))["masks"]
    assert found["raced"] == plain["raced"]
    assert "Distilled for a race" in text_of(render(inspect(str(whole / "masks.json"))))
    count, own = SimpleNamespace(left=1), Track.run

    def run(self: Track, drafter: Any, family: Any) -> dict[str, float]:
        if not count.left:
            raise KeyboardInterrupt
        count.left -= 1
        return own(self, drafter, family)

    with monkeypatch.context() as patch:
        patch.setattr(Track, "run", run)
        with pytest.raises(KeyboardInterrupt):
            raced(tiny_recipe, tmp_path / "again")
    again = raced(tiny_recipe, tmp_path / "again").folder("pruned")
    assert json.loads((again / "masks.json").read_text()) == plain


def text_of(renderable: Any) -> str:
    from rich.console import Console

    console = Console(width=100, record=True)
    console.print(renderable)
    return console.export_text()
