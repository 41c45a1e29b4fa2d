"""Which drafter pays for an encoder–decoder? The ablations of Xia et al. 2022, scaled down.

    python benchmarks/seq2seq/drafters.py --train TRAIN.jsonl.zst --test TEST.jsonl.zst
        [--target FOLDER] [--out runs/seq2seq] [--only ar-shallow spec …] [-s KEY=VALUE]
        [--sentences N] [--quick]

Makes drafters for a target (make_target.py's, unless `--target` names another) from the same
traces, each by a shipped recipe with the changes in `VARIANTS`, or as parallel heads on the
target's own state. Everything that is finished is kept below `--out`, so that an interrupted run
goes on. Then all of them translate the same test sentences in turn, beside plain greedy decoding
and five beams, float32, one sentence at a time. Of each it prints the minutes of its making
(pruning and training; the traces are told apart), accepted and emitted per round, milliseconds of
a draft and of a verification, sentences per second over greedy and over five beams, BLEU against
the references and identity with the target's own greedy output.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from make_target import read_pairs, target_folder
from tradeoff import (
    GREEDY,
    Runs,
    Way,
    drafting,
    figures_of,
    greedily,
    plain_step_ms,
    read_prompts,
    run,
    searching,
    spread,
)

from draftsmith.accept.pairing import Request
from draftsmith.accept.verify import Verification
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.checkpoints.provenance import read_key
from draftsmith.data.chat import Prompt
from draftsmith.data.files import PARTIAL, publish, write_json
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages, stage_keys
from draftsmith.recipes.schema import ScoreSettings

sys.path.append(str(Path(__file__).parents[1]))
from common import report

BEAM = "beam 5"


@dataclass(frozen=True)
class Variant:
    """A drafter of the comparison.

    Attributes:
        about: what it is, in a few words.
        recipe: a shipped one; empty: parallel heads on the target.
        changes: of the recipe, as `-s` takes them.
        lookaheads: at which it is measured.
    """

    about: str
    recipe: str
    lookaheads: tuple[int, ...]
    changes: tuple[str, ...] = ()


_SPEC = "ende-spec-drafter"
VARIANTS = {
    "ar-shallow": Variant("1 decoder layer, shared encoder", "ende-ar-shallow", (2, 4)),
    "spec": Variant("Spec-Drafter 8+2, k 8", _SPEC, (4, 8)),
    "heads": Variant("Blockwise: 7 heads on the target", "", (7,)),
    "balanced": Variant(
        "4+4 instead of 8+2", _SPEC, (8,), ("prune.shape.layers=4", "prune.encoder_repeat=1")
    ),
    "reduced": Variant(
        "8+2 with half the FFN",
        _SPEC,
        (8,),
        ("prune.shape={layers: 2, ffn: 512, encoder_ffn: 512}",),
    ),
    "shallower": Variant("8+1", _SPEC, (8,), ("prune.shape.layers=1",)),
    "k-12": Variant("8+2, k 12", _SPEC, (4, 12), ("distill.block.size=12",)),
}
_MINUTES = "minutes.json"
# Steps of each with `--quick`, and trace tokens.
_QUICK = ("trace.tokens=4000", "prune.steps=10", "prune.warmup=4", "prune.exchange=0")
_QUICK_DISTILL = ("distill.steps=20", "distill.warmup=5", "distill.evaluate_every=20")


def run_of(variant: Variant, args: argparse.Namespace, name: str) -> Run:
    """The run that makes a drafter."""
    changes = [
        f"target={args.target}",
        f"data.path=[{args.train}]",
        f"score.prompts={args.test}",
        *variant.changes,
        *args.set,
        *((*_QUICK, *_QUICK_DISTILL) if args.quick else ()),
        *((f"distill.steps={args.steps}",) if args.steps else ()),
    ]
    return Run(load(variant.recipe or "ende-ar-shallow", changes), args.out / name)


def make(name: str, args: argparse.Namespace) -> Path:
    """Make a drafter, or find it made; returns its folder."""
    variant, folder = VARIANTS[name], args.out / name
    drafter = folder / ("distilled" if variant.recipe else "heads")
    own = run_of(variant, args, name)
    share_traces(own, args.out)
    run_stages(own, ("trace",))
    begun = folder / "begun"
    whole = not begun.exists()
    begun.touch()
    start = time.monotonic()
    if variant.recipe:
        run_stages(own, ("prune", "distill"))
    elif not drafter.exists():
        script = Path(__file__).with_name("train_heads.py")
        given = ["--out", str(drafter), "--heads", str(max(variant.lookaheads))]
        steps = args.steps or (20 if args.quick else 400)
        given += ["--steps", str(steps), "--max-length", "128"]
        subprocess.run([sys.executable, str(script), str(folder), *given], check=True)
    if not (folder / _MINUTES).exists():
        write_json(folder / _MINUTES, (time.monotonic() - start) / 60 if whole else None)
    return drafter


def share_traces(own: Run, folder: Path) -> None:
    """Take the traces of another variant that has the very same, without a copy of their bytes."""
    key, mine = stage_keys(own)["traces"], own.folder("traces")
    if mine.exists():
        return
    for other in folder.glob("*/traces"):
        if read_key(other) == key:
            partial = mine.with_name(mine.name + PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(other, partial, copy_function=os.link)
            publish(partial, mine)
            return


def minutes_of(folder: Path) -> float | None:
    """How long a drafter took to make; None: it has not been made in one go."""
    path = folder / _MINUTES
    found: float | None = json.loads(path.read_text()) if path.is_file() else None
    return found


def ways_of(
    drafters: Mapping[str, Path], target: str, tokens: int
) -> tuple[dict[str, Way], Request, Any]:
    """Every way of decoding, on one target in memory."""
    ref = resolve(target)
    model, ways, pair = load_model(ref), {}, None
    for name, folder in drafters.items():
        is_model = bool(VARIANTS[name].recipe)
        request = Request.of(ref, resolve(str(folder)) if is_model else str(folder))
        pair = request.load(ScoreSettings(max_new_tokens=tokens), model)
        for k in VARIANTS[name].lookaheads:
            ways[f"{name} @{k}"] = drafting(pair, k, Verification())
    assert pair is not None
    plain: dict[str, Way] = {
        GREEDY: lambda prompt: greedily(pair, prompt),
        BEAM: lambda prompt: searching(pair, prompt),
    }
    return plain | ways, request, pair


def figures(
    runs: Mapping[str, Runs], references: Sequence[str], text: Any, out: Path
) -> dict[str, dict[str, Any]]:
    """All that is told of each way."""
    found = {}
    for name, made in runs.items():
        variant = name.partition(" @")[0]
        rounds = [r for t in made.timed for r in t.rounds]
        beams = zip(runs[BEAM].seconds, made.seconds, strict=True)
        found[name] = {
            "about": VARIANTS[variant].about if variant in VARIANTS else "the target alone",
            "minutes": minutes_of(out / variant),
            "accepted_per_round": (
                round(sum(r.accepted for r in rounds) / len(rounds), 3) if rounds else None
            ),
            "speed_over_beam": spread([beam / own for beam, own in beams]),
            **figures_of(made, runs[GREEDY], references, text),
        }
    return found


def show(found: Mapping[str, Mapping[str, Any]], t_ar_ms: float | None) -> None:
    """The table."""

    def said(value: float | None, form: str) -> str:
        return format("–" if value is None else format(value, form), ">7")

    print(f"{'':15}minutes accepted emitted t_draft t_verify  greedy  beam 5    BLEU  identity")
    for name, row in found.items():
        print(
            f"{name:15}{said(row['minutes'], '.1f')} {said(row['accepted_per_round'], '.2f')} "
            f"{said(row['emitted_per_round'], '.2f')} {said(row['t_draft_ms'], '.2f')}  "
            f"{said(row['t_verify_ms'], '.2f')} {row['speed']['median']:7.2f} "
            f"{row['speed_over_beam']['median']:7.2f} {said(row['bleu'], '.2f')}  "
            f"{said(row['identity'], '.1%')}"
        )
    print(f"a plain step of the target takes {said(t_ar_ms, '.2f').strip()} ms")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--target", default=str(target_folder(4, 4)))
    parser.add_argument("--out", type=Path, default=Path("runs/seq2seq"))
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=0, help="of training, instead of the recipes'")
    parser.add_argument("-s", "--set", action="append", default=[], help="change all: KEY=VALUE")
    parser.add_argument("--sentences", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-new-tokens", type=int, default=127)
    parser.add_argument("--make-only", action="store_true", help="train, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="hardly trained, six sentences")
    args = parser.parse_args()
    quiet_transformers()
    drafters = {name: make(name, args) for name in args.only}
    if args.make_only:
        return
    sentences, repeats = (6, 2) if args.quick else (args.sentences, args.repeats)
    ways, request, pair = ways_of(drafters, args.target, args.max_new_tokens)
    pairs = read_pairs(args.test)[:sentences]
    prompts: list[Prompt] = read_prompts(request, pairs)
    runs = run(ways, prompts, repeats)
    special = set(request.tokenizer.all_special_ids)
    found = figures(
        runs,
        [row["target"] for row in pairs],
        lambda ids: pair.text([i for i in ids if i not in special]),
        args.out,
    )
    t_ar_ms = plain_step_ms(runs[GREEDY])
    show(found, t_ar_ms)
    settings = {"sentences": len(prompts), "repeats": repeats, "target": args.target}
    report({"ways": found, "t_ar_ms": t_ar_ms, **settings})


if __name__ == "__main__":
    main()
