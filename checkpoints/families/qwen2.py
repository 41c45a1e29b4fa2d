"""Qwen2 and Qwen2.5: biases on q, k and v."""

from draftsmith.checkpoints.families.base import PLAIN_GGUF, Family, Gguf, decoder_tensors

_TENSORS, _OPTIONAL = decoder_tensors(attention_bias=True)
FAMILY = Family(
    "qwen2",
    _TENSORS,
    _OPTIONAL,
    gguf=Gguf("qwen2", other_width=PLAIN_GGUF),
    # vLLM 0.32.
    derives_head_dim=frozenset({"vllm"}),
)
