"""Real speculative decoding in the runtime that will serve, by the runtime's own counters.

Acceptance hardly depends on who decodes, speed does: how a runtime batches a verification, what a
pass of its drafter costs, when it stops drafting. So this is the number that a user cares for.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from draftsmith.accept.figures import Row, by_domain, compare_texts, replay_row, ties
from draftsmith.accept.form import Score
from draftsmith.accept.pairing import Request
from draftsmith.accept.replay import RoundCounts
from draftsmith.accept.replaying import Replayable, replay_all
from draftsmith.accept.statistics import ratio_interval
from draftsmith.accept.trial import Proposing
from draftsmith.accept.verdict import runtime_verdict
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.export import FILE, export_drafter
from draftsmith.checkpoints.export.processes import ask, interpreter_of
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.gguf_files import open_gguf
from draftsmith.checkpoints.loading import describe, load_config, load_model
from draftsmith.checkpoints.token_map import FILE as TOKEN_MAP
from draftsmith.data.chat import Prompt
from draftsmith.data.files import fingerprint, new_folder, write_text
from draftsmith.data.progress import say
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings, Format, ScoreSettings

# Runtime -> the export that it loads.
FORMATS: dict[str, Format] = {
    "transformers": "hf",
    "llama.cpp": "gguf",
    "ort-genai": "ort-genai",
    "openvino": "openvino",
    "vllm": "hf",
}


@dataclass(frozen=True)
class Answer:
    """A text that a runtime wrote.

    Attributes:
        tokens: ids, a stop id included.
        seconds: of the whole answer, prompt included.
        drafted: proposals made; None: by the target alone, or not counted.
        accepted: of them kept; None likewise.
        passes: of the target; None: not told.
    """

    tokens: list[int]
    seconds: float
    drafted: int | None = None
    accepted: int | None = None
    passes: int | None = None


def score_in_runtime(
    target: ModelRef,
    drafter: ModelRef | str,
    settings: ScoreSettings,
    *,
    exports: Path | None = None,
) -> Score:
    """Score a drafter in another runtime: greedy, one text at a time.

    `decode` holds the runtime's own figures against the runtime without a drafter, `replay` what
    draftsmith expects on the very texts that it wrote.

    Args:
        target: taken as it is where the runtime loads it so, else exported in float32.
        drafter: likewise.
        settings: runtime, prompts and lookaheads.
        exports: where exported models are kept for the next time; None: nowhere.

    Raises:
        RequestError: the runtime is missing, or the pair is none.
        DraftsmithError: the runtime failed.
    """
    if isinstance(drafter, str):
        raise RequestError(
            f"{drafter}: {settings.runtime} needs a drafter that is a model; leave --runtime out"
        )
    check_runtime(settings.runtime, target)
    request = Request.of(target, drafter)
    prompts = request.prompts(settings)[: settings.decode_prompts]
    settings = _within_context(settings, prompts, request.check.target_context)
    with _exported(settings.runtime, (target, drafter), target, exports) as (whole, small):
        found = ask(
            settings.runtime,
            "speculate",
            target=str(whole),
            drafter=str(small),
            prompts=[list(prompt.ids) for prompt in prompts],
            lookaheads=sorted(set(settings.lookahead)),
            max_new_tokens=settings.max_new_tokens,
            stop_ids=sorted(stop_ids(request.configs)),
            threads=torch.get_num_threads(),
        )
    texts = {int(k): [Answer(**text) for text in own] for k, own in found["texts"].items()}
    return _score(request, found["runtime"], prompts, texts, settings)


def check_runtime(runtime: str, target: ModelRef) -> None:
    """Refuse a runtime that is not installed, or can't draft for this kind of target.

    Raises:
        RequestError: naming the cure.
    """
    family, _ = describe(load_config(target), target)
    if family.has_encoder:
        raise RequestError(
            f"{target.spec}: {family.name} is an encoder–decoder, and {runtime} is asked to draft "
            "for decoders alone; leave the runtime out"
        )
    interpreter_of(runtime)


def _within_context(
    settings: ScoreSettings, prompts: Sequence[Prompt], context: int | None
) -> ScoreSettings:
    """Fewer tokens where a text would reach past the target's context: runtimes differ there."""
    longest = max(len(prompt.ids) for prompt in prompts)
    if context is None or longest + settings.max_new_tokens <= context:
        return settings
    say(
        f"note: at most {context - longest} tokens are written, for the longest prompt has "
        f"{longest} of the target's {context} positions"
    )
    return replace(settings, max_new_tokens=context - longest)


@contextmanager
def _exported(
    runtime: str, models: Sequence[ModelRef], target: ModelRef, keep: Path | None
) -> Iterator[list[Path]]:
    """The models as a runtime loads them, kept in a folder or gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as scratch:
        folder = keep or Path(scratch)
        yield [_as_loaded(ref, target, FORMATS[runtime], folder) for ref in models]


def _as_loaded(ref: ModelRef, target: ModelRef, form: Format, folder: Path) -> Path:
    """A model in a runtime's form: itself, an export of an earlier time, or one made now."""
    if form == "gguf" and ref.gguf:
        return ref.path
    if (ref.folder / TOKEN_MAP).is_file() and form == "hf":
        raise RequestError(
            f"{ref.spec}: has a cut vocabulary, which the runtime does not know; `draftsmith "
            f"export {ref.spec} --target {target.spec} --to vllm --out DIR` writes the whole one "
            "to DIR/hf: score that"
        )
    if form == "hf" and not (ref.gguf or ref.pickle):
        return ref.folder
    made = folder / f"{form}-{fingerprint(ref.path)[:12]}"
    if not (made / FILE).is_file():
        say(f"exporting {ref.spec} to {form}")
        with new_folder(made) as partial:
            export_drafter(ref, target, partial, ExportSettings(to=(form,)))
            # For a person who wonders what it is.
            write_text(partial / "model.txt", f"{ref.spec}\n")
    return next(made.glob("drafter-*.gguf")) if form == "gguf" else made / form


