"""Polishing a choice of layers: exchange a kept one for a cut one while that lowers the loss.

Or of halves, where attention and FFN are cut apart: 2 l is the attention of layer l, 2 l + 1 its
FFN, and kept ones alternate.

Gradients through sampled masks are noisy where few layers are open, and the loss between layer
sets is rugged (a drafter of layers 0, 1, 24, 29 of SmolLM2 starts at half the divergence of
0, 1, 25, 29). So masks propose, and a search over single exchanges, exact and cheap since only
kept layers are computed, disposes. It ends where no single exchange helps, which may be far from
the best: cheap choices are proposed beside the masks', and the best of all is where it begins.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftsmith.data.progress import Progress

Parts = tuple[int, ...]
# Sets beside the best that are told of.
RUNNERS_UP = 3


@dataclass(frozen=True)
class Exchanged:
    """What the search came to.

    Attributes:
        by: what proposed the set that it began with.
        proposed: that set.
        parts: the set that no single exchange improves, or that the rounds ended with.
        before: loss of `proposed`.
        after: loss of `parts`.
        runners_up: the sets with the lowest losses of all others that were tried, best first.
    """

    by: str
    proposed: Parts
    parts: Parts
    before: float
    after: float
    runners_up: tuple[Parts, ...] = ()


def exchange_parts(
    proposals: Mapping[str, Parts],
    count: int,
    loss: Callable[[Parts], float],
    rounds: int,
    *,
    halves: bool = False,
) -> Exchanged:
    """From the best proposal, make the best single exchange, again and again.

    Args:
        proposals: name -> parts to keep, ascending.
        count: of all.
        loss: of the source with only some parts open.
        rounds: most exchanges.
        halves: whether they are halves, which must alternate.
    """
    losses = {parts: loss(parts) for parts in proposals.values()}
    by = min(proposals, key=lambda name: losses[proposals[name]])
    proposed = best = proposals[by]
    tries = len(_neighbours(best, count, halves))
    with Progress("exchange", rounds * tries, "sets") as progress:
        for _ in range(rounds):
            found = best
            for candidate in _neighbours(best, count, halves):
                if candidate not in losses:
                    losses[candidate] = loss(candidate)
                if losses[candidate] < losses[found]:
                    found = candidate
                progress.update(1, note=f"best {', '.join(map(str, found))}: {losses[found]:.2f}")
            if found == best:
                break
            best = found
    others = sorted(losses.keys() - {best}, key=lambda parts: (losses[parts], parts))
    return Exchanged(by, proposed, best, losses[proposed], losses[best], tuple(others[:RUNNERS_UP]))


def _neighbours(parts: Parts, count: int, halves: bool) -> list[Parts]:
    cut = [part for part in range(count) if part not in parts]
    sets = [tuple(sorted({*parts} - {out} | {new})) for out in parts for new in cut]
    return [s for s in sets if not halves or all(p % 2 == i % 2 for i, p in enumerate(s))]
