"""Making config and weights agree on whether the head is the embedding."""

import warnings
from typing import Any

import torch

from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.heads import shares_head, untie_head
from draftsmith.checkpoints.layout import Layout, layout_of


def _untie_all(model: Any, layout: Layout) -> None:
    """Give every tensor of its own that the config implies a copy: some flags untie several."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in layout.aliases:
            continue
        if id(tensor) in seen:
            module, _, kind = name.rpartition(".")
            copy = torch.nn.Parameter(tensor.detach().clone())
            setattr(model.get_submodule(module), kind, copy)
        seen.add(id(tensor))


def match_tied_flag(model: Any, family: Family) -> None:
    """Let the config say whether the head is the embedding, and the weights follow (case A19).

    After a merged adapter the two differ while the flag still ties them, and the next reader
    would overwrite one. They are untied with a warning.
    """
    config, shared = model.config, shares_head(model, family)
    if family.is_tied(config) == shared:
        return
    head = model.get_submodule(family.head)
    if shared:
        untie_head(model, family)
        return
    embedding = model.get_input_embeddings()
    if torch.equal(embedding.weight, head.weight):
        head.weight = embedding.weight
        return
    if family.tied_head_power:
        hidden = getattr(config, family.config.hidden)
        head.weight = torch.nn.Parameter(head.weight.detach() * hidden**family.tied_head_power)
    setattr(config, family.tied, False)
    _untie_all(model, layout_of(config, family))
    warnings.warn(
        "the head differs from the embedding though the config ties them: they were untied and "
        "both are saved",
        stacklevel=3,
    )
