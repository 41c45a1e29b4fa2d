"""Mistral; GGUF has no name of its own for it and stores it as llama."""

from draftsmith.checkpoints.families.base import PLAIN_GGUF, Family, decoder_tensors

_TENSORS, _OPTIONAL = decoder_tensors()
FAMILY = Family("mistral", _TENSORS, _OPTIONAL, gguf=PLAIN_GGUF)
