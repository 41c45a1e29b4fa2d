"""onnxruntime, plain: a decoder whose KV cache goes in and comes out."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

VERSION = f"onnxruntime {onnxruntime.__version__}"
# Difference of logits, relative to their scale, that another order of adding up makes.
_ROUNDING = 1e-4


class Decoder:
    """A model that goes through a text; what it has read stays in its cache."""

    def __init__(self, path: str) -> None:
        """Load the `model.onnx` of a folder."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            str(Path(path) / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._outputs = [output.name for output in self._session.get_outputs()]
        self.forget()

    def forget(self) -> None:
        """Start a new text."""
        self._length = 0
        self._cache = {
            cache.name: np.zeros((1, cache.shape[1], 0, cache.shape[3]), np.float32)
            for cache in self._session.get_inputs()
            if cache.name.startswith("past_key_values.")
        }

    def read(self, ids: list[int]) -> NDArray[np.float32]:
        """Logits [T, V] after each of some more tokens."""
        self._length += len(ids)
        feed = {
            "input_ids": np.array([ids], np.int64),
            "attention_mask": np.ones((1, self._length), np.int64),
        }
        found = self._session.run(self._outputs, feed | self._cache)
        outputs = dict(zip(self._outputs, found, strict=True))
        logits: NDArray[np.float32] = outputs.pop("logits")[0]
        self._cache = {
            name.replace("present.", "past_key_values."): cache for name, cache in outputs.items()
        }
        return logits


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What a model says.

    Raises:
        RuntimeError: it says something else when the text is read token by token.
    """
    decoder, ids = Decoder(path), questions["inputs"]["input_ids"][0]
    # Packed weights: not every CPU multiplies one row with them as it does many.
    allowed = max(_ROUNDING, questions["tolerance"])
    logits = decoder.read(ids)
    decoder.forget()
    stepped = np.concatenate([decoder.read([token]) for token in ids])
    difference, scale = np.abs(stepped - logits).max(), np.abs(logits).max()
    if not difference <= allowed * scale:
        raise RuntimeError(
            f"onnxruntime: through the cache, logits differ by {difference:.3g} (largest logit "
            f"{scale:.3g})"
        )
    decoder.forget()
    greedy = _greedy(decoder, questions["prompt"], questions["new_tokens"])
    return {"logits": logits, "greedy": greedy}


def _greedy(decoder: Decoder, prompt: list[int], new_tokens: int) -> list[int]:
    tokens = [int(decoder.read(prompt)[-1].argmax())]
    while len(tokens) < new_tokens:
        tokens.append(int(decoder.read(tokens[-1:])[-1].argmax()))
    return tokens
