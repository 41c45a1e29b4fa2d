"""What a lossy verifier buys: speed against BLEU and identity, from greedy to five beams.

    python benchmarks/seq2seq/tradeoff.py TARGET DRAFTER --pairs TEST.jsonl.zst [--sentences N]
        [--lookahead K] [--repeats N] [--quick] [--plot FILE]

The trade-off of Xia et al. (2022) for any encoder–decoder target and drafter, float32, one sentence
at a time: plain greedy decoding; drafts with exact greedy verification ("vanilla"); with `top_beta`
at β = 3, τ = 1 and at β = 5, τ = 5, both lossy; and beam search with 5 beams by transformers. All
ways translate a sentence before the next one is read, so that all meet the same machine. For each:

- `sentences_per_second`, and `speed`, its ratio to plain greedy: median, low and high over repeats;
- `bleu` against the references (sacrebleu, 13a) and `identity`, the share of positions with the
  token of the target's own greedy output;
- `emitted_per_round`, and milliseconds of a drafter's pass, a verification and a plain step:
  `t_draft_ms`, `t_verify_ms`, `t_ar_ms`.

PAIRS is JSONL with `source` and `target`.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_target import read_pairs

from draftsmith.accept.cache import CachedEncoderDecoder
from draftsmith.accept.decode import Generation, plain_decode, speculative_decode
from draftsmith.accept.pairing import Request, check_lengths
from draftsmith.accept.quality import bleu, token_identity
from draftsmith.accept.trial import Pair
from draftsmith.accept.verify import Verification
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import beam_settings, decoder_start
from draftsmith.checkpoints.loading import quiet_transformers
from draftsmith.data.chat import Prompt, encode_source
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings

sys.path.append(str(Path(__file__).parents[1]))
from common import report

GREEDY, BEAMS = "greedy", 5
VERIFICATIONS = {
    "vanilla": Verification(),
    "beta3_tau1": Verification("top_beta", beta=3, tau=1.0),
    "beta5_tau5": Verification("top_beta", beta=5, tau=5.0),
}
Way = Callable[[Prompt], Generation]


@dataclass
class Runs:
    """What one way of decoding gave.

    Attributes:
        texts: of every sentence; all repeats give the same.
        seconds: of all sentences, by repeat.
        timed: the texts of all repeats, whose rounds have their times.
    """

    texts: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    timed: list[Generation] = field(default_factory=list)


def read_prompts(request: Request, pairs: Sequence[Mapping[str, str]]) -> list[Prompt]:
    """Sources as the target's encoder reads them."""
    start = tuple(decoder_start(request.configs))
    prompts = [
        Prompt(str(number), start, source=tuple(encode_source(request.tokenizer, row["source"])))
        for number, row in enumerate(pairs)
    ]
    check_lengths(prompts, request.check.target_context)
    check_lengths(prompts, request.check.drafter_context, "drafter")
    return prompts


def ways_of(pair: Pair, lookahead: int) -> dict[str, Way]:
    """Every way of decoding a sentence by its name."""
    ways: dict[str, Way] = {GREEDY: lambda prompt: greedily(pair, prompt)}
    for name, verification in VERIFICATIONS.items():
        ways[name] = drafting(pair, lookahead, verification)
    return ways | {f"beam{BEAMS}": lambda prompt: searching(pair, prompt)}


def greedily(pair: Pair, prompt: Prompt) -> Generation:
    """The target's own text."""
    return plain_decode(
        pair.target,
        prompt.ids,
        pair.limits,
        pair.allowed,
        Verification().warping,
        0,
        prompt.source,
    )


def drafting(pair: Pair, lookahead: int, verification: Verification) -> Way:
    """With drafts, verified in one way."""
    drafter, verifier = pair.proposer(verification), verification.verifier(0)
    return lambda prompt: speculative_decode(
        pair.target,
        drafter,
        prompt.ids,
        lookahead,
        pair.limits,
        pair.allowed,
        verifier,
        source=prompt.source,
    )


@torch.inference_mode()
def searching(pair: Pair, prompt: Prompt) -> Generation:
    """By beam search in transformers."""
    target, allowed = pair.target, pair.allowed
    assert isinstance(target, CachedEncoderDecoder)
    assert prompt.source is not None
    settings = beam_settings(
        target.model,
        BEAMS,
        pair.limits.room(prompt.ids, target.context),
        said=set(range(allowed.size)).difference(allowed.holes),
        start=prompt.ids,
        end=pair.limits.stop_ids,
    )
    target.reset(1, [prompt.source])
    return Generation(*target.search_beams(prompt.ids, settings))


