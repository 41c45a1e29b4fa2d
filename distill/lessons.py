"""What each training step learns from: its batches, and what the target says of them."""

from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.distill.batches import Batch, BatchStream
from draftsmith.distill.blocks import Blocks
from draftsmith.distill.engine import Ranks
from draftsmith.distill.losses import Labels
from draftsmith.distill.rounds import OwnRounds
from draftsmith.distill.teacher import Lesson, Teacher
from draftsmith.recipes.schema import DistillSettings

# Tells the draws of on-policy steps from others of the same seed.
_OWN = 7


@dataclass(frozen=True)
class Lessons:
    """The micro-batches of any step; they depend on the seed, the step and the drafter alone.

    Attributes:
        stream: batches of traces.
        rounds: of the drafter.
        blocks: of a drafter of blocks, instead of rounds.
        settings: the recipe's `distill`.
        seed: of which steps are on-policy.
        device: of the drafter.
        teacher: the target; none: the traces say what it would.
    """

    stream: BatchStream
    rounds: OwnRounds
    settings: DistillSettings
    seed: int
    device: torch.device
    teacher: Teacher | None = None
    blocks: Blocks | None = None

    def of_step(self, step: int, ranks: Ranks) -> list[Batch]:
        """The micro-batches of a step that are this process's, weighted."""
        first, parts = step * self.settings.accumulate, self.settings.accumulate
        numbers = ranks.share(range(first, first + parts))
        return [self._batch(number, step) for number in numbers]

    def on(self, batch: Batch) -> Lesson:
        """What the target says of a batch."""
        if self.settings.loss == "sequence":
            return Lesson(Labels(batch.labels, self.settings.label_smoothing))
        return Lesson(batch.traces) if self.teacher is None else self.teacher(batch)

    def is_on_policy(self, step: int) -> bool:
        """Whether a step learns from the drafter's own rounds; the same in every process."""
        share, warmup = self.settings.on_policy, self.settings.on_policy_warmup
        if step < warmup:
            share *= step / warmup
        return bool(np.random.default_rng((self.seed, step, _OWN)).random() < share)

    def _batch(self, number: int, step: int) -> Batch:
        batch = self.stream[number].to(self.device)
        if self.blocks is not None:
            return self.blocks.of(batch, number, step / max(1, self.settings.steps - 1))
        if self.is_on_policy(step):
            return self.rounds.extend(batch)
        return self.rounds.weigh(batch) if self.rounds.decay < 1.0 else batch
