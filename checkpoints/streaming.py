"""Cutting a checkpoint without loading it: tensor by tensor, from file to compact model."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.checksums import verify_checksums
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.formats import ModelRef, stored_tensors
from draftsmith.checkpoints.generation import (
    compact_generation_config,
    repair_generation_config,
)
from draftsmith.checkpoints.layout import Layout, layout_of, meta_model
from draftsmith.checkpoints.loading import (
    check_files,
    check_finite,
    describe,
    load_config,
    load_model,
    one_error,
    own_name,
)
from draftsmith.checkpoints.slicing import (
    Selection,
    Slicer,
    compact_model,
    empty_compact,
    load_tensors,
)

_DTYPES = {
    "F64": torch.float32,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def compact_checkpoint(ref: ModelRef, selection: Selection) -> Any:
    """The compact model of `selection`, in the dtype of the files.

    In memory are the compact model and one tensor of the source at a time. GGUF and pickle files
    can't be read by the tensor and are loaded whole.

    Raises:
        RequestError: the files don't fit their config.
        DraftsmithError: the selection does not fit the source.
    """
    config = load_config(ref)
    family, _ = describe(config, ref)
    if ref.gguf or ref.pickle:
        model = load_model(ref, device="cpu", dtype=torch.float32, target_ids=False)
        return compact_model(model, family, selection)
    slicer = Slicer.of(config, family, selection, family.is_tied(config))
    check_files(ref, config, family)
    verify_checksums(ref.folder)
    layout = layout_of(config, family)
    lacking = _lacking(ref, family, layout)
    dtypes = {_DTYPES[stored.dtype] for stored in stored_tensors(ref)}
    if any(family.rebuilt[template_of(name)[0]] for name in lacking):
        # What is rebuilt is exact; half precision would round it.
        dtypes.add(torch.float32)
    meta = meta_model(config, family)
    model = empty_compact(type(meta), config, slicer, slicer.dtype(dtypes))
    load_tensors(model, itertools.chain(_cut(ref, layout, slicer), _rebuilt(meta, lacking, slicer)))
    with one_error(ref):
        generation = _generation_config(ref)
    model.generation_config = compact_generation_config(generation, selection)
    repair_generation_config(model)
    return model.eval()


def _cut(ref: ModelRef, layout: Layout, slicer: Slicer) -> Iterator[tuple[str, Tensor]]:
    names = _own_names(ref, slicer.family, layout)
    for stored in stored_tensors(ref):
        own = own_name(stored.name, slicer.family, layout)
        first = layout.aliases.get(own) if own else None
        if own is None or first in names:
            continue
        own = first or own
        if (new := slicer.name(own)) is not None:
            tensor = stored.read()
            check_finite(ref, stored.name, tensor)
            yield new, slicer.cut(own, tensor)


def _own_names(ref: ModelRef, family: Family, layout: Layout) -> set[str]:
    found = {own_name(stored.name, family, layout) for stored in stored_tensors(ref)}
    return {name for name in found if name is not None}


def _lacking(ref: ModelRef, family: Family, layout: Layout) -> list[str]:
    """Tensors that the files need not hold and don't, since transformers rebuilds them."""
    names = _own_names(ref, family, layout)
    return [n for n in layout.shapes if n not in names and template_of(n)[0] in family.rebuilt]


def _rebuilt(meta: Any, lacking: list[str], slicer: Slicer) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `lacking` at the source's width, cut."""
    for name in lacking:
        module, _, kind = name.rpartition(".")
        owner = meta.get_submodule(module).float()
        make = slicer.family.rebuilt[template_of(name)[0]]
        shape = getattr(owner, kind).shape
        whole = getattr(owner, make)() if make else torch.zeros(shape)
        yield name, slicer.cut(name, whole)


def _generation_config(ref: ModelRef) -> Any:
    from transformers import GenerationConfig

    if not (ref.folder / "generation_config.json").is_file():
        return GenerationConfig.from_model_config(load_config(ref))
    return GenerationConfig.from_pretrained(ref.folder)
