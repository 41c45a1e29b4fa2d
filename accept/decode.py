"""Decoding texts: plain greedy, and speculative with any drafter and verifier, alone or batched."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftsmith.accept.cache import CachedModel, Source
from draftsmith.accept.drafters import Drafter
from draftsmith.accept.verify import Draft, Greedy, Verifier
from draftsmith.accept.warping import Warping, draw
from draftsmith.checkpoints.pair import SharedVocabulary

# Tokens that are decoded to look for a stop string; its length in tokens is never more.
_TAIL = 64


@dataclass(frozen=True)
class Limits:
    """When a text ends.

    Attributes:
        max_new_tokens: most tokens to emit.
        stop_ids: ids that end the text (EOS); the id itself is emitted.
        min_new_tokens: tokens before which no stop id is emitted.
        stop_strings: strings that end the text where they are complete; the token that completes
            one is emitted.
        decode: ids -> string, for `stop_strings`.
        never_first: ids that no text begins with.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    never_first: frozenset[int] = frozenset()

    def room(self, prompt: Sequence[int], context: int | None) -> int:
        """Tokens that can be emitted after `prompt` in a context of that many positions."""
        left = self.max_new_tokens if context is None else context - len(prompt)
        return min(self.max_new_tokens, left)

    def ends_at(self, tokens: Sequence[int], new: int) -> int | None:
        """Of the last `new` tokens, how many stand if one ends the text; None: none does."""
        for count in range(1, new + 1):
            upto = len(tokens) - new + count
            if tokens[upto - 1] in self.stop_ids or self._stopped(tokens[:upto]):
                return count
        return None

    def open(self, logits_TV: Tensor, emitted: int) -> Tensor:
        """Logits for the positions from `emitted` on, without ids that are too early there."""
        early = min(self.min_new_tokens - emitted, len(logits_TV)) if self.stop_ids else 0
        first = self.never_first if emitted == 0 else frozenset()
        if early <= 0 and not first:
            return logits_TV
        logits, size = logits_TV.clone(), logits_TV.shape[-1]
        logits[: max(0, early), [i for i in self.stop_ids if i < size]] = -torch.inf
        logits[:1, [i for i in first if i < size]] = -torch.inf
        return logits

    def _stopped(self, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop string, over whatever tokens it stretches."""
        if not self.stop_strings or self.decode is None:
            return False
        tail = tokens[-_TAIL:]
        whole, before = self.decode(tail), len(self.decode(tail[:-1]))
        return any(s in whole[max(0, before - len(s) + 1) :] for s in self.stop_strings)


@dataclass(frozen=True)
class Round:
    """One draft and its verification.

    Attributes:
        proposed: proposals made.
        accepted: of them kept.
        emitted: tokens of the final output.
        draft_seconds: of drafting; in a batch, of all rows.
        verify_seconds: of the target's pass.
        rejected: the proposal that was not kept, and the target's token instead.
        passes: of the drafter.
    """

    proposed: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float
    rejected: tuple[int, int] | None = None
    passes: int = 0


@dataclass
class Generation:
    """A decoded text.

    Attributes:
        tokens: what was emitted, EOS included.
        rounds: how (empty for plain decoding); in a batch, its seconds are the batch's.
        prefill_seconds: the target's first pass, over the prompt and the first proposals; the
            drafter reads the prompt within its first draft.
        seconds: time of everything after.
        gaps: at each token, the target's highest logit less its second (plain decoding only).
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)


class Stopwatch:
    """Seconds between calls; waits for an accelerator to finish what it was given.

    Attributes:
        total: seconds from the start to the last call.
    """

    def __init__(self, device: torch.device) -> None:
        """Start now."""
        self._synchronize = device.type == "cuda"
        self.total = 0.0
        self.lap()

    def lap(self) -> float:
        """Seconds since the last call."""
        if self._synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        elapsed = now - getattr(self, "_then", now)
        self._then = now
        self.total += elapsed
        return elapsed


