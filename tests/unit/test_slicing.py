"""The compact model computes what the masked source computes, for every family and axis."""

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import AXES, Axis, Family, template_of
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import (
    compact_generation_config,
    renumber_tokens,
    repair_generation_config,
)
from draftsmith.checkpoints.heads import shares_head
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import resolve_shape, shape_of
from draftsmith.checkpoints.slicing import (
    Selection,
    Slicer,
    compact_config,
    compact_model,
    layers_of,
    load_tensors,
    own_tensors,
)
from draftsmith.checkpoints.tying import match_tied_flag
from draftsmith.errors import DraftsmithError, RequestError
from tests.conftest import make_model
from tests.matrix import (
    both,
    case_names,
    cuts,
    inputs,
    logits,
    matrix,
    random_selection,
    selection_for,
    smaller,
    variants,
)

MATRIX = matrix()
VARIANTS = list(variants())


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to 1e-5, relative to logits larger than one."""
    assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def cached_logits(model: Any, family: Family) -> torch.Tensor:
    """Logits when tokens are fed one by one."""
    from draftsmith.accept.cache import CachedModel

    given = inputs(model, family)
    cached = CachedModel(model)
    ids = given["input_ids"]
    with torch.inference_mode():
        return torch.cat([cached.feed(ids[:, i : i + 1]) for i in range(ids.shape[1])], 1)


def generated_logits(model: Any, family: Family) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of an encoder–decoder's own greedy tokens: cached, and in one pass."""
    from transformers import DynamicCache, EncoderDecoderCache, GenerationMixin

    given = inputs(model, family)
    parameters = inspect.signature(type(model).forward).parameters
    # transformers' own T5 cache has as many layers as the encoder.
    cache = {
        "cache" if "cache" in parameters else "past_key_values": EncoderDecoderCache(
            DynamicCache(), DynamicCache()
        )
    }
    given["decoder_input_ids"] = given["decoder_input_ids"][:, :3]
    out = GenerationMixin.generate(
        model,
        **given,
        **cache,
        max_new_tokens=6,
        min_new_tokens=6,
        do_sample=False,
        use_cache=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    given["decoder_input_ids"] = out.sequences[:, :-1]
    with torch.inference_mode():
        whole = model(**given).logits[:, -len(out.logits) :]
    return torch.stack(out.logits, 1), whole


def assert_cached_equals_uncached(model: Any, family: Family) -> None:
    if family.has_encoder:
        assert_close(*generated_logits(model, family), 1e-4)
    else:
        assert_close(cached_logits(model, family), logits(model, family), 1e-4)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model folder whose tokenizer is given to what is saved."""
    folder = tmp_path_factory.mktemp("source")
    make_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def reloaded(model: Any, tokenizer_folder: Path, folder: Path) -> Any:
    folder.mkdir()
    save_model(model, resolve(str(tokenizer_folder)), folder)
    return load_model(resolve(str(folder)))


@pytest.mark.parametrize(("name", "variant", "axis"), MATRIX, ids=case_names(MATRIX))
def test_masked_equals_compact(
    name: str, variant: dict[str, Any], axis: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """On each axis and on all: in memory and reloaded, cached and uncached."""
    model, family = make_model(name, **variant), families()[name]
    selection = selection_for(model, family, axis)
    masked, compact, small = both(model, selection)
    assert_close(masked, compact)
    if axis != "vocab":
        whole = logits(model, family)
        whole = whole if selection.vocab is None else whole[..., list(selection.vocab)]
        assert (masked - whole).abs().max() > 1e-2, "the masks changed nothing"
    assert_cached_equals_uncached(small, family)
    again = reloaded(small, tokenizer_folder, tmp_path / "compact")
    assert torch.equal(logits(again, family), compact)
    assert_cached_equals_uncached(again, family)
    wanted = selection.shape(shape_of(model.config, family), family)
    assert shape_of(again.config, family) == wanted


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_masked_equals_compact_for_any_shape(data: st.DataObject) -> None:
    """Shapes drawn along all axes at once."""
    name, variant = data.draw(st.sampled_from(VARIANTS))
    model, family = make_model(name, **variant), families()[name]
    shape = shape_of(model.config, family)
    free = [axis for axis in family.axes if family.tied_with(axis)[0] in (axis, family.axes[0])]
    # A norm over a handful of dimensions magnifies rounding past the tolerance.
    least = {"hidden": 8}
    counts = {
        axis: data.draw(st.integers(least.get(axis, 1), getattr(shape, axis)), label=axis)
        for axis in free
        if axis != "vocab"
    }
    try:
        drafter = resolve_shape(shape, counts, family)
    except RequestError:
        assume(False)
    selection = random_selection(shape, drafter, family, data.draw(st.integers(0, 99)))
    masked, compact, small = both(model, selection)
    assert_close(masked, compact)
    assert shape_of(small.config, family) == drafter


# --- breaking a table


@contextmanager
def broken(family: Family, **changes: Any) -> Iterator[None]:
    """The family's table with other entries."""
    families()[family.name] = replace(family, **changes)
    try:
        yield
    finally:
        families()[family.name] = family


def holds(name: str, selections: Mapping[str, Selection]) -> bool:
    """Whether the matrix passes for a family, all axes cut together, whatever the variant."""
    for number, (other, variant) in enumerate(VARIANTS):
        if other != name:
            continue
        try:
            masked, compact, _ = both(make_model(name, **variant), selections[str(number)])
        except Exception:
            return False
        if not (masked - compact).abs().max() <= 1e-5 * max(1.0, float(masked.abs().max())):
            return False
    return True


def all_axes(name: str) -> dict[str, Selection]:
    """Selections of each variant, made with the whole table."""
    return {
        str(number): selection_for(make_model(name, **variant), families()[name], "all")
        for number, (other, variant) in enumerate(VARIANTS)
        if other == name
    }


def test_breaking_any_tensor_of_a_table_fails(family_name: str) -> None:
    """Each dimension of each tensor is needed: left uncut, something else comes out."""
    family, selections = families()[family_name], all_axes(family_name)
    assert holds(family_name, selections)
    for template, dimensions in family.tensors.items():
        for place, dimension in enumerate(dimensions):
            if dimension in ("positions", "buckets", "mel_bins", "kernel", "source_vocab", "one"):
                continue
            if dimension == "head_dim":
                continue  # never cut: the same for every drafter
            wrong = (*dimensions[:place], "one", *dimensions[place + 1 :])
            with broken(family, tensors={**family.tensors, template: wrong}):
                assert not holds(family_name, selections), f"{template} {place}: {dimension}"


def test_breaking_any_module_of_a_table_fails(family_name: str) -> None:
    """Each module where a mask acts, each norm, tie, scale and flag."""
    family, selections = families()[family_name], all_axes(family_name)
    for number, stack in enumerate(family.stacks):
        changed = [
            replace(stack, inputs={a: n for a, n in stack.inputs.items() if a != axis})
            for axis in stack.inputs
        ]
        changed += [
            replace(stack, norms=tuple(n for n in stack.norms if n != norm)) for norm in stack.norms
        ]
        changed += [replace(stack, channels=stack.channels[1:])] if stack.channels else []
        for wrong in changed:
            stacks = (*family.stacks[:number], wrong, *family.stacks[number + 1 :])
            with broken(family, stacks=stacks):
                assert not holds(family_name, selections), wrong
    if family.scales:
        with broken(family, scales=()):
            assert not holds(family_name, selections)
    if family.first_block:
        with broken(family, first_block=frozenset()):
            assert not holds(family_name, selections)


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=case_names(VARIANTS))
def test_every_tensor_of_a_family_is_in_its_table(name: str, variant: dict[str, Any]) -> None:
    """And has the dimensions that the table states."""
    model, family = make_model(name, **variant), families()[name]
    shape = shape_of(model.config, family)
    there = set()
    for tensor_name, tensor in own_tensors(model).items():
        template = template_of(tensor_name)[0]
        there.add(template)
        sizes = [shape.size(d) for d in family.tensors[template]]
        assert len(sizes) == tensor.dim()
        assert all(s in (None, t) for s, t in zip(sizes, tensor.shape, strict=True)), tensor_name
    assert set(family.tensors) - there <= family.optional


