"""The certificate of sampling: are texts drawn with drafts distributed as the target's own?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.accept.cache import CachedModel, Source
from draftsmith.accept.decode import decode_batch, plain_decode
from draftsmith.accept.drafters import Drafter
from draftsmith.accept.statistics import mean_weights, sign_flip_test
from draftsmith.accept.trial import Pair
from draftsmith.accept.verify import Verification
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.data.chat import Prompt
from draftsmith.data.progress import Progress
from draftsmith.errors import RequestError

# A flip of all signs changes nothing, so that n pairs have 2 / 2ⁿ as their least p-value.
_FEWEST_PAIRS = 12
# What a model can't say counts as this unlikely, in nats; much more, and one such token would hide
# whatever the others tell.
_UNLIKELY = -20.0

Texts = list[list[int]]


@dataclass(frozen=True)
class SampleComparison:
    """Texts drawn with drafts against texts that the target drew alone.

    Attributes:
        prompts: how many were continued.
        samples: texts of each prompt, each way.
        tokens: the most of a text.
        statistic: how much they differ, in standard deviations above what chance gives.
        p_value: the probability of a statistic as large if both are alike.
    """

    prompts: int
    samples: int
    tokens: int
    statistic: float
    p_value: float


def check_samples(prompts: int, verification: Verification, samples: int) -> None:
    """Refuse a comparison that could tell nothing, before anything is drawn.

    Raises:
        RequestError: the verifier does not draw, or there are too few texts.
    """
    if verification.name != "sampling" or verification.warping.greedy:
        raise RequestError("samples: nothing is drawn; set verify sampling and a temperature")
    if prompts * samples < _FEWEST_PAIRS:
        raise RequestError(
            f"samples: {samples} of {prompts} prompts tell nothing; "
            f"take {-(-_FEWEST_PAIRS // max(1, prompts))} or more"
        )


def compare_samples(
    pair: Pair,
    prompts: Sequence[Prompt],
    lookahead: int,
    verification: Verification,
    samples: int,
    tokens: int = 16,
    permutations: int = 2000,
) -> SampleComparison:
    """Draw short texts with drafts and without, and test whether one could be the other.

    Two things are compared, of which each sees what the other does not:

    - The texts' log-likelihoods under the target and under the drafter. What a wrong verifier
      accepts too often is what the drafter likes and the target does not, so that all positions of
      all texts shift these the same way. Simulated with 8 prompts, 32 samples and 16 tokens, a
      residual of p instead of (p - q)+ and a ratio 1.5 times too large give a T² of 116 and 68,
      where 2 is expected.
    - How often each beginning of a text was written after a prompt: the squared differences of
      these counts. They see the two faults above with 1 standard deviation only, but anything that
      happens at one place, as a first token that is always the same.

    Texts of one prompt are paired, so that prompts need not be alike.

    Args:
        pair: target and drafter; prompt lookup has no likelihood of its own.
        prompts: to be continued.
        lookahead: most proposals in a round.
        verification: sampling; its seed is that of every text.
        samples: texts of each prompt, each way; those with drafts are decoded together.
        tokens: most tokens of a text.
        permutations: of the test.

    Raises:
        RequestError: the verifier does not draw, or there are too few texts to tell anything.
    """
    check_samples(len(prompts), verification, samples)
    short = replace(pair, limits=replace(pair.limits, max_new_tokens=tokens))
    proposer = pair.proposer(verification)
    differences, weights = [], []
    with Progress("samples", len(prompts), "prompts") as progress:
        for i, prompt in enumerate(prompts):
            rows = range(i * samples, (i + 1) * samples)
            alone = _alone(short, prompt, verification, rows)
            drafted = _drafted(short, proposer, prompt, lookahead, verification, rows)
            differences.append(_figures(pair, prompt, drafted) - _figures(pair, prompt, alone))
            weights.append(_beginnings(drafted, alone))
            progress.update()
    statistic, p_value = sign_flip_test(
        mean_weights(np.concatenate(differences)) + _unit_blocks(weights),
        permutations=permutations,
        seed=verification.seed,
    )
    return SampleComparison(len(prompts), samples, tokens, statistic, p_value)


def _alone(pair: Pair, prompt: Prompt, verification: Verification, rows: range) -> Texts:
    """Texts of the target alone, one by one: with nothing in common with drafting but the model."""
    return [
        plain_decode(
            pair.target,
            prompt.ids,
            pair.limits,
            pair.allowed,
            verification.warping,
            verification.plain_seed(row),
            prompt.source,
        ).tokens
        for row in rows
    ]


def _drafted(
    pair: Pair,
    proposer: Drafter,
    prompt: Prompt,
    lookahead: int,
    verification: Verification,
    rows: range,
) -> Texts:
    generations = decode_batch(
        pair.target,
        proposer,
        [prompt.ids] * len(rows),
        lookahead,
        pair.limits,
        pair.allowed,
        verifiers=[verification.verifier(row) for row in rows],
        seeds=[verification.draft_seed(row) for row in rows],
        sources=_sources(prompt, len(rows)),
    )
    return [text.tokens for text in generations]


def _sources(prompt: Prompt, rows: int) -> list[Source]:
    return [] if prompt.source is None else [prompt.source] * rows


def _beginnings(some: Texts, others: Texts) -> NDArray[np.float64]:
    """Of the texts of one prompt, weights whose sum is that of squared differences of counts.

    Counted is every beginning of a text, so that two texts agree in as many as they have first
    tokens in common. [texts, texts]
    """
    longest = max(map(len, [*some, *others]))
    own_NT, other_NT = _padded(some, longest), _padded(others, longest)

    def common(left_NT: NDArray[np.int64], right_NT: NDArray[np.int64]) -> NDArray[np.int64]:
        found: NDArray[np.int64] = (left_NT[:, None] == right_NT).cumprod(-1).sum(-1)
        return found

    across = common(own_NT, other_NT)
    both = common(own_NT, own_NT) + common(other_NT, other_NT)
    return (both - across - across.T).astype(np.float64)


def _padded(texts: Texts, width: int) -> NDArray[np.int64]:
    """Texts as rows, -1 after their end."""
    return np.array([text + [-1] * (width - len(text)) for text in texts])


def _unit_blocks(blocks: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Weights of each prompt's texts, with a standard deviation of 1 over flips of signs."""
    from scipy.linalg import block_diag  # type: ignore[import-untyped]

    weights_NN = block_diag(*(block - np.diag(np.diagonal(block)) for block in blocks))
    spread = np.sqrt(2.0 * (weights_NN**2).sum())
    unit: NDArray[np.float64] = weights_NN / spread if spread else weights_NN
    return unit


