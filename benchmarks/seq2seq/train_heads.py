"""Train parallel heads on a target's traces: the head-based baseline (Stern et al. 2018).

The target is the one that a run's traces are of; `draftsmith score HEADS --target TARGET` scores
what comes out. A killed training goes on from its last save.

    python benchmarks/seq2seq/train_heads.py runs/NAME --heads 4 --steps 600 --out heads
"""

import argparse
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

from draftsmith.accept.heads import HeadsConfig, ParallelHeads
from draftsmith.checkpoints.devices import compute_dtype
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe, load_model
from draftsmith.checkpoints.provenance import key_of
from draftsmith.data.files import PARTIAL, publish
from draftsmith.data.traces import TraceStore
from draftsmith.distill.heads import train_heads
from draftsmith.recipes.schema import DistillSettings

sys.path.append(str(Path(__file__).parents[1]))
from common import report


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a draftsmith run with traces")
    parser.add_argument("--out", type=Path, required=True, help="a folder that doesn't exist yet")
    parser.add_argument("--heads", type=int, default=4, help="most tokens that they propose")
    parser.add_argument("--loss", default="sequence", help="as distill.loss of recipes")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--dtype", default="float32", help="of matrix products")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists; give another --out")
    # What is asked for names the unfinished work, so that nothing else goes on with it.
    asked = {name: str(value) for name, value in vars(args).items()}
    work = args.out.with_name(f"{args.out.name}-{key_of(asked)[:8]}{PARTIAL}")
    store = TraceStore(args.run / "traces")
    target = resolve(store.about["target"])
    model = load_model(target, dtype=torch.float32)
    config = HeadsConfig.of(target.spec, describe(model.config, target)[1], args.heads)
    torch.manual_seed(args.seed)
    heads = ParallelHeads(config)
    given = {k: getattr(args, k) for k in ("loss", "steps", "batch", "lr", "warmup", "max_length")}
    settings, state = DistillSettings(**given), work / "state"
    start = time.monotonic()
    losses = train_heads(
        model,
        heads,
        store.rows("train"),
        settings,
        seed=args.seed,
        state=state,
        dtype=compute_dtype(args.dtype, model.device),
    )
    minutes = (time.monotonic() - start) / 60
    heads.save(work)
    shutil.rmtree(state)
    publish(work, args.out)
    print(f"{minutes:.1f} minutes; loss {losses[0]:.3f} → {losses[-1]:.3f}")
    report({**asdict(config), **given, "minutes": minutes, "loss": losses[-1]})


if __name__ == "__main__":
    main()
