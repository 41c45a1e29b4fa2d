"""Replaying many texts: those that the target has just written, or a store of traces."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftsmith.accept.decode import Generation
from draftsmith.accept.drafters import AutoregressiveDrafter, Drafter
from draftsmith.accept.heads import HeadsDrafter
from draftsmith.accept.replay import (
    RoundCounts,
    greedy_matches,
    replay,
    replay_starts,
    sampling_acceptance,
    text_logprobs,
)
from draftsmith.accept.trial import Pair
from draftsmith.accept.verify import Verification
from draftsmith.accept.warping import Warping
from draftsmith.data.chat import Prompt
from draftsmith.data.progress import Progress
from draftsmith.data.sound import Sound
from draftsmith.data.traces import TraceRow, TraceStore
from draftsmith.errors import RequestError


@dataclass(frozen=True)
class Replayable:
    """A finished text of the target.

    Attributes:
        prompt: ids before it.
        answer: ids that the target wrote.
        limit: the most tokens that it could have had.
        logprobs: [N] log p of the answer under the warping that it was drawn with; None: greedy.
        domain: what kind of text it is.
        source: what the target's encoder read or heard.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    limit: int
    logprobs: NDArray[Any] | None = None
    domain: str = "all"
    source: tuple[int, ...] | Sound | None = None


def can_replay(drafter: Drafter, verification: Verification) -> bool:
    """Whether the rounds of finished texts are known: see `accept.replay`."""
    return verification.exact and (drafter.prefix_alone or drafter.deterministic)


def of_texts(
    pair: Pair, prompts: Sequence[Prompt], texts: Sequence[Generation], warping: Warping
) -> list[Replayable]:
    """Texts that the target has just written, one for each prompt."""
    return [
        Replayable(
            prompt.ids,
            text.tokens,
            pair.limits.room(prompt.ids, pair.target.context),
            None
            if warping.greedy
            else text_logprobs(
                pair.target,
                prompt.ids,
                text.tokens,
                pair.allowed,
                warping,
                prompt.source,
                pair.limits,
            ),
            prompt.domain,
            prompt.source,
        )
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def of_traces(
    store: TraceStore, verification: Verification, stop_ids: frozenset[int], tokens: int
) -> list[Replayable]:
    """The texts of a store that were written as `verification` would verify them.

    Rows that training never saw, if the store has any.

    Args:
        store: of the target.
        verification: greedy takes the greedy texts, sampling those drawn at its temperature.
        stop_ids: of the target.
        tokens: in the target's vocabulary.

    Raises:
        RequestError: the store is of another vocabulary, or holds no such text.
    """
    about, warping = store.about, verification.warping
    if about["vocabulary"] != tokens:
        raise RequestError(
            f"{store.folder}: traces of {about['target']}, whose tokenizer has "
            f"{about['vocabulary']} tokens; the target's has {tokens}"
        )
    drawn = Warping(about["temperature"])
    if not warping.greedy and warping != drawn:
        raise RequestError(
            f"{store.folder}: its sampled texts were drawn at temperature {drawn.temperature:g} "
            "without top_k, top_p or min_p, and replay holds for that alone; ask for it, or trace "
            "again"
        )
    for split in ("validation", "train"):
        rows = store.rows(split)
        if fitting := [row for row in rows if (row.greedy if warping.greedy else row.sampled)]:
            break
    else:
        kind, other = ("greedy", "sampling") if warping.greedy else ("sampled", "greedy")
        raise RequestError(
            f"{store.folder}: holds no {kind} text; trace with another trace.sampled_share or "
            f"trace.beams: 1, or score with --verify {other}"
        )
    return [_of_row(row, stop_ids, about.get("max_new_tokens")) for row in fitting]


def _of_row(row: TraceRow, stop_ids: frozenset[int], most: int | None) -> Replayable:
    answer = row.answer.tolist()
    # A text without an end was cut where it stops, by the limit or by the context.
    limit = len(answer) if answer[-1] not in stop_ids else max(most or 0, len(answer) + 1)
    if most == len(answer):
        limit = most
    return Replayable(
        row.tokens[: row.prompt_length].tolist(),
        answer,
        limit,
        row.logprobs if row.sampled else None,
        # Without a name, one domain of all.
        row.domain or "all",
        row.read,
    )


def replay_all(
    drafter: Drafter,
    texts: Sequence[Replayable],
    warping: Warping,
    lookaheads: Sequence[int],
    context: int | None,
) -> dict[int, list[RoundCounts]]:
    """Rounds of every text at every lookahead.

    Args:
        drafter: one that `can_replay`.
        texts: finished texts of the target.
        warping: how they were drawn.
        lookaheads: for all of which rounds are counted.
        context: positions of the target; None: any number.
    """
    counts: dict[int, list[RoundCounts]] = {k: [] for k in lookaheads}
    if not lookaheads:
        return counts
    if isinstance(drafter, HeadsDrafter):
        drafter = drafter.alone()
    smallest = min((c for c in (context, drafter.context) if c is not None), default=None)
    with Progress("replay", len(texts), "texts") as progress:
        for text in texts:
            if isinstance(drafter, AutoregressiveDrafter) and drafter.prefix_alone:
                accepted = _acceptance(drafter, text, warping)
                found = {k: replay(accepted, k, text.limit) for k in lookaheads}
            else:
                found = replay_starts(
                    drafter, text.prompt, text.answer, lookaheads, text.limit, smallest, text.source
                )
            for k, count in found.items():
                counts[k].append(count)
            progress.update(1)
    return counts


def _acceptance(drafter: AutoregressiveDrafter, text: Replayable, warping: Warping) -> NDArray[Any]:
    """The probability that a proposal at each position was accepted, [N]."""
    model, vocabulary = drafter.model, drafter.vocabulary
    if warping.greedy or text.logprobs is None:
        matches = greedy_matches(model, text.prompt, text.answer, vocabulary, text.source)
        return matches.astype(np.float64)
    return sampling_acceptance(
        model, text.prompt, text.answer, text.logprobs, vocabulary, warping, text.source
    )
