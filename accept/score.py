"""The score of a drafter: acceptance and speed on prompts, by real decoding and by replay."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Generation, Limits, decode_batch, plain_decode
from draftsmith.accept.drafters import AutoregressiveDrafter, Drafter, PromptLookup
from draftsmith.accept.energy import measure_energy
from draftsmith.accept.latency import Latency, Load, break_even_acceptance, measure_latency
from draftsmith.accept.quality import measure_quality
from draftsmith.accept.replay import (
    RoundCounts,
    greedy_matches,
    replay,
    sampling_acceptance,
    text_logprobs,
)
from draftsmith.accept.statistics import most_rejected, ratio_interval
from draftsmith.accept.verdict import verdict
from draftsmith.accept.verify import Greedy, Verification
from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.layout import cache_bytes
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
# A drafter that is no model: it copies from the text.
PROMPT_LOOKUP = "prompt-lookup"
# Sums in another order, as over one position or several, end some units in the last place apart.
# Logits of about 16 that are closer than this are a numeric tie: 0.001 in float32, 0.5 in bfloat16.
_TIE_UNITS = {torch.float32: 500.0, torch.bfloat16: 4.0, torch.float16: 4.0}
_LOGIT_SCALE = 16.0
_REJECTED = 10


@dataclass(frozen=True)
class Row:
    """Figures of one lookahead; what does not exist is None.

    `rounds` … `emitted` are sums over prompts, expectations in replay rows. `per_position` is the
    share of rounds whose proposal at each position was accepted. Intervals are of 95 %, by
    bootstrap over prompts.
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
    emitted_per_round_interval: list[float] | None = None
    acceptance_rate_interval: list[float] | None = None


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
    by_domain: dict[str, dict[str, Any]]
    verdict: dict[str, Any]
    waterfall: dict[str, float]
    rejected: list[dict[str, Any]]
    kv_bytes_per_token: dict[str, int | None]
    schema: int = SCHEMA
    runtime: str = "torch"
    verify: str = "greedy"
    settings: dict[str, Any] = field(default_factory=dict)
    temperature: float = 0.0
    batch: int = 1
    quality: dict[str, Any] | None = None
    energy: dict[str, float] | None = None

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Pair:
    """A loaded target and drafter, and what they may say; no drafter: prompt lookup."""

    target: CachedModel
    drafter: CachedModel | None
    shared: SharedVocabulary
    allowed: SharedVocabulary
    limits: Limits
    text: Callable[[Sequence[int]], str]
    confidence: float = 0.0

    def proposer(self, verification: Verification) -> Drafter:
        """What proposes, drawing as the target does."""
        if self.drafter is None:
            return PromptLookup(self.limits.stop_ids)
        return AutoregressiveDrafter(
            self.drafter,
            self.shared,
            self.limits.stop_ids,
            verification.warping,
            self.confidence,
        )


@dataclass(frozen=True)
class Texts:
    """What was decoded.

    Attributes:
        plain: by the target alone, prompt by prompt, one at a time.
        speculative: lookahead -> groups of texts that were decoded together.
        alone_seconds: of each group, decoded together by the target alone.
        joules: way of decoding -> energy, where the machine tells.
    """

    plain: list[Generation] = field(default_factory=list)
    speculative: dict[int, list[list[Generation]]] = field(default_factory=dict)
    alone_seconds: list[float] = field(default_factory=list)
    joules: dict[str, float] = field(default_factory=dict)

    def of(self, lookahead: int) -> list[Generation]:
        """All texts of a lookahead, in the order of the prompts."""
        return [text for group in self.speculative[lookahead] for text in group]

    def seconds(self, lookahead: int) -> float:
        """Of decoding with a lookahead; what is decoded together takes its time once."""
        groups = self.speculative[lookahead]
        return sum(group[0].prefill_seconds + group[0].seconds for group in groups)


