"""Parameters, bytes and shapes without weights; the papers' counts."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.layout import (
    cache_bytes,
    layout_of,
    meta_model,
    parameters_per_axis,
    with_counts,
)
from draftsmith.checkpoints.shape import shape_of
from draftsmith.errors import RequestError
from tests.conftest import make_model, tiny_config
from tests.matrix import case_names, variants

VARIANTS = list(variants())
# The models that Yan et al. 2025 cut their drafters from.
LLAMA_7B: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
MIB = 2**20


def llama(sizes: dict[str, Any], **counts: int) -> Any:
    """The config of a drafter of these counts."""
    config = AutoConfig.for_model("llama", **sizes)
    return with_counts(config, families()["llama"], counts)


@pytest.mark.parametrize(
    ("layers", "heads", "ffn", "hidden", "parameters"),
    [
        (24, 16, 5504, 2048, 1_345_423_360),
        (12, 20, 9280, 2560, 1_333_721_600),
        (5, 32, 11_008, 2560, 796_290_560),
        (3, 32, 11_008, 2560, 543_311_360),
        (1, 32, 11_008, 2560, 290_332_160),
    ],
)
def test_the_papers_drafters_of_7b(
    layers: int, heads: int, ffn: int, hidden: int, parameters: int
) -> None:
    config = llama(LLAMA_7B, layers=layers, heads=heads, ffn=ffn, hidden=hidden)
    assert config.head_dim == 128
    assert layout_of(config, families()["llama"]).parameters() == parameters


def test_the_papers_drafter_of_1b_counts_the_head_apart() -> None:
    layout = layout_of(llama(LLAMA_1B, layers=5), families()["llama"])
    assert layout.parameters(count_head="lm_head.weight") == 829_446_144
    assert layout.parameters() == 829_446_144 - 128_256 * 2048


def test_a_wide_drafter_keeps_less_than_a_deep_one() -> None:
    """KV bytes at 1,024 tokens in half precision: 37.5 % less at equal parameters."""
    family = families()["llama"]
    deep = cache_bytes(llama(LLAMA_7B, layers=24, heads=16, ffn=5504, hidden=2048), family, 1024)
    wide = cache_bytes(llama(LLAMA_7B, layers=12, heads=20, ffn=9280, hidden=2560), family, 1024)
    assert (deep, wide) == (192 * MIB, 120 * MIB)
    assert 1 - wide / deep == 0.375


@pytest.mark.parametrize(("name", "variant"), VARIANTS, ids=case_names(VARIANTS))
def test_counts_are_those_of_a_real_model(name: str, variant: dict[str, Any]) -> None:
    model, family = make_model(name, **variant), families()[name]
    layout = layout_of(model.config, family)
    assert layout.parameters() == sum(p.numel() for p in model.parameters())
    assert layout.shapes == {n: tuple(t.shape) for n, t in model.state_dict().items()}
    state = model.state_dict(keep_vars=True)
    assert all(state[alias] is state[own] for alias, own in layout.aliases.items())


def test_parameters_per_entry_add_up(family_name: str) -> None:
    """Cutting one layer, or all entries that are tied to one, saves what was said."""
    family = families()[family_name]
    config = tiny_config(family_name, tie_word_embeddings=True)
    whole = layout_of(config, family).parameters()
    saved = parameters_per_axis(config, family)
    shape = shape_of(config, family)
    for axis in ("layers", "encoder_layers"):
        if axis in family.axes:
            count = getattr(shape, axis) - 1
            smaller = layout_of(with_counts(config, family, {axis: count}), family)
            assert whole - smaller.parameters() == saved[axis]
    assert set(saved) == {a for a in family.axes if a != "vocab" and getattr(shape, a) > 1}
    assert all(count > 0 for count in saved.values())


def test_windows_bound_what_is_kept() -> None:
    family = families()["gemma3_text"]
    types = ["sliding_attention", "full_attention"] * 2
    config = tiny_config("gemma3_text", sliding_window=8, layer_types=types)
    per_layer = 2 * 2 * 2 * 8  # two bytes of keys and of values, 2 KV heads of 8
    assert cache_bytes(config, family, 100) == per_layer * (2 * 8 + 2 * 100)
    window = tiny_config("mistral", sliding_window=8)
    assert cache_bytes(window, families()["mistral"], 100) == per_layer * 4 * 8


def test_cross_attention_is_kept_too() -> None:
    config = tiny_config("t5")
    per_layer = 2 * 2 * 4 * 8
    own, family = cache_bytes(config, families()["t5"], 10), families()["t5"]
    assert own == per_layer * 4 * 10
    assert cache_bytes(config, family, 10, encoder_tokens=7) == own + per_layer * 4 * 7
    assert cache_bytes(config, family, 10, bytes_per_value=4) == 2 * own


def test_counting_takes_no_memory() -> None:
    """A model of 70 billion parameters, on the meta device."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    family = families()["llama"]
    model = meta_model(config, family)
    assert {p.device for p in model.parameters()} == {torch.device("meta")}
    assert layout_of(config, family).parameters() == 70_553_706_496


@pytest.mark.parametrize("value", [0, -1, "64", 2.5, None, True])
def test_a_config_without_a_size_is_refused(value: Any) -> None:
    config = tiny_config()
    config.__dict__["intermediate_size"] = value
    with pytest.raises(RequestError, match=r"config: intermediate_size is .* no positive whole"):
        shape_of(config, families()["llama"])


def test_sizes_that_do_not_divide_are_refused() -> None:
    config = tiny_config()
    config.__dict__["num_key_value_heads"] = 3
    with pytest.raises(RequestError, match="num_attention_heads 4 is no multiple of num_key_value"):
        shape_of(config, families()["llama"])
