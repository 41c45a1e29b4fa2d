"""What `draftsmith plan` predicts of memory, against what training takes.

    .venv/bin/python benchmarks/plan_memory.py [--encoder-decoder] [--quick] [--threads 1]

Distils drafters of random weights on random traces for two steps on the CPU, each case in a process
of its own: two shapes, `train: layers` and `all`, with and without `checkpoint_activations`. Prints
`predicted_over_measured`, of the most that the process holds beyond what it held before the model
was made, for each case with the smallest and largest of all. Two steps, since the optimizer's
state comes with the first. One case more has products in bfloat16. `--quick` takes four of them and
shorter rows. What is measured is what the process holds: malloc keeps some blocks that were freed.
`--encoder-decoder` does the same for drafters with an encoder: `train: decoder` and `all`, and a
drafter of blocks. With MALLOC_MMAP_THRESHOLD_=1000000 in the environment it gives them back, and
the ratios are those of tensors alone.
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
from draftsmith.recipes.schema import BlockSettings, DistillSettings

SHAPES: dict[str, dict[str, int]] = {
    "4x576": {"num_hidden_layers": 4, "hidden_size": 576, "intermediate_size": 1536},
    "8x768": {"num_hidden_layers": 8, "hidden_size": 768, "intermediate_size": 2048},
}
# Encoder + decoder, after the name of their family.
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "sinusoids 6+2x512": (
        "marian",
        {
            "d_model": 512,
            "encoder_layers": 6,
            "decoder_layers": 2,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 8,
            "encoder_ffn_dim": 2048,
            "decoder_ffn_dim": 2048,
            "activation_function": "swish",
        },
    ),
    "buckets 4+2x512": (
        "t5",
        {"d_model": 512, "d_kv": 64, "num_layers": 4, "num_decoder_layers": 2, "d_ff": 2048},
    ),
}
BLOCKS = BlockSettings(size=16, prefixes=2)
VOCABULARY, HEAD_DIM, TOP_N = 49_152, 64, 32
# Rows, their tokens, and those of their sources.
FULL, QUICK = (8, 384, 0), (4, 192, 0)
FULL_PAIR, QUICK_PAIR = (8, 128, 320), (4, 96, 192)


def config_of(name: str, vocabulary: int = VOCABULARY) -> Any:
    """A model whose head is its embedding; a decoder has three query heads to a KV head."""
    from transformers import AutoConfig

    if name in PAIRS:
        kind, sizes = PAIRS[name]
        ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
        return AutoConfig.for_model(
            kind,
            vocab_size=vocabulary,
            decoder_vocab_size=vocabulary,
            tie_word_embeddings=True,
            **ids,
            **sizes,
        )
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


def random_rows(
    count: int, length: int, vocabulary: int = VOCABULARY, source: int = 0
) -> list[TraceRow]:
    """Rows of slightly different lengths, so that batches are padded; half of each is prompt.

    With sources of `source` tokens a prompt is one token.
    """
    rng = np.random.default_rng(0)
    rows = []
    for number in range(count):
        tokens = rng.integers(vocabulary, size=length - number % 4).astype(np.int32)
        prompt = prompt_of(length, source)
        read = rng.integers(vocabulary, size=source - number % 4) if source else None
        answers = len(tokens) - prompt
        rows.append(
            TraceRow(
                tokens=tokens,
                prompt_length=prompt,
                sampled=True,
                logprobs=np.zeros(answers, np.float32),
                top_ids=rng.integers(vocabulary, size=(answers, TOP_N)).astype(np.uint16),
                top_logprobs=np.full((answers, TOP_N), -4.0, np.float16),
                source=None if read is None else read.astype(np.int32),
            )
        )
    return rows


def prompt_of(length: int, source: int) -> int:
    """Tokens of a row that are no answer."""
    return 1 if source else length // 2


def train(config: Any, rows: list[TraceRow], settings: DistillSettings, dtype: str) -> None:
    """Distil a model of random weights."""
    from draftsmith.checkpoints.families import families
    from draftsmith.checkpoints.growing import start_block_drafting
    from draftsmith.checkpoints.layout import meta_model
    from draftsmith.distill.train import distill

    family = families()[config.model_type]
    model = meta_model(config, family, "cpu").float()
    if settings.block is not None:
        # One row is left for the mask.
        tokens = range(1, config.vocab_size)
        model = start_block_drafting(model, family, settings.block.size, tokens)
    with tempfile.TemporaryDirectory() as folder:
        state, products = Path(folder), getattr(torch, dtype)
        distill(model, family, rows, [], settings, seed=0, state=state, dtype=products)


def measured(
    shape: str, settings: DistillSettings, dtype: str, threads: int, source: int = 0
) -> int:
    """Bytes that two steps add to this process at most."""
    torch.set_num_threads(threads)
    # Libraries that are loaded on the way are no part of the plan.
    train(
        config_of(shape if source else "4x576", 64),
        random_rows(4, 8, 64, min(source, 8)),
        replace(settings, batch=2, max_length=8),
        dtype,
    )
    rows = random_rows(settings.batch * 2, settings.max_length, source=source)
    before = resident("VmRSS")
    train(config_of(shape), rows, settings, dtype)
    return resident("VmHWM") - before


def predicted(shape: str, settings: DistillSettings, dtype: str, source: int = 0) -> Any:
    """The plan's figure for the same."""
    from draftsmith.checkpoints.families import families

    config = config_of(shape)
    counts = counts_of(config, families()[config.model_type], settings)
    block, length = settings.block, settings.max_length
    prefixes = 1 if block is None else block.prefixes
    answers = length - prompt_of(length, source) if block is None else block.size
    work = Work(
        rows=settings.batch * prefixes,
        length=length + (0 if block is None else block.size),
        answers=settings.batch * prefixes * answers,
        micro_batches=settings.accumulate,
        top_n=TOP_N,
        width=getattr(torch, dtype).itemsize,
        checkpoint=settings.checkpoint_activations,
        source_length=source,
        rows_of_source=prefixes,
    )
    return peak(counts, work)


