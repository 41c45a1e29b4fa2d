"""Intervals and tests that hold what they promise; positions; rejected tokens; correlation."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftsmith.accept.statistics import (
    RejectedToken,
    mean_weights,
    most_rejected,
    pearson,
    ratio_interval,
    sign_flip_test,
    spearman,
)


def simulated(draws: np.random.Generator, prompts: int, k: int = 4) -> NDArray[np.int64]:
    """(accepted, proposed) of prompts that differ in length and in how well drafts fit."""
    rounds_P = draws.integers(5, 60, prompts)
    fits_P = draws.beta(6.0, 3.0, prompts)
    return np.stack([draws.binomial(rounds_P * k, fits_P), rounds_P * k], axis=1)


def test_intervals_hold_the_true_ratio_as_often_as_they_say() -> None:
    draws = np.random.default_rng(0)
    truth = 6.0 / 9.0  # fit and length are independent, so the mean of the beta distribution
    for level, at_least, at_most in [(0.95, 0.91, 0.97), (0.8, 0.74, 0.84)]:
        found = [
            ratio_interval(simulated(draws, 40), level=level, resamples=400) for _ in range(400)
        ]
        held = np.mean([i is not None and i.low <= truth <= i.high for i in found])
        assert at_least <= held <= at_most


def test_prompts_are_drawn_and_not_rounds() -> None:
    # 20 long texts, half of them always accepted: as 2,000 rounds it would look very certain.
    interval = ratio_interval([(100, 100), (0, 100)] * 10)
    assert interval is not None
    assert interval.value == 0.5
    assert interval.prompts == 20
    # Of 20 draws at one half the middle 95 % lie between 6 and 14 of them.
    assert interval.low == pytest.approx(0.3, abs=0.051)
    assert interval.high == pytest.approx(0.7, abs=0.051)


def test_the_ratio_is_one_of_sums_and_not_a_mean_of_ratios() -> None:
    interval = ratio_interval([(90, 100), (0, 1), (0, 1)])
    assert interval is not None
    assert interval.value == 90 / 102
    assert interval.low <= interval.value <= interval.high


def test_a_higher_level_and_fewer_prompts_make_it_wider() -> None:
    pairs = simulated(np.random.default_rng(1), 60)

    def width(pairs: NDArray[np.int64], level: float) -> float:
        interval = ratio_interval(pairs, level=level)
        assert interval is not None
        assert interval.level == level
        return interval.high - interval.low

    assert width(pairs, 0.5) < width(pairs, 0.95) < width(pairs, 0.99)
    assert width(pairs, 0.95) < width(pairs[:10], 0.95)


def test_a_seed_fixes_the_interval() -> None:
    pairs = simulated(np.random.default_rng(2), 12)
    assert ratio_interval(pairs, seed=3) == ratio_interval(pairs, seed=3)
    assert ratio_interval(pairs, seed=3) != ratio_interval(pairs, seed=4)


def test_no_interval_without_two_prompts_that_tell_something() -> None:
    assert ratio_interval([]) is None
    assert ratio_interval([(3, 4)]) is None
    assert ratio_interval([(3, 4), (0, 0)]) is None
    interval = ratio_interval([(3, 4), (0, 0), (3, 4)])
    assert interval is not None
    assert (interval.low, interval.value, interval.high, interval.prompts) == (0.75, 0.75, 0.75, 2)
    json.dumps(asdict(interval), allow_nan=False)


@pytest.mark.parametrize("pair", [(-1, 2), (1, -2), (math.nan, 1), (1, math.inf), (1, 0)])
def test_impossible_pairs_are_refused(pair: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="pair"):
        ratio_interval([(1, 1), pair])


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0, math.nan])
def test_impossible_levels_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match="level"):
        ratio_interval([(1, 1), (1, 2)], level=level)


def test_most_rejected() -> None:
    pairs = [(7, 1), (7, 2), (7, 2), (5, 9), (3, 9), (3, 8), (2, 2)]
    assert most_rejected(pairs, 3) == [
        RejectedToken(token=7, count=3, share=3 / 7, instead=2, instead_count=2),
        RejectedToken(token=3, count=2, share=2 / 7, instead=8, instead_count=1),
        RejectedToken(token=2, count=1, share=1 / 7, instead=2, instead_count=1),
    ]
    assert len(most_rejected(pairs)) == 4
    assert most_rejected(reversed(pairs)) == most_rejected(iter(pairs))
    assert most_rejected([]) == most_rejected(pairs, 0) == []


def test_ids_of_tensors_are_counted_by_value() -> None:
    rows = torch.tensor([[4, 1], [4, 1]])
    found = most_rejected([(a, b) for a, b in rows])
    assert found == [RejectedToken(4, 2, 1.0, 1, 2)]
    json.dumps([asdict(t) for t in found])


def test_correlations() -> None:
    x = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert pearson(x, [2 * v + 1 for v in x]) == pytest.approx(1.0)
    assert pearson(x, [-v for v in x]) == pytest.approx(-1.0)
    assert spearman(x, [math.exp(v) for v in x]) == pytest.approx(1.0)
    assert pearson(x, [math.exp(v) for v in x]) == pytest.approx(
        np.corrcoef(x, np.exp(x))[0, 1], abs=1e-12
    )
    # Two ties of mean ranks 1.5 and 3.5: worked by hand from ranks 1.5 1.5 3.5 3.5 5.
    assert spearman(x, [1, 1, 2, 2, 9]) == pytest.approx(9 / math.sqrt(90))


def test_no_correlation_without_two_points_that_differ() -> None:
    for correlation in (pearson, spearman):
        assert correlation([], []) is None
        assert correlation([1.0], [2.0]) is None
        assert correlation([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]) is None
        with pytest.raises(ValueError, match="pairs"):
            correlation([1.0, 2.0], [1.0])
        with pytest.raises(ValueError, match="finite"):
            correlation([1.0, math.nan], [1.0, 2.0])


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(-50, 50)), max_size=20))
def test_correlations_stay_within_one(points: list[tuple[int, int]]) -> None:
    x, y = [p[0] for p in points], [p[1] for p in points]
    for correlation in (pearson, spearman):
        found = correlation(x, y)
        assert found is None or -1.0 <= found <= 1.0
        turned = correlation(y, x)
        assert (found is None) == (turned is None)
        assert found is None or found == pytest.approx(turned, abs=1e-12)


def differ(differences: NDArray[np.float64], **settings: int) -> tuple[float, float]:
    return sign_flip_test(mean_weights(differences), **settings)


def test_p_values_are_uniform_where_nothing_differs() -> None:
    """However the pairs are spread, and though prompts are unlike one another."""
    draws = np.random.default_rng(0)
    scales = np.repeat([1.0, 10.0, 100.0], 10)[:, None]
    found = [
        differ(draws.standard_cauchy((30, 2)) * scales, permutations=199, seed=seed)[1]
        for seed in range(300)
    ]
    for level in (0.05, 0.25, 0.5, 0.75):
        # Three standard deviations of 300 draws.
        assert np.mean(np.array(found) <= level) == pytest.approx(level, abs=0.09)
    assert np.mean(np.array(found) <= 0.05) < 0.09


def test_differences_are_seen_in_any_direction() -> None:
    noise = np.random.default_rng(0).normal(size=(60, 2))
    # Two figures that move together hide what their difference shows.
    noise[:, 1] = noise[:, 0] + 0.1 * noise[:, 1]
    for shift in ([0.8, 0.8], [-0.8, -0.8], [0.08, -0.08]):
        statistic, p_value = differ(noise + shift)
        assert p_value == pytest.approx(1 / 2001)
        assert statistic > 5.0
    statistic, p_value = differ(noise)
    assert p_value > 0.05
    assert statistic < 3.0


def test_the_test_by_hand() -> None:
    """One figure: (Σ d)² is 36, 16, 4 or 0 over the eight flips of three pairs."""
    differences = np.array([[1.0], [2.0], [3.0]])
    assert mean_weights(differences).sum() == pytest.approx(36 / 14 / math.sqrt(2))
    statistic, p_value = differ(differences)
    sums = [36, 16, 4, 0]
    assert statistic == pytest.approx((36 - np.mean(sums)) / np.std(sums))
    assert p_value == pytest.approx(2 / 8)


def test_sides_that_are_equal_do_not_differ() -> None:
    assert differ(np.zeros((20, 2))) == (0.0, 1.0)
    # A figure that is the same on both sides tells nothing, and takes nothing away.
    one = np.random.default_rng(1).normal(0.2, 1.0, size=(30, 1))
    both = np.concatenate([one, np.zeros((30, 1))], axis=1)
    assert differ(both) == pytest.approx(differ(one))


def test_a_seed_fixes_the_flips() -> None:
    differences = np.random.default_rng(2).normal(size=(40, 2))
    assert differ(differences, seed=5) == differ(differences, seed=5)
    assert differ(differences, seed=5) != differ(differences, seed=6)
