"""Qwen3: queries and keys are normalised per head."""

from draftsmith.checkpoints.families.base import Family, Gguf, decoder_tensors

_TENSORS, _OPTIONAL = decoder_tensors(attention_bias=True, output_bias=True, qk_norm=True)
FAMILY = Family("qwen3", _TENSORS, _OPTIONAL, gguf=Gguf("qwen3", biases=False))
