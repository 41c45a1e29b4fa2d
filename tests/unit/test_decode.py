"""Speculative decoding emits the target's own tokens, and replay counts its rounds."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept import verify
from draftsmith.accept.cache import CachedModel, padded_inputs
from draftsmith.accept.decode import (
    Generation,
    Limits,
    Round,
    decode_batch,
    greedy_decode,
    speculative_decode,
)
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.replay import RoundCounts, greedy_matches, replay
from draftsmith.checkpoints.pair import SharedVocabulary
from tests.conftest import TINY_VOCAB, make_model

ALL = SharedVocabulary(TINY_VOCAB)


def plain(model: Any, prompt: Sequence[int], limits: Limits) -> Generation:
    return greedy_decode(CachedModel(model), prompt, limits, ALL)


def draft(target: Any, drafter: Any, prompt: Sequence[int], k: int, limits: Limits) -> Generation:
    cached = AutoregressiveDrafter(CachedModel(drafter), ALL, limits.stop_ids)
    return speculative_decode(CachedModel(target), cached, prompt, k, limits, ALL)


def prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, TINY_VOCAB, (n,), generator=generator).tolist() for n in lengths]


def perturbed(model: Any, scale: float) -> Any:
    """A drafter that often agrees with `model`."""
    import copy

    drafter = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return drafter


def test_A6_tokens_equal_plain_greedy(tiny: Any, tiny_drafter: Any) -> None:
    """20 prompts, one of length 1, lookahead 1 to 8, 64 new tokens; together, and some alone."""
    limits, texts = Limits(64), prompts([1, *range(2, 21)])
    expected = [plain(tiny, prompt, limits).tokens for prompt in texts]
    for k in range(1, 9):
        drafter = AutoregressiveDrafter(CachedModel(tiny_drafter), ALL, limits.stop_ids)
        batch = decode_batch(
            CachedModel(tiny),
            drafter,
            texts,
            k,
            limits,
            ALL,
            verifiers=[verify.Greedy()] * len(texts),
            seeds=range(len(texts)),
        )
        assert [row.tokens for row in batch] == expected
        for number in (0, 2 * k):
            assert draft(tiny, tiny_drafter, texts[number], k, limits).tokens == expected[number]


def test_A6_transformers_own_greedy_gives_the_same(tiny: Any) -> None:
    for prompt in prompts([1, 7, 30]):
        ids = torch.tensor([prompt])
        theirs = tiny.generate(ids, max_new_tokens=32, do_sample=False)[0, len(prompt) :].tolist()
        assert plain(tiny, prompt, Limits(32, frozenset({2}))).tokens == theirs


def test_A6_the_target_as_its_own_drafter_is_always_accepted(tiny: Any) -> None:
    for k in (1, 3, 8):
        result = draft(tiny, tiny, [5, 6, 7], k, Limits(65))
        assert sum(r.accepted for r in result.rounds) == sum(r.proposed for r in result.rounds)
        assert len(result.rounds) == -(-65 // (k + 1))


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 30),
    k=st.integers(1, 9),
    new=st.integers(1, 40),
    scale=st.sampled_from([0.0, 0.02, 0.05, 0.3]),
    stops=st.sets(st.integers(3, TINY_VOCAB - 1), max_size=20),
    seed=st.integers(0, 20),
)
def test_decoding_is_exact_and_replay_counts_its_rounds(
    length: int, k: int, new: int, scale: float, stops: set[int], seed: int
) -> None:
    """Whatever the drafter, the prompt, the ends of text and the lookahead."""
    target = make_model(seed=seed % 3)
    drafter = perturbed(target, scale)
    (prompt,) = prompts([length], seed)
    limits = Limits(new, frozenset(stops))
    reference = plain(target, prompt, limits)
    result = draft(target, drafter, prompt, k, limits)
    assert result.tokens == reference.tokens
    counts = replay(
        greedy_matches(CachedModel(drafter), prompt, reference.tokens, ALL), k, limit=new
    )
    assert counts.rounds == len(result.rounds)
    assert counts.accepted == sum(r.accepted for r in result.rounds)
    assert counts.emitted == sum(r.emitted for r in result.rounds) == len(result.tokens)
    assert counts.full == sum(r.accepted == k for r in result.rounds)
    assert counts.at_position == [sum(r.accepted > i for r in result.rounds) for i in range(k)]


class Scripted:
    """A model that says a fixed text, whatever it is given; stands in for `CachedModel`."""

    device = torch.device("cpu")

    def __init__(self, script: Sequence[int], context: int = 1000) -> None:
        self.script, self.context = list(script), context
        self.lengths = [0]

    def reset(self, rows: int = 1, sources: Any = ()) -> None:
        assert rows == 1
        self.lengths = [0]

    def truncate(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def feed_rows(self, texts: Sequence[Sequence[int]], *, keep: int = 0) -> list[torch.Tensor]:
        (ids,), (start,) = texts, self.lengths
        self.lengths = [start + len(ids)]
        assert self.lengths[0] <= self.context, "fed past its context"
        logits = torch.zeros(len(ids), TINY_VOCAB)
        for i in range(len(ids)):
            logits[i, (self.script + [0] * 100)[start + i]] = 9.0
        return [logits[-keep:]]


def scripted(text: Sequence[int], k: int, stops: set[int], new: int = 20) -> Generation:
    """A pair that agrees on `text` after a prompt of one token."""
    limits = Limits(new, frozenset(stops))
    drafter = AutoregressiveDrafter(Scripted(text), ALL, limits.stop_ids)  # type: ignore[arg-type]
    return speculative_decode(Scripted(text), drafter, [50], k, limits, ALL)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [8, 9])
def test_A8_nothing_after_an_eos_counts(stop: int) -> None:
    """A pair that agrees on [a, EOS, b, c]; EOS is a list of two ids."""
    text = [7, stop, 11, 12]
    result = scripted(text, k=4, stops={8, 9})
    assert result.tokens == [7, stop]
    (round_,) = result.rounds
    assert (round_.proposed, round_.accepted, round_.emitted) == (2, 2, 2)


def test_A8_an_eos_that_the_target_adds_ends_the_text() -> None:
    """The block was accepted whole and the target's own token is EOS."""
    result = scripted([7, 8, 11], k=1, stops={8})
    assert result.tokens == [7, 8]
    assert [(r.accepted, r.emitted) for r in result.rounds] == [(1, 2)]


