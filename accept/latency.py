"""What each forward costs on this machine, and what speculation should then gain."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Stopwatch
from draftsmith.accept.replay import RoundCounts

_REPEATS = 7


@dataclass(frozen=True)
class Latency:
    """Seconds of one forward, medians of interleaved runs after a warm-up.

    Attributes:
        ar: one plain target step.
        draft: one drafter step.
        draft_after_full: a drafter step that also takes in the last proposal, which it has not
            seen after full acceptance.
        verify: lookahead -> a target pass over lookahead + 1 positions.
        prefill_target: the target's pass over a prompt.
        prefill_drafter: the drafter's.
    """

    ar: float
    draft: float
    draft_after_full: float
    verify: dict[int, float]
    prefill_target: float
    prefill_drafter: float

    def round_seconds(self, lookahead: int) -> float:
        """A draft of `lookahead` tokens and its verification."""
        return lookahead * self.draft + self.verify[lookahead]

    def break_even(self, lookahead: int) -> float:
        """Emitted per round above which drafting pays."""
        return self.round_seconds(lookahead) / self.ar

    def speedup(self, counts: RoundCounts, texts: int) -> float:
        """Predicted tokens per second over those of the target alone.

        Args:
            counts: rounds over all texts.
            texts: how many, each with its prefill.
        """
        alone = texts * self.prefill_target + counts.emitted * self.ar
        together = (
            texts * (self.prefill_target + self.prefill_drafter)
            + counts.rounds * self.round_seconds(counts.lookahead)
            + counts.full * (self.draft_after_full - self.draft)
        )
        return alone / together


def break_even_acceptance(emitted: float, lookahead: int) -> float | None:
    """The acceptance rate (accepted / proposed) at which a round emits that many tokens.

    A round emits what was accepted and one more. None if even perfect acceptance falls short.
    """
    rate = max(0.0, (emitted - 1) / lookahead)
    return rate if rate <= 1 else None


@torch.inference_mode()
def measure_latency(
    target: CachedModel,
    drafter: CachedModel,
    prompt: Sequence[int],
    answer: Sequence[int],
    lookaheads: Iterable[int],
) -> Latency:
    """Time every kind of forward in turn, with caches as full as in the middle of an answer.

    Args:
        target: the target.
        drafter: the drafter.
        prompt: a typical prompt.
        answer: what the target answered.
        lookaheads: for which to time a verification.
    """
    written = list(answer[: max(1, len(answer) // 2)])
    widths = sorted(set(lookaheads))
    watch = Stopwatch(target.device)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        watch.lap()
        work()
        times.setdefault(name, []).append(watch.lap())

    def step(model: CachedModel, tokens: int) -> None:
        start = model.length
        model.feed_list((written * tokens)[:tokens], keep=1 if model is drafter else 0)
        model.crop(start)

    def prefill(model: CachedModel) -> None:
        model.reset()
        model.feed_list(prompt, keep=1)

    # The first pass warms up and is not counted.
    for repeat in range(_REPEATS + 1):
        if repeat == 1:
            times.clear()
        timed("prefill_target", lambda: prefill(target))
        timed("prefill_drafter", lambda: prefill(drafter))
        target.feed_list(written, keep=1)
        drafter.feed_list(written, keep=1)
        timed("ar", lambda: step(target, 1))
        timed("draft", lambda: step(drafter, 1))
        timed("draft_after_full", lambda: step(drafter, 2))
        for k in widths:
            timed(f"verify {k}", lambda k=k: step(target, k + 1))  # type: ignore[misc]
    median = {name: statistics.median(values) for name, values in times.items()}
    return Latency(
        ar=median["ar"],
        draft=median["draft"],
        draft_after_full=median["draft_after_full"],
        verify={k: median[f"verify {k}"] for k in widths},
        prefill_target=median["prefill_target"],
        prefill_drafter=median["prefill_drafter"],
    )
