"""Training of parallel heads on a frozen target: each learns the token that is further ahead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.accept.heads import ParallelHeads
from draftsmith.checkpoints.devices import autocast
from draftsmith.data.progress import Progress
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream
from draftsmith.distill.engine import freeze_all_but
from draftsmith.distill.losses import Labels, Signal
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.train import loss_head, mean_over_step, training_engine
from draftsmith.recipes.schema import DistillSettings


def ahead(batch: Batch, distance: int) -> Tensor:
    """Places among the A answer positions so many before another of their own text, rising, [A'].

    Texts stand in the rows of a batch, of which the last token predicts nothing: positions of
    neighbouring texts are never as near as those of one.
    """
    positions = batch.positions
    (places,) = (positions[distance:] - positions[:-distance] == distance).nonzero(as_tuple=True)
    return places


class HeadsStudent(nn.Module):
    """A frozen target, heads on it and their loss in one module, as engines want it.

    Attributes:
        model: the target.
        heads: what learns.
        loss: the target's own projection with the loss.
    """

    def __init__(
        self, model: Any, heads: ParallelHeads, settings: DistillSettings, dtype: torch.dtype
    ) -> None:
        """Join them; nothing of the target learns from now on.

        Args:
            model: the target.
            heads: on its device.
            settings: which loss.
            dtype: of matrix products.
        """
        super().__init__()
        freeze_all_but(model, ())
        self.model, self.heads, self._dtype = model.eval(), heads, dtype
        self._settings = settings
        self.loss = loss_head(model, (), settings)

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the loss over `pairs(batch)`."""
        # Within the module: DeepSpeed switches off what stands around it.
        with autocast(self.model, self._dtype):
            with torch.no_grad():
                hidden_AH = hidden_at_answers(self.model, batch)
            total = hidden_AH.new_zeros(())
            for distance, states_AH in enumerate(self.heads(hidden_AH).unbind(-2), start=1):
                places = ahead(batch, distance)
                signal = self._signal(batch, places + distance)
                total = total + self.loss(states_AH[places], signal)
            return total

    def _signal(self, batch: Batch, places: Tensor) -> Signal:
        """What the traces say at some of the answer positions."""
        if self._settings.loss == "sequence":
            return Labels(batch.labels[places], self._settings.label_smoothing)
        return batch.traces[places]

    def pairs(self, batch: Batch) -> int:
        """Pairs of a head and a position that learn from a batch."""
        return sum(len(ahead(batch, 1 + head)) for head in range(len(self.heads.heads)))


def train_heads(
    model: Any,
    heads: ParallelHeads,
    rows: Sequence[TraceRow],
    settings: DistillSettings,
    *,
    seed: int,
    state: Path,
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    """Train `heads` in place until the last step, resuming from `state`.

    Args:
        model: the target, which stays as it is.
        heads: new ones; all head-position pairs of a step count alike.
        rows: traces of the target.
        settings: steps, batch, accumulate, max_length, loss, lr, …, as for `distill`.
        seed: order of the rows.
        state: folder of the saves.
        dtype: of the matrix products; weights and optimizer stay as they are.

    Returns:
        The mean loss of every step.
    """
    stream = BatchStream(rows, settings.batch, settings.max_length, seed)
    student = HeadsStudent(model, heads.to(model.device).train(), settings, dtype)
    engine = training_engine(student, heads.parameters(), settings, state)
    losses: list[float] = engine.load().get("losses", [])
    with Progress("heads", settings.steps, "steps", done=engine.steps_done) as progress:
        while engine.steps_done < settings.steps:
            first = engine.steps_done * settings.accumulate
            numbers = engine.ranks.share(range(first, first + settings.accumulate))
            micro = [stream[number].to(model.device) for number in numbers]
            pairs, mean = engine.ranks.total(sum(map(student.pairs, micro))), 0.0
            for batch in micro:
                loss = mean_over_step(engine(batch), pairs)
                engine.backward(loss)
                mean += float(loss.detach())
            engine.step()
            losses.append(engine.ranks.total(mean))
            if engine.steps_done % settings.save_every == 0 or engine.steps_done == settings.steps:
                engine.save({"losses": losses})
            progress.update(1, note=f"loss {losses[-1]:.3f}")
    engine.finish()
    heads.eval()
    return losses
