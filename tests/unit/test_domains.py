"""Shares of domains: the published rule by hand, and what holds for any measurement."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from draftsmith.errors import DraftsmithError
from draftsmith.prune.domains import Proportions, towards_high_loss, towards_low_acceptance
from draftsmith.recipes.schema import DomainSettings, MixtureSettings

NAMES = ("a", "b", "c")
VALUES = st.fixed_dictionaries({name: st.floats(0, 20) for name in NAMES})
WEIGHTS = st.fixed_dictionaries({name: st.floats(1e-3, 1) for name in NAMES})
SHARES = {"a": 0.2, "b": 0.3, "c": 0.5}


def settings(**changes: Any) -> MixtureSettings:
    domains = {"a": 1.0, "b": 3.0, "c": 1.0}
    return MixtureSettings(
        domains={n: DomainSettings(path=("x.jsonl",), weight=w) for n, w in domains.items()},
        **changes,
    )


def test_losses_above_their_reference_raise_shares() -> None:
    """Algorithm 1: b is 0.5 above, c below its reference counts as at it."""
    losses, reference = {"a": 2.0, "b": 2.5, "c": 1.0}, {"a": 2.0, "b": 2.0, "c": 3.0}
    found = towards_high_loss(SHARES, losses, reference)
    total = 0.2 + 0.3 * math.exp(0.5) + 0.5
    expected = {"a": 0.2 / total, "b": 0.3 * math.exp(0.5) / total, "c": 0.5 / total}
    assert found == pytest.approx(expected, rel=2e-4)


def test_low_acceptance_raises_shares() -> None:
    found = towards_low_acceptance(SHARES, {"a": 0.5, "b": 0.9, "c": 0.7}, rate=2.0)
    raised = {"a": 0.2 * math.exp(0.8), "b": 0.3, "c": 0.5 * math.exp(0.4)}
    expected = {n: v / sum(raised.values()) for n, v in raised.items()}
    assert found == pytest.approx(expected, rel=4e-4)


@hypothesis_settings(deadline=None)
@given(shares=WEIGHTS, measured=VALUES, rate=st.floats(0.01, 100))
def test_shares_stay_shares(
    shares: dict[str, float], measured: dict[str, float], rate: float
) -> None:
    for found in (
        towards_high_loss(shares, measured, dict.fromkeys(NAMES, 1.0), rate),
        towards_low_acceptance(shares, measured, rate),
    ):
        assert sum(found.values()) == pytest.approx(1.0)
        # None vanishes: it could never come back.
        assert min(found.values()) >= 1e-4 / 4


@hypothesis_settings(deadline=None)
@given(shares=WEIGHTS, value=st.floats(0, 1))
def test_equal_domains_keep_their_shares(shares: dict[str, float], value: float) -> None:
    found = towards_low_acceptance(shares, dict.fromkeys(NAMES, value))
    total = sum(shares.values())
    assert found == pytest.approx({n: s / total for n, s in shares.items()}, abs=1e-4)


@pytest.mark.parametrize("measured", [{"a": 1.0, "b": math.nan, "c": 1.0}, {"a": 1.0, "c": 1.0}])
def test_what_was_not_measured_is_an_error(measured: dict[str, float]) -> None:
    with pytest.raises(DraftsmithError, match=r"no finite acceptance of b; .*held_out"):
        towards_low_acceptance(SHARES, measured)
    with pytest.raises(DraftsmithError, match="no finite loss of b"):
        towards_high_loss(SHARES, measured, SHARES)


def test_proportions_follow_the_recipe_and_keep_their_history() -> None:
    recipe = settings(update="acceptance", update_every=5, update_rate=2.0)
    start = Proportions.of(recipe)
    assert start.shares == {"a": 0.2, "b": 0.6, "c": 0.2}
    assert [step for step in range(16) if start.is_due(step)] == [5, 10, 15]
    measured = {"a": 0.1, "b": 0.9, "c": 0.5}
    after = start.updated(5, measured)
    assert after.shares == towards_low_acceptance(start.shares, measured, 2.0)
    assert [entry["step"] for entry in after.history] == [0, 5]
    assert after.history[-1] == {"step": 5, "shares": after.shares, "measured": measured}
    assert len(start.history) == 1
    again = start.restored(json.loads(json.dumps(after.state_dict())))
    assert again == after


def test_proportions_by_loss_and_by_none() -> None:
    losses, reference = {"a": 2.0, "b": 2.0, "c": 2.0}, {"a": 1.0, "b": 2.0, "c": 3.0}
    by_loss = Proportions.of(settings(update="loss", reference=reference))
    assert by_loss.updated(50, losses).shares == towards_high_loss(
        by_loss.shares, losses, reference
    )
    fixed = Proportions.of(settings())
    assert not any(fixed.is_due(step) for step in range(200))
    assert fixed.updated(50, losses) is fixed
