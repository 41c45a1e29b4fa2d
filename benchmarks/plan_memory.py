"""What `draftsmith plan` predicts of memory, against what training takes.

    .venv/bin/python benchmarks/plan_memory.py [--quick] [--threads 1]

Distils drafters of random weights on random traces for two steps on the CPU, each case in a process
of its own: two shapes, `train: layers` and `all`, with and without `checkpoint_activations`. Prints
`predicted_over_measured`, of the most that the process holds beyond what it held before the model
was made, for each case with the smallest and largest of all. Two steps, since the optimizer's
state comes with the first. One case more has products in bfloat16. `--quick` takes four of them and
shorter rows. What is measured is what the process holds: malloc keeps some blocks that were freed.
With MALLOC_MMAP_THRESHOLD_=1000000 in the environment it gives them back, and the ratios are those
of tensors alone.
"""

import argparse
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import report
from kd_loss import resident

from draftsmith.data.traces import TraceRow
from draftsmith.distill.estimate import Work, counts_of, peak
from draftsmith.recipes.schema import DistillSettings

SHAPES: dict[str, dict[str, int]] = {
    "4x576": {"num_hidden_layers": 4, "hidden_size": 576, "intermediate_size": 1536},
    "8x768": {"num_hidden_layers": 8, "hidden_size": 768, "intermediate_size": 2048},
}
VOCABULARY, HEAD_DIM, TOP_N = 49_152, 64, 32
FULL, QUICK = (8, 384), (4, 192)


def config_of(name: str, vocabulary: int = VOCABULARY) -> Any:
    """A decoder with three query heads to a KV head, whose head is its embedding."""
    from transformers import AutoConfig

    heads = SHAPES[name]["hidden_size"] // HEAD_DIM
    return AutoConfig.for_model(
        "llama",
        vocab_size=vocabulary,
        num_attention_heads=heads,
        num_key_value_heads=heads // 3,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        **SHAPES[name],
    )


def random_rows(count: int, length: int, vocabulary: int = VOCABULARY) -> list[TraceRow]:
    """Rows of slightly different lengths, so that batches are padded; half of each is prompt."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        tokens = rng.integers(vocabulary, size=length - number % 4).astype(np.int32)
        prompt = length // 2
        answers = len(tokens) - prompt
        rows.append(
            TraceRow(
                tokens=tokens,
                prompt_length=prompt,
                sampled=True,
                logprobs=np.zeros(answers, np.float32),
                top_ids=rng.integers(vocabulary, size=(answers, TOP_N)).astype(np.uint16),
                top_logprobs=np.full((answers, TOP_N), -4.0, np.float16),
            )
        )
    return rows


def train(config: Any, rows: list[TraceRow], settings: DistillSettings, dtype: str) -> None:
    """Distil a model of random weights."""
    from draftsmith.checkpoints.families import families
    from draftsmith.checkpoints.layout import meta_model
    from draftsmith.distill.train import distill

    family = families()[config.model_type]
    model = meta_model(config, family, "cpu").float()
    with tempfile.TemporaryDirectory() as folder:
        state, products = Path(folder), getattr(torch, dtype)
        distill(model, family, rows, [], settings, seed=0, state=state, dtype=products)


def measured(shape: str, settings: DistillSettings, dtype: str, threads: int) -> int:
    """Bytes that two steps add to this process at most."""
    torch.set_num_threads(threads)
    # Libraries that are loaded on the way are no part of the plan.
    train(
        config_of("4x576", 64),
        random_rows(4, 8, 64),
        replace(settings, batch=2, max_length=8),
        dtype,
    )
    rows = random_rows(settings.batch * 2, settings.max_length)
    before = resident("VmRSS")
    train(config_of(shape), rows, settings, dtype)
    return resident("VmHWM") - before


def predicted(shape: str, settings: DistillSettings, dtype: str) -> Any:
    """The plan's figure for the same."""
    from draftsmith.checkpoints.families import families

    config = config_of(shape)
    counts = counts_of(config, families()[config.model_type], settings)
    work = Work(
        rows=settings.batch,
        length=settings.max_length,
        answers=settings.batch * (settings.max_length - settings.max_length // 2),
        micro_batches=settings.accumulate,
        top_n=TOP_N,
        width=getattr(torch, dtype).itemsize,
        checkpoint=settings.checkpoint_activations,
    )
    return peak(counts, work)


def compare(shape: str, settings: DistillSettings, dtype: str, threads: int) -> dict[str, Any]:
    """Both, measured in a process of its own, and their ratio."""
    plan = predicted(shape, settings, dtype)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        took = pool.submit(measured, shape, settings, dtype, threads).result()
    gb = {"predicted_gb": plan.total / 1e9, "measured_gb": took / 1e9, "moment": plan.moment}
    return {"ratio": plan.total / took, **gb}


def cases(quick: bool) -> Iterator[tuple[str, str, bool, str]]:
    """(shape, what learns, whether activations are computed again, dtype of products)."""
    for number, (shape, what, again) in enumerate(
        product(SHAPES, ("layers", "all"), (False, True))
    ):
        if not quick or number in (0, 2, 5, 7):
            yield shape, what, again, "float32"
    if not quick:
        yield "4x576", "all", False, "bfloat16"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    batch, length = QUICK if arguments.quick else FULL
    base = DistillSettings(steps=2, warmup=0, batch=batch, max_length=length)
    found: dict[str, dict[str, Any]] = {}
    for shape, what, again, dtype in cases(arguments.quick):
        name = f"{shape} {what} {dtype}{' checkpointed' if again else ''}"
        settings = replace(base, train=what, checkpoint_activations=again)
        found[name] = compare(shape, settings, dtype, arguments.threads)
        print(name, {k: v if isinstance(v, str) else round(v, 3) for k, v in found[name].items()})
    ratios = [case["ratio"] for case in found.values()]
    figures = {"low": min(ratios), "high": max(ratios), "cases": found}
    report({"predicted_over_measured": figures, "batch": batch, "length": length})


if __name__ == "__main__":
    main()
