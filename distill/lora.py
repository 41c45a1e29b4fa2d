"""Recovery by LoRA (Hu et al. 2022): products of low rank learn beside the weights, then join them.

Which weights have one is said by axes, so that it means the same in every family.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from draftsmith.checkpoints.families.base import DIMENSIONS, Family
from draftsmith.checkpoints.slicing import template_of
from draftsmith.distill.engine import freeze_all_but
from draftsmith.errors import RequestError


def add_adapters(
    model: Any, family: Family, axes: Iterable[str], rank: int, alpha: float, seed: int
) -> dict[str, nn.Parameter]:
    """Give every projection along some axes an adapter; they alone learn.

    Args:
        model: is changed; `merge_adapters` makes it an ordinary one again.
        family: its table.
        axes: as `kv_heads` (all projections of attention) or `ffn`.
        rank: of the products.
        alpha: their factor, over the rank.
        seed: of their first factors; the second ones begin at zero, so that nothing changes yet.

    Returns:
        The parameters that learn.

    Raises:
        RequestError: no projection of the family has such an axis.
    """
    from peft import LoraConfig, inject_adapter_in_model

    axes = tuple(axes)
    names = [name for name, _ in model.named_modules() if _is_along(model, family, name, axes)]
    if not names:
        raise RequestError(
            f"recipe.distill.lora_axes: no projection of {family.name} has {' or '.join(axes)}; "
            f"its axes are {', '.join(family.axes)}"
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names)  # type: ignore[arg-type]
        inject_adapter_in_model(config, model)
    return freeze_all_but(model, [name for name, _ in model.named_parameters() if "lora_" in name])


def merge_adapters(model: Any) -> None:
    """Add all adapters to their weights and take them out.

    Raises:
        ValueError: a sum is not finite.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in list(model.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge(safe_merge=True)
            model.set_submodule(name, module.get_base_layer())
    # Left there by peft, and written into the config of whatever is saved.
    model.__dict__.pop("peft_config", None)


def _is_along(model: Any, family: Family, name: str, axes: tuple[str, ...]) -> bool:
    template = template_of(f"{name}.weight")[0]
    counts = {c for d in family.tensors.get(template, ()) for c in DIMENSIONS.get(d, ())}
    inside = family.stack_of(template) is not None
    return inside and bool(counts & set(axes)) and isinstance(model.get_submodule(name), nn.Linear)
