"""What tells a good drafter? Depth, width, perplexity and accuracy against acceptance and latency.

    .venv/bin/python benchmarks/correlation.py runs/quickstart [--quick] [--text FILE …]
        [--steps N …] [--drafter DIR …]

The side findings of Yan et al. (NAACL 2025) as a command: a draft takes longer with depth, hardly
with width, and what a drafter is worth as a language model says little of its acceptance.

Cuts SmolLM2-135M to several depths and widths and distils each on the traces of a finished run for
no, some and more steps; `--drafter` judges finished drafters instead. Of each it prints layers,
parameters of a layer, parameters in all, emitted per round (replay of held-out greedy traces), the
time of a draft step, and perplexity and top-1 accuracy on the texts of a corpus (a field `text` in
each row); without `--text` on those traces, where accuracy is acceptance by another name. Then,
as `correlations`, Pearson's and Spearman's of these; of drafters that were distilled at all as
well, since those that were not make any two figures agree. What is finished is kept in
RUN-correlation.json, so that an interrupted run goes on.
"""

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import TARGET, interleaved, report

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.replay import RoundCounts, replay
from draftsmith.accept.statistics import pearson, spearman
from draftsmith.checkpoints.devices import compute_dtype
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import (
    describe,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from draftsmith.checkpoints.pair import SharedVocabulary, own_vocabulary
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.chat import encode_text
from draftsmith.data.corpus import corpus_files, read_texts
from draftsmith.data.files import write_json
from draftsmith.data.progress import say
from draftsmith.data.traces import TraceStore
from draftsmith.distill.train import distill
from draftsmith.recipes.schema import DistillSettings

LOOKAHEAD = 4
# Tokens of a corpus text that are judged.
TEXT_TOKENS = 96


@dataclass(frozen=True)
class Cut:
    """A drafter's shape: layers at even distances, and the first of their channels and heads."""

    layers: int
    ffn: int | None = None
    kv_heads: int | None = None

    @property
    def name(self) -> str:
        """In the table."""
        parts = [f"{self.layers} layers"]
        parts += [f"FFN {self.ffn}"] if self.ffn else []
        return ", ".join(parts + ([f"{self.kv_heads} KV"] if self.kv_heads else []))

    def selection(self, source: Shape) -> Selection:
        """What is kept of a source."""
        layers = np.linspace(0, source.layers - 1, self.layers).round().astype(int).tolist()
        kept = {"layers": layers, "ffn": range(self.ffn or source.ffn)}
        kept["kv_heads"] = range(self.kv_heads or source.kv_heads)
        return Selection.choose(
            source, lambda axis, place: kept.get(axis, range(getattr(source, axis)))
        )


CUTS = (
    Cut(2),
    Cut(4),
    Cut(4, ffn=384),
    Cut(4, kv_heads=1),
    Cut(8),
    Cut(8, ffn=384),
    Cut(16),
)
QUICK_CUTS = (Cut(2), Cut(4), Cut(4, ffn=384), Cut(8))


@dataclass(frozen=True)
class Plan:
    """How much is done: distillation steps before each judgement, and texts of a judgement."""

    cuts: tuple[Cut, ...] = CUTS
    steps: tuple[int, ...] = (0, 20, 60)
    texts: int = 12
    repeats: int = 31


QUICK = Plan(QUICK_CUTS, steps=(0, 6), texts=4, repeats=5)


@dataclass(frozen=True)
class Text:
    """Token ids that are given, and those that are judged."""

    given: list[int]
    judged: list[int]


@dataclass(frozen=True)
class Figures:
    """What is known of a drafter; `log_perplexity` in nats a token."""

    layers: int
    layer_parameters: int
    parameters: int
    trained: bool
    log_perplexity: float
    accuracy: float
    emitted_per_round: float


class Judge:
    """Judges drafters on the same texts."""

    def __init__(
        self, traces: Sequence[Text], corpus: Sequence[Text], vocabulary: SharedVocabulary
    ) -> None:
        """Acceptance is judged on `traces`, the rest on `corpus`, which may be the same."""
        self.traces, self.corpus, self.vocabulary = traces, corpus, vocabulary

    def figures(self, model: Any, trained: bool) -> Figures:
        """All that takes no time into account."""
        of_traces = [self._read(model, text) for text in self.traces]
        counts = RoundCounts(LOOKAHEAD)
        for _, matches in of_traces:
            counts += replay(matches, LOOKAHEAD, limit=len(matches) + 1)
        same = self.corpus is self.traces
        read = of_traces if same else [self._read(model, text) for text in self.corpus]
        assert counts.emitted_per_round is not None
        family = family_of(model.config.model_type, "drafter")
        return Figures(
            layers=shape_of(model.config, family).layers,
            layer_parameters=sum(
                p.numel() for name, p in model.named_parameters() if template_of(name)[1] == 0
            ),
            parameters=sum(p.numel() for p in model.parameters()),
            trained=trained,
            log_perplexity=-float(np.concatenate([logprobs for logprobs, _ in read]).mean()),
            accuracy=float(np.concatenate([matches for _, matches in read]).mean()),
            emitted_per_round=counts.emitted_per_round,
        )

    @torch.inference_mode()
    def _read(self, model: Any, text: Text) -> tuple[Any, Any]:
        """Log-probability of each judged token, and whether it is the likeliest: [N] each."""
        ids = torch.tensor([text.given + text.judged], device=model.device)
        logits_1NV = model(input_ids=ids[:, :-1], logits_to_keep=len(text.judged)).logits
        logits_NV = self.vocabulary.restrict(logits_1NV[0]).float()
        labels = ids[0, len(text.given) :]
        logprobs = logits_NV.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
        return logprobs.cpu().numpy(), (logits_NV.argmax(-1) == labels).cpu().numpy()


def corpus_texts(files: Sequence[str], tokenizer: Any, most: int) -> list[Text]:
    """Beginnings of the first texts of each file, an equal number of each."""
    found = []
    for file in files:
        texts = read_texts(corpus_files([file]), Counter())
        ids = (encode_text(tokenizer, text)[:TEXT_TOKENS] for text in texts)
        long = (row for row in ids if len(row) == TEXT_TOKENS)
        found += [Text(row[:1], row[1:]) for row, _ in zip(long, range(most), strict=False)]
    return found


def greedy_texts(store: TraceStore, most: int) -> list[Text]:
    """Held-out answers that the target did not sample."""
    rows = [row for row in store.rows("validation") if row.greedy and len(row.answer)]
    return [
        Text(row.tokens[: row.prompt_length].tolist(), row.answer.tolist()) for row in rows[:most]
    ]


def latencies(models: dict[str, Any], text: Text, repeats: int) -> dict[str, float]:
    """Milliseconds of a draft step after a text, medians of runs side by side."""
    cached = {name: CachedModel(model) for name, model in models.items()}
    with torch.inference_mode():
        for model in cached.values():
            model.feed_list(text.given + text.judged, keep=1)

        def step(model: CachedModel) -> None:
            length = model.length
            model.feed_list([text.judged[0]], keep=1)
            model.crop(length)

        work = {name: lambda model=model: step(model) for name, model in cached.items()}
        seconds = interleaved(work, repeats)  # type: ignore[arg-type]
    return {name: 1e3 * statistics.median(of) for name, of in seconds.items()}


def distilled(
    model: Any, family: Family, store: TraceStore, steps: Sequence[int]
) -> Iterator[tuple[int, Any]]:
    """The model after each number of steps, trained on from one to the next."""
    rows, done = store.rows("train"), 0
    for seed, until in enumerate(steps):
        if until > done:
            # The whole vocabulary learns: perplexity would show what does not.
            settings = DistillSettings(
                steps=until - done,
                batch=2,
                lr=1.5e-3,
                weight_decay=0.0,
                train="layers",
                cross_entropy=0.5,
                warmup=min(10, until - done),
                max_length=128,
                evaluate_every=until,
                save_every=until,
            )
            with tempfile.TemporaryDirectory() as state:
                dtype = compute_dtype("auto", model.device)
                # Nothing held out is given: the judge looks at it.
                distill(
                    model, family, rows, [], settings, seed=seed, state=Path(state), dtype=dtype
                )
        done = until
        yield until, model


class Known:
    """Figures that are finished, in a file, so that nothing is done twice."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        """Begin anew where the file is about something else."""
        self.file, self.about = file, about
        self.figures: dict[str, Figures] = {}
        if file.is_file() and (found := json.loads(file.read_text()))["about"] == about:
            self.figures = {name: Figures(**of) for name, of in found["figures"].items()}

    def add(self, name: str, figures: Figures) -> None:
        """Remember the figures of a drafter."""
        self.figures[name] = figures
        say(f"{name}: {figures.emitted_per_round:.2f} emitted per round")
        plain = {name: asdict(of) for name, of in self.figures.items()}
        write_json(self.file, {"about": self.about, "figures": plain})


def correlations(
    figures: Sequence[Figures], milliseconds: Sequence[float]
) -> dict[str, dict[str, Any]]:
    """Of each figure with acceptance, and of each size with the time of a draft step."""

    def both(x: Sequence[float], y: Sequence[float]) -> dict[str, float | None]:
        return {"pearson": pearson(x, y), "spearman": spearman(x, y)}

    def column(name: str) -> list[float]:
        return [float(getattr(of, name)) for of in figures]

    sizes = ("layers", "layer_parameters", "parameters")
    acceptance = column("emitted_per_round")
    told = {name: both(column(name), acceptance) for name in ("log_perplexity", "accuracy", *sizes)}
    told["draft_ms"] = both(milliseconds, acceptance)
    return {
        "acceptance": told,
        "draft_ms": {name: both(column(name), milliseconds) for name in sizes},
    }


def show(rows: dict[str, Figures], milliseconds: dict[str, float]) -> None:
    """A table of the drafters."""
    print(f"{'drafter':28} parameters  perplexity  accuracy  emitted/round  draft ms")
    for name, of in rows.items():
        print(
            f"{name:28} {of.parameters / 1e6:8.1f} M {np.exp(of.log_perplexity):11.4g} "
            f"{of.accuracy:9.3f} {of.emitted_per_round:14.2f} {milliseconds[name]:9.2f}"
        )


def made_here(
    plan: Plan, store: TraceStore, judge: Judge, known: Known
) -> tuple[dict[str, Figures], dict[str, float]]:
    """Cut, time, distil and judge; figures and milliseconds by name."""
    reference = resolve(TARGET)
    source = load_model(reference, dtype=torch.float32)
    family, shape = describe(source.config, reference)
    models = {cut.name: compact_model(source, family, cut.selection(shape)) for cut in plan.cuts}
    times = latencies(models, judge.traces[0], plan.repeats)
    rows, milliseconds = {}, {}
    for cut in plan.cuts:
        names = {steps: f"{cut.name}, {steps} steps" for steps in plan.steps}
        if not known.figures.keys() >= set(names.values()):
            for steps, model in distilled(models[cut.name], family, store, plan.steps):
                known.add(names[steps], judge.figures(model, trained=steps > 0))
        rows |= {name: known.figures[name] for name in names.values()}
        milliseconds |= dict.fromkeys(names.values(), times[cut.name])
        # What was judged is of no further use.
        del models[cut.name]
    return rows, milliseconds


def finished(
    folders: Sequence[str], plan: Plan, judge: Judge
) -> tuple[dict[str, Figures], dict[str, float]]:
    """Time and judge drafters that are there."""
    models = {folder: load_model(resolve(folder)) for folder in folders}
    rows = {name: judge.figures(model, trained=True) for name, model in models.items()}
    return rows, latencies(models, judge.traces[0], plan.repeats)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--text", metavar="FILE", nargs="+", help="a corpus to read")
    parser.add_argument("--steps", type=int, nargs="+", help="of distillation, ascending")
    parser.add_argument("--drafter", metavar="DIR", nargs="+", help="judge these instead")
    arguments = parser.parse_args()
    quiet_transformers()
    plan = QUICK if arguments.quick else Plan()
    if arguments.steps:
        plan = replace(plan, steps=tuple(arguments.steps))
    store = TraceStore(arguments.run / "traces")
    traces = greedy_texts(store, plan.texts)
    tokenizer = load_tokenizer(resolve(TARGET))
    each = -(-plan.texts // len(arguments.text or [1]))
    corpus = corpus_texts(arguments.text, tokenizer, each) if arguments.text else traces
    vocabulary = own_vocabulary(tokenizer, len(tokenizer))
    judge = Judge(traces, corpus, vocabulary)
    if arguments.drafter:
        rows, milliseconds = finished(arguments.drafter, plan, judge)
    else:
        shards = [shard.sha256 for shard in store.shards]
        about = {"plan": repr(plan), "text": arguments.text, "traces": shards}
        file = arguments.run.with_name(f"{arguments.run.name}-correlation.json")
        rows, milliseconds = made_here(plan, store, judge, Known(file, about))
    show(rows, milliseconds)
    trained = {name: of for name, of in rows.items() if of.trained}
    report(
        {
            "correlations": correlations(list(rows.values()), [milliseconds[n] for n in rows]),
            "correlations_trained": correlations(
                list(trained.values()), [milliseconds[n] for n in trained]
            ),
            "drafters": {n: asdict(of) | {"draft_ms": milliseconds[n]} for n, of in rows.items()},
            "lookahead": LOOKAHEAD,
            "judged_tokens": {
                "traces": sum(len(text.judged) for text in traces),
                "corpus": sum(len(text.judged) for text in corpus),
            },
        }
    )


if __name__ == "__main__":
    main()
