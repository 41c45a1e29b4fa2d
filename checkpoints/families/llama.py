"""Llama 1, 2, 3.x and models of the same build (SmolLM2, TinyLlama, …)."""

from draftsmith.checkpoints.families.base import PLAIN_GGUF, Family, decoder_tensors

_TENSORS, _OPTIONAL = decoder_tensors(attention_bias=True, output_bias=True, ffn_bias=True)
FAMILY = Family(
    "llama",
    _TENSORS,
    _OPTIONAL,
    hidden_of_heads=True,
    gguf=PLAIN_GGUF,
)