def test_A8_replay_agrees_about_the_end() -> None:
    counts = replay([1.0, 1.0], lookahead=4, limit=20)
    assert (counts.rounds, counts.accepted, counts.emitted) == (1, 2, 2)
    assert counts.at_position == [1, 1, 0, 0]


def test_A1_padding_ids_are_never_proposed_or_emitted() -> None:
    """One tokenizer of 90, vocabularies of 104 and 96 whose padding has the largest logits."""
    target, drafter = make_model(vocab_size=104), make_model(seed=1, vocab_size=96)
    with torch.no_grad():
        for model in (target, drafter):
            model.lm_head.weight[90:] = model.lm_head.weight[:1] * 0 + 9.0
    shared = SharedVocabulary(90, holes=(40,))
    limits = Limits(24)
    for prompt in prompts([1, 6]):
        reference = greedy_decode(CachedModel(target), prompt, limits, shared)
        cached = AutoregressiveDrafter(CachedModel(drafter), shared, frozenset())
        result = speculative_decode(CachedModel(target), cached, prompt, 4, limits, shared)
        assert result.tokens == reference.tokens
        assert max(result.tokens) < 90
        assert 40 not in result.tokens
        cached.reset(1, [0])
        (proposed,) = cached.propose([[*prompt, *result.tokens]], [8])
        assert max(proposed.tokens) < 90


def test_A34_every_number_has_a_name_of_its_own() -> None:
    """Lookahead 4, accepted [4, 0, 2]: rate 6/12, accepted 2.0 and emitted 3.0 a round."""
    from draftsmith.accept.decode import Round

    rounds = [Round(4, accepted, accepted + 1, 0.0, 0.0) for accepted in (4, 0, 2)]
    counts = RoundCounts.of_rounds(rounds, lookahead=4)
    assert counts.accepted_per_round == 2.0
    assert counts.emitted_per_round == 3.0
    assert [n / counts.rounds for n in counts.at_position] == pytest.approx(
        [2 / 3, 2 / 3, 1 / 3, 1 / 3]
    )
    assert counts.accepted / sum(r.proposed for r in rounds) == 6 / 12


def test_a_text_may_fill_the_context(tiny: Any) -> None:
    """Neither model is fed past its positions, and the tokens stay the target's."""
    target = make_model(max_position_embeddings=32)
    drafter = make_model(seed=1, num_hidden_layers=2, max_position_embeddings=24)
    (prompt,) = prompts([20])
    reference = plain(target, prompt, Limits(64))
    result = draft(target, drafter, prompt, 4, Limits(64))
    assert result.tokens == reference.tokens
    assert len(result.tokens) == 12
    counts = replay(
        greedy_matches(CachedModel(drafter), prompt, reference.tokens, ALL), 4, limit=12
    )
    assert counts.rounds == len(result.rounds)
    assert counts.accepted == sum(r.accepted for r in result.rounds)


