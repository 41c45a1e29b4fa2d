"""What each forward costs on this machine, and what speculation should then gain."""

import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from draftsmith.accept.cache import CachedModel, Source
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

    def round_seconds(self, lookahead: int, passes: float | None = None) -> float:
        """A draft and its verification.

        Args:
            lookahead: proposals at most.
            passes: of the drafter; None: one for each.
        """
        passes = lookahead if passes is None else passes
        return passes * self.draft + self.verify[lookahead]

    def speedup(self, load: "Load", lookahead: int) -> float:
        """Predicted tokens per second over those of the target alone.

        A prefill gives the first token of plain decoding, verifies the first draft and gives the
        first proposal, each for hardly more than the prompt alone.
        """
        later, first = load.rounds - load.prefills, load.prefills
        passes = lookahead * load.rounds if load.passes is None else load.passes
        alone = first * self.prefill_target + (load.steps - first) * self.ar
        together = (
            first * (self.prefill_target + self.prefill_drafter)
            + max(0.0, passes - first) * self.draft
            + later * self.verify[lookahead]
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
        passes: of the drafter; None: as many as the lookahead in each round.
    """

    prefills: int
    steps: float
    rounds: float
    full: float
    passes: float | None = None

    @classmethod
    def of(cls, counts: Sequence[RoundCounts], batch: int) -> "Load":
        """Of texts that are decoded in groups of `batch`, in order.

        Of expected rounds the largest of a group stands for the group, which is a little less
        than the expected largest.
        """
        groups = [counts[i : i + batch] for i in range(0, len(counts), batch)]
        known = all(c.passes is not None for c in counts)
        return cls(
            prefills=len(groups),
            steps=sum(max(c.emitted for c in group) for group in groups),
            rounds=sum(max(c.rounds for c in group) for group in groups),
            full=sum(max(c.full for c in group) for group in groups),
            passes=sum(max(c.passes or 0 for c in group) for group in groups) if known else None,
        )

    @property
    def passes_per_round(self) -> float | None:
        """Mean drafter passes of a round; None: as many as the lookahead."""
        return None if self.passes is None or not self.rounds else self.passes / self.rounds


def break_even_acceptance(emitted: float, proposed: float) -> float | None:
    """The acceptance rate (accepted / proposed) at which a round emits that many tokens.

    A round emits what was accepted and one more. None if even perfect acceptance falls short.

    Args:
        emitted: tokens of a round at which it costs what it saves.
        proposed: proposals of a round, on average; the lookahead where drafts are always full.
    """
    needed = max(0.0, emitted - 1)
    return needed / proposed if needed <= proposed and proposed else None


@torch.inference_mode()
def measure_latency(
    target: CachedModel,
    drafter: CachedModel | None,
    prompt: Sequence[int],
    answer: Sequence[int],
    lookaheads: Iterable[int],
    batch: int = 1,
    source: Source | None = None,
    block: int = 0,
    heads: Callable[[], object] | None = None,
) -> Latency:
    """Time every kind of forward in turn, with caches as full as in the middle of an answer.

    Args:
        target: the target.
        drafter: the drafter; None: one that takes no time.
        prompt: a typical prompt.
        answer: what the target answered.
        lookaheads: for which to time a verification.
        batch: rows in each forward.
        source: what an encoder reads; `prompt` is then its decoder's.
        block: masks in a draft of one pass; 0: it is drafted token by token.
        heads: makes a draft from states that the target leaves; `drafter` is then None.
    """
    half = list(answer[: max(1, len(answer) // 2)])
    widths = sorted(set(lookaheads))
    longest = max([*widths, 1]) + 1 + block
    watch = Stopwatch(target.device)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        watch.lap()
        work()
        times.setdefault(name, []).append(watch.lap())

    def room(model: CachedModel, kept_free: int) -> int:
        """Places that are left in a model's context."""
        free = sys.maxsize if model.context is None else model.context - model.length
        return max(1, free - kept_free)

    def feed(model: CachedModel, tokens: Sequence[int], keep: int, block: int = 0) -> None:
        model.feed_rows([tokens] * batch, keep=keep, block=block)

    def step(model: CachedModel, tokens: int, keep: int, block: int = 0) -> None:
        start = model.length
        feed(model, (half * tokens)[: min(tokens, room(model, 0))], keep, block)
        model.crop(start)

    def prefill(model: CachedModel) -> None:
        model.reset(batch, [] if source is None else [source] * batch)
        feed(model, prompt[: room(model, longest)], keep=1)

    def write(model: CachedModel) -> None:
        feed(model, half[: room(model, longest)], keep=1)

    def draft(drafter: CachedModel, tokens: int) -> None:
        step(drafter, tokens + block, keep=block or 1, block=block)

    # The first pass warms up and is not counted.
    for repeat in range(_REPEATS + 1):
        if repeat == 1:
            times.clear()
        timed("prefill_target", lambda: prefill(target))
        write(target)
        timed("ar", lambda: step(target, 1, keep=0))
        if drafter is not None:
            timed("prefill_drafter", lambda: prefill(drafter))
            write(drafter)
            timed("draft", lambda: draft(drafter, 1))
            timed("draft_after_full", lambda: draft(drafter, 1 if block else 2))
        if heads is not None:
            # There is nothing to read; a first round without a draft is counted as with one.
            for name in ("prefill_drafter", "draft", "draft_after_full"):
                timed(name, heads)
        for k in widths:
            timed(f"verify {k}", lambda k=k: step(target, k + 1, keep=0))  # type: ignore[misc]
    median = {name: statistics.median(values) for name, values in times.items()}
    return Latency(
        ar=median["ar"],
        draft=median.get("draft", 0.0),
        draft_after_full=median.get("draft_after_full", 0.0),
        verify={k: median[f"verify {k}"] for k in widths},
        prefill_target=median["prefill_target"],
        prefill_drafter=median.get("prefill_drafter", 0.0),
    )
