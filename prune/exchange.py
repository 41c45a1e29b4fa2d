"""Polishing a choice of layers: exchange a kept one for a cut one while that lowers the loss.

Gradients through sampled masks are noisy where few layers are open, and the loss between layer
sets is rugged (a drafter of layers 0, 1, 24, 29 of SmolLM2 starts at half the divergence of
0, 1, 25, 29). So masks propose, and a search over single exchanges, exact and cheap since only
kept layers are computed, disposes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.data.progress import Progress

Layers = tuple[int, ...]


@dataclass(frozen=True)
class Exchanged:
    """What the search came to.

    Attributes:
        layers: the set that no single exchange improves, or that the rounds ended with.
        before: loss of the set that the masks chose.
        after: loss of `layers`.
    """

    layers: Layers
    before: float
    after: float


def exchange_layers(
    layers: Layers, count: int, loss: Callable[[Layers], float], rounds: int
) -> Exchanged:
    """Make the best single exchange, again and again.

    Args:
        layers: kept at first, ascending.
        count: layers of the source.
        loss: of the source with only some layers open.
        rounds: most exchanges.
    """
    best, best_loss = layers, loss(layers)
    before = best_loss
    tries = len(layers) * (count - len(layers))
    with Progress("exchange", rounds * tries, "sets") as progress:
        for _ in range(rounds):
            found, found_loss = best, best_loss
            for candidate in _neighbours(best, count):
                if (value := loss(candidate)) < found_loss:
                    found, found_loss = candidate, value
                progress.update(1, note=f"best {', '.join(map(str, found))}: {found_loss:.2f}")
            if found == best:
                break
            best, best_loss = found, found_loss
    return Exchanged(best, before, best_loss)


def _neighbours(layers: Layers, count: int) -> list[Layers]:
    cut = [layer for layer in range(count) if layer not in layers]
    return [tuple(sorted({*layers} - {out} | {new})) for out in layers for new in cut]
