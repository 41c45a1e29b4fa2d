"""Logit-level distillation of a drafter on the target's traces."""

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.accept.replay import RoundCounts, replay
from draftsmith.checkpoints.devices import autocast
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.slicing import template_of
from draftsmith.data.progress import Progress
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import Batch, BatchStream, collate
from draftsmith.distill.engine import TorchEngine, freeze_all_but
from draftsmith.distill.losses import LOSSES, TopLoss, mixed
from draftsmith.recipes.schema import DistillSettings

# The lookahead at which held-out traces are replayed while training.
EVALUATION_LOOKAHEAD = 3
# What is left of the peak learning rate at the last step.
FINAL_LR = 0.05


@dataclass(frozen=True)
class HeadLoss:
    """Head projection and loss in one, over the whole vocabulary or its commonest part.

    Attributes:
        loss: one of `LOSSES`.
        columns: [V'] ids over which the drafter is normalised; none: all.
        column_of: [V] place of each id in `columns`, -1 if it has none; none: all.
    """

    loss: TopLoss
    columns: Tensor | None = None
    column_of: Tensor | None = None

    @classmethod
    def over_commonest(
        cls, loss: TopLoss, rows: Sequence[TraceRow], vocab: int, most: int | None
    ) -> "HeadLoss":
        """Normalise over the `most` ids that the target's top n name most often in `rows`."""
        if most is None or most >= vocab:
            return cls(loss)
        counts = np.zeros(vocab, np.int64)
        for row in rows:
            np.add.at(counts, row.top_ids.astype(np.int64).ravel(), 1)
        columns = torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:most]).copy())
        column_of = torch.full((vocab,), -1)
        column_of[columns] = torch.arange(most)
        return cls(loss, columns, column_of)

    def weight(self, head_VH: Tensor) -> Tensor:
        """The rows of the head that are used, [V', H]."""
        return head_VH if self.columns is None else head_VH[self.columns.to(head_VH.device)]

    def __call__(self, hidden_AH: Tensor, weight: Tensor, batch: Batch) -> Tensor:
        """Sum of the loss over the batch's answer tokens."""
        top_ids = batch.top_ids
        if self.column_of is not None:
            top_ids = self.column_of.to(top_ids.device)[top_ids]
        total, _ = self.loss(hidden_AH @ weight.T, top_ids, batch.top_logprobs)
        return total


def hidden_at_answers(model: Any, batch: Batch) -> Tensor:
    """Final hidden states from which the answer tokens are predicted, [A, H]."""
    output = model.base_model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False)
    hidden: Tensor = output.last_hidden_state.flatten(0, 1)
    return hidden[batch.positions]


def mean_over_step(sums: Tensor, tokens: int) -> Tensor:
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
    head_weight = model.get_output_embeddings().weight
    head = HeadLoss.over_commonest(
        mixed(LOSSES[settings.loss], settings.cross_entropy),
        train,
        len(head_weight),
        settings.vocab_limit,
    )
    parameters = trainable_parameters(model, family, settings.train)
    engine = _engine(parameters, settings, state)
    extra = engine.load()
    curve: list[dict[str, float]] = extra.get("curve", [])
    tokens_seen: int = extra.get("tokens", 0)
    weight = None if head_weight.requires_grad else head.weight(head_weight)
    model.train()
    with Progress("distil", settings.steps, "steps", done=engine.steps_done) as progress:
        while engine.steps_done < settings.steps:
            first = engine.steps_done * settings.accumulate
            micro = [stream[first + i].to(model.device) for i in range(settings.accumulate)]
            tokens = sum(b.tokens for b in micro)
            mean = 0.0
            for batch in micro:
                with autocast(model, dtype):
                    hidden_AH = hidden_at_answers(model, batch)
                    rows = head.weight(head_weight) if weight is None else weight
                    loss = mean_over_step(head(hidden_AH, rows, batch), tokens)
                engine.backward(loss)
                mean += float(loss.detach())
            engine.step()
            tokens_seen += tokens
            done = engine.steps_done
            if done % settings.evaluate_every == 0 or done == settings.steps:
                score = evaluate(model, validation, settings.max_length)
                curve.append({"step": done, "tokens": tokens_seen, "loss": mean, **score})
            if done % settings.save_every == 0 and done < settings.steps:
                engine.save({"curve": curve, "tokens": tokens_seen})
            progress.update(1, note=_note(mean, curve))
    model.eval()
    return curve


def _engine(
    parameters: dict[str, nn.Parameter], settings: DistillSettings, state: Path
) -> TorchEngine:
    from transformers import get_cosine_with_min_lr_schedule_with_warmup

    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=settings.lr,
        betas=(0.9, 0.95),
        weight_decay=settings.weight_decay,
        fused=True,
    )
    scheduler = get_cosine_with_min_lr_schedule_with_warmup(
        optimizer, settings.warmup, settings.steps, min_lr_rate=FINAL_LR
    )
    return TorchEngine(parameters, optimizer, state, scheduler, settings.clip)


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


def trainable_parameters(model: nn.Module, family: Family, train: str) -> dict[str, nn.Parameter]:
    """Free the parameters that learn: all, or all but those along the vocabulary."""
    names = [
        name
        for name, _ in model.named_parameters()
        if train == "all" or "vocab" not in family.tensors[template_of(name)[0]]
    ]
    return freeze_all_but(model, names)


def _note(loss: float, curve: Sequence[dict[str, float]]) -> str:
    note = f"loss {loss:.3f}"
    if curve and "emitted_per_round" in curve[-1]:
        note += f", emitted/round {curve[-1]['emitted_per_round']:.2f}"
    return note
