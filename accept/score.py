"""The score of a drafter: acceptance and speed on prompts, by real decoding and by replay."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Generation, Limits, greedy_decode, speculative_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.latency import Latency, break_even_acceptance, measure_latency
from draftsmith.accept.replay import RoundCounts, greedy_matches, replay
from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.loading import (
    describe,
    load_config,
    load_model,
    load_tokenizer,
    require_decoder,
)
from draftsmith.checkpoints.pair import SharedVocabulary, check_pair, own_vocabulary
from draftsmith.data.chat import Prompt, read_prompts
from draftsmith.data.progress import Progress, say
from draftsmith.errors import RequestError

SCHEMA = 1
# Sums in another order, as over one position or several, end some units in the last place apart.
# Logits of about 16 that are closer than this are a numeric tie: 0.001 in float32, 0.5 in bfloat16.
_TIE_UNITS = {torch.float32: 500.0, torch.bfloat16: 4.0, torch.float16: 4.0}
_LOGIT_SCALE = 16.0


@dataclass(frozen=True)
class Row:
    """Figures of one lookahead; what does not exist is None.

    `rounds` … `emitted` are sums over prompts, expectations in replay rows. `per_position` is the
    share of rounds whose proposal at each position was accepted.
    """

    lookahead: int
    rounds: float
    proposed: int | None
    accepted: float
    emitted: int
    accepted_per_round: float | None
    emitted_per_round: float | None
    acceptance_rate: float | None
    per_position: list[float]
    t_draft_ms: float
    t_verify_ms: float
    t_ar_ms: float
    break_even_emitted_per_round: float
    break_even_acceptance: float | None
    speedup_predicted: float
    speedup_measured: float | None = None
    identical_tokens: int | None = None
    compared_tokens: int | None = None
    first_differences: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Score:
    """The form of `score.json`."""

    target: str
    drafter: str
    dtype: str
    machine: dict[str, Any]
    prompts: str
    lossless: bool
    decode: list[Row]
    replay: list[Row]
    by_domain: dict[str, dict[str, float | None]]
    verdict: dict[str, Any]
    waterfall: dict[str, float]
    schema: int = SCHEMA
    runtime: str = "torch"
    verify: str = "greedy"
    temperature: float = 0.0
    batch: int = 1
    quality: None = None
    energy: None = None

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass
class _Texts:
    """What was decoded, prompt by prompt."""

    plain: list[Generation] = field(default_factory=list)
    speculative: dict[int, list[Generation]] = field(default_factory=dict)


@dataclass(frozen=True)
class Pair:
    """A loaded target and drafter, and what they may say."""

    target: CachedModel
    drafter: CachedModel
    shared: SharedVocabulary
    allowed: SharedVocabulary
    limits: Limits


def score_drafter(
    target: ModelRef,
    drafter: ModelRef,
    *,
    prompts: str,
    limit: int | None,
    decode_prompts: int | None,
    max_new_tokens: int,
    lookaheads: tuple[int, ...],
    replay_lookahead: int,
    target_model: Any = None,
) -> Score:
    """Score a drafter for a target at batch 1, greedily.

    Args:
        target: the target.
        drafter: the drafter; any causal model with the target's tokenizer.
        prompts: a JSONL file or a shipped suite.
        limit: use the first prompts only.
        decode_prompts: how many of them are decoded for real; None: all. All are replayed.
        max_new_tokens: tokens written for each.
        lookaheads: decoded for real.
        replay_lookahead: replay covers 1 … this.
        target_model: the target, if it is loaded already.

    Raises:
        RequestError: the tokenizers differ (before any weight is loaded), or a bad prompt file.
    """
    tokenizer = load_tokenizer(target)
    config = load_config(target)
    require_decoder(describe(config, target)[0], target.spec)
    found = check_pair(target, drafter)
    for note in found.notes:
        say(f"note: {note}")
    rows = read_prompts(prompts, tokenizer, limit)
    check_lengths(rows, config.max_position_embeddings)
    target_model = target_model if target_model is not None else load_model(target)
    pair = Pair(
        target=CachedModel(target_model),
        drafter=CachedModel(load_model(drafter)),
        shared=found.shared,
        allowed=own_vocabulary(tokenizer, found.target_rows),
        limits=Limits(max_new_tokens, stop_ids(target_model)),
    )
    return score_pair(
        pair,
        rows,
        lookaheads=lookaheads,
        replay_lookahead=replay_lookahead,
        decode_prompts=decode_prompts,
        names={
            "target": target.spec,
            "drafter": drafter.spec,
            "dtype": str(target_model.dtype).removeprefix("torch."),
            "machine": provenance.machine() | provenance.versions(),
            "prompts": prompts,
        },
    )


def check_lengths(prompts: Sequence[Prompt], context: int) -> None:
    """Refuse prompts that fill the target's context.

    Raises:
        RequestError: naming the longest one.
    """
    longest = max(prompts, key=lambda p: len(p.ids))
    if len(longest.ids) >= context:
        raise RequestError(
            f"prompt {longest.name}: {len(longest.ids)} tokens leave no room in the target's "
            f"context of {context}; shorten or remove it"
        )


def score_pair(
    pair: Pair,
    prompts: Sequence[Prompt],
    *,
    lookaheads: Sequence[int],
    replay_lookahead: int,
    decode_prompts: int | None = None,
    names: dict[str, Any],
) -> Score:
    """Score a drafter at batch 1, greedily.

    Args:
        pair: target and drafter.
        prompts: the first `decode_prompts` are decoded for real, all are replayed.
        lookaheads: decoded for real.
        replay_lookahead: replay covers 1 … this.
        decode_prompts: None decodes all.
        names: target, drafter, dtype, machine and prompts, as they go into the score.
    """
    lookaheads = sorted(set(lookaheads))
    decoded = prompts[:decode_prompts]
    texts = _decode_all(pair, prompts, len(decoded), lookaheads)
    sweep = range(1, replay_lookahead + 1)
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    typical = by_length[len(prompts) // 2]
    latency = measure_latency(
        pair.target,
        pair.drafter,
        prompts[typical].ids,
        texts.plain[typical].tokens,
        {*lookaheads, *sweep},
    )
    matches = [
        greedy_matches(pair.drafter.model, p.ids, t.tokens, pair.shared)
        for p, t in zip(prompts, texts.plain, strict=True)
    ]
    rows = [_decode_row(k, texts, prompts, latency, len(decoded)) for k in lookaheads]
    room = [pair.limits.room(p.ids, pair.target.context) for p in prompts]
    counts = {k: [replay(m, k, r) for m, r in zip(matches, room, strict=True)] for k in sweep}
    replays = [_replay_row(k, counts[k], latency) for k in sweep]
    main = min(max(lookaheads), replay_lookahead)
    return Score(
        lossless=all(_lossless(row, pair.target.model.dtype) for row in rows),
        decode=rows,
        replay=replays,
        by_domain=_by_domain(prompts, counts[main], main),
        verdict=_verdict(rows, replays, on_cpu=pair.target.device.type == "cpu"),
        waterfall=_waterfall(texts, max(lookaheads)),
        **names,
    )


def _decode_all(
    pair: Pair, prompts: Sequence[Prompt], decoded: int, lookaheads: Sequence[int]
) -> _Texts:
    """Plain and speculative decoding in turn, so that both meet the same state of the machine."""
    texts = _Texts(speculative={k: [] for k in lookaheads})
    drafter = AutoregressiveDrafter(pair.drafter, pair.shared, pair.limits.stop_ids)
    with Progress("score", len(prompts), "prompts") as progress:
        for i, prompt in enumerate(prompts):
            if i == 0:
                # Warm-up: the first pass pays for allocations and code paths.
                greedy_decode(pair.target, prompt.ids, Limits(4), pair.allowed)
                speculative_decode(
                    pair.target, drafter, prompt.ids, max(lookaheads), Limits(8), pair.allowed
                )
            texts.plain.append(greedy_decode(pair.target, prompt.ids, pair.limits, pair.allowed))
            for k in lookaheads if i < decoded else ():
                texts.speculative[k].append(
                    speculative_decode(
                        pair.target, drafter, prompt.ids, k, pair.limits, pair.allowed
                    )
                )
            progress.update()
    return texts


def _decode_row(
    lookahead: int, texts: _Texts, prompts: Sequence[Prompt], latency: Latency, decoded: int
) -> Row:
    generations = texts.speculative[lookahead]
    rounds = [r for g in generations for r in g.rounds]
    counts = RoundCounts.of_rounds(rounds, lookahead)
    proposed = sum(r.proposed for r in rounds)
    differences = []
    identical = compared = 0
    ours_and_plain = zip(prompts[:decoded], texts.plain[:decoded], generations, strict=True)
    for prompt, plain, ours in ours_and_plain:
        same = _common_prefix(plain.tokens, ours.tokens)
        compared += max(len(plain.tokens), len(ours.tokens))
        identical += same
        if same < max(len(plain.tokens), len(ours.tokens)):
            gap = plain.gaps[same] if same < len(plain.gaps) else None
            differences.append({"prompt": prompt.name, "position": same, "logit_gap": gap})
    alone = sum(g.prefill_seconds + g.seconds for g in texts.plain[:decoded])
    together = sum(g.prefill_seconds + g.seconds for g in generations)
    return Row(
        **_figures(counts, latency, len(generations)),
        proposed=proposed,
        acceptance_rate=counts.accepted / proposed if proposed else None,
        speedup_measured=alone / together if together else None,
        identical_tokens=identical,
        compared_tokens=compared,
        first_differences=differences,
    )


def _replay_row(lookahead: int, counts: Sequence[RoundCounts], latency: Latency) -> Row:
    total = sum(counts, RoundCounts(lookahead))
    return Row(**_figures(total, latency, len(counts)), proposed=None, acceptance_rate=None)


def _figures(counts: RoundCounts, latency: Latency, texts: int) -> dict[str, Any]:
    """What decode and replay rows have in common."""
    k = counts.lookahead
    break_even = latency.break_even(k)
    return {
        "lookahead": k,
        "rounds": counts.rounds,
        "accepted": counts.accepted,
        "emitted": counts.emitted,
        "accepted_per_round": counts.accepted_per_round,
        "emitted_per_round": counts.emitted_per_round,
        "per_position": [n / counts.rounds if counts.rounds else 0.0 for n in counts.at_position],
        "t_draft_ms": 1e3 * latency.draft,
        "t_verify_ms": 1e3 * latency.verify[k],
        "t_ar_ms": 1e3 * latency.ar,
        "break_even_emitted_per_round": break_even,
        "break_even_acceptance": break_even_acceptance(break_even, k),
        "speedup_predicted": latency.speedup(counts, texts),
    }


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _lossless(row: Row, dtype: torch.dtype) -> bool:
    """Exact but for numeric ties, where two logits are as good as equal in `dtype`."""
    tie = _TIE_UNITS[dtype] * torch.finfo(dtype).eps * _LOGIT_SCALE
    return all(
        d["logit_gap"] is not None and d["logit_gap"] < tie for d in row.first_differences or ()
    )


def _by_domain(
    prompts: Sequence[Prompt], counts: Sequence[RoundCounts], lookahead: int
) -> dict[str, dict[str, float | None]]:
    totals: dict[str, RoundCounts] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        totals[prompt.domain] = totals.get(prompt.domain, RoundCounts(lookahead)) + count
    return {
        domain: {
            "lookahead": lookahead,
            "rounds": total.rounds,
            "emitted": total.emitted,
            "accepted_per_round": total.accepted_per_round,
            "emitted_per_round": total.emitted_per_round,
        }
        for domain, total in totals.items()
    }


def _verdict(decode: Sequence[Row], replays: Sequence[Row], on_cpu: bool) -> dict[str, Any]:
    """Use it, and with which lookahead; or not, and what would have to change."""
    best = max(replays, key=lambda r: r.speedup_predicted)
    measured = max((r for r in decode if r.speedup_measured), key=lambda r: r.speedup_measured or 0)
    # Both must say so: a prediction alone may flatter, a short measurement alone may be luck.
    pays = best.speedup_predicted > 1.0 and (measured.speedup_measured or 0.0) > 1.0
    reached, needed = best.emitted_per_round or 0.0, best.break_even_emitted_per_round
    if not pays and best.speedup_predicted > 1.0:
        text = (
            f"Do not draft on this machine yet: {best.speedup_predicted:.2f} times is predicted at "
            f"k = {best.lookahead}, but {measured.speedup_measured or 0.0:.2f} was measured at "
            f"k = {measured.lookahead}. Decode for real with -k {best.lookahead} on more prompts."
        )
    elif pays:
        text = (
            f"Draft with k = {best.lookahead}: {best.speedup_predicted:.2f} times the target's "
            "tokens per second is predicted on this machine."
        )
    elif all(r.break_even_emitted_per_round > r.lookahead + 1 for r in replays):
        text = (
            "Do not draft on this machine: at every lookahead a round costs more plain steps than "
            "the tokens that it can emit at most. Drafting or verifying must get cheaper first."
        )
    else:
        text = (
            f"Do not draft on this machine: at its best lookahead, k = {best.lookahead}, a round "
            f"emits {reached:.2f} tokens and costs {needed:.2f} plain steps. Acceptance would "
            "have to rise, or drafting and verifying get cheaper."
        )
    if on_cpu and decode[0].t_verify_ms > 1.2 * decode[0].t_ar_ms:
        text += (
            f" Here a verification of {decode[0].lookahead + 1} positions takes "
            f"{decode[0].t_verify_ms / decode[0].t_ar_ms:.1f} plain steps; on a GPU it takes "
            "little more than one, so score there before deciding for one."
        )
    return {
        "drafting_pays": pays,
        "lookahead": best.lookahead if pays else None,
        "speedup_predicted": best.speedup_predicted,
        "text": text,
    }


def _waterfall(texts: _Texts, lookahead: int) -> dict[str, float]:
    """Where the seconds of real decoding went, at one lookahead."""
    generations = texts.speculative[lookahead]
    rounds = [r for g in generations for r in g.rounds]
    draft = sum(r.draft_seconds for r in rounds)
    verify = sum(r.verify_seconds for r in rounds)
    prefill = sum(g.prefill_seconds for g in generations)
    total = prefill + sum(g.seconds for g in generations)
    return {
        "lookahead": lookahead,
        "prefill_seconds": prefill,
        "draft_seconds": draft,
        "verify_seconds": verify,
        "overhead_seconds": total - prefill - draft - verify,
        "target_alone_seconds": sum(
            g.prefill_seconds + g.seconds for g in texts.plain[: len(generations)]
        ),
    }