def test_sliding_window_layers_are_cropped_exactly() -> None:
    target = make_model("mistral", sliding_window=6)
    drafter = perturbed(target, 0.05)
    for prompt in prompts([1, 4, 12]):
        expected = plain(target, prompt, Limits(30)).tokens
        for k in (1, 3, 7):
            assert draft(target, drafter, prompt, k, Limits(30)).tokens == expected


def test_verify_greedy_by_hand() -> None:
    logits = torch.eye(5)[[1, 2, 3]]
    assert verify.greedy(torch.tensor([1, 2]), logits) == verify.Verdict(2, 3)
    assert verify.greedy(torch.tensor([1, 4]), logits) == verify.Verdict(1, 2)
    assert verify.greedy(torch.tensor([0, 2]), logits) == verify.Verdict(0, 1)
    assert verify.greedy(torch.tensor([], dtype=torch.long), logits[:1]) == verify.Verdict(0, 1)


def test_replay_of_probabilities_by_hand() -> None:
    """W = ½ everywhere, k = 1, three tokens, ended by the limit."""
    counts = replay([0.5, 0.5, 0.5], lookahead=1, limit=3)
    # Round 1 at 0; round 2 at 1 or 2; from 1 a third round at 2 unless position 1 was accepted.
    assert counts.rounds == pytest.approx(1 + 1 + 0.5 * 0.5)
    assert counts.emitted == 3


def test_ragged_rows_of_a_padded_batch_equal_single_rows(tiny: Any) -> None:
    rows = prompts([3, 9, 17])
    ids, mask, positions = padded_inputs(rows, pad_id=2)
    with torch.inference_mode():
        batch = CachedModel(tiny).feed(ids, keep=1, mask_BS=mask, positions_BT=positions)[:, -1]
        for i, row in enumerate(rows):
            single = CachedModel(tiny).feed_list(row, keep=1)[-1]
            assert torch.allclose(batch[i], single, atol=1e-4)


def test_A7_equal_logits_have_one_rule_everywhere() -> None:
    """Every token of a pair of equal head rows: plain decoding, drafts and verification agree."""
    target = make_model()
    with torch.no_grad():
        target.lm_head.weight[48:] = target.lm_head.weight[:48]
    for prompt in prompts([2, 5, 9]):
        expected = plain(target, prompt, Limits(32)).tokens
        assert max(expected) < 48
        result = draft(target, target, prompt, 4, Limits(32))
        assert result.tokens == expected
        assert all(r.accepted == r.proposed for r in result.rounds)


def test_the_cache_counts_and_forgets_tokens(tiny: Any) -> None:
    model = CachedModel(tiny)
    with torch.inference_mode():
        model.feed_list([5, 6, 7])
        assert model.lengths == [3]
        whole = model.feed_list([8, 9])
        model.crop(3)
        assert model.lengths == [3]
        assert torch.allclose(model.feed_list([8, 9]), whole, atol=1e-5)
        model.crop(99)
    assert model.lengths == [5]


