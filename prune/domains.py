"""How the shares of a mixture's domains change while masks are learned."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from draftsmith.data.mixture import initial_shares
from draftsmith.errors import DraftsmithError
from draftsmith.recipes.schema import MixtureSettings

# Part of each update that is spread evenly: a share that came to nothing would stay there. As in
# LLM-Shearing's code, after DoReMi (Xie et al. 2023, arXiv 2305.10429).
_EVEN = 1e-4

Values = Mapping[str, float]


def towards_high_loss(
    shares: Values, losses: Values, reference: Values, rate: float = 1.0
) -> dict[str, float]:
    """New shares: w · exp(rate · max(0, loss − reference)), over their sum.

    LLM-Shearing's dynamic batch loading (Xia et al. 2024, algorithm 1, arXiv 2310.06694).

    Args:
        shares: w of each domain.
        losses: of the model that is pruned, on held-out text, in nats a token.
        reference: what it should come to.
        rate: factor of the excess; 1 in the paper.

    Raises:
        DraftsmithError: a domain has no finite loss.
    """
    _check(shares, losses, "loss")
    return _raised(shares, {n: rate * max(0.0, losses[n] - reference[n]) for n in shares})


def towards_low_acceptance(
    shares: Values, acceptances: Values, rate: float = 1.0
) -> dict[str, float]:
    """New shares: w · exp(rate · (best acceptance − acceptance)), over their sum.

    It needs no reference.

    Args:
        shares: w of each domain.
        acceptances: Σ min(p, q) against the target on held-out text, mean over tokens.
        rate: factor of the excess.

    Raises:
        DraftsmithError: a domain has no finite acceptance.
    """
    _check(shares, acceptances, "acceptance")
    best = max(acceptances[name] for name in shares)
    return _raised(shares, {name: rate * (best - acceptances[name]) for name in shares})


@dataclass(frozen=True)
class Proportions:
    """The current shares of a mixture's domains, and how they came about.

    Attributes:
        settings: the recipe's mixture.
        shares: domain -> share; they sum to 1.
        history: at the start and at every update: step, share of each domain, and what was
            measured of it.
    """

    settings: MixtureSettings
    shares: dict[str, float]
    history: tuple[dict[str, Any], ...]

    @classmethod
    def of(cls, settings: MixtureSettings) -> Self:
        """Those of the recipe's weights."""
        shares = initial_shares(settings)
        return cls(settings, shares, ({"step": 0, "shares": shares, "measured": {}},))

    def is_due(self, step: int) -> bool:
        """Whether shares are updated before this step, counted from 0."""
        changing = self.settings.update != "none"
        return changing and step > 0 and step % self.settings.update_every == 0

    def updated(self, step: int, measured: Values) -> Self:
        """The shares after an update.

        Args:
            step: how many are done.
            measured: domain -> its loss in nats, or its acceptance, on held-out text; the same in
                all processes.

        Raises:
            DraftsmithError: a domain was not measured, or the value is not finite.
        """
        rate = self.settings.update_rate
        if self.settings.update == "loss":
            shares = towards_high_loss(self.shares, measured, self.settings.reference, rate)
        elif self.settings.update == "acceptance":
            shares = towards_low_acceptance(self.shares, measured, rate)
        else:
            return self
        entry = {"step": step, "shares": shares, "measured": dict(measured)}
        return replace(self, shares=shares, history=(*self.history, entry))

    def state_dict(self) -> dict[str, Any]:
        """Shares and history, as numbers and names."""
        return {"shares": dict(self.shares), "history": list(self.history)}

    def restored(self, state: Mapping[str, Any]) -> Self:
        """The same with the shares and history of a saved state."""
        return replace(self, shares=dict(state["shares"]), history=tuple(state["history"]))


def _raised(shares: Values, exponents: Values) -> dict[str, float]:
    """Shares times exp(exponent), over their sum, a little of it spread evenly."""
    # Only differences count; the largest factor is 1, so that nothing overflows.
    most = max(exponents.values())
    raised = {name: shares[name] * math.exp(exponents[name] - most) for name in shares}
    total, even = sum(raised.values()), _EVEN / len(raised)
    return {name: (1 - _EVEN) * value / total + even for name, value in raised.items()}


def _check(shares: Values, measured: Values, what: str) -> None:
    bad = [name for name in shares if not math.isfinite(measured.get(name, math.nan))]
    if bad:
        raise DraftsmithError(
            f"mixture.update: no finite {what} of {', '.join(bad)}; lower the learning rates, or "
            "set mixture.held_out higher"
        )
