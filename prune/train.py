"""Learning which parts of the source to keep, so that the rest still speaks like the target."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.families.base import Axis, Family, template_of
from draftsmith.checkpoints.shape import Shape, changed_axes
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.progress import Progress, say
from draftsmith.data.seeds import derived_seed
from draftsmith.data.traces import TraceRow
from draftsmith.distill.deepspeed_engine import make_engine
from draftsmith.distill.engine import Engine, Ranks, TorchEngine, diverged, freeze_all_but
from draftsmith.distill.hearing import hearing_once, set_training
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.train import mean_over_step, recompute_activations
from draftsmith.errors import DraftsmithError
from draftsmith.prune.baselines import select, select_by_position, watched
from draftsmith.prune.budget import DRAFT_MS, Budget, BudgetLagrangian, shape_within
from draftsmith.prune.exchange import Exchanged, Parts, exchange_parts
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks, hard_masks
from draftsmith.prune.objective import Objective
from draftsmith.prune.race import Entrant, Track, race
from draftsmith.prune.text import Text, TraceText
from draftsmith.prune.trajectory import Trajectory
from draftsmith.recipes.schema import PruneSettings

Goal = Shape | Budget
Constraint = Lagrangian | BudgetLagrangian

# A count that is off by less than this, or this share of it, is a matter of rounding.
_CONVERGED, _CONVERGED_SHARE = 0.5, 0.02


@dataclass(frozen=True)
class Snapped:
    """What the exact shape costs, against masks that may be between 0 and 1.

    Attributes:
        before: loss of a token under the masks as they had been learned, without noise.
        after: under the hard masks of what is kept, before any layer is exchanged.
    """

    before: float
    after: float


@dataclass(frozen=True)
class Pruning:
    """What the masks came to.

    Attributes:
        selection: what is kept.
        expected: axis -> expected count when training ended (mean over layers).
        trajectory: what they went through; none: nothing was learned.
        shares: how those of a mixture's domains changed; empty without a mixture.
        snapped: loss before and after the exact shape.
        exchanged: what exchanging layers changed, if it was asked for.
        raced: the choices after a short distillation, best first, if it was asked for.
    """

    selection: Selection
    expected: dict[str, float]
    trajectory: Trajectory | None = None
    shares: Sequence[Mapping[str, Any]] = ()
    snapped: Snapped | None = None
    exchanged: Exchanged | None = None
    raced: Sequence[Entrant] = ()


class MaskOptimizer:
    """Adam over the masks, which are whole and equal in every process.

    Apart from the weights' engine, which may cut what is its own into parts.
    """

    def __init__(self, masks: LearnableMasks, rate: float, clip: float | None) -> None:
        """Set up; gradients come from backward passes."""
        self._masks, self._clip = masks, clip
        # Little momentum: it carries the masks past the constraint.
        self._adam = torch.optim.Adam(masks.parameters(), lr=rate, betas=(0.5, 0.95))

    def step(self, number: int, ranks: Ranks, scale: float = 1.0) -> None:
        """Add up the gradients of all processes, and update.

        Args:
            number: of the step, from 0.
            ranks: of the processes.
            scale: what their gradients were multiplied by.

        Raises:
            DraftsmithError: a gradient is not a number; nothing was updated.
        """
        for parameter in self._masks.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad /= scale
            ranks.add_up(parameter.grad)
        most = float("inf") if self._clip is None else self._clip
        norm = nn.utils.clip_grad_norm_(self._masks.parameters(), most)
        if not torch.isfinite(norm):
            raise diverged(number + 1, self._adam)
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        self._masks.clamp()

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {"masks": self._masks.state_dict(), "adam": self._adam.state_dict()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._masks.load_state_dict(state["masks"])
        self._adam.load_state_dict(state["adam"])


def learn_masks(
    model: Any,
    family: Family,
    source: Shape,
    goal: Goal,
    rows: Sequence[TraceRow],
    settings: PruneSettings,
    *,
    seed: int,
    state: Path,
    dtype: torch.dtype = torch.float32,
    teacher: Teacher | None = None,
    text: Text | None = None,
    track: Track | None = None,
) -> Pruning:
    """Train masks, and weights where the recipe says so.

    In as many processes as were launched; all of them call it with the same arguments.

    Args:
        model: the source; its weights change only with `weights_lr`.
        family: its table.
        source: its shape.
        goal: the shape to reach, or the milliseconds.
        rows: trace rows.
        settings: the recipe's `prune`.
        seed: of the noise and the order of the rows.
        state: folder of the saves.
        dtype: of the matrix products.
        teacher: the target; none: the traces say what it would.
        text: to learn from; none: the traces.
        track: on which choices of layers are distilled for a few steps; none: the loss before
            distillation decides.

    Raises:
        DraftsmithError: the masks did not converge, and `snap` is off.
    """
    axes = goal.axes if isinstance(goal, Budget) else changed_axes(source, goal)
    if not axes:
        return Pruning(Selection.of_layers(source, range(source.layers)), {})
    if settings.apart:
        axes = (*axes, "ffn_layers")
    names = [name for name, _ in model.named_parameters() if settings.weights_lr]
    learning = [name for name in names if template_of(name)[0] not in family.rebuilt]
    weights = freeze_all_but(model, learning)
    recompute_activations(model, settings.checkpoint_activations)
    # Else activations are not computed again.
    set_training(model, bool(learning) or settings.checkpoint_activations)
    objective = Objective.of(model, family, source, rows, settings, dtype, teacher)
    masks = LearnableMasks(axes, source, settings.init_log_alpha).to(model.device)
    constraint = _constraint(goal, axes, source, settings, model.device)
    text = text or TraceText(rows, settings, seed)
    engine = _engine(objective.student, weights.values(), settings, state)
    # Masks of the decoder's layers alone leave the encoder's states as they are.
    with hearing_once(model) if set(axes) == {"layers"} else nullcontext():
        trajectory = _train(engine, masks, constraint, objective, text, settings, seed)
        engine.finish()
        recompute_activations(model, False)
        model.eval()
        return _choose(masks, goal, constraint, objective, text, settings, trajectory, track)


def _constraint(
    goal: Goal,
    axes: tuple[Axis, ...],
    source: Shape,
    settings: PruneSettings,
    device: torch.device,
) -> Constraint:
    """What drives the masks to the goal."""
    if isinstance(goal, Budget):
        return BudgetLagrangian(goal, settings.warmup, settings.penalty, device)
    return Lagrangian(axes, source, goal, settings.warmup, settings.penalty, device)


def _engine(
    student: nn.Module, weights: Iterable[nn.Parameter], settings: PruneSettings, state: Path
) -> Engine:
    """For the weights, if they learn; frozen ones are whole in every process."""
    groups = [{"params": list(weights)}]
    optimizer = torch.optim.Adam(groups, lr=settings.weights_lr, betas=(0.9, 0.95))
    if settings.weights_lr:
        return make_engine(student, optimizer, state, clip=settings.clip, zero=settings.zero)
    return TorchEngine({}, optimizer, state, module=student)


def _train(
    engine: Engine,
    masks: LearnableMasks,
    constraint: Constraint,
    objective: Objective,
    text: Text,
    settings: PruneSettings,
    seed: int,
) -> Trajectory:
    """The training loop.

    Masks and multipliers are whole and equal in every process; micro-batches are shared out.
    """
    optimizer = MaskOptimizer(masks, settings.mask_lr, settings.clip)
    trajectory = Trajectory(objective.source, settings.steps)
    parts: dict[str, Any] = {
        "masks": optimizer,
        "multipliers": constraint,
        "trajectory": trajectory,
        "text": text,
    }
    _restore(parts, engine.load())
    with Progress("masks", settings.steps, "steps", done=engine.steps_done) as progress:
        while (step := engine.steps_done) < settings.steps:
            micro = [batch.to(objective.device) for batch in text.of_step(step, engine.ranks)]
            tokens, mean = engine.ranks.total(sum(batch.tokens for batch in micro)), 0.0
            for batch in micro:
                lesson = objective.lesson(batch)
                # Drawn anew, and alike: each backward pass needs a graph of its own.
                with objective.acting(masks.sample(_generator(seed, step, objective.device))):
                    loss = mean_over_step(engine(batch, lesson), tokens)
                    penalty = constraint.penalty(masks, step) / settings.accumulate
                    engine.backward(loss + penalty)
                mean += float(loss.detach())
            optimizer.step(step, engine.ranks, engine.foreign_scale)
            engine.step()
            constraint.ascend(masks, step, settings.lambda_lr)
            mean, told = engine.ranks.total(mean), constraint.told(masks, step)
            trajectory.record(step, masks, constraint, mean, told)
            text.after(step, masks, objective, engine.ranks)
            if engine.steps_done % settings.save_every == 0 and engine.steps_done < settings.steps:
                engine.save({name: part.state() for name, part in parts.items()})
            progress.update(1, note=_note(mean, told))
    return trajectory


def _choose(
    masks: LearnableMasks,
    goal: Goal,
    constraint: Constraint,
    objective: Objective,
    text: Text,
    settings: PruneSettings,
    trajectory: Trajectory,
    track: Track | None,
) -> Pruning:
    """What is kept, exactly as the goal wants it, and what that costs."""
    source, expected = objective.source, expected_counts(masks, objective.source)
    off = not_converged(constraint.told(masks, settings.steps))
    if off and not settings.snap:
        raise DraftsmithError(
            f"the masks have not converged ({off}); raise prune.steps or prune.lambda_lr, or "
            "allow prune.snap: true to cut to the shape by the masks' order"
        )
    drafter = shape_within(expected, goal) if isinstance(goal, Budget) else goal
    loss_of = _loss_of_parts(masks, drafter, objective, text)
    parts = masks.parts(drafter.layers) if "layers" in masks.axes else ()
    snapped = Snapped(loss_of(None), loss_of(parts))
    if off:
        say(
            f"masks have not converged ({off}); cut to the exact shape by their order: loss "
            f"{snapped.before:.2f} → {snapped.after:.2f}"
        )
    exchanged: Exchanged | None = None
    raced: tuple[Entrant, ...] = ()
    if parts and (settings.exchange or track is not None):
        proposals = {"masks": parts, **_cheap_proposals(objective, text, drafter, settings)}
        if settings.exchange:
            exchanged = _exchange(proposals, loss_of, source, settings)
            parts = exchanged.parts
        if track is not None:
            raced = _race(proposals, exchanged, masks, drafter, objective, track)
            parts = raced[0].parts
    selection = masks.select(source, drafter, parts or None)
    return Pruning(selection, expected, trajectory, text.history(), snapped, exchanged, raced)


def _exchange(
    proposals: Mapping[str, Parts],
    loss_of: Callable[[Parts | None], float],
    source: Shape,
    settings: PruneSettings,
) -> Exchanged:
    """The best proposal, polished by the loss before distillation."""
    count = source.layers * (2 if settings.apart else 1)
    return exchange_parts(proposals, count, loss_of, settings.exchange, halves=settings.apart)


def _race(
    proposals: Mapping[str, Parts],
    exchanged: Exchanged | None,
    masks: LearnableMasks,
    drafter: Shape,
    objective: Objective,
    track: Track,
) -> tuple[Entrant, ...]:
    """All proposals, and the best sets that exchanging found, each distilled for a few steps."""
    model, family, source = objective.student.model, objective.family, objective.source
    found = () if exchanged is None else (exchanged.parts, *exchanged.runners_up)
    polished = {f"exchange, {place}": parts for place, parts in enumerate(found, start=1)}

    def cut(parts: Parts) -> Any:
        # Weights that learn are float32 everywhere.
        return compact_model(model, family, masks.select(source, drafter, parts)).float()

    return race({**proposals, **polished}, cut, family, track)


def _cheap_proposals(
    objective: Objective, text: Text, drafter: Shape, settings: PruneSettings
) -> dict[str, Parts]:
    """Layers that are chosen without learning, on the same sample."""
    source, model = objective.source, objective.student.model
    with watched(model, objective.family, source) as scores:
        objective.under({}, [batch.to(objective.device) for batch in text.sample()])
    by_influence = select({"layers": scores["layers"]}, source, drafter).layers
    by_position = select_by_position("uniform", source, drafter).layers
    found = {"block-influence": by_influence, "uniform": by_position}
    if not settings.apart:
        return found
    return {
        name: tuple(half for layer in kept for half in (2 * layer, 2 * layer + 1))
        for name, kept in found.items()
    }


def _loss_of_parts(
    masks: LearnableMasks, drafter: Shape, objective: Objective, text: Text
) -> Callable[[Parts | None], float]:
    """Kept parts -> loss of a token on a fixed sample; None: the masks as they are, no noise."""
    batches = [batch.to(objective.device) for batch in text.sample()]
    source = objective.source

    def loss_of(parts: Parts | None) -> float:
        if parts is None:
            return objective.under(masks.gates(), batches)
        hard = hard_masks(masks.select(source, drafter, parts or None), source)
        return objective.under({a: hard[a].to(objective.device) for a in masks.axes}, batches)

    return loss_of


@torch.no_grad()
def expected_counts(masks: LearnableMasks, source: Shape) -> dict[str, float]:
    """Expected kept count of each axis, mean over layers."""
    return {
        axis: float(masks.expected_share(axis).mean()) * getattr(source, axis)
        for axis in masks.axes
    }


def not_converged(told: Mapping[str, tuple[Tensor, float]]) -> str:
    """What is not as it is wanted, with both numbers; empty if everything is.

    Args:
        told: by a constraint, of the last step.
    """
    return ", ".join(
        f"{name}: {float(expected):.2f} expected, {wanted:g} wanted"
        for name, (expected, wanted) in told.items()
        if abs(float(expected) - wanted)
        > max(0.0 if name == DRAFT_MS else _CONVERGED, _CONVERGED_SHARE * wanted)
    )


def _restore(parts: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Go on from a save; nothing for a fresh start."""
    for name, state in saved.items():
        parts[name].restore(state)


def _generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """Noise that depends on the step alone, so that a resumed run draws the same."""
    return torch.Generator(device).manual_seed(derived_seed(seed, step))


def _note(loss: float, told: Mapping[str, tuple[Tensor, float]]) -> str:
    counts = (f"{name} {float(now):.1f} → {wanted:.1f}" for name, (now, wanted) in told.items())
    return f"loss {loss:.2f}, {', '.join(counts)}"
