"""One drafter in every runtime: do they accept the same, and what does each gain?

    .venv/bin/python benchmarks/runtimes.py runs/quickstart/distilled [--quick] [--repeats 5]
        [--lookahead 3] [--prompts 6] [--tokens 48] [--runtimes llama.cpp vllm …]

Exports target and drafter in float32 for each runtime, lets it answer the shipped prompts with and
without the drafter, prompt by prompt in turn, and prints its own counters. Runtimes take turns as
well. Beside them stands what draftsmith's replay expects on the texts that the runtime wrote.
"""

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from common import TARGET, report

from draftsmith.accept.form import Score
from draftsmith.accept.runtimes import FORMATS
from draftsmith.accept.score import score_drafter
from draftsmith.checkpoints.export import export_drafter
from draftsmith.checkpoints.export.processes import is_installed
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.loading import quiet_transformers
from draftsmith.data.progress import say
from draftsmith.recipes.schema import ExportSettings, ScoreSettings


def unpacked(folder: Path) -> ModelRef:
    """The target in float32: a packed one is computed otherwise by every runtime."""
    made = folder / "target"
    if not (made / "hf").is_dir():
        packed = resolve(TARGET)
        export_drafter(packed, packed, made, ExportSettings(to=("hf",)))
    return resolve(str(made / "hf"))


def summary(scores: list[Score]) -> dict[str, Any]:
    """What a runtime counts, the same each time, and the spread of what it gains."""
    row, replay = scores[0].decode[0], scores[0].replay[-1]
    speedups = [score.decode[0].speedup_measured or 0.0 for score in scores]
    return {
        "version": scores[0].machine["runtime"],
        "lossless": all(score.lossless for score in scores),
        "identical_tokens": row.identical_tokens,
        "compared_tokens": row.compared_tokens,
        "proposed": row.proposed,
        "accepted": row.accepted,
        "target_passes": row.rounds,
        "accepted_by_replay": replay.accepted,
        "rounds_by_replay": replay.rounds,
        "tokens_per_second_alone": median(s.decode[0].tokens_per_second_alone or 0 for s in scores),
        "tokens_per_second": median(s.decode[0].tokens_per_second or 0 for s in scores),
        "drafted_over_alone": median(speedups),
        "spread": [min(speedups), max(speedups)],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", help="a drafter of SmolLM2-135M-Instruct")
    parser.add_argument("--quick", action="store_true", help="two prompts, once; shows nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lookahead", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runtimes", nargs="+", choices=FORMATS, default=list(FORMATS))
    arguments = parser.parse_args()
    quiet_transformers()
    missing = [name for name in arguments.runtimes if not is_installed(name)]
    runtimes = [name for name in arguments.runtimes if name not in missing]
    prompts, tokens, repeats = arguments.prompts, arguments.tokens, arguments.repeats
    if arguments.quick:
        prompts, tokens, repeats, runtimes = 2, 8, 1, runtimes[:2]
    scores: dict[str, list[Score]] = {name: [] for name in runtimes}
    with tempfile.TemporaryDirectory() as folder:
        target, drafter = unpacked(Path(folder)), resolve(arguments.drafter)
        for turn in range(repeats):
            for name in runtimes if turn % 2 == 0 else runtimes[::-1]:
                settings = ScoreSettings(
                    runtime=name,
                    lookahead=(arguments.lookahead,),
                    # The first of each domain, as the prompts take turns.
                    limit=prompts,
                    max_new_tokens=tokens,
                )
                score = score_drafter(target, drafter, settings, exports=Path(folder))
                scores[name].append(score)
                say(f"{name}, {turn + 1} of {repeats}: {summary(scores[name][-1:])}")
    found = {name: summary(own) for name, own in scores.items()}
    report({"runtimes": found, "lookahead": arguments.lookahead, "not_installed": missing})


if __name__ == "__main__":
    main()
