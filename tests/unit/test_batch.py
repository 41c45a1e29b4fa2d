"""Texts decoded together are those decoded alone, whatever their ends and drafters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import (
    Generation,
    Limits,
    decode_batch,
    greedy_decode,
    plain_decode,
    speculative_decode,
)
from draftsmith.accept.drafters import AutoregressiveDrafter, Drafter, PromptLookup
from draftsmith.accept.replay import replay, sampling_acceptance, text_logprobs
from draftsmith.accept.verify import Greedy, Sampling, TopBeta, Verifier
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.pair import SharedVocabulary
from tests.conftest import TINY_VOCAB, make_model
from tests.unit.test_decode import perturbed, prompts

ALL = SharedVocabulary(TINY_VOCAB)
WARM = Warping(1.0)


def autoregressive(model: Any, limits: Limits, **settings: Any) -> AutoregressiveDrafter:
    return AutoregressiveDrafter(CachedModel(model), ALL, limits.stop_ids, **settings)


def together(
    target: Any,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    k: int,
    limits: Limits,
    verifiers: Sequence[Verifier] | None = None,
) -> list[Generation]:
    return decode_batch(
        CachedModel(target),
        drafter,
        texts,
        k,
        limits,
        ALL,
        verifiers=verifiers or [Greedy()] * len(texts),
        seeds=list(range(len(texts))),
    )


def counts(generation: Generation) -> list[tuple[int, int, int]]:
    return [(r.proposed, r.accepted, r.emitted) for r in generation.rounds]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mistral"])
def test_A10_rows_of_a_batch_are_those_alone(family: str) -> None:
    """Prompts of 3, 9, 17 and 1 tokens; rows accept different amounts and end at other times."""
    window = {} if family == "llama" else {"sliding_window": 6}
    target = make_model(family, **window)
    drafter = perturbed(target, 0.05)
    limits = Limits(24, frozenset({5, 40, 41, 42, 60}))
    texts = prompts([3, 9, 17, 1])
    for k in (1, 3, 5):
        batch = together(target, autoregressive(drafter, limits), texts, k, limits)
        for text, row in zip(texts, batch, strict=True):
            alone = speculative_decode(
                CachedModel(target), autoregressive(drafter, limits), text, k, limits, ALL
            )
            assert row.tokens == alone.tokens
            assert counts(row) == counts(alone)
            assert row.tokens == greedy_decode(CachedModel(target), text, limits, ALL).tokens


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=2, max_size=5),
    k=st.integers(1, 6),
    new=st.integers(1, 24),
    scale=st.sampled_from([0.0, 0.05, 0.3]),
    stops=st.sets(st.integers(3, TINY_VOCAB - 1), max_size=12),
    seed=st.integers(0, 9),
)
def test_any_batch_is_exact(
    lengths: list[int], k: int, new: int, scale: float, stops: set[int], seed: int
) -> None:
    target = make_model(seed=seed % 3)
    drafter = perturbed(target, scale)
    limits = Limits(new, frozenset(stops))
    texts = prompts(lengths, seed)
    batch = together(target, autoregressive(drafter, limits), texts, k, limits)
    for text, row in zip(texts, batch, strict=True):
        assert row.tokens == greedy_decode(CachedModel(target), text, limits, ALL).tokens


def test_A10_sampled_rows_are_those_alone() -> None:
    """Each row has its own seeds, so what others accept changes nothing; temperatures differ."""
    target = make_model()
    drafter = perturbed(target, 0.1)
    limits, texts = Limits(16), prompts([3, 9, 17])

    def verifiers() -> list[Verifier]:
        warpings = (Warping(0.8), Warping(), Warping(1.5, top_k=5))
        return [
            Sampling(warping, torch.Generator().manual_seed(7 + i))
            for i, warping in enumerate(warpings)
        ]

    batch = together(
        target, autoregressive(drafter, limits, warping=WARM), texts, 3, limits, verifiers()
    )
    for i, (text, row, verifier) in enumerate(zip(texts, batch, verifiers(), strict=True)):
        alone = speculative_decode(
            CachedModel(target),
            autoregressive(drafter, limits, warping=WARM),
            text,
            3,
            limits,
            ALL,
            verifier,
            seed=i,
        )
        assert row.tokens == alone.tokens
    assert batch[1].tokens == greedy_decode(CachedModel(target), texts[1], limits, ALL).tokens


def test_the_target_as_its_own_sampling_drafter_is_always_accepted() -> None:
    target, limits = make_model(), Limits(40)
    (row,) = together(
        target,
        autoregressive(target, limits, warping=WARM),
        prompts([5]),
        4,
        limits,
        [Sampling(WARM, torch.Generator().manual_seed(0))],
    )
    assert sum(r.accepted for r in row.rounds) == sum(r.proposed for r in row.rounds)


# --- replay of sampling


def test_replay_of_sampled_texts_agrees_with_real_rounds() -> None:
    """A toy pair, many runs: the mean of real rounds lies within four standard errors."""
    target = make_model(vocab_size=TINY_VOCAB, initializer_range=0.3)
    drafter = perturbed(target, 0.05)
    limits, (prompt,) = Limits(12), prompts([4])
    real, replayed, k = [], [], 3
    for seed in range(150):
        draft = autoregressive(drafter, limits, warping=WARM)
        verifier = Sampling(WARM, torch.Generator().manual_seed(1000 + seed))
        row = speculative_decode(
            CachedModel(target), draft, prompt, k, limits, ALL, verifier, seed=seed
        )
        real.append(len(row.rounds))
        text = plain_decode(CachedModel(target), prompt, limits, ALL, WARM, seed=seed).tokens
        logprobs = logprobs_of(target, prompt, text)
        w = sampling_acceptance(CachedModel(drafter), prompt, text, logprobs, ALL, WARM)
        replayed.append(replay(w, k, limit=12).rounds)
    spread = np.sqrt(np.var(real, ddof=1) / len(real) + np.var(replayed, ddof=1) / len(replayed))
    assert abs(np.mean(real) - np.mean(replayed)) < 4 * spread
    assert 3 < np.mean(real) < 11, "the pair neither always agrees nor never"


@torch.inference_mode()
def logprobs_of(model: Any, prompt: Sequence[int], text: Sequence[int]) -> list[float]:
    ids = torch.tensor([[*prompt, *text]])
    logp = model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
    found: list[float] = logp.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist()
    return found


def test_a_target_replayed_on_itself_is_always_accepted() -> None:
    target, (prompt,) = make_model(), prompts([4])
    text = plain_decode(CachedModel(target), prompt, Limits(12), ALL, WARM, seed=3).tokens
    w = sampling_acceptance(
        CachedModel(target), prompt, text, logprobs_of(target, prompt, text), ALL, WARM
    )
    assert w == pytest.approx(1.0, abs=1e-4)


# --- ends of text


def test_A9_a_stop_string_inside_a_block_ends_it() -> None:
    """'##' of two tokens '#', completed at position 2 of 5, and split over two blocks."""
    strings = {7: "a", 9: "#", 11: "b"}

    def decode(ids: Sequence[int]) -> str:
        return "".join(strings.get(i, "x") for i in ids)

    limits = Limits(20, stop_strings=("##",), decode=decode)
    assert limits.ends_at([9, 9, 7, 7, 11], new=5) == 2
    assert limits.ends_at([7, 9, 9, 11], new=2) == 1
    assert limits.ends_at([7, 9, 11, 9], new=4) is None
    assert limits.ends_at([9, 9, 9], new=1) == 1
    target = make_model(initializer_range=0.3)
    free = greedy_decode(CachedModel(target), [5, 6], Limits(20), ALL).tokens
    for place in range(1, len(free) - 1):
        strings = {token: f"<{token}>" for token in free}
        string = f"{strings[free[place - 1]]}{strings[free[place]]}"[1:-1]
        stopped = Limits(20, stop_strings=(string,), decode=decode)
        plain = greedy_decode(CachedModel(target), [5, 6], stopped, ALL).tokens
        first = next(i for i in range(1, len(free)) if string in decode(free[: i + 1]))
        assert plain == free[: first + 1]
        for k in (1, 4, 8):
            row = speculative_decode(
                CachedModel(target), autoregressive(target, stopped), [5, 6], k, stopped, ALL
            )
            assert row.tokens == plain
            assert sum(r.emitted for r in row.rounds) == len(plain)


def test_no_end_before_the_least_length() -> None:
    target = make_model()
    free = greedy_decode(CachedModel(target), [5, 6], Limits(20), ALL).tokens
    limits = Limits(20, frozenset(free[:3]), min_new_tokens=6)
    plain = greedy_decode(CachedModel(target), [5, 6], limits, ALL).tokens
    assert len(plain) >= 6
    assert not limits.stop_ids & set(plain[:6])
    for k in (1, 3, 8):
        row = speculative_decode(
            CachedModel(target),
            autoregressive(perturbed(target, 0.05), limits),
            [5, 6],
            k,
            limits,
            ALL,
        )
        assert row.tokens == plain


# --- other drafters


@pytest.mark.parametrize("k", [1, 4])
def test_prompt_lookup_is_exact_and_copies(k: int) -> None:
    target = make_model(initializer_range=0.3)
    limits = Limits(30)
    for text in prompts([1, 12, 20]):
        doubled = text + text
        expected = greedy_decode(CachedModel(target), doubled, limits, ALL).tokens
        (row,) = together(target, PromptLookup(frozenset()), [doubled], k, limits)
        assert row.tokens == expected


def test_prompt_lookup_by_hand() -> None:
    lookup = PromptLookup(frozenset({9}))
    (draft,) = lookup.propose([[1, 2, 3, 4, 9, 5, 1, 2, 3]], [5])
    assert draft.tokens == [4, 9]
    assert draft.q is None
    assert lookup.propose([[1, 2, 3]], [5])[0].tokens == []
    assert lookup.propose([[1, 1]], [0])[0].tokens == []


@pytest.mark.parametrize("confidence", [0.05, 0.5, 1.0])
def test_stopping_on_low_confidence_stays_exact(confidence: float) -> None:
    target = make_model()
    drafter, limits = perturbed(target, 0.05), Limits(20)
    for text in prompts([2, 9]):
        expected = greedy_decode(CachedModel(target), text, limits, ALL).tokens
        draft = autoregressive(drafter, limits, confidence=confidence)
        (row,) = together(target, draft, [text], 6, limits)
        assert row.tokens == expected
        assert not draft.prefix_alone
        if confidence == 1.0:
            assert all(r.proposed == 0 for r in row.rounds)


def test_lossy_verification_emits_other_tokens() -> None:
    target = make_model()
    drafter, limits, texts = perturbed(target, 0.3), Limits(30), prompts([4, 8])
    expected = [greedy_decode(CachedModel(target), t, limits, ALL).tokens for t in texts]
    lossy = [TopBeta(20, 9.0)] * 2
    batch = together(target, autoregressive(drafter, limits), texts, 4, limits, lossy)
    assert [row.tokens for row in batch] != expected
    exact = [TopBeta(1, 9.0)] * 2
    batch = together(target, autoregressive(drafter, limits), texts, 4, limits, exact)
    assert [row.tokens for row in batch] == expected


def test_rejections_are_kept_with_what_the_target_said() -> None:
    target, limits = make_model(), Limits(20)
    (row,) = together(
        target, autoregressive(perturbed(target, 0.3), limits), prompts([5]), 4, limits
    )
    for r in row.rounds:
        assert (r.rejected is None) == (r.accepted == r.proposed)
        if r.rejected is not None:
            assert r.rejected[0] != r.rejected[1]


def test_a_batch_of_prompts_that_fill_the_context() -> None:
    """One row has no room at all, another has little."""
    target = make_model(max_position_embeddings=24)
    limits, texts = Limits(20), prompts([24, 20, 3])
    batch = together(target, autoregressive(target, limits), texts, 4, limits)
    assert [len(row.tokens) for row in batch] == [0, 4, 20]
    for text, row in zip(texts, batch, strict=True):
        assert row.tokens == greedy_decode(CachedModel(target), text, limits, ALL).tokens


def test_sampled_rows_keep_their_seeds_when_others_leave() -> None:
    """The first row has room for two tokens only."""
    target = make_model(max_position_embeddings=24)
    drafter = perturbed(target, 0.1)
    limits, texts = Limits(14), prompts([22, 4, 6])
    batch = together(
        target,
        autoregressive(drafter, limits, warping=WARM),
        texts,
        3,
        limits,
        [Sampling(WARM, torch.Generator().manual_seed(7 + i)) for i in range(3)],
    )
    assert [len(row.tokens) for row in batch] == [2, 14, 14]
    for i, (text, row) in enumerate(zip(texts, batch, strict=True)):
        alone = speculative_decode(
            CachedModel(target),
            autoregressive(drafter, limits, warping=WARM),
            text,
            3,
            limits,
            ALL,
            Sampling(WARM, torch.Generator().manual_seed(7 + i)),
            seed=i,
        )
        assert row.tokens == alone.tokens


def test_proposals_come_with_the_distribution_that_they_were_drawn_from() -> None:
    model, warping = make_model(), Warping(0.5, top_k=5)
    drafter = autoregressive(model, Limits(9), warping=warping)
    drafter.reset(2, [0, 1])
    with torch.inference_mode():
        first, second = drafter.propose([[5, 6, 7]] * 2, [6, 6])
        logits = model(input_ids=torch.tensor([[5, 6, 7, *first.tokens[:-1]]])).logits[0, 2:]
    assert first.q is not None
    assert torch.allclose(first.q, warping.probabilities(logits), atol=1e-4)
    assert first.tokens != second.tokens, "each text has its own seed"


def test_confidence_is_the_least_that_is_drafted() -> None:
    drafter = autoregressive(make_model(), Limits(9), confidence=0.5)
    assert not drafter._unsure(torch.zeros(2))
    assert drafter._unsure(torch.zeros(3))


def test_acceptance_of_sampled_texts_by_hand() -> None:
    """Warped, at most one, and nothing for a token that the drafter can't say."""
    model, warping = make_model(), Warping(0.7)
    prompt, text = [5, 6, 7], [8, TINY_VOCAB - 1, 9]
    small = SharedVocabulary(TINY_VOCAB - 1)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *text[:-1]]])).logits[0, 2:, :-1]
    q = float(warping.probabilities(logits)[0, 8])
    w = sampling_acceptance(CachedModel(model), prompt, text, np.zeros(3), small, warping)
    assert w[0] == pytest.approx(q, abs=1e-6)
    assert w[1] == 0.0
    w = sampling_acceptance(CachedModel(model), prompt, text, np.full(3, -50.0), small, warping)
    assert w.tolist() == [1.0, 0.0, 1.0]


