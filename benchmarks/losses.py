"""Which loss makes the better drafter in the same time? And does on-policy pay?

    .venv/bin/python benchmarks/losses.py runs/smollm2-cpu [--quick] [--start pruned|distilled]
        [--steps 200] [--seeds 3] [--ways forward_kl hybrid …]

Distils the compact model of a finished run (`--start distilled`: its finished drafter, to see what
helps one that is good already) on that run's traces, by each way for the same time. What a step
costs over one of forward KL is measured first, single steps in turn. Losses over traces differ by
less than the noise and all get the same steps and tokens; ways with a live target get as many
steps as take that time. Of each seed it prints, on held-out traces: emitted per round at k = 3
(greedy ones), and acceptance under sampling (1 - total variation, over the top n and the tail).
What is finished is kept in RUN-losses.jsonl, so that an interrupted run goes on.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from common import TARGET, interleaved, over_seeds, report

from draftsmith.checkpoints.devices import compute_dtype
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceRow, TraceStore
from draftsmith.distill.batches import BatchStream, collate
from draftsmith.distill.engine import TorchEngine
from draftsmith.distill.head_loss import HeadLoss, Projection
from draftsmith.distill.lessons import Lessons
from draftsmith.distill.losses import total_variation
from draftsmith.distill.rounds import OwnRounds
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.teacher import Teacher
from draftsmith.distill.train import (
    Costs,
    Student,
    distill,
    evaluate,
    loss_head,
    trainable_parameters,
)
from draftsmith.recipes.loading import load
from draftsmith.recipes.schema import DistillSettings

WAYS: dict[str, dict[str, Any]] = {
    "forward_kl": {},
    "forward_kl + ce": {"cross_entropy": 0.5},
    "reverse_kl": {"loss": "reverse_kl"},
    "jensen_shannon": {"loss": "jensen_shannon"},
    "total_variation": {"loss": "total_variation"},
    "hybrid": {"loss": "hybrid"},
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

    def model(self) -> Any:
        """The drafter to begin with."""
        return load_model(resolve(str(self.run / self.start)), dtype=torch.float32)

    def learn(self, way: str, steps: int, seed: int) -> Any:
        """The drafter after so many steps."""
        model, settings = self.model(), self.settings(way, steps)
        teacher = self.teacher if settings.teacher == "live" else None
        family = family_of(model.config.model_type, "drafter")
        with tempfile.TemporaryDirectory() as folder:
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
        return model

    def step(self, way: str) -> Callable[[], None]:
        """A training step, to be made again and again."""
        model, settings = self.model(), self.settings(way, 1)
        family = family_of(model.config.model_type, "drafter")
        learning = trainable_parameters(model, family, settings, 0)
        teacher = self.teacher if settings.teacher == "live" else None
        student = Student(model, loss_head(model, self.train, settings), self.dtype)
        stream = BatchStream(self.train, settings.batch, settings.max_length, 0)
        rounds = OwnRounds(student.propose, settings.lookahead, stop_ids(model))
        # Every step is on-policy; `relative_costs` knows how many are.
        settings = replace(settings, on_policy=1.0 if settings.on_policy else 0.0)
        lessons = Lessons(stream, rounds, settings, 0, model.device, teacher)
        optimizer = torch.optim.AdamW(learning.values(), lr=1e-6, fused=True)
        engine = TorchEngine(learning, optimizer, Path(), module=student)

        def work() -> None:
            for batch in lessons.of_step(engine.steps_done, engine.ranks):
                engine.backward(engine(batch, lessons.on(batch)) / batch.weight)
            engine.step()

        return work

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


def relative_costs(trial: Trial, ways: Sequence[str], repeats: int) -> dict[str, float]:
    """Time of a step of each way over one of forward KL."""
    seconds = interleaved({way: trial.step(way) for way in ways}, repeats)
    base = seconds[ways[0]]
    ratios = {
        way: statistics.median(a / b for a, b in zip(took, base, strict=True))
        for way, took in seconds.items()
    }
    for way, ratio in ratios.items():
        # Off-policy steps of the same way cost what those of a live target cost.
        if (share := WAYS[way].get("on_policy")) and "live" in ratios:
            ratios[way] = share * ratio + (1 - share) * ratios["live"]
    return ratios


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
        figures = over_seeds(own, ("emitted_per_round", "top1", "acceptance_sampling"), 4)
        table[way] = {"steps": own[0]["steps"], "seeds": len(own)} | figures
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run with traces and a compact model")
    parser.add_argument("--quick", action="store_true", help="under two minutes; shows nothing")
    parser.add_argument("--start", choices=sorted(LR), default="pruned")
    parser.add_argument("--steps", type=int, default=200, help="of forward KL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    quiet_transformers()
    trial = Trial(arguments.run, arguments.start, compute_dtype("auto", "cpu"))
    count, seeds, ways, repeats = arguments.steps, arguments.seeds, arguments.ways, 15
    if arguments.quick:
        count, seeds, ways, repeats = 4, 1, arguments.ways[:2], 2
    path = arguments.run.with_name(f"{arguments.run.name}-losses.jsonl")
    asked = {"start": trial.start, "of": count}
    rows = [row for row in finished(path) if asked.items() <= row.items()]
    costs = next((row["costs"] for row in rows if "costs" in row), None)
    if costs is None:
        costs = relative_costs(trial, list(WAYS) if ways == list(WAYS) else ways, repeats)
        keep(path, asked | {"costs": costs})
        say(f"costs: {costs}")
    rows = [row for row in rows if "way" in row]
    steps = {w: round(count / costs[w]) if "teacher" in WAYS[w] else count for w in ways}
    # Seeds outermost: an interrupted run has as much of one way as of another.
    for seed in range(seeds):
        for way in ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            row = asked | {"way": way, "seed": seed, "steps": steps[way]}
            rows.append(row | trial.judge(trial.learn(way, steps[way], seed)))
            keep(path, rows[-1])
            say(f"{way}, seed {seed}: {rows[-1]}")
    before = trial.judge(load_model(resolve(str(trial.run / trial.start))))
    report({"ways": summary(rows, ways), "costs": costs, "before": before, **asked})


if __name__ == "__main__":
    main()
