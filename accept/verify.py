"""Verifiers: how many proposals the target keeps, and which token it adds."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftsmith.accept.warping import Warping, draw
from draftsmith.data.seeds import derived_seed
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings

NAMES = ("greedy", "sampling", "top_beta")


@dataclass(frozen=True)
class Draft:
    """What a drafter proposed for one text.

    Attributes:
        tokens: proposed ids, from the first on.
        q: the warped distributions that they were drawn from, [K, V]; None: each proposal had all
            of the mass.
        passes: of the drafter that it took.
    """

    tokens: list[int]
    q: Tensor | None = None
    passes: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a verification decided.

    Attributes:
        accepted: proposals kept, from the first on.
        token: the target's own token after them.
    """

    accepted: int
    token: int


class Verifier(Protocol):
    """Decides about one text's proposals."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def exact(self) -> bool:
        """Whether what is emitted is distributed as the target's own output."""

    def __call__(self, draft: Draft, logits_TV: Tensor) -> Verdict:
        """Decide.

        Args:
            draft: K >= 0 proposals.
            logits_TV: the target's logits before each proposal and after the last, T = K + 1,
                with -inf at ids that must not be emitted.
        """


@dataclass(frozen=True)
class Greedy:
    """Keep proposals while they equal the target's arg max."""

    name: str = "greedy"
    exact: bool = True

    def __call__(self, draft: Draft, logits_TV: Tensor) -> Verdict:
        """Decide."""
        proposals = torch.tensor(draft.tokens, dtype=torch.long, device=logits_TV.device)
        return greedy(proposals, logits_TV)


@dataclass(frozen=True)
class Sampling:
    """Keep proposals by their likelihood ratio, so that the output is the target's.

    Attributes:
        warping: the target's.
        generator: of the decisions; one for each text.
    """

    warping: Warping
    generator: torch.Generator
    name: str = "sampling"
    exact: bool = True

    def __call__(self, draft: Draft, logits_TV: Tensor) -> Verdict:
        """Decide."""
        return sampling(draft, self.warping.probabilities(logits_TV), self.generator)


@dataclass(frozen=True)
class TopBeta:
    """Keep proposals that are nearly as likely as the best (Xia et al. 2022); lossy.

    Attributes:
        beta: a proposal must be among so many of the likeliest tokens,
        tau: and within this of the likeliest one's log-probability.
    """

    beta: int = 3
    tau: float = 1.0
    name: str = "top_beta"
    exact: bool = field(default=False, init=False)

    def __call__(self, draft: Draft, logits_TV: Tensor) -> Verdict:
        """Decide."""
        return top_beta(draft.tokens, logits_TV, self.beta, self.tau)


@dataclass(frozen=True)
class Verification:
    """Which verifier, as a user chooses it.

    Attributes:
        name: greedy, sampling or top_beta.
        warping: how the target draws, for sampling.
        beta: of top_beta.
        tau: of top_beta.
        seed: of everything that is drawn.
    """

    name: str = "greedy"
    warping: Warping = field(default_factory=Warping)
    beta: int = 3
    tau: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse settings that have no meaning together.

        Raises:
            RequestError: naming the setting and the cure.
        """
        if self.name not in NAMES:
            raise RequestError(f"verify: {self.name!r} is not among {', '.join(NAMES)}")
        if self.name != "sampling" and self.warping != Warping():
            raise RequestError(
                f"temperature {self.warping.temperature}: only verify sampling draws; set it, or "
                "leave temperature, top_k, top_p and min_p out"
            )
        if self.beta < 1 or not 0.0 <= self.tau < float("inf"):
            raise RequestError(f"beta {self.beta}, tau {self.tau}: beta is from 1, tau from 0 on")

    @classmethod
    def of(cls, settings: ScoreSettings, seed: int = 0) -> "Verification":
        """As a recipe or a command asks for it."""
        warping = Warping(settings.temperature, settings.top_k, settings.top_p, settings.min_p)
        return cls(settings.verify, warping, settings.beta, settings.tau, seed)

    @property
    def exact(self) -> bool:
        """Whether the output is distributed as the target's own."""
        return self.name != "top_beta"

    def verifier(self, row: int) -> Verifier:
        """For one text, with draws of its own."""
        if self.name == "sampling":
            seed = derived_seed(derived_seed(self.seed, row), 1)
            return Sampling(self.warping, torch.Generator().manual_seed(seed))
        return TopBeta(self.beta, self.tau) if self.name == "top_beta" else Greedy()

    def draft_seed(self, row: int) -> int:
        """Of one text's proposals."""
        return derived_seed(derived_seed(self.seed, row), 2)

    def plain_seed(self, row: int) -> int:
        """Of one text that the target draws alone."""
        return derived_seed(derived_seed(self.seed, row), 3)


