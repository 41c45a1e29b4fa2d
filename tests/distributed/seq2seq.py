"""Distillation and masks of tiny encoder–decoders, the same in one process and in many.

deepspeed --no_local_rank --num_gpus 2 --module tests.distributed.seq2seq FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.growing import start_block_drafting
from draftsmith.checkpoints.shape import resolve_shape, shape_of
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.processes import is_main
from draftsmith.data.traces import TraceRow
from draftsmith.distill import deepspeed_engine
from draftsmith.distill.deepspeed_engine import DeepSpeedEngine, start_processes
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.train import distill
from draftsmith.prune.train import learn_masks
from draftsmith.recipes.schema import BlockSettings, DistillSettings, PruneSettings
from tests.conftest import TINY_VOCAB, make_model
from tests.e2e.test_seq2seq import row_of

# Family, what learns (blocks: all of a drafter of blocks), ZeRO stage.
CASES = (
    ("t5", "all", 1),
    ("t5", "decoder", 2),
    ("t5", "all", 3),
    ("marian", "all", 2),
    ("marian", "decoder", 3),
    ("t5", "blocks", 2),
    ("marian", "blocks", 3),
)
# These learn from a live target, what its layers read too; under ZeRO 3 that is cut into parts.
LIVE = (("t5", "all", 3), ("marian", "decoder", 3))
BLOCK = BlockSettings(size=3, prefixes=2)
STEPS, SAVED, KILLED = 4, 2, 3


class KilledError(Exception):
    """Stands for a process that ends in the middle of a step."""


def tiny(family: str) -> Any:
    """A model that draws nothing: processes would draw otherwise than one alone does."""
    return make_model(family, dropout=0.0, dropout_rate=0.0)


def rows(seed: int) -> list[TraceRow]:
    """Texts and sources of many lengths, so that each micro-batch pads otherwise."""
    return [row_of(2 + i % 7, 1 + i % 5, seed=100 * seed + i) for i in range(12)]


def distilled(family: str, train: str, zero: Any, state: Path) -> dict[str, Any]:
    """Train from the newest save; the learning curve and the weights."""
    model, table, blocks = tiny(family), families()[family], train == "blocks"
    live = (family, train, zero) in LIVE
    if blocks:
        model = start_block_drafting(model, table, BLOCK.size, range(TINY_VOCAB - 1))
    settings = DistillSettings(
        steps=STEPS,
        batch=2,
        accumulate=2,
        warmup=0,
        lr=1e-3,
        train="all" if blocks else train,  # type: ignore[arg-type]
        block=BLOCK if blocks else None,
        loss="sequence" if blocks else "forward_kl",
        zero=zero,
        evaluate_every=2,
        save_every=SAVED,
        teacher="live" if live else "traces",
        hidden_matching=0.5 if live else 0.0,
        shard_teacher=live,
    )
    teacher = None
    if live:
        whole = Selection.of_layers(shape_of(model.config, table), range(4))
        target = make_model(family, seed=5, dropout=0.0, dropout_rate=0.0)
        teacher = Teacher(target, kept=whole, shard=True)
    curve = distill(model, table, rows(1), rows(2), settings, seed=0, state=state, teacher=teacher)
    return {"curve": curve, "weights": model.state_dict()}


def masked(family: str, state: Path) -> dict[str, Any]:
    """Learn which layers of both sides, and which FFN channels, stay."""
    model, table = tiny(family), families()[family]
    source = shape_of(model.config, table)
    goal = resolve_shape(source, {"layers": 2, "encoder_layers": 2, "ffn": 32}, table)
    settings = PruneSettings(steps=8, warmup=2, batch=2, accumulate=2, exchange=1)
    found = learn_masks(model, table, source, goal, rows(1), settings, seed=0, state=state)
    assert found.trajectory is not None
    return {"selection": found.selection.to_plain(), "trajectory": found.trajectory.state()}


def killed(family: str, train: str, zero: int, state: Path) -> None:
    """Train until the third step breaks off in every process."""
    step = DeepSpeedEngine.step

    def deadly(self: DeepSpeedEngine) -> float:
        if self.steps_done == KILLED - 1:
            raise KilledError
        return step(self)

    DeepSpeedEngine.step = deadly  # type: ignore[method-assign]
    try:
        distilled(family, train, zero, state)
    except KilledError:
        return
    finally:
        DeepSpeedEngine.step = step  # type: ignore[method-assign]
    raise AssertionError("nothing was killed")


def main(folder: Path) -> None:
    """Every case, killed after a save and gone on with."""
    torch.set_num_threads(1)
    # Else nothing of a tiny model would be cut into parts.
    deepspeed_engine.WHOLE_BELOW = 0
    start_processes()
    found: dict[str, Any] = {}
    for family, train, zero in CASES:
        name = f"{family}-{train}-{zero}"
        killed(family, train, zero, folder / name)
        found[name] = distilled(family, train, zero, folder / name)
    for family in ("t5", "marian"):
        found[f"{family}-masks"] = masked(family, folder / f"{family}-masks")
    if is_main():
        torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
