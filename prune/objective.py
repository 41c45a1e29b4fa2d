"""What masks minimise: the recipe's loss of the masked source on some text."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch
from draftsmith.distill.head_loss import HeadLoss, LossHead
from draftsmith.distill.losses import Loss, Traces, cross_entropy, forward_kl, total_variation
from draftsmith.distill.teacher import Lesson, Teacher
from draftsmith.distill.train import Student
from draftsmith.prune.masks import Masks, applied
from draftsmith.recipes.schema import PruneSettings

_LOSSES: dict[str, Loss] = {
    "kd": forward_kl,
    "acceptance": total_variation,
    "ce": cross_entropy,
}


@dataclass(frozen=True)
class Objective:
    """The loss of the source under masks.

    Attributes:
        student: the source and its head with the loss.
        family: its table.
        source: its shape.
        labels: learn the tokens of the text, and not the target's distributions.
        teacher: the target in memory; none: traces say what it would.
    """

    student: Student
    family: Family
    source: Shape
    labels: bool = False
    teacher: Teacher | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        family: Family,
        source: Shape,
        rows: Sequence[TraceRow],
        settings: PruneSettings,
        dtype: torch.dtype = torch.float32,
        teacher: Teacher | None = None,
    ) -> "Objective":
        """A recipe's; by now it is known what learns. Arguments as for `learn_masks`."""
        ids = len(model.get_output_embeddings().weight)
        shared = None if teacher is None else teacher.vocabulary
        loss, limit = _LOSSES[settings.objective], settings.vocab_limit
        head = LossHead.of(model, HeadLoss.over_commonest(loss, rows, ids, limit, shared))
        student = Student(model, head, dtype)
        return cls(student, family, source, settings.objective == "ce", teacher)

    @property
    def device(self) -> torch.device:
        """Of the source."""
        device: torch.device = self.student.model.device
        return device

    def acting(self, masks: Masks) -> AbstractContextManager[None]:
        """Within it masks act on the source.

        A backward pass belongs inside as well: activations that are computed again must be masked
        as they were. The target is asked outside, for it may be the source itself.
        """
        return applied(self.student.model, self.family, self.source, masks)

    def lesson(self, batch: Batch) -> Lesson:
        """What a batch teaches."""
        if self.labels:
            return Lesson(Traces.of_labels(batch.labels))
        return Lesson(batch.traces) if self.teacher is None else self.teacher(batch)

    @torch.no_grad()
    def under(self, masks: Masks, batches: Sequence[Batch]) -> float:
        """Mean loss of a token of some batches under masks."""
        total = 0.0
        for batch in batches:
            lesson = self.lesson(batch)
            with self.acting(masks):
                total += float(self.student(batch, lesson))
        return total / max(1, sum(batch.tokens for batch in batches))
