"""The score of a drafter: acceptance and speed on prompts, by real decoding and by replay."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.drafters import Drafter
from draftsmith.accept.figures import (
    Row,
    by_domain,
    decode_row,
    rejected,
    replay_row,
    ties,
    waterfall,
)
from draftsmith.accept.form import Score
from draftsmith.accept.latency import Latency, measure_latency
from draftsmith.accept.pairing import Request
from draftsmith.accept.quality import measure_quality
from draftsmith.accept.replay import RoundCounts
from draftsmith.accept.replaying import Replayable, can_replay, of_texts, of_traces, replay_all
from draftsmith.accept.runtimes import score_in_runtime
from draftsmith.accept.samples import check_samples, compare_samples
from draftsmith.accept.trial import Pair, Texts, decode_all
from draftsmith.accept.verdict import verdict
from draftsmith.accept.verify import Verification
from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.layout import cache_bytes
from draftsmith.checkpoints.loading import describe
from draftsmith.data.chat import Prompt
from draftsmith.data.progress import say
from draftsmith.data.sound import Sound
from draftsmith.data.traces import TraceStore
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings

# Below this probability, samples that differ so much are no accident.
_SURE = 1e-3


def score_drafter(
    target: ModelRef,
    drafter: ModelRef | str,
    settings: ScoreSettings | None = None,
    *,
    seed: int = 0,
    target_model: Any = None,
    traces: TraceStore | None = None,
    exports: Path | None = None,
) -> Score:
    """Score a drafter for a target.

    Args:
        target: the target.
        drafter: any model with the target's tokenizer and kind of input; or `PROMPT_LOOKUP`,
            `SKIP_LAYERS` and the numbers of the target's layers that draft, or a folder of heads.
        settings: prompts, lookaheads, verifier, …, as in a recipe.
        seed: of what is drawn.
        target_model: the target, if it is loaded already.
        traces: replay these texts of the target in place of new ones; with `mode: replay` the
            target is then not loaded at all.
        exports: for another runtime: where exported models are kept; None: nowhere.

    Raises:
        RequestError: the pair, a prompt or the traces can't be scored, told before any weight is
            loaded as far as that can be known.
    """
    settings = settings or ScoreSettings()
    if settings.runtime != "torch":
        if traces is not None:
            raise RequestError(
                f"{traces.folder}: {settings.runtime} decodes prompts, and replays no traces; "
                "leave the traces or --runtime out"
            )
        return score_in_runtime(target, drafter, settings, exports=exports)
    verification = Verification.of(settings, seed)
    request = Request.of(target, drafter)
    texts = None
    if traces is not None:
        _check_traces(request, settings, traces)
        tokens = len(request.tokenizer.get_vocab())
        texts = of_traces(traces, verification, stop_ids(request.configs), tokens)
        _check_sources(request, texts, traces)
        texts = texts[: settings.limit]
        if settings.mode == "replay":
            return _score_traces(request, settings, verification, texts, traces.folder)
    prompts = request.prompts(settings)
    if settings.samples:
        check_samples(len(prompts[: settings.decode_prompts]), verification, settings.samples)
    if (can := request.most) is not None and (asked := max(settings.lookahead)) > can:
        raise RequestError(
            f"lookahead {asked}: {request.names['drafter']} proposes {can} tokens a round at most; "
            "ask for no more"
        )
    pair = request.load(settings, target_model)
    names = _names(request, pair.target, settings.prompts)
    return score_pair(pair, prompts, settings, verification, names=names, traces=texts)


def _check_traces(request: Request, settings: ScoreSettings, store: TraceStore) -> None:
    """Refuse traces where they can't be used.

    Raises:
        RequestError: nothing is replayed, or the target has to be loaded.
    """
    if settings.mode == "decode":
        raise RequestError(f"{store.folder}: mode decode replays nothing; leave the traces out")
    if settings.mode == "replay" and settings.samples:
        raise RequestError(
            f"samples {settings.samples}: the target is not loaded for a replay of traces alone; "
            "leave samples out, or choose mode both"
        )
    if store.about["target"] != request.target.spec:
        say(f"note: the traces are of {store.about['target']}, not of {request.target.spec}")


def _check_sources(request: Request, texts: Sequence[Replayable], store: TraceStore) -> None:
    """Refuse traces of what the target can't take in.

    Raises:
        RequestError: they are of text, and it hears; or the like.
    """
    family, _ = describe(request.configs.config, request.target)
    kinds = {NoneType: "no encoder", tuple: "an encoder of text", Sound: "an encoder of sound"}
    own = Sound if family.config.mel_bins else tuple if family.has_encoder else NoneType
    if (found := type(texts[0].source)) is not own:
        raise RequestError(
            f"{store.folder}: traces of a target with {kinds[found]}, and {request.target.spec} "
            f"has {kinds[own]}; give traces of its own"
        )


def _names(request: Request, model: CachedModel | None, prompts: str) -> dict[str, Any]:
    dtype = "float32" if model is None else str(model.model.dtype).removeprefix("torch.")
    return {
        **request.names,
        "dtype": dtype,
        "machine": provenance.machine() | provenance.versions(),
        "prompts": prompts,
    }


def score_pair(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ScoreSettings,
    verification: Verification,
    *,
    names: Mapping[str, Any],
    traces: Sequence[Replayable] | None = None,
) -> Score:
    """Score a loaded pair.

    Args:
        pair: target and drafter.
        prompts: the first `settings.decode_prompts` are decoded for real, all are replayed.
        settings: lookaheads and ways of scoring.
        verification: the verifier.
        names: target, drafter, dtype, machine and prompts, as they go into the score.
        traces: texts to replay in place of those that the target answers the prompts with.
    """
    lookaheads = [] if settings.mode == "replay" else sorted(set(settings.lookahead))
    drafter = pair.proposer(verification)
    replayed = _replayed(drafter, settings, verification, traces is not None)
    decoded = prompts[: settings.decode_prompts]
    if not replayed or traces is not None:
        # The others would be written for nothing.
        prompts = decoded
    texts = decode_all(pair, prompts, len(decoded), lookaheads, verification, settings.batch)
    latency = _latency(pair, prompts, texts, {*lookaheads, *replayed}, settings.batch)
    rows = [
        decode_row(k, texts, decoded, latency, verification, settings.batch) for k in lookaheads
    ]
    warping = verification.warping
    finished = of_texts(pair, prompts, texts.plain, warping) if traces is None else traces
    counts = replay_all(drafter, finished, warping, replayed, pair.target.context)
    replays = [replay_row(k, counts[k], latency, settings.batch) for k in replayed]
    main = max(lookaheads or replayed)
    samples = _samples(pair, decoded, main, verification, settings.samples)
    return Score(
        lossless=_lossless(rows, verification, pair, samples),
        decode=rows,
        replay=replays,
        by_domain=by_domain([text.domain for text in finished], counts[main], main)
        if main in replayed and (traces is None or not lookaheads)
        else by_domain([p.domain for p in decoded], _real(texts, main), main),
        verdict=verdict(rows, replays, pair.target.device.type == "cpu", exact=verification.exact),
        waterfall=waterfall(texts, main) if lookaheads else None,
        rejected=rejected(texts.of(main), pair) if lookaheads else [],
        kv_bytes_per_token={
            "target": _kv_bytes(pair.target),
            "drafter": None if pair.drafter is None else _kv_bytes(pair.drafter),
        },
        quality=None if verification.exact else _quality(pair, texts, main),
        samples=samples,
        energy=texts.joules or None,
        **_common(settings, verification),
        **names,
    )


def _score_traces(
    request: Request,
    settings: ScoreSettings,
    verification: Verification,
    texts: Sequence[Replayable],
    folder: Path,
) -> Score:
    """Score by the traces alone; only the drafter is loaded."""
    proposing = request.load_drafter(settings)
    drafter = proposing.drafter(verification.warping)
    lookaheads = _replayed(drafter, settings, verification, asked=True)
    context = request.check.target_context
    counts = replay_all(drafter, texts, verification.warping, lookaheads, context)
    replays = [replay_row(k, counts[k], None, settings.batch) for k in lookaheads]
    main = max(lookaheads)
    model = proposing.model
    return Score(
        lossless=None if verification.exact else False,
        decode=[],
        replay=replays,
        by_domain=by_domain([text.domain for text in texts], counts[main], main),
        verdict=verdict([], replays, on_cpu=False),
        waterfall=None,
        rejected=[],
        kv_bytes_per_token={"target": None, "drafter": None if model is None else _kv_bytes(model)},
        **_common(settings, verification),
        **_names(request, model, f"{folder}: {len(texts)} texts"),
    )


def _lossless(
    rows: Sequence[Row], verification: Verification, pair: Pair, samples: dict[str, Any] | None
) -> bool | None:
    """Whether what was decoded is the target's own; None: nothing was decoded to tell it by."""
    if verification.exact and not rows and samples is None:
        return None
    return (
        verification.exact
        and all(ties(row, pair.target.model.dtype) for row in rows)
        and (samples is None or samples["p_value"] >= _SURE)
    )


