"""From logits to the distribution that is really sampled from, for target and drafter alike."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from draftsmith.errors import RequestError

# Below this, temperature is greedy: the likeliest token has all of the mass in any precision.
_COLD = 1e-5


@dataclass(frozen=True)
class Warping:
    """How a token is drawn.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: keep so many of the likeliest tokens.
        top_p: keep the likeliest tokens that hold this mass together.
        min_p: keep tokens with at least this share of the likeliest one's probability.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        """Refuse what is no distribution.

        Raises:
            RequestError: naming the setting and what is legal.
        """
        for name, legal in (
            ("temperature", 0.0 <= self.temperature < float("inf")),
            ("top_k", self.top_k is None or self.top_k >= 1),
            ("top_p", self.top_p is None or 0.0 < self.top_p <= 1.0),
            ("min_p", self.min_p is None or 0.0 <= self.min_p <= 1.0),
        ):
            if not legal:
                raise RequestError(f"{name}: {getattr(self, name)} is out of range; see --help")

    @property
    def greedy(self) -> bool:
        """Whether one token has all of the mass."""
        return self.temperature < _COLD or self.top_k == 1

    def probabilities(self, logits_NV: Tensor) -> Tensor:
        """The warped distribution [N, V] in float32.

        Args:
            logits_NV: -inf at ids that must not be drawn.
        """
        if self.greedy:
            choices = logits_NV.argmax(-1, keepdim=True)
            one_hot = torch.zeros_like(logits_NV, dtype=torch.float32)
            return one_hot.scatter_(-1, choices, 1.0)
        # Shifted first, so that a low temperature can't overflow.
        scores = logits_NV.float() - logits_NV.float().amax(-1, keepdim=True)
        for processor in self._processors:
            scores = processor(None, scores)
        return scores.softmax(-1)

    @cached_property
    def _processors(self) -> list[Any]:
        """Transformers' own, in the order of its generate()."""
        from transformers import (
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        found: list[Any] = []
        if self.temperature != 1.0:
            found.append(TemperatureLogitsWarper(self.temperature))
        if self.top_k is not None:
            found.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1.0:
            found.append(TopPLogitsWarper(self.top_p))
        if self.min_p is not None:
            found.append(MinPLogitsWarper(self.min_p))
        return found


def draw(probabilities_NV: Tensor, generator: torch.Generator) -> Tensor:
    """One token of each distribution, [N].

    By the inverse of the cumulative sum, in float64: torch.multinomial is slow over large
    vocabularies on a CPU, and float32 sums would reach tokens whose probability is 0.
    """
    cumulative = probabilities_NV.double().cumsum(-1)
    u = torch.rand(
        (len(cumulative), 1), generator=generator, device=generator.device, dtype=torch.float64
    ).to(cumulative.device)
    # The first token whose sum passes u has mass of its own.
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True).squeeze(-1)
