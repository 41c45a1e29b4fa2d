"""The figures of a score, from texts that were decoded and rounds that were replayed."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from draftsmith.accept.decode import Generation
from draftsmith.accept.latency import Latency, Load, break_even_acceptance
from draftsmith.accept.replay import RoundCounts, common_prefix
from draftsmith.accept.statistics import most_rejected, ratio_interval
from draftsmith.accept.trial import Pair, Texts
from draftsmith.accept.verify import Verification
from draftsmith.data.chat import Prompt

# Sums in another order, as over one position or several, end some units in the last place apart.
# Logits of about 16 that are closer than this are a numeric tie: 0.001 in float32, 0.5 in bfloat16.
_TIE_UNITS = {torch.float32: 500.0, torch.bfloat16: 4.0, torch.float16: 4.0}
_LOGIT_SCALE = 16.0
_REJECTED = 10


@dataclass(frozen=True)
class Row:
    """Figures of one lookahead; what does not exist is None.

    `rounds` … `emitted` are sums over prompts, expectations in replay rows. `per_position` is the
    share of rounds whose proposal at each position was accepted. `steps_per_round` is how many
    plain steps a round replaces: what it emits, and in a batch what its longest row does.
    `tokens_per_second` is of whole answers, prompts included, `…_alone` without a drafter.
    Intervals are of 95 %, by bootstrap over prompts.
    """

    lookahead: int
    rounds: float | None
    proposed: int | None
    accepted: float | None
    emitted: int
    accepted_per_round: float | None
    emitted_per_round: float | None
    acceptance_rate: float | None
    per_position: list[float]
    t_draft_ms: float | None
    t_verify_ms: float | None
    t_ar_ms: float | None
    break_even_emitted_per_round: float | None
    break_even_acceptance: float | None
    speedup_predicted: float | None
    speedup_measured: float | None = None
    identical_tokens: int | None = None
    compared_tokens: int | None = None
    first_differences: list[dict[str, Any]] | None = None
    steps_per_round: float | None = None
    emitted_per_round_interval: list[float] | None = None
    acceptance_rate_interval: list[float] | None = None
    speedup_interval: list[float] | None = None
    tokens_per_second: float | None = None
    tokens_per_second_alone: float | None = None


def decode_row(
    lookahead: int,
    texts: Texts,
    prompts: Sequence[Prompt],
    latency: Latency,
    verification: Verification,
    batch: int,
) -> Row:
    """Figures of a lookahead that was decoded for real."""
    generations = texts.of(lookahead)
    counts = [RoundCounts.of_rounds(text.rounds, lookahead) for text in generations]
    proposals = [sum(r.proposed for r in text.rounds) for text in generations]
    ours, alone = texts.seconds(lookahead), sum(texts.alone_seconds)
    written = sum(len(text.tokens) for text in generations)
    alone_rate = sum(texts.alone_tokens) / alone if alone else 0.0
    rate = ratio_interval([(c.accepted, n) for c, n in zip(counts, proposals, strict=True)])
    return Row(
        **_figures(lookahead, counts, latency, batch),
        **_comparison(prompts, texts, generations, verification),
        acceptance_rate_interval=None if rate is None else [rate.low, rate.high],
        tokens_per_second=written / ours if ours else None,
        tokens_per_second_alone=alone_rate or None,
        # Drawn texts are not equally long, so tokens per second are compared.
        speedup_measured=written / ours / alone_rate if ours and alone_rate else None,
    )


def _comparison(
    prompts: Sequence[Prompt],
    texts: Texts,
    generations: Sequence[Generation],
    verification: Verification,
) -> dict[str, Any]:
    """How many tokens equal the target's own, and where texts part; nothing for drawn texts."""
    if not verification.warping.greedy:
        return {}

    def gap(number: int, position: int) -> float | None:
        gaps = texts.plain[number].gaps
        return gaps[position] if position < len(gaps) else None

    plain, ours = ([text.tokens for text in own] for own in (texts.plain, generations))
    return compare_texts([prompt.name for prompt in prompts], plain, ours, gap)


def compare_texts(
    names: Sequence[str],
    plain: Sequence[Sequence[int]],
    drafted: Sequence[Sequence[int]],
    gap: Callable[[int, int], float | None],
) -> dict[str, Any]:
    """How many tokens of texts with drafts equal those without, and where texts part.

    Args:
        names: of the prompts.
        plain: the texts without drafts; of more prompts than were drafted for, the first count.
        drafted: the texts with drafts.
        gap: (number of the prompt, position) -> highest less second-highest logit there.
    """
    differences, identical, compared = [], 0, 0
    for number, (name, own, ours) in enumerate(zip(names, plain, drafted, strict=False)):
        longer, same = max(len(own), len(ours)), common_prefix(own, ours)
        compared, identical = compared + longer, identical + same
        if same < longer:
            found = {"prompt": name, "position": same, "logit_gap": gap(number, same)}
            differences.append(found)
    return {
        "identical_tokens": identical,
        "compared_tokens": compared,
        "first_differences": differences,
    }