def _score(
    request: Request,
    version: str,
    prompts: Sequence[Prompt],
    texts: dict[int, list[Answer]],
    settings: ScoreSettings,
) -> Score:
    """The figures of what a runtime wrote; with lookahead 0, by the target alone."""
    alone, lookaheads = texts.pop(0), sorted(texts)
    proposing, gaps = request.load_drafter(settings), Gaps(request.target)
    replays = _replay(request, proposing, settings, prompts, alone)
    rows = [_row(k, prompts, alone, texts[k], gaps) for k in lookaheads]
    dtype = _dtype(request.target)
    # Packed weights are multiplied with activations that are rounded too.
    tie = torch.float32 if dtype == "float32" else torch.float16
    main = max(lookaheads)
    return Score(
        runtime=settings.runtime,
        dtype=dtype,
        machine=provenance.machine() | provenance.versions() | {"runtime": version},
        prompts=settings.prompts,
        lossless=all(ties(row, tie) for row in rows),
        decode=rows,
        replay=[replay_row(k, replays[k], None, 1) for k in sorted(replays)],
        by_domain=by_domain([p.domain for p in prompts], replays[main], main),
        verdict=runtime_verdict(rows, settings.runtime, len(prompts)),
        waterfall=None,
        rejected=[],
        # Of each runtime's own making.
        kv_bytes_per_token={"target": None, "drafter": None},
        settings={"mode": settings.mode},
        target=request.names["target"],
        drafter=request.names["drafter"],
    )


def _replay(
    request: Request,
    proposing: Proposing,
    settings: ScoreSettings,
    prompts: Sequence[Prompt],
    alone: Sequence[Answer],
) -> dict[int, list[RoundCounts]]:
    """What draftsmith's rounds would be on the texts that the runtime's target wrote."""
    most = settings.max_new_tokens
    texts = [
        Replayable(prompt.ids, text.tokens, most, domain=prompt.domain)
        for prompt, text in zip(prompts, alone, strict=True)
    ]
    greedy, lookaheads = Warping(), range(1, max(settings.lookahead) + 1)
    context = request.check.target_context
    return replay_all(proposing.drafter(greedy), texts, greedy, lookaheads, context)


def _row(
    lookahead: int,
    prompts: Sequence[Prompt],
    alone: Sequence[Answer],
    drafted: Sequence[Answer],
    gaps: "Gaps",
) -> Row:
    """A runtime's figures at one lookahead, which it may have counted or not."""
    emitted, plain = sum(len(text.tokens) for text in drafted), [text.tokens for text in alone]
    rounds, proposed, accepted = (
        _sum([getattr(text, name) for text in drafted])
        for name in ("passes", "drafted", "accepted")
    )
    rate, rate_alone = (
        _ratio(sum(len(t.tokens) for t in texts), sum(t.seconds for t in texts))
        for texts in (drafted, alone)
    )
    return Row(
        lookahead=lookahead,
        rounds=rounds,
        proposed=proposed,
        accepted=accepted,
        emitted=emitted,
        accepted_per_round=_ratio(accepted, rounds),
        emitted_per_round=_ratio(emitted, rounds),
        acceptance_rate=_ratio(accepted, proposed),
        per_position=[],
        t_draft_ms=None,
        t_verify_ms=None,
        t_ar_ms=None,
        break_even_emitted_per_round=None,
        break_even_acceptance=None,
        speedup_predicted=None,
        speedup_measured=_ratio(rate, rate_alone),
        speedup_interval=_interval(alone, drafted),
        tokens_per_second=rate,
        tokens_per_second_alone=rate_alone,
        **compare_texts(
            [prompt.name for prompt in prompts],
            plain,
            [text.tokens for text in drafted],
            lambda number, at: gaps.after([*prompts[number].ids, *plain[number][:at]]),
        ),
    )


def _interval(alone: Sequence[Answer], drafted: Sequence[Answer]) -> list[float] | None:
    """Between what the speedup would be on other prompts like these (95 %)."""
    found = ratio_interval([(a.seconds, d.seconds) for a, d in zip(alone, drafted, strict=True)])
    return None if found is None else [found.low, found.high]


class Gaps:
    """How close the target's two highest logits are; it is loaded at the first question."""

    def __init__(self, target: ModelRef) -> None:
        """Remember where it lies."""
        self._target = target

    @cached_property
    def _model(self) -> Any:
        return load_model(self._target)

    @torch.inference_mode()
    def after(self, ids: Sequence[int]) -> float:
        """Highest less second-highest logit of what follows some ids."""
        inputs = torch.tensor([list(ids)], device=self._model.device)
        best = self._model(input_ids=inputs).logits[0, -1].float().topk(2).values
        return float(best[0] - best[1])


def _dtype(target: ModelRef) -> str:
    """What the target computes in: float32, or the type of most of a GGUF's values."""
    if not target.gguf:
        return "float32"
    types = Counter[str]()
    for tensor in open_gguf(target.path).tensors:
        types[tensor.tensor_type.name] += int(tensor.n_elements)
    name = types.most_common(1)[0][0]
    return "float32" if name == "F32" else name


def _sum(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