def _figures(pair: Pair, prompt: Prompt, texts: Texts) -> NDArray[np.float64]:
    """Log-likelihoods of texts under the target and under the drafter, [texts, 1 or 2]."""
    found = [_log_likelihoods(pair.target, prompt, texts, pair.allowed)]
    if pair.drafter is not None:
        found.append(_log_likelihoods(pair.drafter, prompt, texts, pair.proposing.vocabulary))
    return np.stack(found, axis=-1)


@torch.inference_mode()
def _log_likelihoods(
    model: CachedModel, prompt: Prompt, texts: Texts, vocabulary: SharedVocabulary
) -> NDArray[np.float64]:
    """Sum over each text's tokens of log p, unwarped: finite for whatever was drawn, [texts]."""
    if model.context is not None:
        # Of the last token only the probability is asked for, so it needs no place.
        texts = [text[: max(0, model.context - len(prompt.ids) + 1)] for text in texts]
    longest = max(map(len, texts))
    if not longest:
        return np.zeros(len(texts))
    model.reset(len(texts), _sources(prompt, len(texts)))
    logits = model.feed_rows([[*prompt.ids, *text[:-1]] for text in texts], keep=longest)
    return np.array(
        [
            _log_likelihood(vocabulary.restrict(logits_TV[len(logits_TV) - len(text) :]), text)
            for logits_TV, text in zip(logits, texts, strict=True)
        ]
    )


def _log_likelihood(logits_NV: torch.Tensor, text: Sequence[int]) -> float:
    """Of one text, from the logits before each of its tokens."""
    known = [(i, token) for i, token in enumerate(text) if token < logits_NV.shape[-1]]
    places, ids = torch.tensor(known, dtype=torch.long, device=logits_NV.device).reshape(-1, 2).T
    logprobs = logits_NV.float().log_softmax(-1)[places, ids].double().clamp_min(_UNLIKELY)
    return float(logprobs.sum()) + _UNLIKELY * (len(text) - len(known))
