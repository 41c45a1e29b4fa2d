"""Cutting a checkpoint without loading it: tensor by tensor, from file to compact model."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.checksums import verify_checksums
from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.checkpoints.formats import ModelRef, stored_tensors
from draftsmith.checkpoints.generation import repair_generation_config
from draftsmith.checkpoints.layout import Layout, layout_of, meta_model
from draftsmith.checkpoints.loading import (
    check_files,
    check_finite,
    describe,
    load_config,
    load_model,
    own_name,
)
from draftsmith.checkpoints.slicing import (
    Selection,
    Slicer,
    compact_model,
    empty_compact,
    load_tensors,
    renumber_tokens,
)


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
        return compact_model(load_model(ref, device="cpu", dtype=torch.float32), family, selection)
    slicer = Slicer.of(config, family, selection)
    check_files(ref, config, family)
    verify_checksums(ref.folder)
    layout = layout_of(config, family)
    model_class = type(meta_model(config, family))
    model = empty_compact(model_class, config, slicer, slicer.dtype(_stored_dtype(ref)))
    load_tensors(model, _cut(ref, family, layout, slicer, config))
    model.generation_config = _generation_config(ref, model, selection)
    repair_generation_config(model)
    return model.eval()


def _cut(
    ref: ModelRef, family: Family, layout: Layout, slicer: Slicer, config: Any
) -> Iterator[tuple[str, Tensor]]:
    names = {own_name(stored.name, family, layout) for stored in stored_tensors(ref)}
    for stored in stored_tensors(ref):
        own = own_name(stored.name, family, layout)
        if own is None or layout.aliases.get(own) in names:
            continue
        own = layout.aliases.get(own, own)
        if (new := slicer.name(own)) is not None:
            tensor = stored.read()
            check_finite(ref, stored.name, tensor)
            yield new, slicer.cut(own, tensor)
    lacking = [
        n for n in layout.shapes if n not in names and template_of(n)[0] in family.optional_in_files
    ]
    if lacking:
        # What files need not hold, transformers fills in from the source's widths.
        whole = meta_model(config, family, device="cpu").state_dict()
        for name in lacking:
            yield name, slicer.cut(name, whole[name])


def _stored_dtype(ref: ModelRef) -> torch.dtype:
    """The widest type among the stored tensors."""
    kinds = {stored.dtype for stored in stored_tensors(ref)}
    if len(kinds) > 1 or not kinds <= {"F16", "BF16"}:
        return torch.float32
    return torch.float16 if kinds == {"F16"} else torch.bfloat16


def _generation_config(ref: ModelRef, model: Any, selection: Selection) -> Any:
    from transformers import GenerationConfig

    if not (ref.folder / "generation_config.json").is_file():
        return model.generation_config
    config = copy.deepcopy(GenerationConfig.from_pretrained(ref.folder))
    if selection.vocab is not None:
        renumber_tokens(config, selection.vocab)
    return config