def test_the_variants_show_every_optional_tensor(family_name: str) -> None:
    shown = {
        template_of(tensor)[0]
        for name, variant in VARIANTS
        if name == family_name
        for tensor in own_tensors(make_model(name, **variant))
    }
    assert set(families()[family_name].tensors) <= shown


# --- cases


def test_A12_layers_are_renumbered(  # transformers#30508
    causal_family: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Cached equals uncached after deleting layers, in memory and after a reload."""
    model, family = make_model(causal_family, num_hidden_layers=6), families()[causal_family]
    selection = Selection.of_layers(shape_of(model.config, family), [0, 2, 5])
    compact = compact_model(model, family, selection)
    assert [layer.self_attn.layer_idx for layer in compact.model.layers] == [0, 1, 2]
    assert_cached_equals_uncached(compact, family)
    again = reloaded(compact, tokenizer_folder, tmp_path / "compact")
    assert_cached_equals_uncached(again, family)
    assert torch.equal(logits(again, family), logits(compact, family))


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_A13_per_layer_fields_follow_the_kept_layers(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Alternating full and sliding attention keeps each surviving layer's type."""
    types = ["full_attention", "sliding_attention"] * 3
    window = {"use_sliding_window": True, "max_window_layers": 2} if name == "qwen3" else {}
    model = make_model(name, num_hidden_layers=6, layer_types=types, sliding_window=4, **window)
    family = families()[name]
    selection = Selection.of_layers(shape_of(model.config, family), [1, 4, 5])
    masked, compact, small = both(model, selection)
    assert_close(masked, compact)
    again = reloaded(small, tokenizer_folder, tmp_path / "compact")
    assert again.config.layer_types == [types[1], types[4], types[5]]
    if window:
        assert again.config.max_window_layers == 1
    assert_cached_equals_uncached(again, family)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_A14_head_dim_is_written_and_kept(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Three of four heads, and hidden 32 to 24: head_dim stays 8 and is in the config."""
    family = families()[name]
    model = make_model(name, num_key_value_heads=4)
    shape = shape_of(model.config, family)
    for number, counts in enumerate([{"heads": 3}, {"hidden": 24}, {"heads": 3, "hidden": 20}]):
        drafter = resolve_shape(shape, counts, family)
        _, compact, small = both(model, random_selection(shape, drafter, family, seed=number))
        again = reloaded(small, tokenizer_folder, tmp_path / str(number))
        config = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert config["head_dim"] == 8
        assert again.model.layers[0].self_attn.q_proj.weight.shape == (
            8 * drafter.heads,
            drafter.hidden,
        )
        assert torch.equal(logits(again, family), compact)


def test_A14_readers_that_cannot_take_a_width_are_named() -> None:
    """Transformers refuses a llama whose heads don't divide its width: before any work."""
    model = make_model(num_key_value_heads=4)
    family = families()["llama"]
    shape = shape_of(model.config, family)
    with pytest.raises(
        RequestError,
        match=r"hidden: 32 is no multiple of 3 query heads, and transformers refuses .*llama.*"
        r"legal with 3 heads: 3, 6, 9.*33; legal heads with 32: 1, 2$",
    ):
        resolve_shape(shape, {"heads": 3}, family)
    assert resolve_shape(shape, {"heads": 3, "hidden": 24}, family).heads == 3


@pytest.mark.parametrize("name", ["bart", "marian", "whisper"])
def test_A14_families_that_derive_head_dim_cut_width_and_heads_together(name: str) -> None:
    family = families()[name]
    shape = shape_of(make_model(name, tie_word_embeddings=True).config, family)
    assert resolve_shape(shape, {"hidden": 24}, family).cross_heads == 3
    assert resolve_shape(shape, {"encoder_heads": 1}, family).hidden == 8
    with pytest.raises(RequestError, match=r"hidden: 20 is not among 8, 16, 24, 32: hidden, kv_"):
        resolve_shape(shape, {"hidden": 20}, family)
    with pytest.raises(RequestError, match=r"kv_heads: 2 does not go with hidden 24.*write 3"):
        resolve_shape(shape, {"hidden": 24, "kv_heads": 2}, family)


def test_A15_groups_stay_equal() -> None:
    """A selection whose layers differ in their counts is refused, naming the layer."""
    shape = shape_of(make_model().config, families()["llama"])
    whole = Selection.of_layers(shape, range(4))
    uneven = replace(whole, ffn=(*whole.ffn[:3], (0, 1)))
    with pytest.raises(DraftsmithError, match=r"ffn differs between layers: .*2 in layer 3"):
        uneven.shape(shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (0, 9, 2, 3)}, r"layers: 0, 9, 2, 3 are not ascending numbers from 0 to 3"),
        ({"layers": (0, 1, 2, 4)}, r"layers: .* from 0 to 3"),
        ({"hidden": ()}, r"hidden: .* from 0 to 31"),
        ({"kv_heads": ((0, 0),) * 4}, r"kv_heads in layer 0: 0, 0 are not ascending"),
        ({"vocab": (5, 96)}, r"vocab: 5, 96 are not ascending numbers from 0 to 95"),
    ],
    ids=str,
)
def test_indices_that_are_not_the_sources_are_refused(change: dict[str, Any], message: str) -> None:
    shape = shape_of(make_model().config, families()["llama"])
    with pytest.raises(DraftsmithError, match=message):
        replace(Selection.of_layers(shape, range(4)), **change).shape(shape)


