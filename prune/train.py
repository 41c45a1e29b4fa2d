"""Learning which parts of the source to keep, so that the rest still speaks like the target."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.loading import autocast
from draftsmith.checkpoints.shape import Shape, changed_axes
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.progress import Progress, say
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import BatchStream
from draftsmith.distill.engine import TorchEngine, freeze_all_but
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.train import HeadLoss, hidden_at_answers, mean_over_step
from draftsmith.errors import DraftsmithError
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks, applied
from draftsmith.recipes.schema import PruneSettings

# A count that is off by less than this is a matter of rounding.
_CONVERGED = 0.5
_SAVE_EVERY = 10


@dataclass(frozen=True)
class Pruning:
    """What the masks came to.

    Attributes:
        selection: what is kept.
        expected: axis -> expected count when training ended (mean over layers).
        history: per step: loss, and the expected count of each axis.
    """

    selection: Selection
    expected: dict[str, float]
    history: list[dict[str, float]]


def select_by_position(method: str, source: Shape, drafter: Shape) -> Selection:
    """Baselines that look at nothing: the first of everything, or layers evenly spread.

    Args:
        method: `first` or `uniform`; widths are cut to their first entries by both.
        source: the shape that is cut.
        drafter: the shape that comes out.
    """
    masks = LearnableMasks(changed_axes(source, drafter), source, init=0.0)
    if method == "uniform" and "layers" in masks.axes:
        # First and last always stay: they read the embeddings and write for the head.
        spread = torch.linspace(0, source.layers - 1, drafter.layers).round().long()
        with torch.no_grad():
            masks.log_alpha["layers"][spread] = 1.0
    return masks.select(source, drafter)


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
    """Train masks with frozen weights against the target's traces.

    Args:
        model: the source.
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
    masks = LearnableMasks(axes, source, settings.init_log_alpha).to(model.device)
    lagrangian = Lagrangian(axes, source, drafter, settings.warmup)
    freeze_all_but(model, ())
    parameters = dict(masks.named_parameters())
    engine = TorchEngine(
        parameters, torch.optim.Adam(parameters.values(), lr=settings.mask_lr), state
    )
    history = _resume(engine, lagrangian)
    stream = BatchStream(rows, settings.batch, settings.max_length, seed)
    head = HeadLoss(forward_kl)
    weight = model.get_output_embeddings().weight
    with Progress("masks", settings.steps, "steps", done=engine.steps_done) as progress:
        while engine.steps_done < settings.steps:
            step = engine.steps_done
            batch = stream[step].to(model.device)
            z = masks.sample(_generator(seed, step, model.device))
            with applied(model, family, source, z), autocast(model, dtype):
                hidden_AH = hidden_at_answers(model, batch)
                loss = mean_over_step(head(hidden_AH, weight, batch), batch.tokens)
            engine.backward(loss + lagrangian.penalty(masks, step))
            engine.step()
            masks.clamp()
            lagrangian.ascend(masks, step, settings.lambda_lr)
            counts = expected_counts(masks, source)
            history.append({"loss": float(loss.detach()), **counts})
            if engine.steps_done % _SAVE_EVERY == 0 and engine.steps_done < settings.steps:
                engine.save({"history": history, "multipliers": dict(lagrangian.multipliers)})
            progress.update(1, note=_note(history[-1], drafter))
    expected = expected_counts(masks, source)
    _check_convergence(expected, drafter, snap=settings.snap)
    return Pruning(masks.select(source, drafter), expected, history)


@torch.no_grad()
def expected_counts(masks: LearnableMasks, source: Shape) -> dict[str, float]:
    """Expected kept count of each axis, mean over layers."""
    return {
        axis: float(masks.expected_share(axis).mean()) * getattr(source, axis)
        for axis in masks.axes
    }


def _resume(engine: TorchEngine, lagrangian: Lagrangian) -> list[dict[str, float]]:
    extra = engine.load()
    lagrangian.multipliers.update(extra.get("multipliers", {}))
    history: list[dict[str, float]] = extra.get("history", [])
    return history


def _generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Noise that depends on the step alone, so that a resumed run draws the same."""
    return torch.Generator(device).manual_seed((seed << 32) + step)


def _check_convergence(expected: dict[str, float], drafter: Shape, *, snap: bool) -> None:
    off = {a: n for a, n in expected.items() if abs(n - getattr(drafter, a)) > _CONVERGED}
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
