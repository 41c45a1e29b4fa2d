"""Attention and FFN of a block, kept or cut apart."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.errors import DraftsmithError
from draftsmith.prune import masks as masks_module
from draftsmith.prune.compact import read_masks
from draftsmith.prune.exchange import exchange_parts
from draftsmith.prune.masks import LearnableMasks, sample
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages
from tests.conftest import make_model
from tests.matrix import VARIANTS, both, logits
from tests.unit.test_masks import learn

CASES = [
    (name, variant)
    for name in ("llama", "mistral", "qwen2", "qwen3", "gemma3_text")
    for variant in VARIANTS[name]
]


def joined(shape: Shape, layers: tuple[int, ...], ffn_layers: tuple[int, ...]) -> Selection:
    """All widths cut by a little, each FFN in its own way."""

    def choose(axis: Axis, place: tuple[int, ...]) -> list[int]:
        if axis == "layers":
            return list(layers)
        most = getattr(shape, axis)
        first = place[0] if axis == "ffn" else 0
        return list(range(most))[first : first + most - 4] if axis == "ffn" else list(range(most))

    return Selection.choose(shape, choose, ffn_layers)


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_masked_equals_compact(name: str, variant: dict[str, Any]) -> None:
    """Block 0 joins attention 0 with FFN 1, block 1 is layer 2's attention with FFN 3."""
    model, family = make_model(name, **variant), families()[name]
    masked, compact, small = both(model, joined(shape_of(model.config, family), (0, 2), (1, 3)))
    assert (masked - compact).abs().max() <= 1e-5
    assert (masked - logits(model, family)).abs().max() > 1e-2
    whole = Selection.of_layers(shape_of(model.config, family), (0, 2))
    other = logits(compact_model(model, family, whole), family)
    assert (other - compact).abs().max() > 1e-3, "the FFNs are those of the layers themselves"
    kinds = getattr(model.config, "layer_types", None)
    if kinds is not None:
        assert small.config.layer_types == [kinds[0], kinds[2]]


@pytest.mark.parametrize("ffn_layers", [(1, 2, 3), (0, 0), (2, 3), (1, 4), (3, 2), (-1, 2)])
def test_halves_that_make_no_blocks_are_refused(ffn_layers: tuple[int, ...]) -> None:
    model = make_model()
    family = families()["llama"]
    whole = Selection.of_layers(shape_of(model.config, family), (0, 2))
    broken = Selection(**{**vars(whole), "ffn_layers": ffn_layers})
    with pytest.raises(DraftsmithError, match="ffn_layers"):
        compact_model(model, family, broken)


def test_a_family_without_halves_is_refused() -> None:
    model, family = make_model("bart"), families()["bart"]
    whole = Selection.of_layers(shape_of(model.config, family), (0, 1))
    with pytest.raises(DraftsmithError, match="bart can't be cut apart"):
        compact_model(model, family, Selection(**{**vars(whole), "ffn_layers": (0, 1)}))


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=10), st.integers(1, 3))
def test_the_best_alternating_choice_is_found(values: list[int], blocks: int) -> None:
    values = values[: len(values) // 2 * 2]
    count = 2 * min(blocks, len(values) // 2)
    legal = [
        chosen
        for chosen in itertools.combinations(range(len(values)), count)
        if all(part % 2 == place % 2 for place, part in enumerate(chosen))
    ]
    found = masks_module._alternating([float(value) for value in values], count)
    assert found in legal
    assert sum(values[i] for i in found) == max(sum(values[i] for i in c) for c in legal)


def test_exchanged_halves_alternate() -> None:
    worth = {0: 5.0, 3: 4.0, 4: 3.0, 7: 6.0}
    asked = []

    def loss(parts: tuple[int, ...]) -> float:
        asked.append(parts)
        return 20.0 - sum(worth.get(part, 0.0) for part in parts)

    found = exchange_parts({"masks": (0, 1, 2, 3)}, count=8, loss=loss, rounds=9, halves=True)
    assert found.parts == (0, 3, 4, 7)
    assert all(part % 2 == place % 2 for parts in asked for place, part in enumerate(parts))


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_gradients_reach_both_halves(name: str) -> None:
    model, family = make_model(name), families()[name]
    shape, axes = shape_of(model.config, family), ("layers", "ffn_layers")
    masks = LearnableMasks(axes, shape, init=0.0)
    z = {a: sample(masks.log_alpha[a], torch.full((shape.layers,), 0.6)) for a in axes}
    with masks_module.applied(model, family, shape, z):
        model(input_ids=torch.arange(3, 20)[None]).logits.square().sum().backward()
    for axis in axes:
        assert (masks.log_alpha[axis].grad != 0).all(), axis


def test_masks_learn_halves(tmp_path: Path) -> None:
    """Both counts are constrained, and what comes out is exact."""
    found = learn(make_model(), tmp_path, steps=30, apart=True, lambda_lr=2.0)
    assert set(found.expected) == {"layers", "ffn_layers"}
    assert found.exchanged is not None
    assert len(found.exchanged.parts) == 4
    assert found.selection.ffn_layers == tuple(p // 2 for p in found.exchanged.parts if p % 2)
    assert found.selection.layers == tuple(p // 2 for p in found.exchanged.parts if not p % 2)


def test_useless_halves_are_cut(tmp_path: Path) -> None:
    """Attention of 1 and 3 and the FFNs of 0 and 2 add nothing: 0 reads on in FFN 1, 2 in 3."""
    model = make_model(initializer_range=0.3)
    with torch.no_grad():
        for layer in (1, 3):
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in (0, 2):
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    settings = {"warmup": 30, "batch": 4, "lambda_lr": 2.0, "mask_lr": 0.15, "exchange": 0}
    found = learn(model, tmp_path, 60, own=True, apart=True, **settings)
    assert found.selection.layers == (0, 2)
    assert found.selection.ffn_layers == (1, 3)


def test_a_recipe_cuts_them_apart(tiny_recipe: Path, tmp_path: Path) -> None:
    """And its masks are published and read like any others."""
    run = Run(load(str(tiny_recipe), ["prune.apart=true"]), tmp_path / "out")
    run_stages(run, ("trace", "prune"))
    masks = read_masks(run.folder("pruned") / "masks.json")
    assert masks.selection.ffn_layers is not None
    assert len(masks.selection.ffn_layers) == len(masks.selection.layers) == 2
