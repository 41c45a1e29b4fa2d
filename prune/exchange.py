"""Polishing a choice of layers: exchange a kept one for a cut one while that lowers the loss.

Or of halves, where attention and FFN are cut apart: 2 l is the attention of layer l, 2 l + 1 its
FFN, and kept ones alternate.

Gradients through sampled masks are noisy where few layers are open, and the loss between layer
sets is rugged (a drafter of layers 0, 1, 24, 29 of SmolLM2 starts at half the divergence of
0, 1, 25, 29). So masks propose, and a search over single exchanges, exact and cheap since only
kept layers are computed, disposes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from draftsmith.data.progress import Progress

Parts = tuple[int, ...]


@dataclass(frozen=True)
class Exchanged:
    """What the search came to.

    Attributes:
        proposed: the set that the masks chose.
        parts: the set that no single exchange improves, or that the rounds ended with.
        before: loss of `proposed`.
        after: loss of `parts`.
    """

    proposed: Parts
    parts: Parts
    before: float
    after: float


def exchange_parts(
    parts: Parts,
    count: int,
    loss: Callable[[Parts], float],
    rounds: int,
    *,
    halves: bool = False,
) -> Exchanged:
    """Make the best single exchange, again and again.

    Args:
        parts: kept at first, ascending.
        count: of all.
        loss: of the source with only some parts open.
        rounds: most exchanges.
        halves: whether they are halves, which must alternate.
    """
    best, best_loss = parts, loss(parts)
    before = best_loss
    tries = len(_neighbours(parts, count, halves))
    with Progress("exchange", rounds * tries, "sets") as progress:
        for _ in range(rounds):
            found, found_loss = best, best_loss
            for candidate in _neighbours(best, count, halves):
                if (value := loss(candidate)) < found_loss:
                    found, found_loss = candidate, value
                progress.update(1, note=f"best {', '.join(map(str, found))}: {found_loss:.2f}")
            if found == best:
                break
            best, best_loss = found, found_loss
    return Exchanged(parts, best, before, best_loss)


def _neighbours(parts: Parts, count: int, halves: bool) -> list[Parts]:
    cut = [part for part in range(count) if part not in parts]
    sets = [tuple(sorted({*parts} - {out} | {new})) for out in parts for new in cut]
    return [s for s in sets if not halves or all(p % 2 == i % 2 for i, p in enumerate(s))]
