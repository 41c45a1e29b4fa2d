"""A model's head: what it computes, whether it is the embedding, a weight of its own."""

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


def head_bias(model: Any, family: Family) -> Any:
    """What is added to the logits, [V]: the head's own bias, or one of the model; None: nothing."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None:
        return head.bias
    name = next((n for n, sizes in family.tensors.items() if sizes == ("one", "vocab")), None)
    return None if name is None else model.get_buffer(name)[0]


def head_scale(model: Any, family: Family) -> float:
    """The factor of the logits: some families scale those of a tied head."""
    if not (family.tied_head_power and family.is_tied(model.config)):
        return 1.0
    return float(getattr(model.config, family.config.hidden) ** family.tied_head_power)


def head_softcap(model: Any) -> float | None:
    """The bound of the logits; None: there is none."""
    bound: float | None = getattr(model.config, "final_logit_softcapping", None)
    return bound


def head_logits(model: Any, family: Family, states: torch.Tensor) -> torch.Tensor:
    """The logits [..., V] that a model's head gives for final hidden states [..., H]."""
    weight, bias = model.get_output_embeddings().weight, head_bias(model, family)
    logits = torch.nn.functional.linear(states, weight, bias) * head_scale(model, family)
    bound = head_softcap(model)
    return logits if bound is None else bound * torch.tanh(logits / bound)


def untie_head(model: Any, family: Family) -> None:
    """Give the head a weight of its own."""
    head = model.get_submodule(family.head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
