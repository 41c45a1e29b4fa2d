"""How rugged is the choice of layers? The divergence from which sets of them start.

    .venv/bin/python benchmarks/layer_sets.py runs/quickstart [--sets 0,1,24,29 0,1,25,29 …]

Reads the traces of a finished run and prints, for each set of kept layers, the forward KL of the
uncut rest against the target's traces, before any distillation.
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
from draftsmith.distill.head_loss import HeadLoss
from draftsmith.distill.losses import forward_kl
from draftsmith.distill.states import hidden_at_answers
from draftsmith.prune.masks import applied, hard_masks

SETS = ("0,1,24,29", "0,16,24,29", "0,1,25,29", "0,1,2,29", "0,10,20,29", "0,1,2,3")
ROWS = 24


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sets", nargs="+", default=SETS)
    arguments = parser.parse_args()
    quiet_transformers()
    provenance = json.loads((arguments.run / "pruned" / "provenance.json").read_text())
    reference = resolve(provenance["settings"]["source"] or provenance["settings"]["target"])
    model = load_model(reference)
    family, shape = describe(model.config, reference)
    batch = collate(TraceStore(arguments.run / "traces").rows("validation")[:ROWS], 192)
    head, weight = HeadLoss(forward_kl), model.get_output_embeddings().weight
    figures = {}
    for text in arguments.sets:
        selection = Selection.of_layers(shape, map(int, text.split(",")))
        masks = {"layers": hard_masks(selection, shape)["layers"]}
        with (
            torch.inference_mode(),
            applied(model, family, shape, masks),
            autocast(model, compute_dtype("auto", model.device)),
        ):
            total = head(hidden_at_answers(model, batch), weight, batch.traces)
        figures[text] = round(float(total) / batch.tokens, 3)
        print(f"{text:>16}  {figures[text]:.2f} nats")
    report({"forward_kl": figures, "tokens": batch.tokens})


if __name__ == "__main__":
    main()
