"""An encoder that doesn't change need hear each sound only once.

Half a minute of sound costs it more than all that a short decoder then does with its states.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.data.processes import launched_processes

# Of states; sounds that come later are heard again each time.
MOST_BYTES = 2 << 30


class Memory:
    """The states of the sounds that were heard."""

    def __init__(self, hear: Callable[..., Any], most_bytes: int) -> None:
        """Remember what `hear` gives for `input_features`, up to so many bytes."""
        self._hear, self._room = hear, most_bytes
        self._states: dict[bytes, Tensor] = {}

    def __call__(self, **inputs: Any) -> Any:
        """As the encoder; what is no sound passes through."""
        from transformers.modeling_outputs import BaseModelOutput

        if "input_features" not in inputs:
            return self._hear(**inputs)
        states = [self._of(features) for features in inputs["input_features"]]
        return BaseModelOutput(last_hidden_state=torch.stack(states))

    def _of(self, features_MF: Tensor) -> Tensor:
        """States [S, H] of one sound, heard alone: a resumed run has it in another batch."""
        values = features_MF.detach().cpu().float().numpy()
        key = hashlib.blake2b(values.tobytes(), digest_size=16).digest()
        if (known := self._states.get(key)) is not None:
            return known
        # Whoever asks, the states may be used where gradients are made.
        with torch.inference_mode(False), torch.no_grad():
            heard = self._hear(input_features=features_MF[None].clone()).last_hidden_state[0]
        states: Tensor = heard
        if states.nbytes <= self._room:
            self._room -= states.nbytes
            self._states[key] = states
        return states


@contextmanager
def hearing_once(model: Any, most_bytes: int = MOST_BYTES) -> Iterator[None]:
    """Within, an encoder whose parameters are all frozen hears each sound once.

    Nothing else may act on it. Among many processes it hears as ever: they may gather its weights
    together, and each would have heard others.

    Args:
        model: of any kind; one without an encoder, or whose encoder learns, is left as it is.
        most_bytes: of states that are kept.
    """
    encoder = _frozen_encoder(model)
    if encoder is None or launched_processes() > 1:
        yield
        return
    encoder.forward = Memory(encoder.forward, most_bytes)
    try:
        yield
    finally:
        del encoder.forward


def set_training(model: Any, on: bool) -> None:
    """Put a model into train or eval mode, but never an encoder that doesn't learn into the former.

    It is to give the states that it will give when drafting, without dropout.
    """
    model.train(on)
    if (encoder := _frozen_encoder(model)) is not None:
        encoder.eval()


def _frozen_encoder(model: Any) -> nn.Module | None:
    if not model.config.is_encoder_decoder:
        return None
    encoder: nn.Module = model.get_encoder()
    return None if any(p.requires_grad for p in encoder.parameters()) else encoder