def _replayed(
    drafter: Drafter, settings: ScoreSettings, verification: Verification, asked: bool
) -> range:
    """The lookaheads that are replayed; `asked`: for traces, which are of no other use.

    Raises:
        RequestError: nothing else was asked for, and it can't be had.
    """
    if settings.mode == "decode":
        return range(0)
    if can_replay(drafter, verification):
        most = max(settings.replay_lookahead, *settings.lookahead)
        return range(1, min(most, drafter.most or most) + 1)
    why = f"what {verification.name} keeps of this drafter can't be computed from a finished text"
    if settings.mode == "replay" or asked:
        raise RequestError(f"replay: {why}; choose mode decode, without traces")
    say(f"note: nothing is replayed: {why}")
    return range(0)


def _latency(
    pair: Pair, prompts: Sequence[Prompt], texts: Texts, lookaheads: set[int], batch: int
) -> Latency:
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i].source or prompts[i].ids))
    typical, heads = by_length[len(prompts) // 2], pair.proposing.heads
    return measure_latency(
        pair.target,
        pair.drafter,
        prompts[typical].ids,
        texts.plain[typical].tokens,
        lookaheads,
        batch,
        prompts[typical].source,
        0 if pair.proposing.block is None else pair.proposing.block.size,
        None if heads is None else partial(heads.tokens, heads.blank_states(batch)),
    )


def _real(texts: Texts, lookahead: int) -> list[RoundCounts]:
    return [RoundCounts.of_rounds(text.rounds, lookahead) for text in texts.of(lookahead)]


def _samples(
    pair: Pair, prompts: Sequence[Prompt], lookahead: int, verification: Verification, samples: int
) -> dict[str, Any] | None:
    """Whether texts drawn with drafts are distributed as those drawn without."""
    if not samples:
        return None
    return asdict(compare_samples(pair, prompts, lookahead, verification, samples))


def _kv_bytes(model: CachedModel) -> int:
    return cache_bytes(
        model.model.config, model.family, 1, bytes_per_value=model.model.dtype.itemsize
    )


def _common(settings: ScoreSettings, verification: Verification) -> dict[str, Any]:
    """What the figures depend on."""
    plain = {"seed": verification.seed, "confidence": settings.confidence, "mode": settings.mode}
    if verification.name == "top_beta":
        plain |= {"beta": verification.beta, "tau": verification.tau}
    if verification.name == "sampling":
        plain |= asdict(verification.warping)
    return {
        "verify": verification.name,
        "settings": plain,
        "temperature": verification.warping.temperature,
        "batch": settings.batch,
    }


def _quality(pair: Pair, texts: Texts, lookahead: int) -> dict[str, Any]:
    """How far a lossy output is from the target's own."""
    outputs = [text.tokens for text in texts.of(lookahead)]
    own = [text.tokens for text in texts.plain[: len(outputs)]]
    return {"lookahead": lookahead, **asdict(measure_quality(outputs, own, pair.text))}