def compare(
    shape: str, settings: DistillSettings, dtype: str, threads: int, source: int = 0
) -> dict[str, Any]:
    """Both, measured in a process of its own, and their ratio."""
    plan = predicted(shape, settings, dtype, source)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        took = pool.submit(measured, shape, settings, dtype, threads, source).result()
    gb = {"predicted_gb": plan.total / 1e9, "measured_gb": took / 1e9, "moment": plan.moment}
    return {"ratio": plan.total / took, **gb}


Case = tuple[str, str, bool, str, BlockSettings | None]


def cases(quick: bool) -> Iterator[Case]:
    """(shape, what learns, whether activations are computed again, dtype of products, blocks)."""
    for number, (shape, what, again) in enumerate(
        product(SHAPES, ("layers", "all"), (False, True))
    ):
        if not quick or number in (0, 2, 5, 7):
            yield shape, what, again, "float32", None
    if not quick:
        yield "4x576", "all", False, "bfloat16", None


def pair_cases(quick: bool) -> Iterator[Case]:
    """The same with encoders."""
    for number, (shape, what, again) in enumerate(
        product(PAIRS, ("decoder", "all"), (False, True))
    ):
        if not quick or number in (0, 2, 4, 7):
            yield shape, what, again, "float32", None
    yield next(iter(PAIRS)), "all", False, "float32", BLOCKS
    if not quick:
        yield next(iter(PAIRS)), "all", False, "bfloat16", None


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--encoder-decoder", action="store_true", help="drafters with an encoder")
    arguments = parser.parse_args()
    pairs, quick = arguments.encoder_decoder, arguments.quick
    sizes = (QUICK_PAIR, FULL_PAIR) if pairs else (QUICK, FULL)
    batch, length, source = sizes[not quick]
    base = DistillSettings(steps=2, warmup=0, batch=batch, max_length=length)
    found: dict[str, dict[str, Any]] = {}
    for shape, what, again, dtype, block in (pair_cases if pairs else cases)(quick):
        name = f"{shape} {what} {dtype}{' checkpointed' if again else ''}"
        name += "" if block is None else " in blocks"
        settings = replace(base, train=what, checkpoint_activations=again, block=block)
        found[name] = compare(shape, settings, dtype, arguments.threads, source)
        print(name, {k: v if isinstance(v, str) else round(v, 3) for k, v in found[name].items()})
    ratios = [case["ratio"] for case in found.values()]
    figures = {"low": min(ratios), "high": max(ratios), "cases": found}
    about = {"batch": batch, "length": length, "source_length": source}
    report({"predicted_over_measured": figures, **about})


if __name__ == "__main__":
    main()
