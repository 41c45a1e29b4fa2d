"""The score of a drafter: acceptance and speed on prompts, by real decoding and by replay."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Limits
from draftsmith.accept.figures import (
    Row,
    by_domain,
    decode_row,
    rejected,
    replay_row,
    ties,
    waterfall,
)
from draftsmith.accept.latency import Latency, measure_latency
from draftsmith.accept.quality import measure_quality
from draftsmith.accept.replay import (
    RoundCounts,
    greedy_matches,
    replay,
    sampling_acceptance,
    text_logprobs,
)
from draftsmith.accept.trial import Pair, Texts, decode_all
from draftsmith.accept.verdict import verdict
from draftsmith.accept.verify import Verification
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
from draftsmith.checkpoints.pair import check_pair, own_vocabulary
from draftsmith.data.chat import Prompt, read_prompts
from draftsmith.data.progress import say
from draftsmith.errors import RequestError

SCHEMA = 1
# A drafter that is no model: it copies from the text.
PROMPT_LOOKUP = "prompt-lookup"
# A drafter that is some layers of the target, as skip-layers:0,1,28,29.
SKIP_LAYERS = "skip-layers:"


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


def score_drafter(
    target: ModelRef,
    drafter: ModelRef | str,
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
        drafter: any causal model with the target's tokenizer; or `PROMPT_LOOKUP`, or
            `SKIP_LAYERS` and the numbers of the target's layers that draft.
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
    found = check_pair(target, target if isinstance(drafter, str) else drafter)
    if isinstance(drafter, str):
        kept_layers(drafter, describe(config, target)[1].layers)
    for note in found.notes:
        say(f"note: {note}")
    rows = read_prompts(prompts, tokenizer, limit)
    check_lengths(rows, config.max_position_embeddings)
    target_model = target_model if target_model is not None else load_model(target)
    pair = Pair(
        target=CachedModel(target_model),
        drafter=_drafter(drafter, target_model),
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
            "drafter": drafter if isinstance(drafter, str) else drafter.spec,
            "dtype": str(target_model.dtype).removeprefix("torch."),
            "machine": provenance.machine() | provenance.versions(),
            "prompts": prompts,
        },
    )


def kept_layers(spec: str, layers: int) -> tuple[int, ...]:
    """The layers of the target that a drafter's name asks for; none for prompt lookup.

    Raises:
        RequestError: no ascending numbers of its layers.
    """
    if spec == PROMPT_LOOKUP:
        return ()
    try:
        kept = tuple(map(int, spec.removeprefix(SKIP_LAYERS).split(",")))
    except ValueError:
        kept = ()
    if not kept or list(kept) != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < layers:
        raise RequestError(
            f"{spec}: write the layers that draft as {SKIP_LAYERS}0,1,{layers - 1}, ascending "
            f"numbers from 0 to {layers - 1}"
        )
    return kept


def _drafter(drafter: ModelRef | str, target_model: Any) -> CachedModel | None:
    if not isinstance(drafter, str):
        return CachedModel(load_model(drafter))
    kept = kept_layers(drafter, target_model.config.num_hidden_layers)
    if not kept:
        return None
    from draftsmith.checkpoints.slicing import layers_of

    family = family_of(target_model.config.model_type, drafter)
    return CachedModel(layers_of(target_model, family, kept))


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
    texts = decode_all(pair, prompts, len(decoded), lookaheads, verification, batch)
    replayed = range(1, replay_lookahead + 1) if _can_replay(pair, verification) else range(0)
    latency = _latency(pair, prompts, texts, {*lookaheads, *replayed}, batch)
    rows = [decode_row(k, texts, decoded, latency, verification, batch) for k in lookaheads]
    counts = _replay(pair, prompts, texts, verification, replayed)
    replays = [replay_row(k, counts[k], latency, batch) for k in replayed]
    main = max(lookaheads)
    real = [RoundCounts.of_rounds(text.rounds, main) for text in texts.of(main)]
    return Score(
        lossless=verification.exact and all(ties(row, pair.target.model.dtype) for row in rows),
        decode=rows,
        replay=replays,
        by_domain=by_domain(prompts, counts[main], main)
        if main in replayed
        else by_domain(decoded, real, main),
        verdict=verdict(rows, replays, pair.target.device.type == "cpu", exact=verification.exact),
        waterfall=waterfall(texts, main),
        rejected=rejected(texts.of(main), pair),
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