def test_positions_of_padded_rows_count_from_nought() -> None:
    ids, mask, positions = padded_inputs([[5, 6, 7], [8]], pad_id=2)
    assert ids.tolist() == [[5, 6, 7], [2, 2, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]


def test_stop_ids_open_at_the_least_length() -> None:
    limits = Limits(9, frozenset({1}), min_new_tokens=3)
    logits = torch.zeros(4, 3)
    for emitted, closed in ((0, 3), (2, 1), (3, 0), (8, 0)):
        opened = limits.open(logits, emitted)
        assert (opened[:, 1] == -torch.inf).tolist() == [i < closed for i in range(4)]
        assert bool((opened[:, [0, 2]] == 0).all())
    assert bool((logits == 0).all()), "the model's own logits stay"


def test_a_text_ends_soon_after_its_least_length(tiny: Any) -> None:
    """Nearly every token is a stop id, so only the least length holds the text open."""
    limits = Limits(20, frozenset(range(5, TINY_VOCAB)), min_new_tokens=5)
    expected = plain(tiny, [5, 6], limits).tokens
    assert 5 < len(expected) < 20
    assert set(expected[:-1]) <= set(range(5))
    assert expected[-1] in limits.stop_ids
    for k in (1, 4):
        assert draft(tiny, perturbed(tiny, 0.05), [5, 6], k, limits).tokens == expected


def test_stop_strings_by_hand() -> None:
    """Of one character a token: several strings, long ones, and one that was complete before."""
    limits = Limits(9, stop_strings=("abc", "zz"), decode=lambda ids: "".join(map(chr, ids)))

    def ends(text: str, new: int) -> int | None:
        return limits.ends_at([ord(c) for c in text], new)

    assert ends("xabc", new=1) == 1
    assert ends("xzz", new=3) == 3
    assert ends("abcx", new=1) is None
    assert ends("zzx", new=1) is None


def rounds_of(
    target: Sequence[int], drafter: Sequence[int], limits: Limits, context: int = 1000
) -> list[tuple[int, int, int, tuple[int, int] | None]]:
    """Rounds of lookahead 4 after a prompt of one token, with two scripts."""
    cached = AutoregressiveDrafter(
        Scripted(drafter, context),  # type: ignore[arg-type]
        ALL,
        limits.stop_ids,
    )
    result = speculative_decode(Scripted(target), cached, [50], 4, limits, ALL)  # type: ignore[arg-type]
    return [(r.proposed, r.accepted, r.emitted, r.rejected) for r in result.rounds]


def test_a_drafter_of_a_short_context_drafts_up_to_it() -> None:
    text = list(range(10, 30))
    assert rounds_of(text, text, Limits(8), context=5) == [(4, 4, 5, None), *[(0, 0, 1, None)] * 3]


def test_a_rejection_names_both_tokens() -> None:
    rounds = rounds_of([7, 12, 13], [7, 11, 13, 14], Limits(2))
    assert rounds == [(1, 1, 2, None)]
    rounds = rounds_of([7, 12, 13, 14, 15, 16], [7, 11, 13, 14, 15, 16], Limits(6))
    assert rounds[0] == (4, 1, 2, (11, 12))


def test_nothing_after_a_stop_string_counts() -> None:
    """Complete at the first of four proposals; the third is never compared."""
    limits = Limits(20, stop_strings=("<7>",), decode=lambda ids: "".join(f"<{i}>" for i in ids))
    assert rounds_of([7, 8, 9, 10, 11], [7, 8, 9, 10, 11], limits) == [(4, 1, 1, None)]
    assert rounds_of([7, 8, 9, 10, 11], [7, 8, 12, 10, 11], limits) == [(4, 1, 1, None)]


def test_counts_of_short_drafts_and_of_both_texts() -> None:
    """A draft that the text's end cut short was not kept in full."""
    rounds = [Round(4, 4, 5, 0.0, 0.0), Round(2, 2, 3, 0.0, 0.0)]
    counts = RoundCounts.of_rounds(rounds, lookahead=4)
    assert counts.full == 1
    both = counts + RoundCounts.of_rounds(rounds[:1], lookahead=4)
    assert both == RoundCounts(4, 3, 10, 13, 2, [3.0, 3.0, 2.0, 2.0], proposed=10, passes=0)


def test_seconds_are_those_after_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks whenever it is read: encoders, two laps a round, and the end."""
    ticks = iter(range(1000))
    monkeypatch.setattr("draftsmith.accept.decode.time.perf_counter", lambda: float(next(ticks)))
    text = list(range(10, 30))
    cached = AutoregressiveDrafter(Scripted(text), ALL, frozenset())  # type: ignore[arg-type]
    result = speculative_decode(Scripted(text), cached, [50], 4, Limits(10), ALL)  # type: ignore[arg-type]
    # What encoders read, and the first verification, which takes in the prompt, are its prefill.
    assert [(r.draft_seconds, r.verify_seconds) for r in result.rounds] == [(1.0, 0.0), (1.0, 1.0)]
    assert (result.prefill_seconds, result.seconds) == (2.0, 4.0)


def test_a_drafter_forgets_what_was_rejected() -> None:
    """Its second draft starts from the target's text, not from its own."""
    target, own = [7, 12, 13, 14, 15, 16], [7, 11, 13, 14, 15, 16]
    model = Scripted(own)
    cached = AutoregressiveDrafter(model, ALL, frozenset())  # type: ignore[arg-type]
    speculative_decode(Scripted(target), cached, [50], 4, Limits(6), ALL)  # type: ignore[arg-type]
    cached.reset(1, [0])
    cached.propose([[50, 7]], [3])
    assert model.lengths == [4]
    cached.rollback([2])
    assert model.lengths == [2]
    cached.rollback([9])
    assert model.lengths == [2], "it never claims more than it has read"
