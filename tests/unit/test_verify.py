"""Verifiers and warping: what is emitted is distributed as the target's own output."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.verify import (
    Draft,
    Greedy,
    Sampling,
    TopBeta,
    Verdict,
    Verification,
    sampling,
    top_beta,
)
from draftsmith.accept.warping import Warping, draw
from draftsmith.errors import RequestError

# Chi-square quantile at 1 - 1e-4 by degrees of freedom: a right test fails once in 10,000 seeds.
CHI_SQUARE = {1: 15.1, 2: 18.4, 3: 21.1, 4: 23.5, 5: 25.7, 7: 29.9, 8: 31.8}
DRAWS = 50_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chi_square(counts: torch.Tensor, p: torch.Tensor) -> float:
    """Pearson's statistic; tokens without mass must not have been emitted."""
    expected = p.double() * counts.sum()
    assert int(counts[expected == 0].sum()) == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum())


def emitted_first(p: torch.Tensor, q: torch.Tensor, draws: int = DRAWS) -> torch.Tensor:
    """Counts of the first emitted token, over rounds of one proposal each."""
    source = generator(1)
    counts = torch.zeros(len(p))
    p_TV = torch.stack([p, p])
    for token in draw(q.expand(draws, -1), source).tolist():
        verdict = sampling(Draft([token], q[None]), p_TV, source)
        counts[token if verdict.accepted else verdict.token] += 1
    return counts


def test_A4_the_first_token_is_the_targets() -> None:
    """P = [.5, .3, .2], q = [.2, .3, .5], 50,000 draws."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    assert chi_square(emitted_first(p, q), p) < CHI_SQUARE[2]


def test_A4_a_greedy_draft_is_a_distribution_too() -> None:
    """A proposal that was the draft's arg max has all of q: with its softmax p would be lost."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    source = generator(2)
    counts, wrong = torch.zeros(3), torch.zeros(3)
    for _ in range(20_000):
        verdict = sampling(Draft([2]), torch.stack([p, p]), source)
        counts[2 if verdict.accepted else verdict.token] += 1
        verdict = sampling(Draft([2], q[None]), torch.stack([p, p]), source)
        wrong[2 if verdict.accepted else verdict.token] += 1
    assert chi_square(counts, p) < CHI_SQUARE[2]
    assert chi_square(wrong, p) > 100 * CHI_SQUARE[2]


def test_sequences_are_the_targets() -> None:
    """Two proposals from a Markov chain, and the token after them: all eight outcomes."""
    p = torch.tensor([[0.6, 0.4], [0.1, 0.9]])
    q = torch.tensor([[0.3, 0.7], [0.5, 0.5]])
    source = generator(3)
    counts = torch.zeros(8)
    for _ in range(20_000):
        proposals, state = [], 0
        for _ in range(2):
            state = int(draw(q[state : state + 1], source))
            proposals.append(state)
        rows = [0, *proposals]
        verdict = sampling(Draft(proposals, q[rows[:2]]), p[rows], source)
        tokens = [*proposals[: verdict.accepted], verdict.token]
        while len(tokens) < 3:
            tokens.append(int(draw(p[tokens[-1] : tokens[-1] + 1], source)))
        counts[tokens[0] * 4 + tokens[1] * 2 + tokens[2]] += 1
    expected = torch.tensor(
        [p[0, a] * p[a, b] * p[b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)]
    )
    assert chi_square(counts, expected) < CHI_SQUARE[7]


@settings(max_examples=15, deadline=None)
@given(data=st.data(), size=st.integers(2, 6), seed=st.integers(0, 10_000))
def test_any_pair_of_distributions_keeps_the_targets(
    data: st.DataObject, size: int, seed: int
) -> None:
    """With zeros in either, drawn by warping random logits."""
    logits = torch.randn(2, size, generator=generator(seed)) * 3
    warping = Warping(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 2.0])),
        top_k=data.draw(st.sampled_from([None, 2])),
        min_p=data.draw(st.sampled_from([None, 0.1])),
    )
    p, q = warping.probabilities(logits)
    counts = emitted_first(p, q, draws=4000)
    degrees = int((p > 0).sum()) - 1
    assert degrees == 0 or chi_square(counts, p) < CHI_SQUARE[degrees]


# --- A5


def test_A5_equal_distributions_leave_no_residual() -> None:
    p = torch.tensor([0.0, 1.0, 0.0])
    for seed in range(20):
        verdict = sampling(Draft([1], p[None]), torch.stack([p, p]), generator(seed))
        assert verdict == Verdict(1, 1)


