"""Gemma 3 text: norms around both halves of a block, gains learned less one, scaled embedding."""

from draftsmith.checkpoints.families.base import (
    ConfigKeys,
    Family,
    HiddenScale,
    Stack,
    decoder_tensors,
)

_TENSORS, _OPTIONAL = decoder_tensors(attention_bias=True, output_bias=True, qk_norm=True)
_BLOCK = "model.layers.{layer}."
_NORMS = tuple(
    f"model.layers.{{layer}}.{name}_layernorm" for name in ("pre_feedforward", "post_feedforward")
)
FAMILY = Family(
    "gemma3_text",
    _TENSORS | {f"{norm}.weight": ("hidden",) for norm in _NORMS},
    _OPTIONAL,
    stacks=(
        Stack(
            norms=Stack.norms + _NORMS,
            additions=(
                _BLOCK + "post_attention_layernorm",
                _BLOCK + "post_feedforward_layernorm",
            ),
            ffn_part=("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        ),
    ),
    config=ConfigKeys(activation="hidden_activation"),
    hidden_of_heads=True,
    scales=(
        HiddenScale(
            power=0.5,
            tensors=("model.embed_tokens.weight",),
            tied=("model.norm.weight",),
            offset=1.0,
        ),
    ),
)