def replay_row(
    lookahead: int, counts: Sequence[RoundCounts], latency: Latency | None, batch: int
) -> Row:
    """Figures of a lookahead that was replayed; without latencies, of acceptance alone."""
    return Row(**_figures(lookahead, counts, latency, batch))


def _figures(
    lookahead: int, counts: Sequence[RoundCounts], latency: Latency | None, batch: int
) -> dict[str, Any]:
    """What decode and replay rows have in common."""
    total = RoundCounts.total(counts, lookahead)
    interval = ratio_interval([(c.emitted, c.rounds) for c in counts])
    return {
        "lookahead": lookahead,
        "rounds": total.rounds,
        "proposed": total.proposed,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "accepted_per_round": total.accepted_per_round,
        "emitted_per_round": total.emitted_per_round,
        "acceptance_rate": total.accepted / total.proposed if total.proposed else None,
        "emitted_per_round_interval": None if interval is None else [interval.low, interval.high],
        "per_position": [n / total.rounds if total.rounds else 0.0 for n in total.at_position],
        **_costs(lookahead, counts, latency, batch),
    }


def _costs(
    lookahead: int, counts: Sequence[RoundCounts], latency: Latency | None, batch: int
) -> dict[str, float | None]:
    """What depends on the machine; all unknown where nothing was timed."""
    if latency is None:
        names = (
            "t_draft_ms",
            "t_verify_ms",
            "t_ar_ms",
            "break_even_emitted_per_round",
            "break_even_acceptance",
            "steps_per_round",
            "speedup_predicted",
        )
        return dict.fromkeys(names)
    load, total = Load.of(counts, batch), RoundCounts.total(counts, lookahead)
    break_even = latency.round_seconds(lookahead, load.passes_per_round) / latency.ar
    proposed = total.proposed_per_round
    return {
        "t_draft_ms": 1e3 * latency.draft,
        "t_verify_ms": 1e3 * latency.verify[lookahead],
        "t_ar_ms": 1e3 * latency.ar,
        "break_even_emitted_per_round": break_even,
        "break_even_acceptance": break_even_acceptance(
            break_even, lookahead if proposed is None else proposed
        ),
        "steps_per_round": load.steps / load.rounds if load.rounds else None,
        "speedup_predicted": latency.speedup(load, lookahead),
    }


def ties(row: Row, dtype: torch.dtype) -> bool:
    """Nothing differs but for numeric ties, where two logits are as good as equal in `dtype`."""
    tie = _TIE_UNITS[dtype] * torch.finfo(dtype).eps * _LOGIT_SCALE
    return all(
        d["logit_gap"] is not None and d["logit_gap"] < tie for d in row.first_differences or ()
    )


def by_domain(
    names: Sequence[str], counts: Sequence[RoundCounts], lookahead: int
) -> dict[str, dict[str, Any]]:
    """Figures of each domain at one lookahead, from the domain and the counts of every text."""
    domains: dict[str, list[RoundCounts]] = {}
    for name, count in zip(names, counts, strict=True):
        domains.setdefault(name, []).append(count)
    found = {}
    for domain, own in domains.items():
        total = RoundCounts.total(own, lookahead)
        interval = ratio_interval([(c.emitted, c.rounds) for c in own])
        found[domain] = {
            "lookahead": lookahead,
            "prompts": len(own),
            "rounds": total.rounds,
            "emitted": total.emitted,
            "accepted_per_round": total.accepted_per_round,
            "emitted_per_round": total.emitted_per_round,
            "emitted_per_round_interval": None
            if interval is None
            else [interval.low, interval.high],
        }
    return found


def rejected(generations: Sequence[Generation], pair: Pair) -> list[dict[str, Any]]:
    """The proposals that were rejected most often, and what the target said instead."""
    pairs = (r.rejected for text in generations for r in text.rounds if r.rejected)
    return [
        {
            **asdict(found),
            "text": pair.text([found.token]),
            "instead_text": pair.text([found.instead]),
        }
        for found in most_rejected(pairs, _REJECTED)
    ]


def waterfall(texts: Texts, lookahead: int) -> dict[str, float]:
    """Where the seconds of real decoding went, at one lookahead."""
    draft = verify = prefill = 0.0
    for group in texts.speculative[lookahead]:
        # Rows of a group share its rounds; the longest row saw them all.
        longest = max(group, key=lambda text: len(text.rounds))
        draft += sum(r.draft_seconds for r in longest.rounds)
        verify += sum(r.verify_seconds for r in longest.rounds)
        prefill += longest.prefill_seconds
    total = texts.seconds(lookahead)
    rounds = [r for text in texts.of(lookahead) for r in text.rounds]
    wasted = sum(r.proposed - r.accepted for r in rounds)
    drafted = sum(r.proposed for r in rounds)
    return {
        "lookahead": lookahead,
        "prefill_seconds": prefill,
        "draft_seconds": draft,
        "verify_seconds": verify,
        "overhead_seconds": total - prefill - draft - verify,
        "rejected_draft_seconds": draft * wasted / drafted if drafted else 0.0,
        "target_alone_seconds": sum(texts.alone_seconds),
    }