def test_logprobs_of_sampled_texts_by_hand() -> None:
    """Warped, and finite for a token that lost its mass."""
    model, warping, prompt = make_model(), Warping(0.7, top_k=8), [5, 6, 7]
    with torch.inference_mode():
        p_V = warping.probabilities(model(input_ids=torch.tensor([prompt])).logits[0, -1:])[0]
    likely, unlikely = int(p_V.argmax()), int(p_V.argmin())
    found = text_logprobs(CachedModel(model), prompt, [likely], ALL, warping)
    assert found[0] == pytest.approx(float(p_V[likely].log()), abs=1e-4)
    found = text_logprobs(CachedModel(model), prompt, [unlikely], ALL, warping)
    assert np.isfinite(found).all()
    assert found[0] < -80


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ([1, 5, 2, 5], [2, 5]),  # of one token, if no longer ending is found
        ([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], [4, 9, 2]),  # the longest ending wins
        ([1, 2, 8, 1, 2, 6, 3, 1, 2], [6, 3, 1]),  # the last occurrence wins
        ([4, 4], [4]),  # it may touch the ending
        ([1, 2, 1, 2, 1, 2], [1, 2]),  # and overlap it
    ],
)
def test_prompt_lookup_copies_what_followed_last(text: list[int], tokens: list[int]) -> None:
    assert PromptLookup(frozenset()).propose([text], [3])[0].tokens == tokens


