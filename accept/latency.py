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
        prefill_target: the target's pass over a prompt, which gives the first token too.
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

    def speedup(self, load: "Load", lookahead: int) -> float:
        """Predicted tokens per second over those of the target alone.

        A prefill gives the first token of plain decoding, verifies the first draft and gives the
        first proposal, each for hardly more than the prompt alone.
        """
        later, first = load.rounds - load.prefills, load.prefills
        alone = first * self.prefill_target + (load.steps - first) * self.ar
        together = (
            first * (self.prefill_target + self.prefill_drafter)
            + first * (lookahead - 1) * self.draft
            + later * self.round_seconds(lookahead)
            + load.full * (self.draft_after_full - self.draft)
        )
        return alone / together if together else 1.0


@dataclass(frozen=True)
class Load:
    """Work on a set of texts, as the machine sees it: a batch goes on until its last row ends.

    Attributes:
        prefills: batches.
        steps: plain decoding steps.
        rounds: rounds of speculative decoding.
        full: of which all proposals were kept, so that the drafter takes in one position more.
    """

    prefills: int
    steps: float
    rounds: float
    full: float

    @classmethod
    def of(cls, counts: Sequence[RoundCounts], batch: int) -> "Load":
        """Of texts that are decoded in groups of `batch`, in order.

        Of expected rounds the largest of a group stands for the group, which is a little less
        than the expected largest.
        """
        groups = [counts[i : i + batch] for i in range(0, len(counts), batch)]
        return cls(
            prefills=len(groups),
            steps=sum(max(c.emitted for c in group) for group in groups),
            rounds=sum(max(c.rounds for c in group) for group in groups),
            full=sum(max(c.full for c in group) for group in groups),
        )


def break_even_acceptance(emitted: float, lookahead: int) -> float | None:
    """The acceptance rate (accepted / proposed) at which a round emits that many tokens.

    A round emits what was accepted and one more. None if even perfect acceptance falls short.
    """
    rate = max(0.0, (emitted - 1) / lookahead)
    return rate if rate <= 1 else None


@torch.inference_mode()
def measure_latency(
    target: CachedModel,
    drafter: CachedModel | None,
    prompt: Sequence[int],
    answer: Sequence[int],
    lookaheads: Iterable[int],
    batch: int = 1,
) -> Latency:
    """Time every kind of forward in turn, with caches as full as in the middle of an answer.

    Args:
        target: the target.
        drafter: the drafter; None: one that takes no time.
        prompt: a typical prompt.
        answer: what the target answered.
        lookaheads: for which to time a verification.
        batch: rows in each forward.
    """
    written = list(answer[: max(1, len(answer) // 2)])
    widths = sorted(set(lookaheads))
    watch = Stopwatch(target.device)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        watch.lap()
        work()
        times.setdefault(name, []).append(watch.lap())

    def feed(model: CachedModel, tokens: Sequence[int], keep: int) -> None:
        model.feed_rows([tokens] * batch, keep=keep)

    def step(model: CachedModel, tokens: int) -> None:
        start = model.length
        feed(model, (written * tokens)[:tokens], keep=1 if model is drafter else 0)
        model.crop(start)

    def prefill(model: CachedModel) -> None:
        model.reset(batch)
        feed(model, prompt, keep=1)

    # The first pass warms up and is not counted.
    for repeat in range(_REPEATS + 1):
        if repeat == 1:
            times.clear()
        timed("prefill_target", lambda: prefill(target))
        feed(target, written, keep=1)
        timed("ar", lambda: step(target, 1))
        if drafter is not None:
            timed("prefill_drafter", lambda: prefill(drafter))
            feed(drafter, written, keep=1)
            timed("draft", lambda: step(drafter, 1))
            timed("draft_after_full", lambda: step(drafter, 2))
        for k in widths:
            timed(f"verify {k}", lambda k=k: step(target, k + 1))  # type: ignore[misc]
    median = {name: statistics.median(values) for name, values in times.items()}
    return Latency(
        ar=median["ar"],
        draft=median.get("draft", 0.0),
        draft_after_full=median.get("draft_after_full", 0.0),
        verify={k: median[f"verify {k}"] for k in widths},
        prefill_target=median["prefill_target"],
        prefill_drafter=median.get("prefill_drafter", 0.0),
    )
