"""Logit-level distillation of a drafter on the target's traces."""

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.devices import autocast
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.data.progress import Progress
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream
from draftsmith.distill.best import Best
from draftsmith.distill.blocks import Blocks
from draftsmith.distill.deepspeed_engine import make_engine
from draftsmith.distill.engine import Engine, freeze_all_but, learns
from draftsmith.distill.evaluation import Costs, evaluate
from draftsmith.distill.head_loss import HeadLoss, LossHead
from draftsmith.distill.hearing import hearing_once, set_training
from draftsmith.distill.lessons import Lessons
from draftsmith.distill.logs import LOGS, Logs
from draftsmith.distill.lora import add_adapters, merge_adapters
from draftsmith.distill.losses import make_loss
from draftsmith.distill.rounds import OwnRounds
from draftsmith.distill.states import distance_of_reads, hidden_at_answers, states_at_answers
from draftsmith.distill.teacher import Lesson, Teacher
from draftsmith.recipes.schema import DistillSettings

# What is left of the peak learning rate at the last step.
FINAL_LR = 0.05


class Student(nn.Module):
    """The drafter and its loss in one module, which an engine can cut into parts.

    Attributes:
        model: the drafter.
        head: its head with the loss, on the very same weight.
    """

    def __init__(
        self, model: Any, head: LossHead, dtype: torch.dtype, hidden_matching: float = 0.0
    ) -> None:
        """Join them.

        Args:
            model: the drafter.
            head: on its head's weight.
            dtype: of matrix products.
            hidden_matching: factor of the distance between what layers read and what they should.
        """
        super().__init__()
        self.model, self.head, self._dtype = model, head, dtype
        self._hidden_matching = hidden_matching

    def forward(self, batch: Batch, lesson: Lesson) -> Tensor:
        """Weighted sum of the loss over the batch's answer tokens."""
        layers = tuple(range(1, 1 + len(lesson.reads)))
        # Within the module: DeepSpeed switches off what stands around it.
        with autocast(self.model, self._dtype):
            hidden_AH, reads = states_at_answers(self.model.base_model, batch, layers)
            loss: Tensor = self.head(hidden_AH, lesson.signal, batch.weights)
            if reads:
                distance_A = distance_of_reads(reads, lesson.reads)
                weights_A = 1.0 if batch.weights is None else batch.weights
                loss = loss + self._hidden_matching * (weights_A * distance_A).sum()
            return loss

    @torch.no_grad()
    def propose(self, batch: Batch) -> Tensor:
        """The drafter's likeliest ids at the batch's positions, [A]."""
        was_training = self.model.training
        self.model.eval()
        with autocast(self.model, self._dtype):
            hidden_AH = hidden_at_answers(self.model, batch)
            ids: Tensor = self.head(hidden_AH, None)
        set_training(self.model, was_training)
        return ids


def mean_over_step(sums: Tensor, tokens: float) -> Tensor:
    """Divide by the tokens of the whole step; a step without tokens has loss zero (case A24)."""
    if not tokens:
        warnings.warn("a training step had no answer token; its loss counts as zero", stacklevel=2)
    return sums / (tokens or 1.0)


