"""The compact model computes what the masked source computes, for every family and axis."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import AXES, Axis
from draftsmith.checkpoints.loading import load_model, resolve
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model, template_of
from draftsmith.errors import DraftsmithError
from draftsmith.prune.masks import applied, hard_masks
from tests.conftest import TINY_VOCAB, make_model

# What makes a family's tiny model show all that its table states.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"head_dim": 6, "hidden_size": 40},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    ],
    "mistral": [{}, {"sliding_window": 8}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{}, {"attention_bias": True}],
}
# Axis -> counts smaller than the tiny model's.
SMALLER: dict[Axis, int] = {
    "layers": 2,
    "kv_heads": 1,
    "heads_per_group": 1,
    "ffn": 24,
    "hidden": 24,
}


def ids(length: int = 20) -> torch.Tensor:
    return torch.randint(3, TINY_VOCAB, (2, length), generator=torch.Generator().manual_seed(7))


def random_selection(shape: Shape, counts: dict[Axis, int], seed: int) -> Selection:
    """A selection of these counts, with other indices in every layer and group."""
    generator = torch.Generator().manual_seed(seed)

    def pick(axis: Axis) -> tuple[int, ...]:
        most = getattr(shape, axis)
        order = torch.randperm(most, generator=generator)[: counts.get(axis, most)]
        return tuple(sorted(order.tolist()))

    layers = pick("layers")
    kv_heads = tuple(pick("kv_heads") for _ in layers)
    heads = tuple(tuple(pick("heads_per_group") for _ in groups) for groups in kv_heads)
    return Selection(layers, kv_heads, heads, tuple(pick("ffn") for _ in layers), pick("hidden"))


def both(model: Any, selection: Selection) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits of the hard-masked source and of the compact model, and that model."""
    family = families()[model.config.model_type]
    shape = shape_of(model.config, family)
    compact = compact_model(model, family, selection)
    with torch.inference_mode():
        with applied(model, family, shape, hard_masks(selection, shape)):
            masked = model(input_ids=ids()).logits
        return masked, compact(input_ids=ids()).logits, compact


def cases() -> list[Any]:
    found = []
    for family in sorted(families()):
        # A family without a line here is tried as it is: a new file joins by existing.
        for variant in VARIANTS.get(family, [{}]):
            found += [
                pytest.param(
                    family, variant, {axis: SMALLER[axis]}, id=f"{family}-{axis}-{variant}"
                )
                for axis in AXES
                if not (axis == "heads_per_group" and variant.get("num_key_value_heads") == 4)
            ]
    return found


@pytest.mark.parametrize(("family", "variant", "counts"), cases())
def test_masked_equals_compact_on_each_axis(
    family: str, variant: dict[str, Any], counts: dict[Axis, int]
) -> None:
    model = make_model(family, **variant)
    shape = shape_of(model.config, families()[family])
    selection = random_selection(shape, counts, seed=3)
    masked, compact, _ = both(model, selection)
    with torch.inference_mode():
        whole = model(input_ids=ids()).logits
    assert (masked - compact).abs().max() <= 1e-5 * max(1.0, float(whole.abs().max()))
    assert (masked - whole).abs().max() > 1e-2, "the masks changed nothing"


@settings(max_examples=25, deadline=None)
@given(
    family=st.sampled_from(sorted(families())),
    layers=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    heads_per_group=st.integers(1, 2),
    ffn=st.integers(1, 64),
    hidden=st.integers(2, 32),
    seed=st.integers(0, 99),
)
def test_masked_equals_compact_on_all_axes_at_once(
    family: str,
    layers: int,
    kv_heads: int,
    heads_per_group: int,
    ffn: int,
    hidden: int,
    seed: int,
) -> None:
    counts: dict[Axis, int] = {
        "layers": layers,
        "kv_heads": kv_heads,
        "heads_per_group": heads_per_group,
        "ffn": ffn,
        "hidden": hidden,
    }
    model = make_model(family)
    shape = shape_of(model.config, families()[family])
    selection = random_selection(shape, counts, seed)
    masked, compact, small = both(model, selection)
    scale = max(1.0, float(masked.abs().max()))
    assert (masked - compact).abs().max() <= 1e-5 * scale
    assert shape_of(small.config, families()[family]) == selection.shape(shape)