def test_A18_tied_weights_are_saved_once(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Hidden cut and saved: one copy, the flag true, the reload bit-equal, no pickle."""
    model = make_model(tie_word_embeddings=True)
    family = families()["llama"]
    compact = compact_model(model, family, selection_for(model, family, "hidden"))
    # A slice that is a view of something larger is saved as what it shows.
    norm = compact.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.detach().repeat(2)[: len(norm.weight)])
    again = reloaded(compact, tokenizer_folder, tmp_path / "compact")
    config = json.loads((tmp_path / "compact" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert not list((tmp_path / "compact").glob("*.bin"))
    assert again.lm_head.weight.data_ptr() == again.model.embed_tokens.weight.data_ptr()
    for name, tensor in compact.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "t5", "bart", "whisper"])
def test_A19_a_head_that_left_its_embedding_is_untied(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """As after merging an adapter on the head alone: both are saved, the flag is false."""
    model, family = make_model(name, tie_word_embeddings=True), families()[name]
    head = model.get_submodule(family.head)
    low_rank = torch.randn(head.weight.shape[0], 2) @ torch.randn(2, head.weight.shape[1])
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.1 * low_rank)
    before = logits(model, family)
    with pytest.warns(UserWarning, match="were untied and both are saved"):
        again = reloaded(model, tokenizer_folder, tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert_close(logits(again, family), before)
    # And cut once more, it stays untied.
    _, _, small = both(again, selection_for(again, family, "hidden"))
    assert small.get_submodule(family.head).weight is not small.get_input_embeddings().weight


def test_A30_the_position_table_follows_heads_and_first_block(
    tokenizer_folder: Path, tmp_path: Path
) -> None:
    """T5 with d_kv 8 ≠ d_model / heads: 4 heads to 3, block 0 of both stacks dropped."""
    family = families()["t5"]
    model = make_model("t5", d_model=24, tie_word_embeddings=True)
    shape = shape_of(model.config, family)
    drafter = resolve_shape(shape, {"kv_heads": 3, "layers": 2, "encoder_layers": 2}, family)
    selection = replace(
        random_selection(shape, drafter, family, seed=5), layers=(1, 3), encoder_layers=(1, 2)
    )
    masked, compact, small = both(model, selection)
    assert_close(masked, compact)
    for stack, kept in (
        (small.decoder, selection.kv_heads),
        (small.encoder, selection.encoder_heads),
    ):
        first = stack.block[0].layer[0].SelfAttention
        assert first.relative_attention_bias.weight.shape == (32, 3)
        assert all(heads == kept[0] for heads in kept)
    again = reloaded(small, tokenizer_folder, tmp_path / "cut")
    assert torch.equal(logits(again, family), compact)
    uneven = replace(selection, kv_heads=((0, 1, 2), (1, 2, 3)))
    with pytest.raises(DraftsmithError, match="one table of positions for all layers"):
        compact_model(model, family, uneven)


# --- configs and odds


def test_rope_is_written_for_readers_of_any_age(tokenizer_folder: Path, tmp_path: Path) -> None:
    model = make_model(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3})
    again = reloaded(model, tokenizer_folder, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["rope_theta"] == 5e3
    assert config["rope_scaling"]["factor"] == 2.0
    family = families()["llama"]
    assert torch.equal(logits(again, family), logits(model, family))


def test_both_rotary_bases_are_written(tokenizer_folder: Path, tmp_path: Path) -> None:
    """One for layers with windows, one for those without."""
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 7e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    model = make_model(
        "gemma3_text",
        rope_parameters=rope,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    again = reloaded(model, tokenizer_folder, tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (7e5, 3e4)
    assert config["rope_scaling"]["factor"] == 4.0
    family = families()["gemma3_text"]
    assert torch.equal(logits(again, family), logits(model, family))


def test_half_precision_is_widened_where_a_scale_is_taken_up() -> None:
    family = families()["gemma3_text"]
    model = make_model("gemma3_text", tie_word_embeddings=True).bfloat16()
    hidden = compact_model(model, family, selection_for(model, family, "hidden"))
    assert hidden.dtype == torch.float32
    layers = compact_model(model, family, selection_for(model, family, "layers"))
    assert layers.dtype == torch.bfloat16


def test_special_ids_follow_a_cut_vocabulary() -> None:
    model, family = make_model(eos_token_id=[2, 70]), families()["llama"]
    shape = shape_of(model.config, family)
    whole = Selection.of_layers(shape, range(4))
    cut = compact_model(model, family, replace(whole, vocab=(0, 1, 2, 40, 70)))
    assert cut.config.eos_token_id == [2, 4]
    assert cut.config.vocab_size == 5
    with pytest.raises(DraftsmithError, match="eos_token_id 70 is not among the kept tokens"):
        compact_model(model, family, replace(whole, vocab=(0, 1, 2, 40)))


def test_unknown_tensor_is_an_error() -> None:
    model, family = make_model(), families()["llama"]
    shape = shape_of(model.config, family)
    slicer = Slicer.of(model.config, family, Selection.of_layers(shape, [0]), tied=False)
    with pytest.raises(DraftsmithError, match=r"model\.surprise\.weight: not in the table"):
        slicer.name("model.surprise.weight")


def test_an_axis_that_a_family_lacks_is_refused() -> None:
    family = families()["llama"]
    shape = shape_of(make_model().config, family)
    with pytest.raises(RequestError, match=r"encoder_layers: llama has no such axis; its axes are"):
        resolve_shape(shape, {"encoder_layers": 1}, family)


def test_every_axis_can_be_cut_somewhere() -> None:
    seen: set[Axis | str] = {axis for _, _, axis in MATRIX}
    assert set(AXES) <= seen
    family = families()["qwen2"]
    shape = shape_of(make_model("qwen2").config, family)
    assert {axis for axis, _ in cuts(shape, family)} >= {"layers", "hidden", "all"}
    assert smaller(shape, family, "kv_heads") is not None


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("gemma3_text", {}),
        ("bart", {"scale_embedding": True}),
        ("marian", {"scale_embedding": True}),
        ("t5", {}),
        ("llama", {}),
    ],
)
def test_A19_a_head_that_left_its_embedding_is_cut_as_it_is(
    name: str, variant: dict[str, Any]
) -> None:
    """In memory, while the config still ties them: scales follow the weights."""
    model, family = make_model(name, tie_word_embeddings=True, **variant), families()[name]
    head = model.get_submodule(family.head)
    head.weight = torch.nn.Parameter(head.weight + 0.3 * torch.randn_like(head.weight))
    for axis in ("hidden", "all"):
        masked, compact, _ = both(model, selection_for(model, family, axis))
        assert_close(compact, masked)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "bart"])
def test_a_shared_head_under_an_untied_config_is_cut(name: str) -> None:
    model, family = make_model(name), families()[name]
    model.get_submodule(family.head).weight = model.get_input_embeddings().weight
    masked, compact, _ = both(model, selection_for(model, family, "ffn"))
    assert_close(compact, masked)


def test_weights_that_are_kept_wide_stay_wide(tmp_path: Path, tokenizer_folder: Path) -> None:
    """T5 in half precision keeps one projection in float32, lest it overflows."""
    family = families()["t5"]
    model = make_model("t5", tie_word_embeddings=True)
    folder = tmp_path / "t5"
    folder.mkdir()
    save_model(model, resolve(str(tokenizer_folder)), folder)
    half = load_model(resolve(str(folder)), dtype=torch.float16)
    assert len({p.dtype for p in half.parameters()}) == 2
    assert compact_model(half, family, selection_for(half, family, "layers")).dtype == torch.float32


def test_a_tensor_of_another_shape_is_never_spread() -> None:
    model = make_model()
    tensors = dict(model.state_dict())
    tensors["model.norm.weight"] = torch.ones(1)
    with pytest.raises(DraftsmithError, match=r"model\.norm\.weight: cut to \(1,\), but the .*32"):
        load_tensors(make_model(), tensors.items())


@pytest.mark.parametrize(
    ("name", "wanted", "message"),
    [
        ("llama", {"kv_heads": 0, "heads": 4}, "kv_heads: 0 is not among"),
        ("llama", {"head_dim": 32}, "head_dim: llama has no such axis"),
        ("llama", {"depth": 3}, "depth: llama has no such axis"),
        ("llama", {"hidden": 0}, "hidden: 0 is not among"),
    ],
)
def test_wrong_counts_are_refused(name: str, wanted: dict[str, int], message: str) -> None:
    shape = shape_of(make_model(name).config, families()[name])
    with pytest.raises(RequestError, match=message):
        resolve_shape(shape, wanted, families()[name])


def test_widths_that_readers_cannot_build_are_refused() -> None:
    family = families()["whisper"]
    shape = shape_of(make_model("whisper", d_model=24).config, family)
    with pytest.raises(RequestError, match="hidden: 18 is no multiple of 4, which transformers"):
        resolve_shape(shape, {"hidden": 18}, family)
    assert resolve_shape(shape, {"hidden": 12}, family).kv_heads == 2


def test_generation_settings_follow_what_is_kept() -> None:
    model, family = make_model("whisper", tie_word_embeddings=True), families()["whisper"]
    generation = model.generation_config
    generation.alignment_heads = [[0, 1], [2, 1], [3, 2]]
    generation.lang_to_id = {"<|en|>": 40, "<|de|>": 61}
    generation.forced_decoder_ids = [[1, 40], [2, 61]]
    generation.suppress_tokens = [5, 61, 70]
    generation.bad_words_ids = [[40, 5], [61]]
    shape = shape_of(model.config, family)
    kept = Selection.of_layers(shape, (2, 3))
    cut = replace(kept, vocab=(0, 1, 2, 5, 40, 70))
    new = compact_model(model, family, cut).generation_config
    assert new.alignment_heads == [[0, 1], [1, 2]]
    assert new.lang_to_id == {"<|en|>": 4}
    assert new.forced_decoder_ids == [[1, 4]]
    assert new.suppress_tokens == [3, 5]
    assert new.bad_words_ids == [[4, 3]]
    assert generation.alignment_heads == [[0, 1], [2, 1], [3, 2]]


def test_ids_that_stand_for_nothing_stay() -> None:
    model, family = make_model(), families()["llama"]
    model.config.pad_token_id = -1
    shape = shape_of(model.config, family)
    selection = replace(Selection.of_layers(shape, range(4)), vocab=(0, 1, 2, 9))
    renumbered = compact_config(model.config, family, selection)
    assert renumbered.pad_token_id == -1


@pytest.mark.parametrize("tied", [False, True])
def test_layers_as_a_model_of_their_own_share_their_weights(causal_family: str, tied: bool) -> None:
    """The same logits as the cut model, without another copy in memory."""
    model, family = make_model(causal_family, tie_word_embeddings=tied), families()[causal_family]
    selection = Selection.of_layers(shape_of(model.config, family), (0, 2, 3))
    view = layers_of(model, family, (0, 2, 3))
    assert torch.equal(
        logits(view, family), logits(compact_model(model, family, selection), family)
    )
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.data_ptr() for tensor in view.state_dict().values()} <= own
    assert_cached_equals_uncached(view, family)
    assert_cached_equals_uncached(model, family)


def test_special_ids_are_renumbered_one_or_many() -> None:
    config = SimpleNamespace(
        pad_token_id=0, eos_token_id=[5, 7], extra_token_ids=[7, -1], bad_words_ids=[[5, 7], [5, 9]]
    )
    renumber_tokens(config, {0: 3, 5: 1, 7: 2})
    assert vars(config) == {
        "pad_token_id": 3,
        "eos_token_id": [1, 2],
        "extra_token_ids": [2, -1],
        "bad_words_ids": [[1, 2]],
    }


def test_alignment_heads_follow_layers_and_heads() -> None:
    selection: Any = SimpleNamespace(layers=(1, 3), cross_heads=((0, 2), (1,)), vocab=None)
    config = SimpleNamespace(alignment_heads=[[1, 2], [3, 1], [3, 0], [0, 0]])
    assert compact_generation_config(config, selection).alignment_heads == [[0, 1], [1, 0]]
    assert len(config.alignment_heads) == 4, "the source keeps its own"
    config = SimpleNamespace(alignment_heads=[[0, 0]])
    assert compact_generation_config(config, selection).alignment_heads is None


def test_neutral_settings_and_those_of_beams_are_kept() -> None:
    from transformers import GenerationConfig

    plain = GenerationConfig(temperature=1.0, top_p=1.0, top_k=50)
    assert repair_generation_config(SimpleNamespace(generation_config=plain)) == []
    beams = GenerationConfig(num_beams=4, length_penalty=2.0, early_stopping=True)
    assert repair_generation_config(SimpleNamespace(generation_config=beams)) == []


def test_A19_the_head_follows_the_flag() -> None:
    """Shared under an untied config it gets its own weight; an equal one is shared again."""
    family = families()["llama"]
    model = make_model(tie_word_embeddings=False)
    model.lm_head.weight = model.get_input_embeddings().weight
    match_tied_flag(model, family)
    assert not shares_head(model, family)
    model = make_model(tie_word_embeddings=True)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    match_tied_flag(model, family)
    assert shares_head(model, family)
    assert model.config.tie_word_embeddings