def greedy(proposals_K: Tensor, logits_TV: Tensor) -> Verdict:
    """Keep proposals while they equal the target's arg max; exact (Leviathan et al. 2023, T = 0).

    Args:
        proposals_K: proposed ids, K >= 0.
        logits_TV: as for `Verifier`.
    """
    choices = logits_TV.argmax(-1)
    agree = (choices[:-1] == proposals_K).long()
    accepted = int(agree.cumprod(0).sum())
    return Verdict(accepted, int(choices[accepted]))


def sampling(draft: Draft, p_TV: Tensor, generator: torch.Generator) -> Verdict:
    """Keep x ~ q with probability min(1, p(x) / q(x)), else draw from (p - q)+; exact.

    Leviathan et al. 2023, algorithm 1. p and q are the warped distributions that are really drawn
    from; a greedy one has all of its mass on one token, and nothing divides by q.

    Args:
        draft: K >= 0 proposals with the distributions that they were drawn from, over at most the
            V tokens of p.
        p_TV: the target's, T = K + 1.
        generator: of the decisions.
    """
    u = torch.rand(len(draft.tokens), generator=generator, device=generator.device).tolist()
    for i, token in enumerate(draft.tokens):
        q_V = _proposal(draft, i, p_TV)
        p = float(p_TV[i, token])
        # Written without a division: q > 0 for what was drawn, but not in every precision.
        if u[i] * float(q_V[token]) < p:
            continue
        residual = (p_TV[i].double() - q_V.double()).clamp_min_(0.0)
        # p = q up to rounding leaves nothing; then a draw from p is right (case A5).
        left = residual if float(residual.sum()) > 0.0 else p_TV[i].double()
        return Verdict(i, int(draw(left[None], generator)))
    last = len(draft.tokens)
    return Verdict(last, int(draw(p_TV[last, None], generator)))


def top_beta(proposals: list[int], logits_TV: Tensor, beta: int, tau: float) -> Verdict:
    """Keep proposals in the target's top `beta` and within `tau` of its best; lossy.

    Xia et al. 2022, section 3.3. What is not kept is replaced by the arg max, and so is what
    follows after full acceptance.

    Args:
        proposals: K >= 0 proposed ids.
        logits_TV: as for `Verifier`.
        beta: 1 and any tau is greedy verification.
        tau: in nats; differences of log-probabilities are those of logits.
    """
    accepted = 0
    for i, token in enumerate(proposals):
        best = logits_TV[i].topk(min(beta, logits_TV.shape[-1]))
        among = bool((best.indices == token).any())
        if not among or float(best.values[0] - logits_TV[i, token]) > tau:
            break
        accepted += 1
    return Verdict(accepted, int(logits_TV[accepted].argmax()))


def _proposal(draft: Draft, i: int, p_TV: Tensor) -> Tensor:
    """The distribution that proposal i was drawn from, over p's tokens."""
    q_V = p_TV.new_zeros(p_TV.shape[-1])
    if draft.q is None:
        q_V[draft.tokens[i]] = 1.0
    else:
        q_V[: draft.q.shape[-1]] = draft.q[i]
    return q_V
