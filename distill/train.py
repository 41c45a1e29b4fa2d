"""Logit-level distillation of a drafter on the target's traces."""

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.accept.replay import RoundCounts, replay
from draftsmith.checkpoints.devices import autocast
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.slicing import template_of
from draftsmith.data.progress import Progress
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream, collate
from draftsmith.distill.best import Best
from draftsmith.distill.deepspeed_engine import make_engine
from draftsmith.distill.engine import Engine, freeze_all_but
from draftsmith.distill.head_loss import HeadLoss, LossHead
from draftsmith.distill.lora import add_adapters, merge_adapters
from draftsmith.distill.losses import make_loss
from draftsmith.recipes.schema import DistillSettings

# The lookahead at which held-out traces are replayed while training.
EVALUATION_LOOKAHEAD = 3
# What is left of the peak learning rate at the last step.
FINAL_LR = 0.05


def hidden_at_answers(model: Any, batch: Batch) -> Tensor:
    """Final hidden states from which the answer tokens are predicted, [A, H]."""
    output = model.base_model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden[batch.positions]


class Student(nn.Module):
    """The drafter and its loss in one module, which an engine can cut into parts.

    Attributes:
        model: the drafter.
        head: its head with the loss, on the very same weight.
    """

    def __init__(self, model: Any, head: LossHead, dtype: torch.dtype) -> None:
        """Join them; matrix products are in `dtype`."""
        super().__init__()
        self.model, self.head, self._dtype = model, head, dtype

    def forward(self, batch: Batch) -> Tensor:
        """Sum of the loss over the batch's answer tokens."""
        # Within the module: DeepSpeed switches off what stands around it.
        with autocast(self.model, self._dtype):
            loss: Tensor = self.head(hidden_at_answers(self.model, batch), batch)
            return loss


def mean_over_step(sums: Tensor, tokens: float) -> Tensor:
    """Divide by the tokens of the whole step; a step without tokens has loss zero (case A24)."""
    if not tokens:
        warnings.warn("a training step had no answer token; its loss counts as zero", stacklevel=2)
    return sums / max(tokens, 1)


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

    Returns:
        The learning curve: step, tokens, loss, and emitted per round on held-out greedy traces.
    """
    stream = BatchStream(train, settings.batch, settings.max_length, seed)
    learning = trainable_parameters(model, family, settings, seed)
    student = Student(model, _loss_head(model, train, settings), dtype)
    engine = _engine(student, learning.values(), settings, state)
    extra = engine.load()
    curve: list[dict[str, float]] = extra.get("curve", [])
    tokens_seen: int = extra.get("tokens", 0)
    best = Best(state, settings.patience)
    model.train()
    with Progress("distil", settings.steps, "steps", done=engine.steps_done) as progress:
        while engine.steps_done < settings.steps and not best.is_over(curve):
            first = engine.steps_done * settings.accumulate
            mine = engine.ranks.share(range(first, first + settings.accumulate))
            micro = [stream[number].to(model.device) for number in mine]
            tokens = engine.ranks.total(sum(batch.tokens for batch in micro))
            mean = 0.0
            for batch in micro:
                loss = mean_over_step(engine(batch), tokens)
                engine.backward(loss)
                mean += float(loss.detach())
            engine.step()
            mean, tokens_seen = engine.ranks.total(mean), tokens_seen + int(tokens)
            done = engine.steps_done
            if done % settings.evaluate_every == 0 or done == settings.steps:
                score = evaluate(model, validation, settings.max_length)
                curve.append({"step": done, "tokens": tokens_seen, "loss": mean, **score})
                best.keep(curve, engine, model)
            if done % settings.save_every == 0 and done < settings.steps:
                engine.save({"curve": curve, "tokens": tokens_seen})
            progress.update(1, note=_note(mean, curve))
    engine.finish()
    best.restore(model)
    merge_adapters(model)
    recompute_activations(model, False)
    model.eval()
    return curve


def _loss_head(model: Any, rows: Sequence[TraceRow], settings: DistillSettings) -> LossHead:
    """The model's head with the recipe's loss; it knows by now whether it learns."""
    weight = model.get_output_embeddings().weight
    loss = make_loss(
        settings.loss,
        cross_entropy_share=settings.cross_entropy,
        temperature=settings.temperature,
        beta=settings.beta,
        alpha=settings.alpha,
    )
    return LossHead(HeadLoss.over_commonest(loss, rows, len(weight), settings.vocab_limit), weight)


def _engine(
    student: Student, learning: Iterable[nn.Parameter], settings: DistillSettings, state: Path
) -> Engine:
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
    return make_engine(student, optimizer, state, scheduler, settings.clip, zero=settings.zero)


@torch.inference_mode()
def evaluate(model: Any, rows: Sequence[TraceRow], max_length: int) -> dict[str, float]:
    """Replay held-out greedy traces: emitted per round at k = 3, and top-1 agreement.

    Empty where there is no such row.
    """
    counts, agreed = RoundCounts(EVALUATION_LOOKAHEAD), Counter[bool]()
    was_training = model.training
    model.eval()
    for row in rows:
        answers = min(len(row.tokens), max_length) - row.prompt_length
        if row.sampled or row.prompt_length < 1 or answers < 1:
            continue
        batch = collate([row], max_length).to(model.device)
        choices = model.get_output_embeddings()(hidden_at_answers(model, batch)).argmax(-1)
        matches = (choices == batch.labels).cpu().numpy()
        counts += replay(matches, EVALUATION_LOOKAHEAD, limit=answers + 1)
        agreed.update(matches.tolist())
    model.train(was_training)
    if counts.emitted_per_round is None:
        return {}
    return {
        "emitted_per_round": counts.emitted_per_round,
        "top1": agreed[True] / max(1, agreed.total()),
    }


def trainable_parameters(
    model: Any, family: Family, settings: DistillSettings, seed: int
) -> dict[str, nn.Parameter]:
    """Free the parameters that learn: all, all but those along the vocabulary, or adapters."""
    recompute_activations(model, settings.checkpoint_activations)
    if settings.lora_rank:
        axes, rank = settings.lora_axes, settings.lora_rank
        return add_adapters(model, family, axes, rank, settings.lora_alpha, seed)
    names = [
        name
        for name, _ in model.named_parameters()
        if settings.train == "all" or "vocab" not in family.tensors[template_of(name)[0]]
    ]
    return freeze_all_but(model, names)


def recompute_activations(model: Any, on: bool) -> None:
    """Let blocks compute their activations again in the backward pass, or not."""
    if on == model.is_gradient_checkpointing:
        return
    # transformers 5.24 has another name for it than 5.17.
    kind = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    if on:
        getattr(model, f"{kind}_checkpointing_enable")({"use_reentrant": False})
    else:
        getattr(model, f"{kind}_checkpointing_disable")()


def _note(loss: float, curve: Sequence[dict[str, float]]) -> str:
    note = f"loss {loss:.3f}"
    if curve and "emitted_per_round" in curve[-1]:
        note += f", emitted/round {curve[-1]['emitted_per_round']:.2f}"
    return note