def test_A5_distributions_one_ulp_apart() -> None:
    """What rounding leaves over is a draw from p or from the tiny residual, never NaN."""
    p = torch.tensor([0.3, 0.7])
    q = torch.tensor([math.nextafter(0.3, 1), 0.7]).float()
    q[0] = torch.nextafter(p[0], torch.tensor(1.0))
    for seed in range(200):
        verdict = sampling(Draft([0], q[None]), torch.stack([p, p]), generator(seed))
        assert verdict.token in (0, 1)


def test_A5_a_rejected_draft_with_nothing_left_draws_from_p() -> None:
    """Q gave a token that p lacks, and covers all that p has: only a wrong q can, yet no NaN."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([1.0, 1.0, 1.0])
    tokens = {
        sampling(Draft([2], q[None]), torch.stack([p, p]), generator(seed)).token
        for seed in range(50)
    }
    assert tokens == {0, 1}


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_A5_cold_sampling_is_greedy(temperature: float) -> None:
    logits = torch.randn(4, 9, generator=generator(5)) * 30
    warping = Warping(temperature)
    for proposals in ([1, 2, 3], logits.argmax(-1)[:3].tolist(), []):
        rows = logits[: len(proposals) + 1]
        cold = Sampling(warping, generator(0))(Draft(proposals), rows)
        assert cold == Greedy()(Draft(proposals), rows)
        assert torch.isfinite(warping.probabilities(logits)).all()


# --- warping


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 0.9, "min_p": 0.2},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_warping_is_that_of_transformers(settings: dict[str, Any]) -> None:
    """The same processors in the same order as generate()."""
    from transformers import GenerationConfig
    from transformers.generation.utils import GenerationMixin

    logits = torch.randn(3, 12, generator=generator(6)) * 2
    config = GenerationConfig(do_sample=True, top_k=settings.get("top_k", 0) or None)
    for name, value in settings.items():
        setattr(config, name, value)
    mixin: Any = GenerationMixin.__new__(GenerationMixin)
    mixin.generation_config = config
    processors = mixin._get_logits_processor(
        generation_config=config, input_ids_seq_length=1, device="cpu"
    )
    expected = processors(torch.zeros(3, 1, dtype=torch.long), logits.clone()).softmax(-1)
    assert torch.allclose(Warping(**settings).probabilities(logits), expected, atol=1e-6)


def test_forbidden_ids_have_no_mass() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0]])
    for warping in (Warping(), Warping(0.5), Warping(1.0, top_k=2), Warping(1.0, top_p=0.9)):
        assert float(warping.probabilities(logits)[0, 1]) == 0.0


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"temperature": math.nan},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
    ],
    ids=str,
)
def test_what_is_no_distribution_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"\w+: .* is out of range"):
        Warping(**settings)


def test_draws_follow_the_distribution_and_reach_no_token_without_mass() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    counts = torch.bincount(draw(p.expand(DRAWS, -1), generator(8)), minlength=6).float()
    assert chi_square(counts, p) < CHI_SQUARE[2]
    one_hot = torch.zeros(1, 40_000)
    one_hot[0, 39_999] = 1.0
    assert int(draw(one_hot, generator())) == 39_999


# --- top beta


def test_top_beta_by_hand() -> None:
    logits = torch.tensor([[3.0, 2.5, 1.0, 0.0], [0.0, 3.0, 2.9, 2.8], [1.0, 0.0, 0.0, 0.0]])
    assert top_beta([1, 3], logits, beta=3, tau=1.0) == Verdict(2, 0)
    assert top_beta([1, 3], logits, beta=2, tau=1.0) == Verdict(1, 1)
    assert top_beta([2, 1], logits, beta=3, tau=1.0) == Verdict(0, 0)
    assert top_beta([2, 1], logits, beta=3, tau=2.0) == Verdict(2, 0)
    assert top_beta([], logits[:1], beta=3, tau=1.0) == Verdict(0, 0)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), beta=st.integers(1, 8), tau=st.floats(0.0, 5.0))
def test_top_beta_keeps_no_fewer_than_greedy_and_one_is_greedy(
    seed: int, beta: int, tau: float
) -> None:
    logits = torch.randn(4, 8, generator=generator(seed))
    proposals = torch.randint(0, 8, (3,), generator=generator(seed)).tolist()
    strict = Greedy()(Draft(proposals), logits)
    assert TopBeta(beta, tau)(Draft(proposals), logits).accepted >= strict.accepted
    assert TopBeta(1, tau)(Draft(proposals), logits) == strict
    assert TopBeta(beta, 0.0)(Draft(proposals), logits).accepted == strict.accepted


def test_only_top_beta_is_lossy() -> None:
    assert Greedy().exact
    assert Sampling(Warping(1.0), generator()).exact
    assert not TopBeta().exact


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1.0}, {"min_p": 0.0}, {"min_p": 1.0}], ids=str
)
def test_the_ends_of_the_ranges_are_legal(settings: dict[str, Any]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    probabilities = Warping(1.0, **settings).probabilities(logits)
    assert float(probabilities.sum()) == pytest.approx(1.0)
    one = settings in ({"top_k": 1}, {"min_p": 1.0})
    assert int((probabilities > 0).sum()) == (1 if one else 3)


def test_min_p_above_one_is_refused() -> None:
    with pytest.raises(RequestError, match=r"min_p: 1\.5 is out of range"):
        Warping(min_p=1.5)


@pytest.mark.parametrize("warping", [Warping(1.0, top_k=1), Warping(1e-6)], ids=str)
def test_one_token_is_greedy_even_where_two_are_as_likely(warping: Warping) -> None:
    assert warping.greedy
    assert warping.probabilities(torch.tensor([[1.0, 4.0, 4.0]])).tolist() == [[0.0, 1.0, 0.0]]


def test_a_low_temperature_loses_no_precision() -> None:
    """Divided first, logits of 1000 would round where they differ."""
    logits = torch.tensor([[1000.0, 1000.0 - 2 * 6.1035e-5, 990.0]])
    expected = (logits.double() / 1e-3).softmax(-1)
    assert torch.allclose(Warping(1e-3).probabilities(logits).double(), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("u", "p", "token"),
    [
        (0.0, [0.0, 0.5, 0.5], 1),
        (0.5, [0.5, 0.0, 0.5], 2),
        (1 - 2**-53, [0.25, 0.75, 0.0], 1),
        # Sums in float32 would not grow any more.
        (1 - 1e-9, [1.0, 2e-8, 2e-8], 2),
    ],
)
def test_draws_at_the_edges_of_tokens(
    u: float, p: list[float], token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "rand", lambda *a, **k: torch.tensor([[u]], dtype=torch.float64))
    assert int(draw(torch.tensor([p]), generator())) == token


def test_what_the_target_cannot_say_is_never_accepted() -> None:
    """Not even where rounding left the proposal no mass in q."""
    p, q = torch.tensor([0.5, 0.5, 0.0]), torch.tensor([0.5, 0.5, 0.0])
    for seed in range(20):
        assert sampling(Draft([2], q[None]), torch.stack([p, p]), generator(seed)).accepted == 0


def test_each_greedy_proposal_has_its_own_mass() -> None:
    """The second of two proposals is nearly impossible for the target."""
    p_TV = torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.5, 1e-9], [1.0, 0.0, 0.0]])
    for seed in range(20):
        verdict = sampling(Draft([1, 2]), p_TV, generator(seed))
        assert verdict.accepted == 1
        assert verdict.token in (0, 1)


def test_a_drafter_of_fewer_tokens_keeps_the_targets_distribution() -> None:
    """What the drafter can't say is drawn from the residual."""
    p, q = torch.tensor([0.4, 0.2, 0.1, 0.3]), torch.tensor([0.2, 0.5, 0.3])
    source, counts = generator(4), torch.zeros(4)
    for token in draw(q.expand(5_000, -1), source).tolist():
        verdict = sampling(Draft([token], q[None]), torch.stack([p, p]), source)
        counts[token if verdict.accepted else verdict.token] += 1
    assert chi_square(counts, p) < CHI_SQUARE[3]


