"""Does bfloat16 pay on this CPU? Times the two jobs that may use it, against float32.

    .venv/bin/python benchmarks/dtype.py [--quick]

Prints `write_float32_over_bfloat16` (a step of writing 48 rows) and
`distil_float32_over_bfloat16` (a training step of a 4-layer drafter): above 1, bfloat16 is quicker.
"""

import argparse
from typing import Any

import torch
from common import LAYERS, TARGET, interleaved, ratio, report

from draftsmith.accept.cache import CachedModel
from draftsmith.checkpoints.devices import autocast
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe as describe_config
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.checkpoints.slicing import Selection, compact_model

ROWS, TOKENS, VOCABULARY = 48, 384, 8192


def writing(model: Any) -> Any:
    """One decoding step of many rows, 64 tokens into their texts."""
    cached = CachedModel(model)
    with torch.inference_mode():
        cached.feed(torch.randint(3, 40_000, (ROWS, 64)), keep=1)

    @torch.inference_mode()
    def step() -> None:
        cached.feed(torch.randint(3, 40_000, (ROWS, 1)), keep=1)
        cached.crop(64)

    return step


def distilling(drafter: Any, dtype: torch.dtype) -> Any:
    """Forward and backward of a batch, with a limited head."""
    weight = drafter.get_output_embeddings().weight[:VOCABULARY].detach()
    ids = torch.randint(3, VOCABULARY, (2, TOKENS // 2))

    def step() -> None:
        with autocast(drafter, dtype):
            hidden = drafter.base_model(input_ids=ids, use_cache=False).last_hidden_state
            (hidden.flatten(0, 1) @ weight.T).float().logsumexp(-1).sum().backward()
        drafter.zero_grad()

    return step


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    repeats = 5 if parser.parse_args().quick else 15
    quiet_transformers()
    torch.manual_seed(0)
    exact = load_model(resolve(TARGET), device="cpu")
    family, shape = describe_config(exact.config, resolve(TARGET))
    drafter = compact_model(exact, family, Selection.of_layers(shape, LAYERS))
    half = load_model(resolve(TARGET), device="cpu", dtype=torch.bfloat16)
    write = interleaved({"float32": writing(exact), "bfloat16": writing(half)}, repeats)
    distil = interleaved(
        {
            "float32": distilling(drafter, torch.float32),
            "bfloat16": distilling(drafter, torch.bfloat16),
        },
        repeats,
    )
    report(
        {
            "write_float32_over_bfloat16": ratio(write, "float32", "bfloat16"),
            "distil_float32_over_bfloat16": ratio(distil, "float32", "bfloat16"),
        }
    )


if __name__ == "__main__":
    main()
