"""Choosing what is kept without training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.slicing import compact_model
from draftsmith.distill.batches import collate
from draftsmith.distill.losses import LOSSES, Traces
from draftsmith.distill.states import hidden_at_answers
from draftsmith.errors import RequestError
from draftsmith.prune.baselines import (
    select_at_random,
    select_by_activations,
    select_by_position,
    watched,
)
from draftsmith.prune.compact import read_masks
from draftsmith.prune.objective import Objective
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages
from draftsmith.recipes.schema import PruneSettings
from tests.conftest import CAUSAL, make_model
from tests.unit.test_batches import trace_rows

SOURCE = Shape(layers=8, kv_heads=4, heads_per_group=2, head_dim=8, ffn=64, hidden=32, vocab=96)
DRAFTER = Shape(layers=3, kv_heads=2, heads_per_group=1, head_dim=8, ffn=24, hidden=16, vocab=96)
LAYERS = Shape(layers=3, kv_heads=4, heads_per_group=2, head_dim=8, ffn=64, hidden=32, vocab=96)


def test_by_position() -> None:
    first, last = (select_by_position(m, SOURCE, DRAFTER) for m in ("first", "last"))
    assert (first.layers, last.layers) == ((0, 1, 2), (5, 6, 7))
    assert (first.hidden, last.hidden) == (tuple(range(16)), tuple(range(16, 32)))
    assert (first.ffn[0], last.ffn[0]) == (tuple(range(24)), tuple(range(40, 64)))
    assert (first.kv_heads[0], last.kv_heads[0]) == ((0, 1), (2, 3))
    assert select_by_position("uniform", SOURCE, LAYERS).layers == (0, 4, 7)
    for method in ("first", "last", "uniform"):
        assert select_by_position(method, SOURCE, DRAFTER).shape(SOURCE) == DRAFTER


def test_random_choices_depend_on_the_seed_alone() -> None:
    chosen = {seed: select_at_random(SOURCE, DRAFTER, seed) for seed in range(8)}
    assert len({c.layers for c in chosen.values()}) > 3
    for seed, selection in chosen.items():
        assert selection == select_at_random(SOURCE, DRAFTER, seed)
        assert selection.shape(SOURCE) == DRAFTER


def by_activations(method: str, model: Any, drafter: Shape, family: str = "llama") -> Any:
    source = shape_of(model.config, families()[family])
    return select_by_activations(
        method,
        model,
        families()[family],
        source,
        drafter,
        trace_rows(6),
        batch=2,
        max_length=20,
        seed=0,
    )


def narrower(model: Any, family: str = "llama", **counts: int) -> Shape:
    return replace(shape_of(model.config, families()[family]), **counts)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_block_that_changes_nothing_goes_first(layer: int) -> None:
    """Block influence of a block whose output projections are zero is zero."""
    model = make_model()
    with torch.no_grad():
        model.model.layers[layer].self_attn.o_proj.weight.zero_()
        model.model.layers[layer].mlp.down_proj.weight.zero_()
    for method in ("block-influence", "importance"):
        kept = by_activations(method, model, narrower(model, layers=3)).layers
        assert kept == tuple(i for i in range(4) if i != layer)


def test_widths_with_small_activations_go_first() -> None:
    model = make_model()
    quiet = {"ffn": [3, 40], "kv_heads": [1], "hidden": [5, 17, 30]}
    with torch.no_grad():
        for block in model.model.layers:
            block.mlp.up_proj.weight[quiet["ffn"]] *= 1e-3
            block.self_attn.v_proj.weight.unflatten(0, (2, 8))[quiet["kv_heads"]] *= 1e-3
            for norm in (block.input_layernorm, block.post_attention_layernorm):
                norm.weight[quiet["hidden"]] *= 1e-3
        model.model.norm.weight[quiet["hidden"]] *= 1e-3
    chosen = by_activations("importance", model, narrower(model, ffn=62, kv_heads=1, hidden=29))
    assert chosen.ffn[0] == tuple(i for i in range(64) if i not in quiet["ffn"])
    assert chosen.kv_heads == ((0,),) * 4
    assert chosen.hidden == tuple(i for i in range(32) if i not in quiet["hidden"])


@pytest.mark.parametrize("family", CAUSAL)
def test_every_family_is_cut_by_importance_on_all_axes(family: str) -> None:
    model = make_model(family)
    drafter = narrower(model, family, layers=2, kv_heads=1, heads_per_group=1, ffn=40, hidden=24)
    selection = by_activations("importance", model, drafter, family)
    compact = compact_model(model, families()[family], selection)
    assert shape_of(compact.config, families()[family]) == drafter


def test_watching_leaves_no_trace() -> None:
    model = make_model()
    table = families()["llama"]
    with watched(model, table, shape_of(model.config, table)) as scores:
        model(input_ids=torch.arange(3, 20)[None])
    before = scores["ffn"].clone()
    model(input_ids=torch.arange(3, 20)[None])
    assert torch.equal(scores["ffn"], before)
    assert all((values > 0).all() for values in scores.values())


def test_block_influence_cuts_no_widths() -> None:
    model = make_model()
    with pytest.raises(RequestError, match=r"method: block-influence: .* cuts ffn, hidden"):
        by_activations("block-influence", model, narrower(model, layers=3, ffn=40, hidden=24))


@pytest.mark.parametrize("method", ["last", "random", "block-influence", "importance"])
def test_recipes_prune_by_them(tiny_recipe: Path, tmp_path: Path, method: str) -> None:
    run = Run(load(str(tiny_recipe), [f"prune.method={method}"]), tmp_path / "out")
    run_stages(run, ("trace", "prune"))
    masks = read_masks(run.folder("pruned") / "masks.json")
    assert masks.method == method
    assert len(masks.selection.layers) == 2


@pytest.mark.parametrize(
    ("objective", "name"),
    [("kd", "forward_kl"), ("acceptance", "total_variation"), ("ce", "cross_entropy")],
)
def test_masks_minimise_what_the_recipe_says(objective: Any, name: str) -> None:
    """With every mask open: the mean loss of that name of the source itself."""
    model, rows = make_model(seed=1), trace_rows(4, make_model())
    source = shape_of(model.config, families()["llama"])
    family, settings = families()["llama"], PruneSettings(objective=objective)
    found, batch = Objective.of(model, family, source, rows, settings), collate(rows, 32)
    logits = model.get_output_embeddings()(hidden_at_answers(model, batch))
    signal = Traces.of_labels(batch.labels) if objective == "ce" else batch.traces
    expected, _ = LOSSES[name](signal.against(logits))
    mean = found.under({}, [batch])
    assert mean * batch.tokens == pytest.approx(float(expected.detach()))


def test_weights_that_learn_are_not_the_targets(
    tiny_recipe: Path, tmp_path: Path, tiny: Any
) -> None:
    """The run scores with the model that it was given."""
    run = Run(load(str(tiny_recipe), ["prune.weights_lr=1e-2"]), tmp_path / "out")
    run_stages(run, ("trace", "prune"))
    assert all(
        torch.equal(tensor, tiny.state_dict()[name])
        for name, tensor in run.target_model.state_dict().items()
    )