def test_top_beta_of_more_tokens_than_there_are_asks_for_tau_alone() -> None:
    logits = torch.tensor([[3.0, 2.5, 1.0], [0.0, 0.0, 1.0]])
    assert top_beta([1], logits, beta=100, tau=1.0) == Verdict(1, 2)
    assert top_beta([2], logits, beta=100, tau=1.0) == Verdict(0, 0)


def test_every_text_has_draws_of_its_own() -> None:
    seeds = []
    for seed in (0, 1):
        chosen = Verification("sampling", Warping(1.0), seed=seed)
        for row in range(3):
            verifier = chosen.verifier(row)
            assert isinstance(verifier, Sampling)
            seeds.append(verifier.generator.initial_seed())
            seeds += [chosen.draft_seed(row), chosen.plain_seed(row)]
    assert len(set(seeds)) == 2 * 3 * 3


def test_the_verifier_is_as_chosen() -> None:
    assert Verification().verifier(0) == Greedy()
    assert Verification().exact
    assert not Verification("top_beta").exact
    assert Verification("top_beta", beta=5, tau=0.0).verifier(0) == TopBeta(5, 0.0)
    for wrong in (
        {"name": "top_beta", "tau": math.inf},
        {"name": "top_beta", "warping": Warping(1.0)},
    ):
        with pytest.raises(RequestError):
            Verification(**wrong)  # type: ignore[arg-type]