def test_every_tensor_of_a_family_is_in_its_table(family_name: str) -> None:
    """And has the dimensions that the table states."""
    for variant in VARIANTS.get(family_name, [{}]):
        model = make_model(family_name, **variant)
        family = families()[family_name]
        shape = shape_of(model.config, family)
        state = model.state_dict()
        for name, tensor in state.items():
            dims = family.tensors[template_of(name)[0]]
            assert tuple(tensor.shape) == tuple(map(shape.size, dims)), name
        there = {template_of(name)[0] for name in state}
        assert set(family.tensors) - there <= family.optional


def cached_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits when tokens are fed one by one."""
    from draftsmith.accept.cache import CachedModel

    cached = CachedModel(model)
    with torch.inference_mode():
        return torch.cat([cached.feed(tokens[:, i : i + 1]) for i in range(tokens.shape[1])], 1)


def assert_cached_equals_uncached(model: Any) -> None:
    with torch.inference_mode():
        whole = model(input_ids=ids()).logits
    assert (cached_logits(model, ids()) - whole).abs().max() <= 1e-4


def reloaded(model: Any, tokenizer_folder: Path, folder: Path) -> Any:
    folder.mkdir()
    save_model(model, resolve(str(tokenizer_folder)), folder)
    return load_model(resolve(str(folder)))


def test_A12_layers_are_renumbered(  # transformers#30508
    family_name: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Cached equals uncached after deleting layers, in memory and after a reload."""
    model = make_model(family_name, num_hidden_layers=6)
    family = families()[family_name]
    selection = Selection.of_layers(shape_of(model.config, family), [0, 2, 5])
    compact = compact_model(model, family, selection)
    assert_cached_equals_uncached(compact)
    again = reloaded(compact, save(model), tmp_path / "compact")
    assert_cached_equals_uncached(again)
    with torch.inference_mode():
        assert torch.equal(again(input_ids=ids()).logits, compact(input_ids=ids()).logits)


def test_A13_per_layer_fields_follow_the_kept_layers(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    """Alternating full and sliding attention keeps each surviving layer's type."""
    types = ["full_attention", "sliding_attention"] * 3
    model = make_model(
        "qwen3",
        num_hidden_layers=6,
        layer_types=types,
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=2,
    )
    family = families()["qwen3"]
    selection = Selection.of_layers(shape_of(model.config, family), [1, 4, 5])
    masked, compact, small = both(model, selection)
    assert (masked - compact).abs().max() <= 1e-5 * float(masked.abs().max())
    again = reloaded(small, save(model), tmp_path / "compact")
    assert again.config.layer_types == [types[1], types[4], types[5]]
    assert again.config.max_window_layers == 1
    assert_cached_equals_uncached(again)


def test_A15_groups_stay_equal() -> None:
    """A selection whose layers differ in their counts is refused, naming the layer."""
    shape = shape_of(make_model().config, families()["llama"])
    whole = Selection.of_layers(shape, range(4))
    uneven = Selection(
        whole.layers, whole.kv_heads, whole.heads, (tuple(range(64)),) * 3 + ((0, 1),), whole.hidden
    )
    with pytest.raises(DraftsmithError, match=r"ffn differs between layers: .*2 in layer 3"):
        uneven.shape(shape)


def test_A18_tied_weights_are_saved_once(save: Callable[..., Path], tmp_path: Path) -> None:
    """Hidden cut and saved: one copy, the flag true, the reload bit-equal, no pickle."""
    model = make_model(tie_word_embeddings=True)
    family = families()["llama"]
    shape = shape_of(model.config, family)
    compact = compact_model(model, family, random_selection(shape, {"hidden": 24}, seed=1))
    again = reloaded(compact, save(model), tmp_path / "compact")
    config = json.loads((tmp_path / "compact" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert not list((tmp_path / "compact").glob("*.bin"))
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    for name, tensor in compact.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


def test_rope_is_written_for_readers_of_any_age(save: Callable[..., Path], tmp_path: Path) -> None:
    model = make_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3})
    again = reloaded(model, save(model), tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["rope_theta"] == 5e3
    assert config["rope_scaling"]["factor"] == 2.0
    with torch.inference_mode():
        assert torch.equal(again(input_ids=ids()).logits, model(input_ids=ids()).logits)


def test_unknown_tensor_is_an_error() -> None:
    from draftsmith.checkpoints.slicing import slice_state_dict

    model = make_model()
    family = families()["llama"]
    shape = shape_of(model.config, family)
    state = model.state_dict() | {"model.surprise.weight": torch.zeros(1)}
    with pytest.raises(DraftsmithError, match=r"model\.surprise\.weight"):
        slice_state_dict(state, family, shape, Selection.of_layers(shape, [0]))
