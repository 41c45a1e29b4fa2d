"""A drafter with a cut vocabulary, written with all tokens for runtimes that know no map.

A token that was cut is read as the fallback of the map. Its logit is the mean of all kept ones:
few heads have a bias, so there is no number to write that is always low, but a mean is never
larger than the largest, whatever the state before the head. So no cut token is ever the likeliest,
and greedy drafts are those of the cut drafter. In sampling, n cut tokens get n * exp(mean) beside
sum(exp(kept)), at most n / (n + kept) and far less where the drafter knows what comes.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.export.base import Candidate, Job
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.generation import renumber_tokens
from draftsmith.checkpoints.heads import untie_head
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.slicing import load_tensors
from draftsmith.checkpoints.token_map import TokenMap, cut_tensors

Numbers = TypeVar("Numbers", bound=Candidate)


def expanded_candidate(candidate: Numbers) -> Numbers:
    """The same with a row for each of the target's tokens, as far as numbers go."""
    token_map = candidate.token_map
    if token_map is None:
        return candidate
    return replace(
        candidate,
        config=expanded_config(candidate.config, candidate.family, token_map),
        shape=replace(candidate.shape, vocab=token_map.target_vocab),
        token_map=None,
    )


def expanded_job(job: Job) -> Job:
    """The same with a model that has a row for each of the target's tokens."""
    if job.token_map is None:
        return job
    model = expanded_model(job.model, job.family, job.token_map)
    pair = replace(job.pair, drafter_rows=job.token_map.target_vocab)
    return replace(expanded_candidate(job), config=model.config, model=model, pair=pair)


def cost_of(candidate: Candidate) -> str:
    """What the rows cost, as a note."""
    token_map = candidate.token_map
    assert token_map is not None
    wide = expanded_config(candidate.config, candidate.family, token_map)
    before, after = (
        layout_of(config, candidate.family).parameters() for config in (candidate.config, wide)
    )
    return (
        f"the vocabulary was expanded from {candidate.shape.vocab:,} to "
        f"{token_map.target_vocab:,} rows: +{after - before:,} parameters ({before:,} before), and "
        "the head computes all rows; cut tokens are never the likeliest, but may be sampled"
    )


def expanded_config(config: Any, family: Family, token_map: TokenMap) -> Any:
    """A config with the target's vocabulary and ids, and a head apart from the embedding."""
    wide = copy.deepcopy(config)
    setattr(wide, family.config.vocab, token_map.target_vocab)
    for key, flag in family.vocab_copies.items():
        if getattr(config, flag):
            setattr(wide, key, token_map.target_vocab)
    # What a cut token is read as and how likely it is can't be one row.
    setattr(wide, family.tied, False)
    renumber_tokens(wide, dict(enumerate(token_map.target_ids)))
    return wide


def expanded_model(model: Any, family: Family, token_map: TokenMap) -> Any:
    """A copy of a drafter that takes and gives the target's ids without a map.

    Args:
        model: as it is stored, its rows those of the map.
        family: its table.
        token_map: the map.

    Returns:
        A model of the same class and dtype on the CPU, in eval mode, with an untied head. Kept
        ids have the logits that they had, cut ones the mean of those.
    """
    config = expanded_config(model.config, family, token_map)
    wide = type(model)._from_config(config, dtype=model.dtype)
    untie_head(wide, family)
    load_tensors(wide, _tensors(model, family, token_map))
    if model.generation_config is not None:
        wide.generation_config = copy.deepcopy(model.generation_config)
        renumber_tokens(wide.generation_config, dict(enumerate(token_map.target_ids)))
    return wide.eval()


def _tensors(model: Any, family: Family, token_map: TokenMap) -> Iterator[tuple[str, Tensor]]:
    head = f"{family.head}.weight"
    factor = 1.0
    if family.is_tied(model.config):
        factor = float(getattr(model.config, family.config.hidden) ** family.tied_head_power)
    axes = cut_tensors(model, family)
    for name, tensor in model.state_dict().items():
        if name not in axes:
            yield name, tensor
        elif isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Embedding):
            yield name, tensor[token_map.rows()]
        else:
            wide = _with_means(tensor, axes[name], token_map)
            yield name, wide * factor if name == head else wide


def _with_means(tensor: Tensor, axis: int, token_map: TokenMap) -> Tensor:
    """Kept rows in their places, and their mean in all others."""
    shape = list(tensor.shape)
    shape[axis] = token_map.target_vocab
    wide = tensor.mean(axis, keepdim=True).expand(shape).clone()
    return wide.index_copy_(axis, torch.tensor(token_map.target_ids), tensor)
