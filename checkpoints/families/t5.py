"""T5 and T5 v1.1: relative positions in each stack's first block, plain or gated FFN.

transformers always calls the head tied; whether it is, shows in whether logits are scaled.
"""

from draftsmith.checkpoints.families.base import ConfigKeys, Family, HiddenScale, Stack, Tensors


def _attention(module: str, inner: str) -> Tensors:
    tensors: Tensors = {f"{module}.{p}.weight": (inner, "hidden") for p in "qkv"}
    return {**tensors, f"{module}.o.weight": ("hidden", inner)}


def _ffn(module: str, inner: str) -> Tensors:
    tensors: Tensors = {f"{module}.{w}.weight": (inner, "hidden") for w in ("wi", "wi_0", "wi_1")}
    return {**tensors, f"{module}.wo.weight": ("hidden", inner)}


_DECODER, _ENCODER = "decoder.block.{layer}.layer.", "encoder.block.{layer}.layer."
_TABLES = {
    _DECODER + "0.SelfAttention.relative_attention_bias.weight": ("buckets", "head"),
    _ENCODER + "0.SelfAttention.relative_attention_bias.weight": ("buckets", "encoder_head"),
}
_STACKS = (
    Stack(
        block="decoder.block.{layer}",
        inputs={
            "kv_heads": _DECODER + "0.SelfAttention.o",
            "cross_heads": _DECODER + "1.EncDecAttention.o",
            "ffn": _DECODER + "2.DenseReluDense.wo",
        },
        norms=(
            *(f"{_DECODER}{i}.layer_norm" for i in range(3)),
            "decoder.final_layer_norm",
        ),
        returns_more=True,
    ),
    Stack(
        block="encoder.block.{layer}",
        layers="encoder_layers",
        inputs={
            "encoder_heads": _ENCODER + "0.SelfAttention.o",
            "encoder_ffn": _ENCODER + "1.DenseReluDense.wo",
        },
        norms=(
            *(f"{_ENCODER}{i}.layer_norm" for i in range(2)),
            "encoder.final_layer_norm",
        ),
        returns_more=True,
    ),
)
_TENSORS: Tensors = {
    "shared.weight": ("vocab", "hidden"),
    "lm_head.weight": ("vocab", "hidden"),
    **_attention(_DECODER + "0.SelfAttention", "query"),
    **_attention(_DECODER + "1.EncDecAttention", "cross"),
    **_ffn(_DECODER + "2.DenseReluDense", "ffn"),
    **_attention(_ENCODER + "0.SelfAttention", "encoder_query"),
    **_ffn(_ENCODER + "1.DenseReluDense", "encoder_ffn"),
    **{f"{norm}.weight": ("hidden",) for stack in _STACKS for norm in stack.norms},
    **_TABLES,
}
FAMILY = Family(
    "t5",
    _TENSORS,
    optional=frozenset(
        {"lm_head.weight"} | {name for name in _TENSORS if "DenseReluDense.wi" in name}
    ),
    ignored=frozenset({_DECODER + "1.EncDecAttention.relative_attention_bias.weight"}),
    stacks=_STACKS,
    config=ConfigKeys(
        layers="num_decoder_layers",
        kv_heads=None,
        heads="num_heads",
        head_dim="d_kv",
        ffn="d_ff",
        hidden="d_model",
        context=None,
        encoder_layers="num_layers",
        encoder_heads="num_heads",
        encoder_ffn="d_ff",
        activation="dense_act_fn",
        dropout="dropout_rate",
        activation_dropout="dropout_rate",
        attention_dropout="dropout_rate",
    ),
    ties=(("kv_heads", "cross_heads", "encoder_heads"), ("ffn", "encoder_ffn")),
    same_in_all_layers=frozenset({"kv_heads", "encoder_heads"}),
    first_block=frozenset(_TABLES),
    cache_of_encoder=True,
    scales=(
        HiddenScale(
            power=-0.5,
            tensors=("decoder.final_layer_norm.weight",),
            flag="scale_decoder_outputs",
        ),
    ),
    tied="scale_decoder_outputs",
    tied_head_power=-0.5,
    auto="AutoModelForSeq2SeqLM",
)
