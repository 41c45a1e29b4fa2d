"""Learning which parts of the source to keep, so that the rest still speaks like the target."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.devices import autocast
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.shape import Shape, changed_axes
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.progress import Progress, say
from draftsmith.data.seeds import derived_seed
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream, collate
from draftsmith.distill.engine import Engine, TorchEngine, freeze_all_but
from draftsmith.distill.head_loss import HeadLoss, LossHead
from draftsmith.distill.losses import (
    Loss,
    Traces,
    cross_entropy,
    forward_kl,
    total_variation,
)
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.train import mean_over_step, recompute_activations
from draftsmith.errors import DraftsmithError
from draftsmith.prune.exchange import Exchanged, Layers, exchange_layers
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks, Masks, applied, hard_masks
from draftsmith.recipes.schema import PruneSettings

# A count that is off by less than this, or this share of it, is a matter of rounding.
_CONVERGED, _CONVERGED_SHARE = 0.5, 0.02
# Rows on which sets of layers are compared.
_EXCHANGE_ROWS = 12
_OBJECTIVES: dict[str, Loss] = {
    "kd": forward_kl,
    "acceptance": total_variation,
    "ce": cross_entropy,
}


@dataclass(frozen=True)
class Pruning:
    """What the masks came to.

    Attributes:
        selection: what is kept.
        expected: axis -> expected count when training ended (mean over layers).
        history: per step: loss, and the expected count of each axis.
        exchanged: what exchanging layers changed, if it was asked for.
    """

    selection: Selection
    expected: dict[str, float]
    history: list[dict[str, float]]
    exchanged: Exchanged | None = None


@dataclass(frozen=True)
class MaskedLoss:
    """The recipe's objective for the masked source, on the target's texts.

    Attributes:
        labels: learn the tokens of the text, and not the distributions of its traces.
    """

    model: Any
    family: Family
    source: Shape
    head: LossHead
    dtype: torch.dtype
    labels: bool = False

    def acting(self, masks: Masks) -> AbstractContextManager[None]:
        """Within it masks act on the source.

        A backward pass belongs inside as well: activations that are computed again must be masked
        as they were.
        """
        return applied(self.model, self.family, self.source, masks)

    def __call__(self, batch: Batch) -> Tensor:
        """Sum over the batch's answer tokens."""
        with autocast(self.model, self.dtype):
            hidden_AH = hidden_at_answers(self.model, batch)
            signal = Traces.of_labels(batch.labels) if self.labels else batch.traces
            loss: Tensor = self.head(hidden_AH, signal)
            return loss


def masked_loss(
    model: Any,
    family: Family,
    source: Shape,
    rows: Sequence[TraceRow],
    settings: PruneSettings,
    dtype: torch.dtype = torch.float32,
) -> MaskedLoss:
    """The objective of a recipe for a frozen source; arguments as for `learn_masks`."""
    ids, objective = len(model.get_output_embeddings().weight), settings.objective
    head_loss = HeadLoss.over_commonest(_OBJECTIVES[objective], rows, ids, settings.vocab_limit)
    head = LossHead.of(model, head_loss)
    return MaskedLoss(model, family, source, head, dtype, labels=objective == "ce")


def learn_masks(
    model: Any,
    family: Family,
    source: Shape,
    drafter: Shape,
    rows: Sequence[TraceRow],
    settings: PruneSettings,
    *,
    seed: int,
    state: Path,
    dtype: torch.dtype = torch.float32,
) -> Pruning:
    """Train masks against the target's traces, and weights where the recipe says so.

    Args:
        model: the source; its weights change only with `weights_lr`.
        family: its table.
        source: its shape.
        drafter: the shape to reach.
        rows: trace rows to learn from.
        settings: the recipe's `prune`.
        seed: of the noise and the order of the rows.
        state: folder of the saves.
        dtype: of the matrix products.

    Raises:
        DraftsmithError: the masks did not converge, and `snap` is off.
    """
    axes = changed_axes(source, drafter)
    if not axes:
        return Pruning(Selection.of_layers(source, range(source.layers)), {}, [])
    learning = [name for name, _ in model.named_parameters()] if settings.weights_lr else []
    weights = freeze_all_but(model, learning)
    recompute_activations(model, settings.checkpoint_activations)
    # Else activations are not computed again.
    model.train(bool(learning) or settings.checkpoint_activations)
    loss = masked_loss(model, family, source, rows, settings, dtype)
    masks = LearnableMasks(axes, source, settings.init_log_alpha).to(model.device)
    lagrangian = Lagrangian(axes, source, drafter, settings.warmup, settings.penalty)
    stream = BatchStream(rows, settings.batch, settings.max_length, seed)
    engine = _engine(masks, weights, settings, state)
    history = _train(engine, masks, lagrangian, loss, stream, drafter, settings, seed)
    recompute_activations(model, False)
    model.eval()
    expected = expected_counts(masks, source)
    _check_convergence(expected, drafter, snap=settings.snap)
    selection, exchanged = masks.select(source, drafter), None
    if settings.exchange and "layers" in axes:
        exchanged = _exchange(masks, selection, loss, stream, drafter, settings)
        selection = masks.select(source, drafter, exchanged.layers)
    return Pruning(selection, expected, history, exchanged)