def score_drafter(
    target: ModelRef,
    drafter: ModelRef | None,
    *,
    prompts: str,
    limit: int | None,
    decode_prompts: int | None,
    max_new_tokens: int,
    lookaheads: tuple[int, ...],
    replay_lookahead: int,
    target_model: Any = None,
    verification: Verification | None = None,
    batch: int = 1,
    confidence: float = 0.0,
    stop_strings: tuple[str, ...] = (),
) -> Score:
    """Score a drafter for a target.

    Args:
        target: the target.
        drafter: any causal model with the target's tokenizer; None: prompt lookup.
        prompts: a file, a shipped suite, or a set of the hub.
        limit: use the first prompts only.
        decode_prompts: how many of them are decoded for real; None: all. All are replayed.
        max_new_tokens: tokens written for each.
        lookaheads: decoded for real.
        replay_lookahead: replay covers 1 … this.
        target_model: the target, if it is loaded already.
        verification: greedy by default.
        batch: texts decoded together.
        confidence: stop drafting below it; 0: never.
        stop_strings: end a text as the EOS does.

    Raises:
        RequestError: the tokenizers differ (before any weight is loaded), or a bad prompt file.
    """
    verification = verification or Verification()
    tokenizer = load_tokenizer(target)
    config = load_config(target)
    require_decoder(describe(config, target)[0], target.spec)
    found = check_pair(target, drafter or target)
    for note in found.notes:
        say(f"note: {note}")
    rows = read_prompts(prompts, tokenizer, limit)
    check_lengths(rows, config.max_position_embeddings)
    target_model = target_model if target_model is not None else load_model(target)
    pair = Pair(
        target=CachedModel(target_model),
        drafter=None if drafter is None else CachedModel(load_model(drafter)),
        shared=found.shared,
        allowed=own_vocabulary(tokenizer, found.target_rows),
        limits=Limits(
            max_new_tokens,
            stop_ids(target_model),
            stop_strings=stop_strings,
            decode=tokenizer.decode if stop_strings else None,
        ),
        text=lambda ids: str(tokenizer.decode(list(ids))),
        confidence=confidence,
    )
    return score_pair(
        pair,
        rows,
        lookaheads=lookaheads,
        replay_lookahead=replay_lookahead,
        decode_prompts=decode_prompts,
        verification=verification,
        batch=batch,
        names={
            "target": target.spec,
            "drafter": drafter.spec if drafter else PROMPT_LOOKUP,
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
    names: dict[str, Any],
    decode_prompts: int | None = None,
    verification: Verification,
    batch: int = 1,
) -> Score:
    """Score a loaded pair.

    Args:
        pair: target and drafter.
        prompts: the first `decode_prompts` are decoded for real, all are replayed.
        lookaheads: decoded for real.
        replay_lookahead: replay covers 1 … this, where it holds.
        names: target, drafter, dtype, machine and prompts, as they go into the score.
        decode_prompts: None decodes all.
        verification: the verifier.
        batch: texts decoded together.
    """
    lookaheads = sorted(set(lookaheads))
    decoded = prompts[:decode_prompts]
    texts = _decode_all(pair, prompts, len(decoded), lookaheads, verification, batch)
    replayed = range(1, replay_lookahead + 1) if _can_replay(pair, verification) else range(0)
    latency = _latency(pair, prompts, texts, {*lookaheads, *replayed}, batch)
    rows = [_decode_row(k, texts, decoded, latency, verification, batch, pair) for k in lookaheads]
    counts = _replay(pair, prompts, texts, verification, replayed)
    replays = [_replay_row(k, counts[k], latency, batch) for k in replayed]
    main = max(lookaheads)
    real = [RoundCounts.of_rounds(text.rounds, main) for text in texts.of(main)]
    return Score(
        lossless=verification.exact and all(_ties(row, pair.target.model.dtype) for row in rows),
        decode=rows,
        replay=replays,
        by_domain=_by_domain(prompts, counts[main], main)
        if main in replayed
        else _by_domain(decoded, real, main),
        verdict=verdict(rows, replays, pair.target.device.type == "cpu", exact=verification.exact),
        waterfall=_waterfall(texts, main),
        rejected=_rejected(texts.of(main), pair),
        kv_bytes_per_token={
            "target": _kv_bytes(pair.target),
            "drafter": None if pair.drafter is None else _kv_bytes(pair.drafter),
        },
        verify=verification.name,
        settings=_settings(verification, pair),
        temperature=verification.warping.temperature,
        batch=batch,
        quality=None if verification.exact else _quality(pair, texts, main),
        energy=texts.joules or None,
        **names,
    )


def _can_replay(pair: Pair, verification: Verification) -> bool:
    """Whether acceptance at a position depends on the text before it alone."""
    return verification.exact and pair.proposer(verification).prefix_alone


def _decode_all(
    pair: Pair,
    prompts: Sequence[Prompt],
    decoded: int,
    lookaheads: Sequence[int],
    verification: Verification,
    batch: int,
) -> Texts:
    """Plain and speculative decoding in turn, so that both meet the same state of the machine."""
    texts = Texts(speculative={k: [] for k in lookaheads})
    proposer = pair.proposer(verification)
    with Progress("score", len(prompts), "prompts") as progress:
        for group in _groups(prompts, decoded, batch):
            if not texts.plain:
                # Warm-up: the first pass pays for allocations and code paths.
                few = Pair(**{**vars(pair), "limits": Limits(8)})
                _together(few, proposer, prompts, group, max(lookaheads), verification)
                _alone(few, prompts, group, verification, 1, {})
            real = group[0] < decoded
            alone = _alone(pair, prompts, group, verification, batch if real else 1, texts.joules)
            texts.plain.extend(alone[0])
            if not real:
                progress.update(len(group))
                continue
            texts.alone_seconds.append(alone[1])
            for k in lookaheads:
                with measure_energy(pair.target.device) as energy:
                    made = _together(pair, proposer, prompts, group, k, verification)
                _add(texts.joules, f"lookahead {k}", energy.joules)
                texts.speculative[k].append(made)
            progress.update(len(group))
    return texts


def _groups(prompts: Sequence[Prompt], decoded: int, batch: int) -> Iterator[range]:
    """Numbers of the prompts that are decoded together; those that are only replayed, alone."""
    for start in range(0, decoded, batch):
        yield range(start, min(start + batch, decoded))
    yield from (range(i, i + 1) for i in range(decoded, len(prompts)))


def _alone(
    pair: Pair,
    prompts: Sequence[Prompt],
    group: range,
    verification: Verification,
    batch: int,
    joules: dict[str, float],
) -> tuple[list[Generation], float]:
    """The target's own texts, and the seconds that it takes for them together."""
    limits, warping = pair.limits, verification.warping
    with measure_energy(pair.target.device) as energy:
        plain = [
            plain_decode(
                pair.target,
                prompts[i].ids,
                limits,
                pair.allowed,
                warping,
                verification.plain_seed(i),
            )
            for i in group
        ]
    if batch == 1:
        _add(joules, "target alone", energy.joules)
        return plain, sum(text.prefill_seconds + text.seconds for text in plain)
    # Without proposals, a round is a plain step of all rows.
    with measure_energy(pair.target.device) as energy:
        together = decode_batch(
            pair.target,
            PromptLookup(limits.stop_ids),
            [prompts[i].ids for i in group],
            0,
            limits,
            pair.allowed,
            verifiers=[Greedy()] * len(group),
            seeds=list(group),
        )
    _add(joules, "target alone", energy.joules)
    return plain, together[0].prefill_seconds + together[0].seconds


def _together(
    pair: Pair,
    proposer: Drafter,
    prompts: Sequence[Prompt],
    group: range,
    lookahead: int,
    verification: Verification,
) -> list[Generation]:
    return decode_batch(
        pair.target,
        proposer,
        [prompts[i].ids for i in group],
        lookahead,
        pair.limits,
        pair.allowed,
        verifiers=[verification.verifier(i) for i in group],
        seeds=[verification.draft_seed(i) for i in group],
    )


def _latency(
    pair: Pair, prompts: Sequence[Prompt], texts: Texts, lookaheads: set[int], batch: int
) -> Latency:
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    typical = by_length[len(prompts) // 2]
    return measure_latency(
        pair.target,
        pair.drafter,
        prompts[typical].ids,
        texts.plain[typical].tokens,
        lookaheads,
        batch,
    )


def _replay(
    pair: Pair,
    prompts: Sequence[Prompt],
    texts: Texts,
    verification: Verification,
    lookaheads: range,
) -> dict[int, list[RoundCounts]]:
    """Expected rounds of every text at every lookahead."""
    if not lookaheads or pair.drafter is None:
        return {}
    drafter, warping = pair.drafter.model, verification.warping
    acceptance = []
    for prompt, text in zip(prompts, texts.plain, strict=True):
        if warping.greedy:
            w: Any = greedy_matches(drafter, prompt.ids, text.tokens, pair.shared)
        else:
            logprobs = text_logprobs(
                pair.target.model, prompt.ids, text.tokens, pair.allowed, warping
            )
            w = sampling_acceptance(
                drafter, prompt.ids, text.tokens, logprobs, pair.shared, warping
            )
        acceptance.append(w)
    room = [pair.limits.room(p.ids, pair.target.context) for p in prompts]
    return {k: [replay(w, k, r) for w, r in zip(acceptance, room, strict=True)] for k in lookaheads}


def _decode_row(
    lookahead: int,
    texts: Texts,
    prompts: Sequence[Prompt],
    latency: Latency,
    verification: Verification,
    batch: int,
    pair: Pair,
) -> Row:
    generations = texts.of(lookahead)
    counts = [RoundCounts.of_rounds(text.rounds, lookahead) for text in generations]
    proposals = [sum(r.proposed for r in text.rounds) for text in generations]
    proposed, accepted = sum(proposals), sum(c.accepted for c in counts)
    together = texts.seconds(lookahead)
    rate = ratio_interval([(c.accepted, n) for c, n in zip(counts, proposals, strict=True)])
    return Row(
        **_figures(lookahead, counts, latency, batch),
        **_comparison(prompts, texts, generations, verification),
        proposed=proposed,
        acceptance_rate=accepted / proposed if proposed else None,
        acceptance_rate_interval=None if rate is None else [rate.low, rate.high],
        speedup_measured=sum(texts.alone_seconds) / together if together else None,
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
    differences, identical, compared = [], 0, 0
    for prompt, plain, ours in zip(prompts, texts.plain, generations, strict=False):
        longer = max(len(plain.tokens), len(ours.tokens))
        same = _common_prefix(plain.tokens, ours.tokens)
        compared += longer
        identical += same
        if same < longer:
            gap = plain.gaps[same] if same < len(plain.gaps) else None
            differences.append({"prompt": prompt.name, "position": same, "logit_gap": gap})
    return {
        "identical_tokens": identical,
        "compared_tokens": compared,
        "first_differences": differences,
    }


def _replay_row(lookahead: int, counts: Sequence[RoundCounts], latency: Latency, batch: int) -> Row:
    figures = _figures(lookahead, counts, latency, batch)
    return Row(**figures, proposed=None, acceptance_rate=None)


def _figures(
    lookahead: int, counts: Sequence[RoundCounts], latency: Latency, batch: int
) -> dict[str, Any]:
    """What decode and replay rows have in common."""
    total = sum(counts, RoundCounts(lookahead))
    break_even = latency.break_even(lookahead)
    interval = ratio_interval([(c.emitted, c.rounds) for c in counts])
    return {
        "lookahead": lookahead,
        "rounds": total.rounds,
        "accepted": total.accepted,
        "emitted": total.emitted,
        "accepted_per_round": total.accepted_per_round,
        "emitted_per_round": total.emitted_per_round,
        "emitted_per_round_interval": None if interval is None else [interval.low, interval.high],
        "per_position": [n / total.rounds if total.rounds else 0.0 for n in total.at_position],
        "t_draft_ms": 1e3 * latency.draft,
        "t_verify_ms": 1e3 * latency.verify[lookahead],
        "t_ar_ms": 1e3 * latency.ar,
        "break_even_emitted_per_round": break_even,
        "break_even_acceptance": break_even_acceptance(break_even, lookahead),
        "speedup_predicted": latency.speedup(Load.of(counts, batch), lookahead),
    }


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _ties(row: Row, dtype: torch.dtype) -> bool:
    """Nothing differs but for numeric ties, where two logits are as good as equal in `dtype`."""
    tie = _TIE_UNITS[dtype] * torch.finfo(dtype).eps * _LOGIT_SCALE
    return all(
        d["logit_gap"] is not None and d["logit_gap"] < tie for d in row.first_differences or ()
    )


def _by_domain(
    prompts: Sequence[Prompt], counts: Sequence[RoundCounts], lookahead: int
) -> dict[str, dict[str, Any]]:
    domains: dict[str, list[RoundCounts]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        domains.setdefault(prompt.domain, []).append(count)
    found = {}
    for domain, own in domains.items():
        total = sum(own, RoundCounts(lookahead))
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


def _rejected(generations: Sequence[Generation], pair: Pair) -> list[dict[str, Any]]:
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


def _kv_bytes(model: CachedModel) -> int:
    config = model.model.config
    family = family_of(config.model_type, "model")
    return cache_bytes(config, family, 1, bytes_per_value=model.model.dtype.itemsize)


def _settings(verification: Verification, pair: Pair) -> dict[str, Any]:
    """What else the figures depend on."""
    settings: dict[str, Any] = {"seed": verification.seed, "confidence": pair.confidence}
    if verification.name == "top_beta":
        settings |= {"beta": verification.beta, "tau": verification.tau}
    if verification.name == "sampling":
        settings |= asdict(verification.warping)
    return settings


def _quality(pair: Pair, texts: Texts, lookahead: int) -> dict[str, Any]:
    """How far a lossy output is from the target's own."""
    outputs = [text.tokens for text in texts.of(lookahead)]
    own = [text.tokens for text in texts.plain[: len(outputs)]]
    return {"lookahead": lookahead, **asdict(measure_quality(outputs, own, pair.text))}


def _waterfall(texts: Texts, lookahead: int) -> dict[str, float]:
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
        "target_alone_seconds": float(np.sum(texts.alone_seconds)),
    }


def _add(joules: dict[str, float], way: str, amount: float | None) -> None:
    if amount is not None:
        joules[way] = joules.get(way, 0.0) + amount