def run(ways: Mapping[str, Way], prompts: Sequence[Prompt], repeats: int) -> dict[str, Runs]:
    """Every way in turn, sentence by sentence, so that all meet the same state of the machine."""
    runs = {name: Runs() for name in ways}
    for way in ways.values():
        way(prompts[0])
    for _ in range(repeats):
        for made in runs.values():
            made.texts, made.seconds = [], [*made.seconds, 0.0]
        for prompt in prompts:
            for name, way in ways.items():
                start = time.perf_counter()
                text = way(prompt)
                runs[name].seconds[-1] += time.perf_counter() - start
                runs[name].texts.append(text)
                runs[name].timed.append(text)
    return runs


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Median, low and high."""
    low, high = min(values), max(values)
    return {
        name: round(value, digits)
        for name, value in (("median", statistics.median(values)), ("low", low), ("high", high))
    }


def figures_of(
    made: Runs, greedy: Runs, references: Sequence[str], text: Callable[[Sequence[int]], str]
) -> dict[str, Any]:
    """All that is told of one way; None where it has no such figure."""
    outputs = [t.tokens for t in made.texts]
    identity, _ = token_identity(outputs, [t.tokens for t in greedy.texts])
    score, signature = bleu([text(ids) for ids in outputs], references)
    ratios = [plain / own for plain, own in zip(greedy.seconds, made.seconds, strict=True)]
    return {
        "sentences_per_second": spread([len(outputs) / s for s in made.seconds]),
        "speed": spread(ratios),
        "bleu": None if score is None else round(score, 2),
        "bleu_signature": signature,
        "identity": None if identity is None else round(identity, 4),
        **times_of(made),
    }


def times_of(made: Runs) -> dict[str, float | None]:
    """Emitted per round, and milliseconds of passes; the first pass of a text reads it as well."""
    rounds = [r for text in made.timed for r in text.rounds]
    later = [r for text in made.timed for r in text.rounds[1:]]
    return {
        "emitted_per_round": mean(sum(r.emitted for r in rounds), len(rounds)),
        "t_draft_ms": mean(1e3 * sum(r.draft_seconds for r in later), sum(r.passes for r in later)),
        "t_verify_ms": mean(1e3 * sum(r.verify_seconds for r in later), len(later)),
    }


def mean(total: float, count: int) -> float | None:
    """None of nothing."""
    return round(total / count, 3) if count else None


def plain_step_ms(greedy: Runs) -> float | None:
    """Of the target alone, after its first token."""
    steps = sum(len(text.tokens) - 1 for text in greedy.timed)
    return mean(1e3 * sum(text.seconds for text in greedy.timed), steps)


def show(found: Mapping[str, Mapping[str, Any]], t_ar_ms: float | None) -> None:
    """A line for each way."""

    def said(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    print(f"{'':10} sent./s  speed (low–high)    BLEU  identity  emitted  t_draft  t_verify (ms)")
    for name, row in found.items():
        speed = row["speed"]
        print(
            f"{name:10} {row['sentences_per_second']['median']:7.2f}  "
            f"{speed['median']:5.2f} ({speed['low']:.2f}–{speed['high']:.2f})  "
            f"{said(row['bleu'], '6.2f'):>6}  {said(row['identity'], '8.1%'):>8}  "
            f"{said(row['emitted_per_round'], '7.2f'):>7}  {said(row['t_draft_ms'], '7.2f'):>7}  "
            f"{said(row['t_verify_ms'], '8.2f'):>8}"
        )
    print(f"a plain step of the target takes {said(t_ar_ms, '.2f')} ms")


def draw(found: Mapping[str, Mapping[str, Any]], file: Path) -> None:
    """Speed against BLEU, and against identity with the target's greedy output."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    labels = {"bleu": "BLEU against references", "identity": "identity with greedy output"}
    for panel, (key, label) in zip(figure.subplots(1, 2), labels.items(), strict=True):
        for name, row in found.items():
            if row[key] is None:
                continue
            speed = row["speed"]
            around = [[speed["median"] - speed["low"]], [speed["high"] - speed["median"]]]
            panel.errorbar(speed["median"], row[key], xerr=around, fmt="o", capsize=3, label=name)
        panel.axvline(1.0, color="0.8", zorder=0)
        panel.margins(0.1)
        panel.set(xlabel="sentences per second over plain greedy", ylabel=label)
    # Points lie close together; names beside them would cover one another.
    figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=len(found))
    figure.savefig(file)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="12 sentences, 3 times")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    sentences, repeats = (12, 3) if args.quick else (args.sentences, args.repeats)
    quiet_transformers()
    try:
        request = Request.of(resolve(args.target), resolve(args.drafter))
        pairs = read_pairs(args.pairs)[:sentences]
        prompts = read_prompts(request, pairs)
    except RequestError as error:
        sys.exit(str(error))
    pair = request.load(ScoreSettings(max_new_tokens=args.max_new_tokens))
    runs = run(ways_of(pair, args.lookahead), prompts, repeats)
    special = set(request.tokenizer.all_special_ids)
    references = [row["target"] for row in pairs]
    found = {
        name: figures_of(
            made,
            runs[GREEDY],
            references,
            lambda ids: pair.text([i for i in ids if i not in special]),
        )
        for name, made in runs.items()
    }
    t_ar_ms = plain_step_ms(runs[GREEDY])
    show(found, t_ar_ms)
    if args.plot is not None:
        draw(found, args.plot)
    settings = {"sentences": len(prompts), "repeats": repeats, "lookahead": args.lookahead}
    report({"ways": found, "t_ar_ms": t_ar_ms, **settings})


if __name__ == "__main__":
    main()