def distill(
    model: Any,
    family: Family,
    train: Sequence[TraceRow],
    validation: Sequence[TraceRow],
    settings: DistillSettings,
    *,
    seed: int,
    state: Path,
    dtype: torch.dtype = torch.float32,
    teacher: Teacher | None = None,
    target_layers: int | None = None,
) -> list[dict[str, float]]:
    """Train `model` in place until the recipe's last step, resuming from `state`.

    In as many processes as were launched; all of them call it with the same arguments.

    Args:
        model: the drafter.
        family: its table.
        train: trace rows to learn from.
        validation: rows to replay now and then.
        settings: the recipe's `distill`.
        seed: order of the rows.
        state: folder of the saves.
        dtype: of the matrix products; weights and optimizer stay as they are.
        teacher: the target; none: the traces say what it would.
        target_layers: by which the cost of a drafter's pass is guessed where the recipe names none.

    Returns:
        The learning curve: step, tokens, loss, and what `evaluate` finds.
    """
    stream = BatchStream(
        train, settings.batch, settings.max_length, seed, settings.domain_weights or None
    )
    learning = trainable_parameters(model, family, settings, seed)
    head = loss_head(model, train, settings, None if teacher is None else teacher.vocabulary)
    student = Student(model, head, dtype, settings.hidden_matching)
    engine = training_engine(student, learning.values(), settings, state)
    extra = engine.load()
    curve: list[dict[str, float]] = extra.get("curve", [])
    tokens_seen: int = extra.get("tokens", 0)
    best = Best(state, settings.patience)
    rounds = OwnRounds(
        student.propose, settings.lookahead, stop_ids(model), settings.position_decay
    )
    blocks = None
    if settings.block is not None and (block := Block.of(model.config)) is not None:
        blocks = Blocks(student.propose, block, settings.block, seed)
    lessons = Lessons(stream, rounds, settings, seed, model.device, teacher, blocks)
    costs = Costs.of(model, family, settings, target_layers)
    logs = Logs(state.parent / LOGS, engine.steps_done + 1, on=engine.ranks.is_main)
    set_training(model, True)
    progress = Progress("distil", settings.steps, "steps", done=engine.steps_done)
    with hearing_once(model), progress:
        while engine.steps_done < settings.steps and not best.is_over(curve):
            micro, lr = lessons.of_step(engine.steps_done, engine.ranks), lr_of(engine)
            weight = engine.ranks.total(sum(batch.weight for batch in micro))
            mean = 0.0
            for batch in micro:
                loss = mean_over_step(engine(batch, lessons.on(batch)), weight)
                engine.backward(loss)
                mean += float(loss.detach())
            norm = engine.step()
            mean, done = engine.ranks.total(mean), engine.steps_done
            tokens_seen += int(engine.ranks.total(sum(batch.tokens for batch in micro)))
            logs.add(done, {"loss": mean, "gradient_norm": norm, "lr": lr})
            if done % settings.evaluate_every == 0 or done == settings.steps:
                # Ties may fall otherwise elsewhere; what one rank sees counts for all.
                score = engine.ranks.gather(evaluate(model, validation, settings, costs))[0]
                curve.append({"step": done, "tokens": tokens_seen, "loss": mean, **score})
                logs.add(done, score)
                best.keep(curve, engine, model)
            if done % settings.save_every == 0 and done < settings.steps:
                engine.save({"curve": curve, "tokens": tokens_seen})
            progress.update(1, note=_note(mean, curve))
    logs.close()
    engine.finish()
    best.restore(model)
    merge_adapters(model)
    recompute_activations(model, False)
    model.eval()
    return curve


def loss_head(
    model: Any,
    rows: Sequence[TraceRow],
    settings: DistillSettings,
    target_vocabulary: int | None = None,
) -> LossHead:
    """The model's head with the recipe's loss; by now it is known what learns.

    Args:
        model: the drafter.
        rows: of the traces, by which `vocab_limit` chooses.
        settings: the recipe's `distill`.
        target_vocabulary: logits of a live target; none: traces speak for it.
    """
    loss = make_loss(
        settings.loss,
        cross_entropy_share=settings.cross_entropy,
        temperature=settings.temperature,
        beta=settings.beta,
        alpha=settings.alpha,
    )
    ids, limit = len(model.get_output_embeddings().weight), settings.vocab_limit
    head_loss = HeadLoss.over_commonest(loss, rows, ids, limit, target_vocabulary)
    return LossHead.of(model, head_loss)


def training_engine(
    module: nn.Module, learning: Iterable[nn.Parameter], settings: DistillSettings, state: Path
) -> Engine:
    """The engine with the optimizer and the learning rates of a recipe.

    Args:
        module: gives a loss.
        learning: those of its parameters that learn.
        settings: the recipe's `distill`.
        state: folder of the saves.
    """
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.AdamW(
        learning,
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, settings.warmup, settings.steps, min_lr_rate=FINAL_LR
    )
    return make_engine(module, optimizer, state, scheduler, settings.clip, zero=settings.zero)


def trainable_parameters(
    model: Any, family: Family, settings: DistillSettings, seed: int
) -> dict[str, nn.Parameter]:
    """Free the parameters that learn: all, all but those along the vocabulary, or adapters."""
    recompute_activations(model, settings.checkpoint_activations)
    if settings.lora_rank:
        axes, rank = settings.lora_axes, settings.lora_rank
        return add_adapters(model, family, axes, rank, settings.lora_alpha, seed)
    names = [name for name, _ in model.named_parameters() if learns(name, family, settings)]
    return freeze_all_but(model, names)


def recompute_activations(model: Any, on: bool) -> None:
    """Let blocks compute their activations again in the backward pass, or not."""
    # transformers 5.24 has another name for it than 5.17.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on == getattr(model, f"is_{kind}_checkpointing"):
        return
    if on:
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def lr_of(engine: Engine) -> float:
    """The learning rate of the next step."""
    return float(engine.optimizer.param_groups[0]["lr"])


def _note(loss: float, curve: Sequence[dict[str, float]]) -> str:
    note = f"loss {loss:.3f}"
    if curve and "emitted_per_round" in curve[-1]:
        note += f", emitted/round {curve[-1]['emitted_per_round']:.2f}"
    return note
