"""How sure a score is, and where drafts fail: intervals, tests, positions, rejected tokens.

scipy.stats is imported where it is used: a second that most commands have no need to wait.
"""

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Interval:
    """A ratio of sums and the interval that holds it with a probability of `level`.

    `prompts` counts those that had a part in it.
    """

    value: float
    low: float
    high: float
    level: float
    prompts: int


def ratio_interval(
    pairs: Sequence[tuple[float, float]] | NDArray[np.generic],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap over prompts of Σ numerators / Σ denominators (Efron 1979).

    Prompts are what is drawn anew, since the rounds of one text resemble one another. The same
    seed draws the same prompts, so rows of one score share their luck and compare better.

    Args:
        pairs: [prompts, 2] a prompt's numerator and denominator, as emitted and rounds, or
            accepted and proposed.
        level: the share of such intervals that hold the true ratio. Few prompts promise too
            much: simulated, 0.95 is 0.91 of 20 or 10 prompts and 0.81 of 5. BCa intervals
            (Efron 1987) did no better (0.90, 0.89 and 0.81), and equal prompts have none.
        resamples: how often the prompts are drawn.
        seed: of the draws.

    Returns:
        None for fewer than two prompts with a denominator: one alone tells nothing of the spread.

    Raises:
        ValueError: a number that is negative or not finite, a numerator without a denominator,
            or a level that is not between 0 and 1.
    """
    from scipy.stats import bootstrap  # type: ignore[import-untyped]

    pairs_P2 = _checked(np.asarray(pairs, np.float64).reshape(-1, 2))
    if not 0.0 < level < 1.0:
        raise ValueError(f"level: {level} is not between 0 and 1")
    if len(pairs_P2) < 2:
        return None
    found = bootstrap(
        tuple(pairs_P2.T),
        _ratio_of_sums,
        paired=True,
        confidence_level=level,
        n_resamples=resamples,
        method="percentile",
        rng=seed,
    ).confidence_interval
    value = float(_ratio_of_sums(*pairs_P2.T))
    return Interval(value, float(found.low), float(found.high), level, len(pairs_P2))


def _ratio_of_sums(numerators: NDArray[Any], denominators: NDArray[Any], axis: int = -1) -> Any:
    return numerators.sum(axis) / denominators.sum(axis)


def _checked(pairs_P2: NDArray[np.float64]) -> NDArray[np.float64]:
    """The pairs with a denominator; those without one say nothing."""
    if not np.isfinite(pairs_P2).all() or (pairs_P2 < 0.0).any():
        raise ValueError("pairs must be finite and not negative")
    empty_P = pairs_P2[:, 1] == 0.0
    if pairs_P2[empty_P, 0].any():
        raise ValueError("a pair has a numerator but a denominator of 0")
    return pairs_P2[~empty_P]


@dataclass(frozen=True)
class RejectedToken:
    """A token that was proposed in vain.

    Attributes:
        token: its id.
        count: how often it was rejected.
        share: of all rejections.
        instead: the id that the target gave most often in its place.
        instead_count: how often it was that one.
    """

    token: int
    count: int
    share: float
    instead: int
    instead_count: int


def most_rejected(rejections: Iterable[tuple[int, int]], n: int = 20) -> list[RejectedToken]:
    """The tokens most often rejected, at most `n`, the most frequent first; ties by id.

    Args:
        rejections: (proposed id, the target's id) of every rejection.
        n: how many to name.
    """
    by_token: dict[int, Counter[int]] = defaultdict(Counter)
    for proposed, own in rejections:
        by_token[int(proposed)][int(own)] += 1
    counts = Counter({token: instead.total() for token, instead in by_token.items()})
    total = counts.total()
    return [
        RejectedToken(token, count, count / total, *_top(by_token[token], 1)[0])
        for token, count in _top(counts, n)
    ]


def _top(counts: Counter[int], n: int) -> list[tuple[int, int]]:
    """As `most_common`, which orders ties by arrival; here the smaller id is first."""
    return heapq.nsmallest(n, counts.items(), key=lambda item: (-item[1], item[0]))


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of two series, -1 … 1; None for fewer than two points or a constant one.

    Raises:
        ValueError: unequal lengths, or a number that is not finite.
    """
    from scipy.stats import pearsonr

    return float(pearsonr(x, y).statistic) if _vary(x, y) else None


def spearman(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation of ranks, ties sharing their mean rank; else as `pearson`."""
    from scipy.stats import spearmanr

    return float(spearmanr(x, y).statistic) if _vary(x, y) else None


def _vary(x: Sequence[float], y: Sequence[float]) -> bool:
    """Whether both series have what correlates; scipy would warn and answer NaN."""
    if len(x) != len(y):
        raise ValueError(f"{len(x)} and {len(y)} numbers do not make pairs")
    if not np.isfinite([x, y]).all():
        raise ValueError("only finite numbers correlate")
    return len(set(x)) > 1 and len(set(y)) > 1


def sign_flip_test(
    weights_NN: NDArray[np.floating[Any]], *, permutations: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Do the two sides of N pairs have the same distribution? A paired permutation test.

    Where they have, either side of a pair could be the other, so that whatever is a difference of
    its sides may change its sign. That the pairs are unlike one another does no harm.

    Args:
        weights_NN: how much two pairs agree about what differs: an inner product of differences,
            symmetric. The statistic is its sum over all pairs of pairs.
        permutations: random flips of signs; all flips are tried where there are no more.
        seed: of the flips.

    Returns:
        The statistic in standard deviations above its mean over the flips, and its p-value, at
        least 1 / (permutations + 1).
    """
    from scipy.stats import permutation_test

    # What stays the same whatever is flipped.
    varying_NN = weights_NN - np.diag(np.diagonal(weights_NN))

    def agreement(signs: NDArray[Any], _: NDArray[Any], axis: int = -1) -> Any:
        signs_RN = np.moveaxis(signs, axis, -1)
        return ((signs_RN @ varying_NN) * signs_RN).sum(-1)

    signs = np.ones(len(weights_NN))
    found = permutation_test(
        (signs, -signs),
        agreement,
        permutation_type="samples",
        n_resamples=permutations,
        alternative="greater",
        rng=seed,
    )
    spread = float(found.null_distribution.std())
    above = float(found.statistic - found.null_distribution.mean())
    return above / spread if spread else 0.0, float(found.pvalue)


def mean_weights(differences_NF: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Weights whose sum is Hotelling's T² about zero: have all figures a mean difference of 0?

    Scaled to a standard deviation near 1 over flips of signs.
    """
    moments_FF = differences_NF.T @ differences_NF
    precision_FF = np.linalg.pinv(moments_FF, hermitian=True)
    rank = max(1, int(np.linalg.matrix_rank(moments_FF, hermitian=True)))
    return differences_NF @ precision_FF @ differences_NF.T / np.sqrt(2.0 * rank)
