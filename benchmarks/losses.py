"""Which loss makes the better drafter in the same time? And does on-policy pay?

    .venv/bin/python benchmarks/losses.py runs/smollm2-cpu [--quick] [--start pruned|distilled]
        [--seconds 90] [--seeds 3] [--ways forward_kl hybrid …]

Distils the compact model of a finished run (`--start distilled`: its finished drafter, to see what
helps one that is good already) on that run's traces, by each way for the same time: seconds of a
step are measured first, the ways interleaved, and each gets as many steps as fit. Of each seed it
prints, on held-out traces: emitted per round at k = 3 (greedy ones), and acceptance under sampling
(1 - total variation, over the top n and the tail). What is finished is kept in RUN-losses.jsonl, so
that an interrupted run goes on.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from common import TARGET, report

from draftsmith.checkpoints.devices import compute_dtype
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceRow, TraceStore
from draftsmith.distill.batches import collate
from draftsmith.distill.head_loss import HeadLoss, Projection
from draftsmith.distill.losses import total_variation
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.train import Costs, distill, evaluate
from draftsmith.recipes.loading import load
from draftsmith.recipes.schema import DistillSettings

WAYS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "forward_kl + ce": {"cross_entropy": 0.5},
    "cross_entropy": {"cross_entropy": 1.0},
    "reverse_kl": {"loss": "reverse_kl"},
    "jensen_shannon": {"loss": "jensen_shannon"},
    "total_variation": {"loss": "total_variation"},
    "hybrid": {"loss": "hybrid"},
    "hybrid + ce": {"loss": "hybrid", "cross_entropy": 0.5},
    "live": {"teacher": "live"},
    "live, on-policy": {"teacher": "live", "on_policy": 0.5},
}
# Peak learning rates: a drafter that is good already is unlearned by what a fresh one needs.
LR = {"pruned": 1.5e-3, "distilled": 3e-4}


@dataclass(frozen=True)
class Trial:
    """A finished run, from which every way begins."""

    run: Path
    start: str
    dtype: torch.dtype

    @cached_property
    def train(self) -> list[TraceRow]:
        """What is learned from."""
        return TraceStore(self.run / "traces").rows("train")

    @cached_property
    def validation(self) -> list[TraceRow]:
        """What is judged on."""
        return TraceStore(self.run / "traces").rows("validation")

    @cached_property
    def teacher(self) -> Teacher:
        """The target, loaded once."""
        return Teacher(load_model(resolve(TARGET), dtype=self.dtype))

    def settings(self, way: str, steps: int) -> DistillSettings:
        """Those of the shipped recipe, but for the way."""
        shipped = load("smollm2-cpu").distill
        fixed = {"loss": "forward_kl", "cross_entropy": 0.0, "patience": 0, "lr": LR[self.start]}
        return replace(
            shipped,
            **(fixed | WAYS[way]),
            steps=steps,
            warmup=min(30, steps // 4),
            evaluate_every=10**6,
            save_every=10**6,
        )

    def learn(self, way: str, steps: int, seed: int) -> tuple[Any, float]:
        """The drafter after so many steps, and the seconds that they took."""
        model = load_model(resolve(str(self.run / self.start)), dtype=torch.float32)
        settings = self.settings(way, steps)
        teacher = self.teacher if settings.teacher == "live" else None
        family = family_of(model.config.model_type, "drafter")
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            distill(
                model,
                family,
                self.train,
                [],
                settings,
                seed=seed,
                state=Path(folder) / "state",
                dtype=self.dtype,
                teacher=teacher,
            )
            return model, time.perf_counter() - began

    def judge(self, model: Any) -> dict[str, float]:
        """On held-out traces."""
        settings = self.settings("forward_kl", 1)
        greedy = evaluate(model, self.validation, settings, Costs(0.0))
        distance = positions = 0.0
        head = HeadLoss(total_variation)
        with torch.inference_mode():
            for row in self.validation:
                batch = collate([row], settings.max_length)
                hidden = hidden_at_answers(model, batch)
                distance += float(head(hidden, Projection.of(model), batch.traces))
                positions += batch.tokens
        return {
            "emitted_per_round": greedy["emitted_per_round"],
            "top1": greedy["top1"],
            "acceptance_sampling": 1 - distance / positions,
        }


def seconds_per_step(trial: Trial, ways: Sequence[str], repeats: int) -> dict[str, float]:
    """Median over interleaved repeats, start and end taken off."""
    short, long = 2, 10
    found: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            took = [trial.learn(way, steps, seed=0)[1] for steps in (short, long)]
            found[way].append((took[1] - took[0]) / (long - short))
    return {way: statistics.median(values) for way, values in found.items()}


def finished(path: Path) -> list[dict[str, Any]]:
    """What earlier runs of this script measured."""
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def keep(path: Path, row: Mapping[str, Any]) -> None:
    """Add a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def summary(rows: Sequence[Mapping[str, Any]], ways: Sequence[str]) -> dict[str, Any]:
    """Mean, lowest and highest over seeds."""
    table = {}
    for way in ways:
        own = [row for row in rows if row["way"] == way]
        figures = ("emitted_per_round", "top1", "acceptance_sampling")
        table[way] = {"steps": own[0]["steps"], "seeds": len(own)} | {
            name: [
                round(statistics.mean(row[name] for row in own), 4),
                round(min(row[name] for row in own), 4),
                round(max(row[name] for row in own), 4),
            ]
            for name in figures
        }
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run with traces and a compact model")
    parser.add_argument("--quick", action="store_true", help="under two minutes; shows nothing")
    parser.add_argument("--start", choices=sorted(LR), default="pruned")
    parser.add_argument("--seconds", type=float, default=90, help="of training for each way")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    quiet_transformers()
    trial = Trial(arguments.run, arguments.start, compute_dtype("auto", "cpu"))
    seconds, seeds, ways = arguments.seconds, arguments.seeds, arguments.ways
    if arguments.quick:
        seconds, seeds, ways = 2.0, 1, arguments.ways[:2]
    path = arguments.run.with_name(f"{arguments.run.name}-losses.jsonl")
    asked = {"start": trial.start, "seconds": seconds}
    rows = [row for row in finished(path) if asked.items() <= row.items()]
    steps = {row["way"]: row["steps"] for row in rows}
    if missing := [way for way in ways if way not in steps]:
        per_step = seconds_per_step(trial, missing, 1 if arguments.quick else 3)
        steps |= {way: max(1, round(seconds / each)) for way, each in per_step.items()}
    # Seeds outermost: an interrupted run has as much of one way as of another.
    for seed in range(seeds):
        for way in ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            model, took = trial.learn(way, steps[way], seed)
            row = asked | {"way": way, "seed": seed, "steps": steps[way], "took": round(took, 1)}
            rows.append(row | trial.judge(model))
            keep(path, rows[-1])
            say(f"{way}, seed {seed}: {rows[-1]}")
    before = trial.judge(load_model(resolve(str(trial.run / trial.start))))
    report({"ways": summary(rows, ways), "before": before, **asked})


if __name__ == "__main__":
    main()
