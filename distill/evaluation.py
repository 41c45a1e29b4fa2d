"""How well a drafter drafts while it learns: replays of held-out greedy texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftsmith.accept.cache import cached
from draftsmith.accept.drafters import BlockDrafter
from draftsmith.accept.replay import RoundCounts, replay, replay_starts
from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.checkpoints.shape import shape_of
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import collate
from draftsmith.distill.head_loss import head_logits
from draftsmith.distill.hearing import set_training
from draftsmith.distill.states import hidden_at_answers
from draftsmith.recipes.schema import DistillSettings

# Predicted speedups are looked for at lookaheads up to this.
MOST_LOOKAHEAD = 8


@dataclass(frozen=True)
class Costs:
    """Times, over that of a plain step of the target.

    Attributes:
        draft: a pass of the drafter.
        verify: a verification.
    """

    draft: float
    verify: float = 1.0

    @classmethod
    def of(
        cls, model: Any, family: Family, settings: DistillSettings, target_layers: int | None
    ) -> "Costs":
        """The recipe's; a drafter's latency grows with its decoder's depth (Yan et al. 2025)."""
        layers = getattr(model.config, family.config.layers)
        by_depth = layers / target_layers if target_layers else 0.0
        return cls(settings.draft_cost or by_depth, settings.verify_cost)

    def speedup(self, counts: RoundCounts) -> float:
        """Predicted tokens per second over the target alone, without prefills."""
        # After full acceptance the drafter has yet to read its last proposal.
        one_by_one = counts.lookahead * counts.rounds + counts.full
        passes = one_by_one if counts.passes is None else counts.passes
        return counts.emitted / (passes * self.draft + counts.rounds * self.verify)


@dataclass(frozen=True)
class Replayed:
    """A text that was replayed.

    Attributes:
        counts: its rounds at every lookahead that is looked at.
        agreed: places at which the drafter's likeliest token was the target's.
        asked: places at which it was asked.
    """

    counts: Sequence[RoundCounts]
    agreed: float
    asked: float


@torch.inference_mode()
def evaluate(
    model: Any, rows: Sequence[TraceRow], settings: DistillSettings, costs: Costs
) -> dict[str, float]:
    """Replay held-out greedy traces; empty where there is none.

    Returns:
        Emitted per round at the recipe's lookahead, top-1 agreement, and the best predicted speedup
        with the lookahead that gives it.
    """
    was_training = model.training
    model.eval()
    replayed = (
        _block_replay(model, settings) if Block.of(model.config) else _replay(model, settings)
    )
    found = [replayed(row) for row in rows if _is_greedy(row, settings)]
    set_training(model, was_training)
    if not found:
        return {}
    totals = [
        RoundCounts.total(own, own[0].lookahead)
        for own in zip(*(text.counts for text in found), strict=True)
    ]
    best = max(totals, key=costs.speedup)
    recipes = next(c for c in totals if c.lookahead == settings.lookahead)
    return {
        "emitted_per_round": float(recipes.emitted_per_round or 0.0),
        "top1": sum(text.agreed for text in found) / sum(text.asked for text in found),
        "predicted_speedup": costs.speedup(best),
        "best_lookahead": best.lookahead,
    }


def _is_greedy(row: TraceRow, settings: DistillSettings) -> bool:
    """Whether a row can be replayed, and has an answer within the longest row."""
    return row.greedy and 0 < row.prompt_length < min(len(row.tokens), settings.max_length)


def _replay(model: Any, settings: DistillSettings) -> Callable[[TraceRow], Replayed]:
    """For a drafter whose proposals depend on the text alone: one pass tells all rounds."""
    lookaheads = range(1, max(settings.lookahead, MOST_LOOKAHEAD) + 1)

    def replayed(row: TraceRow) -> Replayed:
        batch = collate([row], settings.max_length).to(model.device)
        choices = head_logits(model, hidden_at_answers(model, batch)).argmax(-1)
        matches = (choices == batch.labels).cpu().numpy()
        counts = [replay(matches, k, limit=len(matches) + 1) for k in lookaheads]
        return Replayed(counts, int(matches.sum()), len(matches))

    return replayed


def _block_replay(model: Any, settings: DistillSettings) -> Callable[[TraceRow], Replayed]:
    """For a drafter of blocks, which drafts wherever a round begins."""
    block = Block.of(model.config)
    assert block is not None
    # By the config: a head that is cut into parts has no rows here.
    shape = shape_of(model.config, family_of(model.config.model_type, "model"))
    sayable = SharedVocabulary(shape.vocab).without([block.mask_id])
    drafter = BlockDrafter(cached(model), sayable, stop_ids(model), block.size, block.mask_id)
    lookaheads = sorted({1, settings.lookahead, block.size})

    def replayed(row: TraceRow) -> Replayed:
        tokens = row.tokens[: settings.max_length].tolist()
        prompt, answer = tokens[: row.prompt_length], tokens[row.prompt_length :]
        limit = len(answer) + 1
        found = replay_starts(
            drafter, prompt, answer, lookaheads, limit, drafter.context, source=row.read
        )
        first = found[1]
        return Replayed([found[k] for k in lookaheads], first.accepted, first.rounds)

    return replayed
