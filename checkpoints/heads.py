"""Is a model's head its embedding? And giving it a weight of its own."""

from typing import Any

import torch

from draftsmith.checkpoints.families.base import Family


def shares_head(model: Any, family: Family) -> bool:
    """Whether the head's weight is that of another module."""
    head = model.get_submodule(family.head).weight
    return any(
        tensor is head and name != f"{family.head}.weight"
        for name, tensor in model.state_dict(keep_vars=True).items()
    )


def untie_head(model: Any, family: Family) -> None:
    """Give the head a weight of its own."""
    head = model.get_submodule(family.head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
