"""Which layers to keep? Learned masks against baselines, each distilled with the same tokens.

    .venv/bin/python benchmarks/layer_choice.py runs/smollm2-cpu [--quick] [--steps 250] [--seeds 3]
        [--ways "masks, acceptance" uniform …]

Chooses four layers of SmolLM2 in each way on the traces of a finished run, and distils what is left
with the recipe's loss for so many steps. Prints, of each seed: what was kept, forward KL and
emitted per round at k = 4 on held-out greedy traces, before and after. A seed draws the masks'
noise, the random choice, and the order of rows. Mask training reads texts that no baseline reads,
which it prints too. What is finished is kept in RUN-layers.jsonl, so that an interrupted run goes
on.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from common import TARGET, over_seeds, report
from losses import finished, keep

from draftsmith.checkpoints.devices import compute_dtype
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe, load_model, quiet_transformers
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceRow, TraceStore
from draftsmith.distill.batches import collate
from draftsmith.distill.evaluation import Costs, evaluate
from draftsmith.distill.head_loss import HeadLoss, Projection
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.states import hidden_at_answers
from draftsmith.distill.train import distill
from draftsmith.prune.baselines import select_at_random, select_by_activations, select_by_position
from draftsmith.prune.race import Track
from draftsmith.prune.train import learn_masks
from draftsmith.recipes.loading import load
from draftsmith.recipes.schema import DistillSettings, PruneSettings

LAYERS = 4
# Rows on which a race is judged, as many as a trace stage would hold out for it.
HELD_OUT = 96
WAYS: dict[str, dict[str, Any]] = {
    "masks, acceptance": {"objective": "acceptance"},
    "masks, KL": {"objective": "kd"},
    "masks, acceptance, no race": {"objective": "acceptance", "race": 0},
    "masks, KL, no race": {"objective": "kd", "race": 0},
    "block-influence": {"method": "block-influence"},
    "uniform": {"method": "uniform"},
    "random": {"method": "random"},
    "first": {"method": "first"},
}


@dataclass(frozen=True)
class Trial:
    """A run whose traces are learned from."""

    run: Path
    steps: int
    quick: bool

    @cached_property
    def train(self) -> list[TraceRow]:
        """What is learned from."""
        return TraceStore(self.run / "traces").rows("train")

    @cached_property
    def validation(self) -> list[TraceRow]:
        """What is judged on."""
        rows = TraceStore(self.run / "traces").rows("validation")
        return rows[:4] if self.quick else rows

    def prune_settings(self, way: str) -> PruneSettings:
        """Those of the shipped recipe, but for the way."""
        settings = replace(load("smollm2-cpu").prune, **WAYS[way])
        if self.quick:
            settings = replace(settings, steps=3, warmup=1, exchange=0, race=min(2, settings.race))
        return settings

    def choose(self, way: str, seed: int) -> Selection:
        """The layers that a way keeps."""
        settings, reference = self.prune_settings(way), resolve(TARGET)
        model = load_model(reference)
        family, source = describe(model.config, reference)
        drafter = replace(source, layers=LAYERS)
        if settings.method == "masks":
            with tempfile.TemporaryDirectory() as folder:
                learned = learn_masks(
                    model,
                    family,
                    source,
                    drafter,
                    self.train,
                    settings,
                    seed=seed,
                    state=Path(folder) / "state",
                    track=self.track(settings, seed),
                )
                return learned.selection
        if settings.method == "random":
            return select_at_random(source, drafter, seed)
        if settings.method == "block-influence":
            sizes = {"batch": settings.batch, "max_length": settings.max_length, "seed": seed}
            return select_by_activations(
                settings.method, model, family, source, drafter, self.train, **sizes
            )
        return select_by_position(settings.method, source, drafter)

    def track(self, settings: PruneSettings, seed: int) -> Track | None:
        """A race is judged on texts of the training set: the held-out ones give these figures."""
        held_out, rest = self.train[:HELD_OUT], self.train[HELD_OUT:]
        return Track.of(rest, held_out, settings, seed, torch.float32)

    def distil_settings(self) -> DistillSettings:
        """Those of the shipped recipe, for fewer steps."""
        rare = {"evaluate_every": 10**6, "save_every": 10**6, "patience": 0}
        shipped, steps = load("smollm2-cpu").distill, self.steps
        return replace(shipped, **rare, steps=steps, warmup=min(30, steps // 4), lookahead=4)

    def distil(self, kept: Selection, seed: int) -> dict[str, float]:
        """Cut, learn and judge."""
        reference, settings = resolve(TARGET), self.distil_settings()
        model = load_model(reference)
        family, _ = describe(model.config, reference)
        drafter = compact_model(model, family, kept)
        before = self.judge(drafter)
        dtype = compute_dtype("auto", "cpu")
        with tempfile.TemporaryDirectory() as folder:
            state = Path(folder) / "state"
            distill(drafter, family, self.train, [], settings, seed=seed, state=state, dtype=dtype)
        after = self.judge(drafter)
        return {f"{k}_before": v for k, v in before.items()} | after

    def judge(self, model: Any) -> dict[str, float]:
        """On held-out traces."""
        settings = self.distil_settings()
        greedy = evaluate(model, self.validation, settings, Costs(0.0))
        divergence, positions, head = 0.0, 0, HeadLoss(forward_kl)
        with torch.inference_mode():
            for row in self.validation:
                batch = collate([row], settings.max_length)
                hidden = hidden_at_answers(model, batch)
                divergence += float(head(hidden, Projection.of(model), batch.traces))
                positions += batch.tokens
        return {
            "emitted_per_round": greedy["emitted_per_round"],
            "top1": greedy["top1"],
            "forward_kl": divergence / positions,
        }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean, lowest and highest over seeds, of each way."""
    table = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        names = ("emitted_per_round", "top1", "forward_kl", "forward_kl_before")
        table[way] = {"kept": [row["kept"] for row in own]} | over_seeds(own, names, 3)
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run with traces")
    parser.add_argument("--quick", action="store_true", help="under two minutes; shows nothing")
    parser.add_argument("--steps", type=int, default=250, help="of distillation")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    arguments = parser.parse_args()
    quiet_transformers()
    steps, seeds, ways = arguments.steps, arguments.seeds, arguments.ways
    if arguments.quick:
        steps, seeds, ways = 4, 1, ways[:3]
    trial = Trial(arguments.run, steps, arguments.quick)
    path = arguments.run.with_name(f"{arguments.run.name}-layers.jsonl")
    rows = [row for row in finished(path) if row["steps"] == steps]
    # Seeds outermost: an interrupted run has as much of one way as of another.
    for seed in range(seeds):
        for way in ways:
            if any((row["way"], row["seed"]) == (way, seed) for row in rows):
                continue
            start = time.monotonic()
            kept = trial.choose(way, seed)
            row = {"way": way, "seed": seed, "steps": steps, "kept": list(kept.layers)}
            row["seconds_to_choose"] = round(time.monotonic() - start)
            rows.append(row | trial.distil(kept, seed))
            if not arguments.quick:
                keep(path, rows[-1])
            say(f"{way}, seed {seed}: {rows[-1]}")
    rows = [row for row in rows if row["way"] in ways and row["seed"] < seeds]
    masks = trial.prune_settings("masks, KL")
    read = masks.steps * masks.batch * masks.accumulate
    report({"ways": summary(rows), "steps": steps, "rows_read_by_masks": read})


if __name__ == "__main__":
    main()