@torch.inference_mode()
def greedy_decode(
    target: CachedModel,
    prompt: Sequence[int],
    limits: Limits,
    vocabulary: SharedVocabulary,
    source: Source | None = None,
) -> Generation:
    """Decode with the target alone; the reference that speculation must reproduce.

    Arguments as for `plain_decode`.
    """
    return plain_decode(target, prompt, limits, vocabulary, Warping(), seed=0, source=source)


@torch.inference_mode()
def plain_decode(
    target: CachedModel,
    prompt: Sequence[int],
    limits: Limits,
    vocabulary: SharedVocabulary,
    warping: Warping,
    seed: int,
    source: Source | None = None,
) -> Generation:
    """Decode one text with the target alone, greedily or by sampling.

    Args:
        target: its cache is reset first.
        prompt: at least one id.
        limits: when to stop.
        vocabulary: ids that may be emitted.
        warping: how tokens are drawn.
        seed: of the draws.
        source: what the target's encoder reads, if it has one; `prompt` is its decoder's.
    """
    out = Generation()
    generator = torch.Generator().manual_seed(seed)
    watch = Stopwatch(target.device)
    target.reset(sources=() if source is None else [source])
    pending = list(prompt)
    for _ in range(limits.room(prompt, target.context)):
        logits_1V = vocabulary.restrict(target.feed_list(pending, keep=1))
        if not out.tokens:
            watch.lap()
            out.prefill_seconds = watch.total
        logits_V = limits.open(logits_1V, len(out.tokens))[-1]
        best = logits_V.topk(min(2, logits_V.numel()))
        # The same rule for equal logits as drafters and verifiers have; topk has another.
        token = int(logits_V.argmax())
        if not warping.greedy:
            token = int(draw(warping.probabilities(logits_V[None]), generator))
        pending = [token]
        out.tokens.append(token)
        out.gaps.append(float(best.values[0] - best.values[-1]))
        if limits.ends_at(out.tokens, 1):
            break
    out.seconds = watch.lap()
    return out


@torch.inference_mode()
def speculative_decode(
    target: CachedModel,
    drafter: Drafter,
    prompt: Sequence[int],
    lookahead: int,
    limits: Limits,
    vocabulary: SharedVocabulary,
    verifier: Verifier | None = None,
    seed: int = 0,
    source: Source | None = None,
) -> Generation:
    """Decode one text with drafts of up to `lookahead` tokens; `decode_batch` for a single row."""
    (generation,) = decode_batch(
        target,
        drafter,
        [prompt],
        lookahead,
        limits,
        vocabulary,
        verifiers=[verifier or Greedy()],
        seeds=[seed],
        sources=() if source is None else [source],
    )
    return generation


@dataclass
class _Row:
    """A text that is being written."""

    tokens: list[int]
    room: int
    verifier: Verifier
    out: Generation
    ended: bool = False

    def lookahead(self, most: int, context: int | None) -> int:
        """A draft is at most as long as what is left of the text less one, and of the contexts."""
        left = self.room - len(self.out.tokens) - 1
        if context is not None:
            left = min(left, context - len(self.tokens))
        return max(0, min(most, left))

    def take(
        self, draft: Draft, logits_TV: Tensor, limits: Limits, seconds: tuple[float, float]
    ) -> None:
        """Verify a draft and append what stands: nothing after the end counts (case A8)."""
        verdict = self.verifier(draft, limits.open(logits_TV, len(self.out.tokens)))
        emitted = [*draft.tokens[: verdict.accepted], verdict.token]
        end = limits.ends_at([*self.out.tokens, *emitted], len(emitted))
        rejected = None
        if verdict.accepted < len(draft.tokens) and end is None:
            rejected = (draft.tokens[verdict.accepted], verdict.token)
        emitted = emitted[:end]
        self.tokens += emitted
        self.out.tokens += emitted
        accepted = min(verdict.accepted, len(emitted))
        self.out.rounds.append(
            Round(
                len(draft.tokens),
                accepted,
                len(emitted),
                *seconds,
                rejected=rejected,
                passes=draft.passes,
            )
        )
        self.ended = end is not None or len(self.out.tokens) >= self.room


