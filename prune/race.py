"""Which layers learn best? Every choice is distilled for a few steps, and the quickest is kept.

What a choice says before distillation is a poor guide to what distillation makes of it: of
SmolLM2's layers 0, 16, 24, 29 begin below 0, 1, 24, 29 in KL, and 0, 1, 2, 21 above both in
acceptance, yet 0, 1, 24, 29 come out best (docs/results.md). So the last word is had by what the
drafter is for: what it emits per round after some learning.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoints.families.base import Family
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceRow
from draftsmith.distill.evaluation import Costs, evaluate
from draftsmith.distill.train import distill
from draftsmith.errors import DraftsmithError
from draftsmith.prune.exchange import Parts
from draftsmith.recipes.schema import DistillSettings, PruneSettings

# Of its steps, those over which the learning rate rises.
_WARMUP_SHARE = 0.2


@dataclass(frozen=True)
class Entrant:
    """A choice that was raced.

    Attributes:
        by: what proposed it.
        parts: the layers, or halves of layers, that it keeps.
        emitted_per_round: of the drafter that it makes, on held-out traces, after the race's steps.
        top1: share of the target's tokens there that the drafter would have said.
    """

    by: str
    parts: Parts
    emitted_per_round: float
    top1: float


@dataclass(frozen=True)
class Track:
    """What all choices learn from and are judged on.

    Attributes:
        train: trace rows.
        validation: held-out greedy trace rows.
        settings: of the short distillation.
        seed: order of the rows.
        dtype: of the matrix products.
    """

    train: Sequence[TraceRow]
    validation: Sequence[TraceRow]
    settings: DistillSettings
    seed: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        train: Sequence[TraceRow],
        validation: Sequence[TraceRow],
        settings: PruneSettings,
        seed: int,
        dtype: torch.dtype,
    ) -> "Track | None":
        """A recipe's; None: no race is asked for.

        Raises:
            DraftsmithError: nothing is held out that could be judged on.
        """
        if not settings.race:
            return None
        judged = [
            row
            for row in validation
            if row.greedy and row.prompt_length < min(len(row.tokens), settings.max_length)
        ]
        if not judged:
            raise DraftsmithError(
                f"recipe.prune.race: {settings.race}: the traces hold out no greedy text with an "
                f"answer within max_length {settings.max_length} to judge by; raise "
                "trace.validation_share, or set prune.race: 0"
            )
        short = DistillSettings(
            steps=settings.race,
            warmup=int(_WARMUP_SHARE * settings.race),
            lr=settings.race_lr,
            batch=settings.batch,
            accumulate=settings.accumulate,
            max_length=settings.max_length,
            vocab_limit=settings.vocab_limit,
            # Which layers learn best is asked; embeddings and an encoder are the same for all.
            train="layers" if judged[0].source is None else "decoder",
            weight_decay=0.0,
            evaluate_every=settings.race,
            save_every=settings.race,
            zero=settings.zero,
        )
        return cls(train, judged, short, seed, dtype)

    def run(self, drafter: Any, family: Family) -> dict[str, float]:
        """What `evaluate` finds after the short distillation, in which the drafter is changed."""
        with tempfile.TemporaryDirectory() as folder:
            # Nothing is kept, its logs neither.
            state = Path(folder) / "state"
            distill(
                drafter,
                family,
                self.train,
                (),
                self.settings,
                seed=self.seed,
                state=state,
                dtype=self.dtype,
            )
        return evaluate(drafter, self.validation, self.settings, Costs(0.0))


def race(
    proposals: Mapping[str, Parts],
    cut: Callable[[Parts], Any],
    family: Family,
    track: Track,
) -> tuple[Entrant, ...]:
    """Distil every choice for a few steps; the best comes first.

    Args:
        proposals: name -> parts to keep. What several propose runs once.
        cut: the compact model of some parts, with weights of its own.
        family: its table.
        track: what they run on.
    """
    distinct: dict[Parts, str] = {}
    for by, parts in proposals.items():
        distinct.setdefault(parts, by)
    entrants = []
    for parts, by in distinct.items():
        found = track.run(cut(parts), family)
        entrants.append(Entrant(by, parts, found["emitted_per_round"], found["top1"]))
        say(
            f"race {len(entrants)} of {len(distinct)}: {', '.join(map(str, parts))} ({by}): "
            f"{found['emitted_per_round']:.3f} emitted/round"
        )
    return tuple(sorted(entrants, key=lambda e: (-e.emitted_per_round, -e.top1)))
