"""How rugged is the choice of layers? The divergence from which sets of them start.

    .venv/bin/python benchmarks/layer_sets.py runs/quickstart [--sets 0,1,24,29 0,1,25,29 …]
        [--rows 24] [--vocab-limit 8192]

Reads the traces of a finished run and prints, for each set of kept layers, the forward KL and the
total variation of the uncut rest against the target's traces, before any distillation; over the
whole vocabulary, or over the commonest tokens alone, as masks may see it.
"""

import argparse
import json
from pathlib import Path

import torch
from common import report

from draftsmith.checkpoints.devices import autocast, compute_dtype
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe, load_model, quiet_transformers
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.traces import TraceStore
from draftsmith.distill.batches import collate
from draftsmith.distill.head_loss import HeadLoss, LossHead
from draftsmith.distill.losses import forward_kl, total_variation
from draftsmith.distill.states import hidden_at_answers
from draftsmith.prune.masks import applied, hard_masks

SETS = ("0,1,24,29", "0,16,24,29", "0,1,25,29", "0,1,2,29", "0,10,20,29", "0,1,2,3")
LOSSES = {"forward_kl": forward_kl, "total_variation": total_variation}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--rows", type=int, default=24, help="held-out texts")
    parser.add_argument("--vocab-limit", type=int, default=None)
    arguments = parser.parse_args()
    quiet_transformers()
    provenance = json.loads((arguments.run / "pruned" / "provenance.json").read_text())
    reference = resolve(provenance["settings"]["source"] or provenance["settings"]["target"])
    model = load_model(reference)
    family, shape = describe(model.config, reference)
    store = TraceStore(arguments.run / "traces")
    batch = collate(store.rows("validation")[: arguments.rows], 192)
    rows, limit = store.rows("train"), arguments.vocab_limit
    model.requires_grad_(False)
    heads = {
        name: LossHead.of(model, HeadLoss.over_commonest(loss, rows, shape.vocab, limit))
        for name, loss in LOSSES.items()
    }
    figures: dict[str, dict[str, float]] = {}
    for text in arguments.sets:
        selection = Selection.of_layers(shape, map(int, text.split(",")))
        masks = {"layers": hard_masks(selection, shape)["layers"]}
        with (
            torch.inference_mode(),
            applied(model, family, shape, masks),
            autocast(model, compute_dtype("auto", model.device)),
        ):
            hidden = hidden_at_answers(model, batch)
            sums = {name: float(head(hidden, batch.traces)) for name, head in heads.items()}
        figures[text] = {name: round(total / batch.tokens, 4) for name, total in sums.items()}
        print(f"{text:>16}  {figures[text]}")
    report({"sets": figures, "tokens": batch.tokens, "vocab_limit": limit})


if __name__ == "__main__":
    main()