@torch.inference_mode()
def decode_batch(
    target: CachedModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    lookahead: int,
    limits: Limits,
    vocabulary: SharedVocabulary,
    *,
    verifiers: Sequence[Verifier],
    seeds: Sequence[int],
    sources: Sequence[Source] = (),
) -> list[Generation]:
    """Decode texts together, each with its own rounds; every row equals decoding it alone.

    The first round starts at the first generated token. Rows keep what they accept, end when they
    end, and leave the batch then.

    Args:
        target: its cache is reset first.
        drafter: likewise.
        prompts: at least one id each.
        lookahead: most proposals in a round.
        limits: when a text ends.
        vocabulary: ids that may be emitted.
        verifiers: one for each row.
        seeds: of each row's proposals.
        sources: what the encoder of each row reads, if there is one; prompts are the decoder's.
    """
    rows = [
        _Row(list(prompt), limits.room(prompt, target.context), verifier, Generation())
        for prompt, verifier in zip(prompts, verifiers, strict=True)
    ]
    watch = Stopwatch(target.device)
    target.reset(len(rows), sources)
    drafter.reset(len(rows), seeds, sources)
    reading = watch.lap()
    prefill: float | None = None
    context = min((c for c in (target.context, drafter.context) if c is not None), default=None)
    active = [row for row in rows if row.room > 0]
    _leave(target, drafter, rows, active)
    while active:
        texts = [row.tokens for row in active]
        lookaheads = [row.lookahead(lookahead, context) for row in active]
        drafts = drafter.propose(texts, lookaheads)
        draft_seconds = watch.lap()
        restricted = _verify(target, texts, drafts, vocabulary)
        verify_seconds = watch.lap()
        if prefill is None:
            # The first pass takes in the prompts as well, and is counted as theirs.
            prefill, verify_seconds = reading + verify_seconds, 0.0
        for row, draft, logits_TV in zip(active, drafts, restricted, strict=True):
            row.take(draft, logits_TV, limits, (draft_seconds, verify_seconds))
        # The target's own token has not been fed yet, so neither cache may claim it.
        lengths = [len(row.tokens) - 1 for row in active]
        target.truncate(lengths)
        drafter.rollback(lengths)
        going = [row for row in active if not row.ended]
        _leave(target, drafter, active, going)
        active = going
    watch.lap()
    for row in rows:
        row.out.prefill_seconds = prefill or 0.0
        row.out.seconds = watch.total - row.out.prefill_seconds
    return [row.out for row in rows]


def _verify(
    target: CachedModel,
    texts: Sequence[Sequence[int]],
    drafts: Sequence[Draft],
    vocabulary: SharedVocabulary,
) -> list[Tensor]:
    """The target's logits before each proposal and after the last, of every row.

    Fed is what the target has not seen: its own last token, or the whole prompt, and proposals.
    """
    fed = [
        [*text[known:], *draft.tokens]
        for text, known, draft in zip(texts, target.lengths, drafts, strict=True)
    ]
    logits = target.feed_rows(fed, keep=1 + max(len(draft.tokens) for draft in drafts))
    return [
        vocabulary.restrict(logits_TV[-len(draft.tokens) - 1 :])
        for logits_TV, draft in zip(logits, drafts, strict=True)
    ]


def _leave(
    target: CachedModel, drafter: Drafter, rows: Sequence[_Row], going: Sequence[_Row]
) -> None:
    """Take finished rows out of both caches."""
    if going and len(going) < len(rows):
        kept = [i for i, row in enumerate(rows) if any(row is other for other in going)]
        target.select(kept)
        drafter.select(kept)
