"""Decoding one text: plain greedy, and speculative with any drafter. Both give the same tokens."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.accept import verify
from draftsmith.accept.cache import CachedModel
from draftsmith.accept.drafters import Drafter
from draftsmith.checkpoints.pair import SharedVocabulary


@dataclass(frozen=True)
class Limits:
    """When a text ends.

    Attributes:
        max_new_tokens: most tokens to emit.
        stop_ids: ids that end the text (EOS); the id itself is emitted.
    """

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()

    def room(self, prompt: Sequence[int], context: int) -> int:
        """Tokens that can be emitted after `prompt` in a context of that many positions."""
        return min(self.max_new_tokens, context - len(prompt))


@dataclass(frozen=True)
class Round:
    """One draft and its verification; `emitted` counts tokens of the final output."""

    proposed: int
    accepted: int
    emitted: int
    draft_seconds: float
    verify_seconds: float


@dataclass
class Generation:
    """A decoded text.

    Attributes:
        tokens: what was emitted, EOS included.
        rounds: how (empty for plain decoding).
        prefill_seconds: the target's time before the first token's step; the drafter reads the
            prompt within its first draft.
        seconds: time of everything after.
        gaps: at each token, the target's highest logit less its second (plain decoding only).
    """

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    prefill_seconds: float = 0.0
    seconds: float = 0.0
    gaps: list[float] = field(default_factory=list)


class Stopwatch:
    """Seconds between calls; waits for an accelerator to finish what it was given."""

    def __init__(self, device: torch.device) -> None:
        """Start now."""
        self._synchronize = device.type == "cuda"
        self.lap()

    def lap(self) -> float:
        """Seconds since the last call."""
        if self._synchronize:
            torch.cuda.synchronize()
        now = time.perf_counter()
        elapsed = now - getattr(self, "_then", now)
        self._then = now
        return elapsed


@torch.inference_mode()
def greedy_decode(
    target: CachedModel, prompt: Sequence[int], limits: Limits, vocabulary: SharedVocabulary
) -> Generation:
    """Decode with the target alone; the reference that speculation must reproduce.

    Args:
        target: its cache is reset first.
        prompt: at least one id.
        limits: when to stop.
        vocabulary: ids that may be emitted.
    """
    out = Generation()
    target.reset()
    watch = Stopwatch(target.device)
    if len(prompt) > 1:
        target.feed_list(prompt[:-1], keep=1)
    out.prefill_seconds = watch.lap()
    token = prompt[-1]
    for _ in range(limits.room(prompt, target.context)):
        logits_V = vocabulary.restrict(target.feed_list([token], keep=1))[-1]
        best = logits_V.topk(min(2, logits_V.numel()))
        token = int(best.indices[0])
        out.tokens.append(token)
        out.gaps.append(float(best.values[0] - best.values[-1]))
        if token in limits.stop_ids:
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
) -> Generation:
    """Decode with drafts of up to `lookahead` tokens, verified greedily: exact.

    The first round starts at the first generated token; a draft is at most as long as what is
    left of the text less one, and of either model's context.
    """
    out = Generation()
    tokens = list(prompt)
    target.reset()
    drafter.reset()
    watch = Stopwatch(target.device)
    if len(prompt) > 1:
        target.feed_list(prompt[:-1], keep=1)
    room = limits.room(prompt, target.context)
    out.prefill_seconds = watch.lap()
    ended = False
    while len(out.tokens) < room and not ended:
        context_left = min(target.context, drafter.context) - len(tokens)
        k = max(0, min(lookahead, room - len(out.tokens) - 1, context_left))
        proposals = drafter.propose(tokens, k) if k else []
        draft_seconds = watch.lap()
        logits_TV = target.feed_list([tokens[-1], *proposals])
        proposals_K = torch.tensor(proposals, dtype=torch.long, device=logits_TV.device)
        verdict = verify.greedy(proposals_K, vocabulary.restrict(logits_TV))
        emitted, accepted, ended = _until_end(proposals, verdict, limits.stop_ids)
        tokens += emitted
        out.tokens += emitted
        # The target's own token has not been fed yet, so neither cache may claim it.
        target.crop(len(tokens) - 1)
        drafter.rollback(len(tokens) - 1)
        out.rounds.append(Round(len(proposals), accepted, len(emitted), draft_seconds, watch.lap()))
    out.seconds = sum(r.draft_seconds + r.verify_seconds for r in out.rounds) + watch.lap()
    return out


def _until_end(
    proposals: Sequence[int], verdict: verify.Verdict, stop_ids: frozenset[int]
) -> tuple[list[int], int, bool]:
    """What a round emits: nothing after the first end of text counts, accepted or not (case A8)."""
    emitted = [*proposals[: verdict.accepted], verdict.token]
    for i, token in enumerate(emitted):
        if token in stop_ids:
            return emitted[: i + 1], min(verdict.accepted, i + 1), True
    return emitted, verdict.accepted, False