def test_A26_padding_columns_have_no_say_whatever_their_logits() -> None:
    """Target of 104 columns, drafter of 96, 90 tokens: sampled texts don't change at +50."""
    shared = SharedVocabulary(90)
    texts: list[list[list[int]]] = []
    acceptance = []
    for padding in (0.0, 50.0):
        target, drafter = make_model(vocab_size=104), make_model(seed=1, vocab_size=96)
        for model in (target, drafter):
            model.lm_head.register_forward_hook(
                lambda module, args, logits, value=padding: torch.cat(
                    [logits[..., :90], torch.full_like(logits[..., 90:], value)], -1
                )
            )
        proposer = AutoregressiveDrafter(CachedModel(drafter), shared, frozenset(), WARM)
        rows = decode_batch(
            CachedModel(target),
            proposer,
            prompts([2, 7]),
            3,
            Limits(12),
            shared,
            verifiers=[Sampling(WARM, torch.Generator().manual_seed(i)) for i in range(2)],
            seeds=[5, 6],
        )
        texts.append([row.tokens for row in rows])
        (prompt,) = prompts([4])
        logprobs = text_logprobs(CachedModel(target), prompt, [8, 9, 10], shared, WARM)
        w = sampling_acceptance(CachedModel(drafter), prompt, [8, 9, 10], logprobs, shared, WARM)
        acceptance.append(w.tolist())
    assert texts[0] == texts[1]
    assert acceptance[0] == acceptance[1]
    assert max(max(row) for row in texts[0]) < 90
