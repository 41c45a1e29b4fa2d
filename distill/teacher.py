"""The target in memory as a teacher: what it would have said, and what its layers read."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.slicing import Selection
from draftsmith.distill.batches import Batch
from draftsmith.distill.deepspeed_engine import cut_for_inference
from draftsmith.distill.head_loss import LiveTarget, Projection
from draftsmith.distill.losses import Signal
from draftsmith.distill.states import states_at_answers


@dataclass(frozen=True)
class Lesson:
    """What the target says of a batch.

    Attributes:
        signal: its distributions at the A answer positions.
        reads: what the drafter's second, third, … layer should read there, [A, H] each, H the
            drafter's width; empty without hidden matching.
    """

    signal: Signal
    reads: tuple[Tensor, ...] = ()


class Teacher:
    """A target that is read, never trained.

    Its head is whole in every process also where the rest is cut into parts.
    """

    def __init__(self, model: Any, *, kept: Selection | None = None, shard: bool = False) -> None:
        """Take a loaded target.

        Args:
            model: the target, on its device and in the dtype in which it computes.
            kept: what the drafter has of it, for hidden matching; none: without.
            shard: cut its weights into the parts of as many processes as were launched.
        """
        model.requires_grad_(False).eval()
        self.head, self._kept = Projection.of(model), kept
        self._body = model.base_model
        if shard:
            self.head = self.head.copied()
            self._body = cut_for_inference(self._body)

    @property
    def vocabulary(self) -> int:
        """Its logits."""
        return len(self.head.weight)

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Lesson:
        """Read a batch; no logits are made yet."""
        layers = () if self._kept is None else self._kept.layers[1:]
        hidden_AH, reads = states_at_answers(self._body, batch, layers)
        if self._kept is not None:
            columns = torch.tensor(self._kept.hidden, device=hidden_AH.device)
            reads = tuple(states_AH[:, columns] for states_AH in reads)
        return Lesson(LiveTarget(hidden_AH, self.head), reads)
