"""What learning masks costs: a step with masks on every axis, against plain fine-tuning.

    .venv/bin/python benchmarks/masked_step.py [--quick] [--repeats 7]

SmolLM2 cut to eight layers learns all of its weights on rows of 512 tokens, four at a time; once as
it is, and once with hard-concrete masks on layers, KV heads, heads of a group, FFN channels and the
residual stream, which learn beside the weights under their constraint. Prints `masked_over_plain`:
`time` of a whole step (forward, backward, optimizer), variants in turn, and `memory`, the most that
the process holds beyond what it held before, each way in a process of its own. Masks are kept
half open, so that no block is skipped: late in a run, where most are closed, a step is cheaper.
"""

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import TARGET, interleaved, ratio, report
from kd_loss import resident

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import collate
from draftsmith.distill.train import mean_over_step
from draftsmith.prune.lagrangian import Lagrangian
from draftsmith.prune.masks import LearnableMasks
from draftsmith.prune.objective import Objective
from draftsmith.prune.train import MaskOptimizer, _engine, _generator
from draftsmith.recipes.schema import PruneSettings

AXES: tuple[Axis, ...] = ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")
LAYERS, TOP_N = 8, 16
FULL, QUICK = (4, 512), (2, 128)
WAYS = ("plain", "masked")


def source_model() -> Any:
    """The first layers of the target."""
    model = load_model(resolve(TARGET))
    family = family_of(model.config.model_type, TARGET)
    kept = Selection.of_layers(shape_of(model.config, family), range(LAYERS))
    return compact_model(model, family, kept)


def rows_of(count: int, length: int, vocabulary: int) -> list[TraceRow]:
    """Random rows without padding, nearly all of it answer."""
    rng, answers = np.random.default_rng(0), length - 4
    return [
        TraceRow(
            tokens=rng.integers(vocabulary, size=length).astype(np.int32),
            prompt_length=4,
            sampled=True,
            logprobs=np.zeros(answers, np.float32),
            top_ids=rng.integers(vocabulary, size=(answers, TOP_N)).astype(np.uint16),
            top_logprobs=np.full((answers, TOP_N), -4.0, np.float16),
        )
        for _ in range(count)
    ]


def step_of(way: str, size: tuple[int, int]) -> Callable[[], None]:
    """A training step, ready to be made again and again."""
    model = source_model()
    family = family_of(model.config.model_type, TARGET)
    source = shape_of(model.config, family)
    rows = rows_of(*size, source.vocab)
    batch = collate(rows, size[1])
    settings = PruneSettings(weights_lr=1e-5, mask_lr=1e-4)
    model.requires_grad_(True).train()
    objective = Objective.of(model, family, source, rows, settings)
    lesson = objective.lesson(batch)
    with TemporaryDirectory() as folder:
        engine = _engine(objective.student, model.parameters(), settings, Path(folder))

    def plain() -> None:
        engine.backward(mean_over_step(engine(batch, lesson), batch.tokens))
        engine.step()

    masks = LearnableMasks(AXES, source, init=2.0)
    optimizer = MaskOptimizer(masks, settings.mask_lr, settings.clip)
    # Asked for what is there: the count stays where it is.
    lagrangian = Lagrangian(AXES, source, source, warmup=0, quadratic=1.0)

    def masked() -> None:
        with objective.acting(masks.sample(_generator(0, engine.steps_done, model.device))):
            loss = mean_over_step(engine(batch, lesson), batch.tokens)
            engine.backward(loss + lagrangian.penalty(masks, engine.steps_done))
        optimizer.step(engine.steps_done, engine.ranks)
        engine.step()
        lagrangian.ascend(masks, engine.steps_done, settings.lambda_lr)

    return masked if way == "masked" else plain


def memory(way: str, size: tuple[int, int]) -> float:
    """Bytes that two steps add to this process at most: the optimizer's state comes with one."""
    quiet_transformers()
    before = resident("VmRSS")
    step = step_of(way, size)
    step()
    step()
    return float(resident("VmHWM") - before)


def measured_memory(way: str, size: tuple[int, int]) -> float:
    """`memory` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(memory, way, size).result()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    quiet_transformers()
    size = QUICK if arguments.quick else FULL
    used = {way: [measured_memory(way, size)] for way in WAYS}
    steps = {way: step_of(way, size) for way in WAYS}
    took = interleaved(steps, 5 if arguments.quick else arguments.repeats)
    figures = {"time": ratio(took, "masked", "plain"), "memory": ratio(used, "masked", "plain")}
    seconds = {way: round(statistics.median(values), 3) for way, values in took.items()}
    gigabytes = {way: round(values[0] / 1e9, 3) for way, values in used.items()}
    report(
        {"masked_over_plain": figures, "seconds": seconds, "added_gb": gigabytes, "size": size}
        | {"threads": torch.get_num_threads()}
    )


if __name__ == "__main__":
    main()