def _engine(
    masks: LearnableMasks,
    weights: Mapping[str, nn.Parameter],
    settings: PruneSettings,
    state: Path,
) -> TorchEngine:
    """One optimizer for masks and weights, at rates of their own."""
    own = dict(masks.named_parameters())
    # Little momentum: it carries the masks past the constraint.
    groups = [{"params": list(own.values()), "lr": settings.mask_lr, "betas": (0.5, 0.95)}]
    if weights:
        groups.append({"params": list(weights.values()), "lr": settings.weights_lr})
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95))
    return TorchEngine({**own, **weights}, optimizer, state, clip=settings.clip)


def _train(
    engine: TorchEngine,
    masks: LearnableMasks,
    lagrangian: Lagrangian,
    loss: MaskedLoss,
    stream: BatchStream,
    drafter: Shape,
    settings: PruneSettings,
    seed: int,
) -> list[dict[str, float]]:
    """The training loop; returns loss and expected counts of every step.

    Masks and multipliers are whole and equal in every process; rows are shared out.
    """
    history = _resume(engine, lagrangian)
    device = loss.model.device
    with Progress("masks", settings.steps, "steps", done=engine.steps_done) as progress:
        while engine.steps_done < settings.steps:
            step, ranks = engine.steps_done, engine.ranks
            first = step * settings.accumulate
            mine = ranks.share(range(first, first + settings.accumulate))
            micro = [stream[number].to(device) for number in mine]
            tokens, mean = ranks.total(sum(batch.tokens for batch in micro)), 0.0
            for batch in micro:
                # Drawn anew, and alike: each backward pass needs a graph of its own.
                z = masks.sample(_generator(seed, step, device))
                with loss.acting(z):
                    value = mean_over_step(loss(batch), tokens)
                    engine.backward(value + lagrangian.penalty(masks, step) / settings.accumulate)
                mean += float(value.detach())
            engine.step()
            masks.clamp()
            lagrangian.ascend(masks, step, settings.lambda_lr)
            counts = expected_counts(masks, loss.source)
            history.append({"loss": ranks.total(mean), **counts})
            if engine.steps_done % settings.save_every == 0 and engine.steps_done < settings.steps:
                engine.save({"history": history, "multipliers": dict(lagrangian.multipliers)})
            progress.update(1, note=_note(history[-1], drafter))
    return history


def _exchange(
    masks: LearnableMasks,
    selection: Selection,
    loss: MaskedLoss,
    stream: BatchStream,
    drafter: Shape,
    settings: PruneSettings,
) -> Exchanged:
    """Polish the choice of layers on a fixed sample of rows."""
    device = loss.model.device
    sample = collate(stream.rows[:_EXCHANGE_ROWS], settings.max_length).to(device)

    @torch.inference_mode()
    def loss_of(layers: Layers) -> float:
        hard = hard_masks(masks.select(loss.source, drafter, layers), loss.source)
        z = {axis: value.to(device) for axis, value in hard.items() if axis in masks.axes}
        with loss.acting(z):
            return float(loss(sample)) / sample.tokens

    return exchange_layers(selection.layers, loss.source.layers, loss_of, settings.exchange)


@torch.no_grad()
def expected_counts(masks: LearnableMasks, source: Shape) -> dict[str, float]:
    """Expected kept count of each axis, mean over layers."""
    return {
        axis: float(masks.expected_share(axis).mean()) * getattr(source, axis)
        for axis in masks.axes
    }


def _resume(engine: Engine, lagrangian: Lagrangian) -> list[dict[str, float]]:
    extra = engine.load()
    lagrangian.multipliers.update(extra.get("multipliers", {}))
    history: list[dict[str, float]] = extra.get("history", [])
    return history


def _generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Noise that depends on the step alone, so that a resumed run draws the same."""
    return torch.Generator(device).manual_seed(derived_seed(seed, step))


def _check_convergence(expected: dict[str, float], drafter: Shape, *, snap: bool) -> None:
    off = {}
    for axis, count in expected.items():
        wanted = getattr(drafter, axis)
        if abs(count - wanted) > max(_CONVERGED, _CONVERGED_SHARE * wanted):
            off[axis] = count
    if not off:
        return
    numbers = ", ".join(
        f"{a}: {n:.2f} expected, {getattr(drafter, a)} wanted" for a, n in off.items()
    )
    if not snap:
        raise DraftsmithError(
            f"the masks have not converged ({numbers}); raise prune.steps or prune.lambda_lr, or "
            "allow prune.snap: true to cut to the shape by the masks' order"
        )
    say(f"masks have not converged ({numbers}); cut to the exact shape by their order")


def _note(last: dict[str, float], drafter: Shape) -> str:
    counts = ", ".join(
        f"{axis} {count:.1f} → {getattr(drafter, axis)}"
        for axis, count in last.items()
        if axis != "loss"
    )
    return f"loss {last['loss']:.2f}, {counts}"
