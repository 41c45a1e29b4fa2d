"""What a family table states: which tensors there are, and which axis each dimension is.

Masks, slicing, parameter counts and exports work on axis names alone. A new family is one new
file in this folder that defines `FAMILY`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Literal

Axis = Literal["layers", "kv_heads", "heads_per_group", "ffn", "hidden"]
AXES: tuple[Axis, ...] = ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")

# What a tensor dimension can be. `query` = kv_heads x heads_per_group x head_dim, `key_value` =
# kv_heads x head_dim, both in this order; `head_dim` and `vocab` are never cut.
Dim = Literal["hidden", "ffn", "query", "key_value", "head_dim", "vocab"]


@dataclass(frozen=True)
class Modules:
    """Where masks act, as module names; `{layer}` is the block's number.

    Attributes:
        block: a transformer block, which adds to the residual stream.
        attention_out: the projection whose input is the heads' outputs.
        ffn_down: the projection whose input is the FFN's inner activations.
        norms: the norms over the residual stream inside a block.
        final_norm: the norm before the head.
        head: the projection to the vocabulary.
        norm_epsilon: attribute of a norm that holds its epsilon.
    """

    block: str = "model.layers.{layer}"
    attention_out: str = "model.layers.{layer}.self_attn.o_proj"
    ffn_down: str = "model.layers.{layer}.mlp.down_proj"
    norms: tuple[str, ...] = (
        "model.layers.{layer}.input_layernorm",
        "model.layers.{layer}.post_attention_layernorm",
    )
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norm_epsilon: str = "variance_epsilon"


@dataclass(frozen=True)
class ConfigKeys:
    """Which config field holds each size."""

    layers: str = "num_hidden_layers"
    kv_heads: str = "num_key_value_heads"
    heads: str = "num_attention_heads"
    head_dim: str = "head_dim"
    ffn: str = "intermediate_size"
    hidden: str = "hidden_size"
    vocab: str = "vocab_size"


@dataclass(frozen=True)
class Gguf:
    """How the family is written as GGUF; tensor names come from the gguf package.

    Attributes:
        architecture: value of `general.architecture`.
        interleaved: whether llama.cpp rotates neighbouring pairs in this architecture, so that
            the rows of q and k are stored reordered.
    """

    architecture: str
    interleaved: bool = False


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    Attributes:
        name: transformers' `model_type`.
        tensors: weight-name template -> the axis of each dimension.
        optional: templates that a checkpoint may lack (biases, an untied head).
        per_layer_config: config fields with one entry a layer; they follow the kept layers.
        per_layer_counts: config fields that count leading layers (0 .. n-1) of some kind.
        rotated: templates whose rows are rotated by position (q and k).
        modules: where masks act.
        config: names of the sizes in the config.
        gguf: how to write it, or none.
    """

    name: str
    tensors: Mapping[str, tuple[Dim, ...]]
    optional: frozenset[str] = frozenset()
    per_layer_config: tuple[str, ...] = ("layer_types",)
    per_layer_counts: tuple[str, ...] = ("max_window_layers",)
    rotated: frozenset[str] = frozenset(
        f"model.layers.{{layer}}.self_attn.{p}_proj.{kind}"
        for p in "qk"
        for kind in ("weight", "bias")
    )
    modules: Modules = dataclass_field(default_factory=Modules)
    config: ConfigKeys = dataclass_field(default_factory=ConfigKeys)
    gguf: Gguf | None = None


def decoder_tensors(
    *, attention_bias: bool = False, ffn_bias: bool = False, qk_norm: bool = False
) -> tuple[dict[str, tuple[Dim, ...]], frozenset[str]]:
    """The tensors of a gated pre-norm decoder, which most families share.

    Returns:
        The table, and which of its tensors a checkpoint may lack.
    """
    block = "model.layers.{layer}."
    tensors: dict[str, tuple[Dim, ...]] = {
        "model.embed_tokens.weight": ("vocab", "hidden"),
        block + "input_layernorm.weight": ("hidden",),
        block + "self_attn.q_proj.weight": ("query", "hidden"),
        block + "self_attn.k_proj.weight": ("key_value", "hidden"),
        block + "self_attn.v_proj.weight": ("key_value", "hidden"),
        block + "self_attn.o_proj.weight": ("hidden", "query"),
        block + "post_attention_layernorm.weight": ("hidden",),
        block + "mlp.gate_proj.weight": ("ffn", "hidden"),
        block + "mlp.up_proj.weight": ("ffn", "hidden"),
        block + "mlp.down_proj.weight": ("hidden", "ffn"),
        "model.norm.weight": ("hidden",),
        "lm_head.weight": ("vocab", "hidden"),
    }
    biases: dict[str, tuple[Dim, ...]] = {}
    if attention_bias:
        biases |= {
            block + "self_attn.q_proj.bias": ("query",),
            block + "self_attn.k_proj.bias": ("key_value",),
            block + "self_attn.v_proj.bias": ("key_value",),
            block + "self_attn.o_proj.bias": ("hidden",),
        }
    if ffn_bias:
        biases |= {
            block + "mlp.gate_proj.bias": ("ffn",),
            block + "mlp.up_proj.bias": ("ffn",),
            block + "mlp.down_proj.bias": ("hidden",),
        }
    if qk_norm:
        tensors |= {
            block + "self_attn.q_norm.weight": ("head_dim",),
            block + "self_attn.k_norm.weight": ("head_dim",),
        }
    return tensors | biases, frozenset(biases) | {"lm_head.weight"}
