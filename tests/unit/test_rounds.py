"""Rounds of the drafter on the target's texts, and what it proposes past a mistake."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftsmith.accept.replay import replay
from draftsmith.checkpoints.families import families
from draftsmith.distill.batches import Batch, collate
from draftsmith.distill.rounds import OwnRounds, rounds_of
from draftsmith.distill.states import hidden_at_answers
from tests.conftest import make_model
from tests.unit.test_batches import trace_rows

DECODERS = sorted(name for name, family in families().items() if not family.has_encoder)


def proposer(model: Any) -> Any:
    """The likeliest ids of a model at a batch's positions."""

    def propose(batch: Batch) -> torch.Tensor:
        with torch.inference_mode():
            logits = model.get_output_embeddings()(hidden_at_answers(model, batch))
        return logits.argmax(-1)

    return propose


def greedy(model: Any, text: Sequence[int], tokens: int) -> list[int]:
    """What the model would write next, by a plain loop without a cache."""
    text = list(text)
    for _ in range(tokens):
        with torch.inference_mode():
            text.append(int(model(input_ids=torch.tensor([text])).logits[0, -1].argmax()))
    return text[-tokens:] if tokens else []


def half_right(model: Any, seed: int = 0) -> list[Any]:
    """Rows whose answers are the model's own tokens, but for some mistakes."""
    rng = np.random.default_rng(seed)
    rows = []
    for row in trace_rows(3, model, lengths=(14, 22), seed=seed):
        tokens = row.tokens.copy()
        for i in range(row.prompt_length, len(tokens)):
            if rng.random() < 0.6:
                tokens[i] = greedy(model, tokens[:i].tolist(), 1)[0]
        row.tokens[:] = tokens
        rows.append(row)
    return rows


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 6))
def test_rounds_are_those_of_replay(matches: list[bool], lookahead: int) -> None:
    found = list(rounds_of(matches, lookahead))
    counts = replay(matches, lookahead, limit=len(matches) + 1)
    assert len(found) == counts.rounds
    assert sum(kept for _, kept in found) == counts.accepted
    assert next(start for start, _ in found) == 0


@pytest.mark.parametrize("lookahead", [1, 2, 3, 5])
@pytest.mark.parametrize("family", DECODERS)
def test_branches_are_what_the_drafter_would_have_drafted(family: str, lookahead: int) -> None:
    """Each round's draft, token by token and without a mask, from the text before it."""
    model = make_model(family)
    rows = half_right(model)
    batch = collate(rows, max_length=20)
    longer = OwnRounds(proposer(model), lookahead).extend(batch)
    expected = []
    for number, row in enumerate(rows):
        tokens = row.tokens[:20].tolist()
        answer = tokens[row.prompt_length :]
        chosen = [greedy(model, tokens[: row.prompt_length + i], 1)[0] for i in range(len(answer))]
        matches = [a == b for a, b in zip(chosen, answer, strict=True)]
        for start, kept in rounds_of(matches, lookahead):
            if start + kept < len(answer) and kept < lookahead:
                before = tokens[: row.prompt_length + start + kept]
                draft = greedy(model, before, lookahead - kept)
                expected += [(number, [*before, *draft[: i + 1]]) for i in range(len(draft) - 1)]
    width = longer.ids.shape[1]
    own = longer.positions[batch.tokens :].tolist()
    assert len(own) == len(expected)
    assert lookahead < 3 or expected
    found = [(place // width, seen_text(longer, place)) for place in own]
    assert sorted(found) == sorted(expected)


def seen_text(batch: Batch, place: int) -> list[int]:
    """The tokens that a position sees, in the order of their positions."""
    assert batch.position_ids is not None
    row, column = divmod(place, batch.ids.shape[1])
    seen = batch.mask[row, 0, column].nonzero()[:, 0]
    order = batch.position_ids[row, seen].argsort()
    assert batch.position_ids[row, seen][order].tolist() == list(range(len(seen)))
    return batch.ids[row, seen][order].tolist()


@pytest.mark.parametrize("family", DECODERS)
def test_states_on_branches_are_those_of_the_text_alone(family: str) -> None:
    """Hidden states behind the mask equal those of a row that holds just what they see."""
    model = make_model(family)
    longer = OwnRounds(proposer(model), 4).extend(collate(half_right(model), max_length=20))
    with torch.inference_mode():
        together = hidden_at_answers(model, longer)
        for place, hidden in zip(longer.positions.tolist(), together, strict=True):
            text = torch.tensor([seen_text(longer, place)])
            alone = model.base_model(input_ids=text).last_hidden_state[0, -1]
            assert torch.allclose(hidden, alone, atol=1e-5)


def test_a_proposed_end_ends_the_draft() -> None:
    model = make_model()
    rows = half_right(model)
    batch = collate(rows, max_length=20)
    everything = frozenset(range(model.config.vocab_size))
    assert len(OwnRounds(proposer(model), 4, everything).extend(batch).positions) == batch.tokens


def test_an_end_proposed_after_a_mistake_ends_the_draft_there() -> None:
    """From an end nothing is proposed, nor from what would have come after it."""
    model = make_model()
    batch = collate(half_right(model), max_length=20)
    free = OwnRounds(proposer(model), 5).extend(batch)
    drafts = [seen_text(free, place) for place in free.positions[batch.tokens :].tolist()]
    mistakes = {draft[-1] for draft in drafts if draft[:-1] not in drafts}
    # A token that is proposed in the middle of a draft, and is no mistake of a round itself.
    end = next(d[-1] for d in drafts if d[:-1] in drafts and d[-1] not in mistakes)
    ended = OwnRounds(proposer(model), 5, frozenset({end})).extend(batch)
    left = [seen_text(ended, place) for place in ended.positions[batch.tokens :].tolist()]
    begins = [d for d in drafts if d[-1] == end]
    assert left == [d for d in drafts if not any(d[: len(b)] == b for b in begins)]


def test_positions_count_less_the_later_they_stand_in_their_round() -> None:
    model = make_model()
    batch = collate(half_right(model), max_length=20)
    matches = (proposer(model)(batch) == batch.labels).tolist()
    weights = OwnRounds(proposer(model), 3, decay=0.5).weigh(batch).weights
    assert weights is not None
    expected: list[float] = []
    rows = (batch.positions // batch.ids.shape[1]).tolist()
    for row in sorted(set(rows)):
        own = [m for m, r in zip(matches, rows, strict=True) if r == row]
        for start, kept in rounds_of(own, 3):
            expected += [0.5**i for i in range(min(kept + 1, len(own) - start))]
    assert weights.tolist() == expected
    assert {1.0, 0.5} <= set(expected)


def test_weights_of_domains_go_over_to_branches() -> None:
    model = make_model()
    rows = half_right(model)
    batch = collate(rows, max_length=20, domain_weights={"": 2.0})
    longer = OwnRounds(proposer(model), 4, decay=0.5).extend(batch)
    assert longer.weights is not None
    assert len(longer.weights) == len(longer.positions) == len(longer.labels) > batch.tokens
    assert set(longer.weights.tolist()) <= {2.0, 1.0, 0.5, 0.25, 0.125}
    places = longer.weights[batch.tokens :].log2()
    assert places.max() == 0, "a branch begins after a mistake, at the second place or later"
