"""The certificate of sampling: it holds where verification is right, and sees where it isn't."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftsmith.accept import samples, verify
from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Generation, Limits, plain_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.samples import SampleComparison, compare_samples
from draftsmith.accept.trial import Pair, Proposing
from draftsmith.accept.verify import Draft, Verdict, Verification
from draftsmith.accept.warping import Warping, draw
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.data.chat import Prompt
from draftsmith.errors import RequestError
from tests.conftest import TINY_VOCAB, make_model
from tests.unit.test_decode import perturbed, prompts

WARM = Warping(0.7)


def pair_of(target: Any, drafter: Any, shared: int = TINY_VOCAB) -> Pair:
    return Pair(
        CachedModel(target),
        Proposing(
            None if drafter is None else CachedModel(drafter),
            SharedVocabulary(shared),
            frozenset({2}),
        ),
        SharedVocabulary(TINY_VOCAB),
        Limits(64, frozenset({2})),
        text=str,
    )


@pytest.fixture(scope="module")
def small() -> Any:
    """One layer: the tests draw thousands of tokens."""
    return make_model(num_hidden_layers=1)


@pytest.fixture(scope="module")
def pair(small: Any) -> Pair:
    """A drafter that is often right, so that every branch of a verifier is taken."""
    return pair_of(small, perturbed(small, 0.07))


@pytest.fixture(scope="module")
def written() -> dict[Any, Generation]:
    """Texts of the target alone, which are the same in many tests and take most of the time."""
    return {}


@pytest.fixture(autouse=True)
def plain_texts(written: dict[Any, Generation], monkeypatch: pytest.MonkeyPatch) -> None:
    def once(target: CachedModel, prompt: tuple[int, ...], limits: Limits, *rest: Any) -> Any:
        key = (id(target.model), prompt, limits, rest)
        if key not in written:
            written[key] = plain_decode(target, prompt, limits, *rest)
        return written[key]

    monkeypatch.setattr(samples, "plain_decode", once)


TEXTS = prompts([3, 4, 6])


def compared(
    pair: Pair,
    seed: int = 0,
    many: int = 32,
    tokens: int = 12,
    lookahead: int = 1,
    texts: Sequence[Sequence[int]] = TEXTS,
) -> SampleComparison:
    rows = [Prompt(str(i), tuple(ids)) for i, ids in enumerate(texts)]
    verification = Verification("sampling", WARM, seed=seed)
    return compare_samples(pair, rows, lookahead, verification, many, tokens)


def test_right_verification_is_not_accused(pair: Pair) -> None:
    found = [compared(pair, seed, many=8, tokens=6).p_value for seed in range(5)]
    assert min(found) > 0.01
    assert max(found) > 0.3
    assert len(set(found)) == 5


def test_a_drafter_of_fewer_tokens_and_prompt_lookup_are_right_too(small: Any, pair: Pair) -> None:
    fewer = pair_of(small, perturbed(small, 0.1), shared=TINY_VOCAB - 30)
    assert compared(fewer, many=4).p_value > 0.01
    assert compared(pair_of(small, None), many=4).p_value > 0.01


Sampling = Callable[[Draft, Tensor, torch.Generator], Verdict]


def wrong(*, ratio: float = 1.0, residual: bool = True, bonus: bool = True) -> Sampling:
    """Verification by likelihood ratio, with faults."""

    def sampling(draft: Draft, p_TV: Tensor, generator: torch.Generator) -> Verdict:
        assert draft.q is not None or not draft.tokens
        for i, token in enumerate(draft.tokens):
            assert draft.q is not None
            u = float(torch.rand(1, generator=generator))
            if u * float(draft.q[i, token]) < ratio * float(p_TV[i, token]):
                continue
            left = (p_TV[i] - draft.q[i]).clamp_min(0.0) if residual else p_TV[i]
            return Verdict(i, int(draw(left[None], generator)))
        last = len(draft.tokens)
        # Without a bonus token the last proposal's distribution is drawn from again.
        from_V = p_TV[last] if bonus or not last else p_TV[last - 1]
        return Verdict(last, int(draw(from_V[None], generator)))

    return sampling


@pytest.mark.parametrize(
    "fault",
    [{"ratio": 3.0}, {"residual": False}, {"bonus": False}],
    ids=["accepts too often", "residual of p", "bonus of the position before"],
)
def test_faults_of_verification_are_seen(
    fault: dict[str, Any], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "sampling", wrong(**fault))
    found = compared(pair)
    assert found.p_value < 1e-3
    assert found.statistic > 4.0


def test_the_verifier_that_carries_the_faults_is_right_without_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "sampling", wrong())
    assert compared(pair).p_value > 0.01


def test_greedy_proposals_judged_by_their_softmax_are_seen(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(self: Any, row: int, logits_V: Tensor, drawn_from: list[Tensor]) -> int:
        drawn_from.append(self.warping.probabilities(logits_V[None])[0])
        return int(logits_V.argmax())

    monkeypatch.setattr(AutoregressiveDrafter, "_choose", choose)
    assert compared(pair, lookahead=3).p_value < 1e-3


def test_prompt_lookup_that_accepts_too_often_is_seen(
    small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def everything(draft: Draft, p_TV: Tensor, generator: torch.Generator) -> Verdict:
        last = len(draft.tokens)
        return Verdict(last, int(draw(p_TV[last, None], generator)))

    monkeypatch.setattr(verify, "sampling", everything)
    # Endings that were there before, so that there is something to copy.
    again = [[*ids, *ids, ids[0]] for ids in TEXTS]
    assert compared(pair_of(small, None), texts=again).p_value < 1e-3


def test_a_seed_fixes_the_comparison(pair: Pair) -> None:
    first = compared(pair, seed=3, many=4, tokens=5)
    assert first == compared(pair, seed=3, many=4, tokens=5)
    assert first != compared(pair, seed=4, many=4, tokens=5)
    assert (first.prompts, first.samples, first.tokens) == (3, 4, 5)


def test_texts_fill_the_context_and_no_more(small: Any) -> None:
    """Neither model is asked about a position that it lacks."""
    target, drafter = make_model(num_hidden_layers=1), make_model(seed=1, num_hidden_layers=1)
    target.config.max_position_embeddings = 12
    drafter.config.max_position_embeddings = 8
    found = compared(pair_of(target, drafter), many=4, tokens=16)
    assert np.isfinite(found.statistic)
    drafter.config.max_position_embeddings = 2
    assert np.isfinite(compared(pair_of(target, drafter), many=4, tokens=16).statistic)


@pytest.mark.parametrize("verification", [Verification(), Verification("sampling", Warping())])
def test_where_nothing_is_drawn_nothing_is_compared(pair: Pair, verification: Verification) -> None:
    with pytest.raises(RequestError, match="temperature"):
        compare_samples(pair, [Prompt("a", (5,))] * 12, 2, verification, 8)


def test_too_few_samples_are_refused(pair: Pair) -> None:
    with pytest.raises(RequestError, match="take 6 or more"):
        compare_samples(pair, [Prompt("a", (5,))] * 2, 2, Verification("sampling", WARM), 5)


def test_a_text_of_which_the_drafter_knows_no_token_is_unlikely() -> None:
    from draftsmith.accept.samples import _UNLIKELY, _log_likelihood

    assert _log_likelihood(torch.randn(1, 5), [7]) == _UNLIKELY
