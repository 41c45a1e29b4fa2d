"""What a drafter has more than the model it is cut from: a deeper encoder, a mask."""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.generation import special_ids
from draftsmith.checkpoints.heads import shares_head, untie_head
from draftsmith.checkpoints.slicing import load_tensors, own_tensors
from draftsmith.checkpoints.token_map import cut_tensors


def repeat_encoder(model: Any, family: Family, times: int) -> Any:
    """A model whose encoder has each block of `model`'s so many times in a row.

    Xia et al. 2022 start an encoder of 12 layers from one of 6 in this way.

    Args:
        model: an encoder–decoder.
        family: its table.
        times: how often each block comes; 1 gives the same model.
    """
    if times == 1:
        return model
    config, count = copy.deepcopy(model.config), family.config.encoder_layers
    assert count is not None, family.name
    setattr(config, count, getattr(config, count) * times)
    dtype = next(model.parameters()).dtype
    deep = type(model)._from_config(config, dtype=dtype)
    if not shares_head(model, family):
        untie_head(deep, family)
    load_tensors(deep, _repeated(model, family, times))
    deep.generation_config = copy.deepcopy(model.generation_config)
    return deep.eval()


def _repeated(model: Any, family: Family, times: int) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in own_tensors(model).items():
        template, layer = template_of(name)
        stack = family.stack_of(template)
        if layer is None or stack is None or stack.layers != "encoder_layers":
            yield name, tensor.detach()
        elif template in family.first_block:
            yield template.format(layer=layer), tensor.detach()
        else:
            for number in range(layer * times, (layer + 1) * times):
                yield template.format(layer=number), tensor.detach()


def start_block_drafting(model: Any, family: Family, size: int, tokens: Iterable[int]) -> Any:
    """A model that is to propose blocks; its mask has yet to be learned.

    The mask is the first row of the vocabulary that stands for no token, or a new one behind all
    others; it starts as the mean of the tokens' embeddings.

    Args:
        model: a loaded model.
        family: its table.
        size: masks in a block.
        tokens: ids that its decoder writes.

    Returns:
        The model itself, or one with a row more.
    """
    rows = len(model.get_output_embeddings().weight)
    written = sorted(set(range(rows)) & {*tokens, *special_ids(model)})
    spare = sorted(set(range(rows)).difference(written))
    mask_id = spare[0] if spare else rows
    if not spare:
        model = _with_another_row(model, family)
    table = model.get_decoder().get_input_embeddings().weight
    table.data[mask_id] = table.data[written].mean(0)
    model.config.block_drafting = asdict(Block(size, mask_id))
    return model


def with_another_row(config: Any, family: Family) -> Any:
    """A copy of a config whose vocabulary has one row more."""
    config = copy.deepcopy(config)
    rows = getattr(config, family.config.vocab) + 1
    setattr(config, family.config.vocab, rows)
    for key, flag in family.vocab_copies.items():
        if getattr(config, flag):
            setattr(config, key, rows)
    return config


def _with_another_row(model: Any, family: Family) -> Any:
    """A copy whose vocabulary has one row more, which begins as the mean of the others."""
    wide = type(model)._from_config(with_another_row(model.config, family), dtype=model.dtype)
    if not shares_head(model, family):
        untie_head(wide, family)
    axes = cut_tensors(model, family)
    load_tensors(
        wide,
        (
            (name, _with_mean(tensor.detach(), axes[name]) if name in axes else tensor.detach())
            for name, tensor in own_tensors(model).items()
        ),
    )
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def _with_mean(tensor: Tensor, axis: int) -> Tensor:
    return torch.cat([tensor, tensor.mean(axis, keepdim=True)], axis)
