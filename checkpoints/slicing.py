"""From a choice of indices to the compact model: one slicer for every family and axis."""

import copy
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from draftsmith.checkpoints.families.base import (
    AXES,
    DIMENSIONS,
    FIXED,
    WITHIN,
    Axis,
    Family,
    template_of,
)
from draftsmith.checkpoints.generation import compact_generation_config, renumber_tokens
from draftsmith.checkpoints.heads import shares_head, untie_head
from draftsmith.checkpoints.shape import Shape, check_shape, shape_of
from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Selection:
    """What is kept along every axis, in the source's numbering; every tuple is ascending.

    Attributes:
        layers: kept decoder blocks.
        kv_heads: for each kept block, the kept KV heads.
        heads_per_group: for each kept block and kept KV head, the kept query heads of its group
            (0 … heads_per_group - 1).
        ffn: for each kept block, the kept FFN channels.
        hidden: the kept dimensions of the residual stream.
        vocab: the kept tokens; None keeps all.
        cross_heads: for each kept block, the kept heads that look at the encoder.
        encoder_layers: kept encoder blocks.
        encoder_heads: for each of them, the kept heads.
        encoder_ffn: for each of them, the kept FFN channels.
        ffn_layers: for each kept block, the source's block whose FFN it has, which is its own or
            lies between it and the next kept one; None: its own.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[tuple[int, ...], ...]
    heads_per_group: tuple[tuple[tuple[int, ...], ...], ...]
    ffn: tuple[tuple[int, ...], ...]
    hidden: tuple[int, ...]
    vocab: tuple[int, ...] | None = None
    cross_heads: tuple[tuple[int, ...], ...] = ()
    encoder_layers: tuple[int, ...] = ()
    encoder_heads: tuple[tuple[int, ...], ...] = ()
    encoder_ffn: tuple[tuple[int, ...], ...] = ()
    ffn_layers: tuple[int, ...] | None = None

    @classmethod
    def choose(
        cls,
        shape: Shape,
        choose: Callable[[Axis, tuple[int, ...]], Iterable[int]],
        ffn_layers: Iterable[int] | None = None,
    ) -> "Selection":
        """Build a selection by asking for the kept entries of each axis, in each kept place.

        Args:
            shape: the source's.
            choose: (axis, place) -> kept entries; the place is () for layers and widths of the
                whole model, (layer,) inside a layer, (layer, kv_head) for query heads, all in
                the source's numbering. Tokens are not asked for.
            ffn_layers: the blocks whose FFNs the kept ones have, if not their own.
        """
        kept: dict[Axis, Any] = {}
        if ffn_layers is not None:
            kept["ffn_layers"] = tuple(ffn_layers)
        for axis in AXES:
            if axis != "vocab":
                kept[axis] = _choose(axis, kept, choose) if getattr(shape, axis) else ()
        return cls(**kept)

    @classmethod
    def of_layers(
        cls, shape: Shape, layers: Iterable[int], encoder_layers: Iterable[int] | None = None
    ) -> "Selection":
        """Keep some blocks of `shape`, each at full width; None keeps all of the encoder's."""
        kept: dict[Axis, Iterable[int]] = {"layers": tuple(layers)}
        if encoder_layers is not None:
            kept["encoder_layers"] = tuple(encoder_layers)
        return cls.choose(shape, lambda axis, place: kept.get(axis, range(getattr(shape, axis))))

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Selection":
        """Read what `to_plain` wrote.

        Raises:
            ValueError: it is nothing of this form.
        """
        if unknown := sorted(set(plain) - {field.name for field in fields(cls)}):
            raise ValueError(f"{unknown[0]} is no axis")
        return TypeAdapter(cls).validate_json(json.dumps(plain), strict=True)

    def to_plain(self) -> dict[str, Any]:
        """As lists, for JSON."""
        return asdict(self)

    def places(self, axis: Axis) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """(place, kept entries) wherever the axis is cut; places as for `choose`."""
        kept = getattr(self, axis)
        outer = _outer(axis, self.ffn_layers)
        if outer is None:
            yield (), () if kept is None else kept
        elif WITHIN.get(outer) is None:
            yield from (((o,), k) for o, k in zip(getattr(self, outer), kept, strict=True))
        else:
            for (place, entries), groups in zip(self.places(outer), kept, strict=True):
                yield from (((*place, e), k) for e, k in zip(entries, groups, strict=True))

    def shape(self, source: Shape, family: Family | None = None) -> Shape:
        """The shape that comes out.

        Raises:
            DraftsmithError: counts differ between layers or groups, indices are not ascending
                numbers of the source, or the family's layers must keep the same entries; naming
                where.
            RequestError: readers of the family don't take the shape.
        """
        self._check_lengths(source)
        self._check_halves(source)
        counts = {axis: self._uniform(axis, source) for axis in AXES if getattr(source, axis)}
        shape = Shape(**(asdict(source) | {str(axis): count for axis, count in counts.items()}))
        if family is not None:
            for axis in family.same_in_all_layers:
                self._check_same(axis, family)
            for tie in family.ties:
                _check_tie(tie, source, shape, family)
            check_shape(shape, family)
        return shape

    def index(self, dimension: str, layer: int | None, source: Shape) -> Tensor | None:
        """Indices kept along a tensor dimension; None keeps all.

        Args:
            dimension: of `DIMENSIONS` or `FIXED`.
            layer: position among the kept layers, for dimensions inside a block.
            source: the shape that is cut.
        """
        if dimension in FIXED or dimension == "head_dim":
            return None
        axis, *inner = DIMENSIONS[dimension]
        kept = getattr(self, axis)
        if kept is None:
            return None
        if axis in WITHIN:
            assert layer is not None
            kept = kept[layer]
        if inner[:1] == ["heads_per_group"]:
            assert layer is not None
            per_group = source.heads_per_group
            groups = zip(kept, self.heads_per_group[layer], strict=True)
            kept = [group * per_group + head for group, heads in groups for head in heads]
            inner = inner[1:]
        unit = math.prod(getattr(source, count) for count in inner)
        return (torch.tensor(kept)[:, None] * unit + torch.arange(unit)).flatten()

    def _check_lengths(self, source: Shape) -> None:
        """Every kept layer and head must have its own entry."""
        for axis in AXES:
            kept, outer = getattr(self, axis), WITHIN.get(axis)
            if not getattr(source, axis):
                if kept:
                    raise DraftsmithError(f"{axis}: {_short(kept)} are kept of none")
            elif outer is not None:
                wanted = [len(entries) for _, entries in self.places(outer)]
                found = [len(kept)] if outer not in WITHIN else [len(groups) for groups in kept]
                if found != (wanted if outer in WITHIN else [sum(wanted)]):
                    raise DraftsmithError(
                        f"{axis}: {_short(found)} entries for {_short(wanted)} of {outer}"
                    )

    def _check_halves(self, source: Shape) -> None:
        """A block's attention comes before its FFN, and both before the next block's."""
        if self.ffn_layers is None:
            return
        following = (*self.layers[1:], source.layers)
        blocks = zip(self.layers, self.ffn_layers, following, strict=False)
        if len(self.ffn_layers) != len(self.layers) or not all(a <= f < b for a, f, b in blocks):
            raise DraftsmithError(
                f"ffn_layers: {_short(self.ffn_layers)} can't follow the attention of layers "
                f"{_short(self.layers)}: each FFN is that of its layer, or of one between it and "
                "the next"
            )

    def _uniform(self, axis: Axis, source: Shape) -> int:
        most = getattr(source, axis)
        seen: dict[int, str] = {}
        for place, kept in self.places(axis):
            if axis == "vocab" and self.vocab is None:
                return int(most)
            where = f" in layer {place[0]}" if place else ""
            if list(kept) != sorted(set(kept)) or not kept or not 0 <= kept[0] <= kept[-1] < most:
                raise DraftsmithError(
                    f"{axis}{where}: {_short(kept)} are not ascending numbers from 0 to {most - 1}"
                )
            seen.setdefault(len(kept), where)
        if len(seen) > 1:
            detail = ", ".join(f"{count}{where}" for count, where in seen.items())
            raise DraftsmithError(f"{axis} differs between layers: {detail}; a drafter is uniform")
        return next(iter(seen))

    def _check_same(self, axis: Axis, family: Family) -> None:
        kept = getattr(self, axis)
        if len(set(kept)) > 1:
            raise DraftsmithError(
                f"{axis}: {family.name} has one table of positions for all layers, so all keep "
                f"the same heads; here {_short(kept[0])} and others"
            )


@dataclass(frozen=True)
class Slicer:
    """Cuts tensors one by one.

    Attributes:
        family: the source's table.
        source: its shape.
        selection: what is kept.
        renamed: dimensions that are another one under this config.
        factors: name of a compact tensor -> (factor, offset): multiplied as (x + offset) * factor
            - offset, where the model's code derives a scale from its width.
    """

    family: Family
    source: Shape
    selection: Selection
    renamed: Mapping[str, str]
    factors: Mapping[str, tuple[float, float]]

    @classmethod
    def of(cls, config: Any, family: Family, selection: Selection, tied: bool) -> "Slicer":
        """For a source of this config.

        Args:
            config: the source's.
            family: its table.
            selection: what is kept.
            tied: whether the source's head is its embedding, whatever the config says.

        Raises:
            DraftsmithError: the selection is not uniform, or not one of this source.
        """
        source = shape_of(config, family)
        selection.shape(source, family)
        if selection.ffn_layers is not None and family.stacks[0].additions is None:
            raise DraftsmithError(
                f"ffn_layers: attention and FFN of {family.name} can't be cut apart; keep whole "
                "layers"
            )
        renamed = {"source_vocab": "vocab"} if family.one_vocabulary(config) else {}
        factors = _factors(config, family, source, selection, tied)
        return cls(family, source, selection, renamed, factors)

    def name(self, name: str) -> str | None:
        """The compact model's name of a tensor; None if it goes.

        Raises:
            DraftsmithError: a tensor that the family's table does not know.
        """
        template, layer = template_of(name)
        if template not in self.family.tensors:
            raise DraftsmithError(
                f"{name}: not in the table of family {self.family.name}; report the model, please"
            )
        position = self._position(template, layer)
        return None if position is None and layer is not None else template.format(layer=position)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """The kept part of a tensor that stays; float64 where scaled.

        It may share memory with the source: `load_tensors` copies it.
        """
        template, layer = template_of(name)
        position = self._position(template, layer)
        kept = tensor.detach()
        for place, dimension in enumerate(self.family.tensors[template]):
            dimension = self.renamed.get(dimension, dimension)
            index = self.selection.index(dimension, position, self.source)
            if index is not None:
                kept = kept.index_select(place, index.to(kept.device))
        factor, offset = self.factors.get(template.format(layer=position), (1.0, 0.0))
        if factor != 1.0:
            return (kept.double() + offset) * factor - offset
        return kept

    def dtype(self, stored: set[torch.dtype]) -> torch.dtype:
        """The compact model's: the source's, or float32 where half would round what is there."""
        return torch.float32 if self.factors or len(stored) > 1 else next(iter(stored))

    def _position(self, template: str, layer: int | None) -> int | None:
        """A block's number among the kept ones."""
        if layer is None:
            return None
        if template in self.family.first_block:
            return 0
        stack = self.family.stack_of(template)
        assert stack is not None, template
        kept = getattr(self.selection, stack.layers)
        if self.selection.ffn_layers is not None and stack.is_ffn(template):
            kept = self.selection.ffn_layers
        return kept.index(layer) if layer in kept else None


def compact_config(config: Any, family: Family, selection: Selection) -> Any:
    """The config of the compact model: counts, per-layer lists, an explicit head_dim."""
    shape = selection.shape(shape_of(config, family), family)
    new = copy.deepcopy(config)
    for key in family.per_layer_config:
        entries = getattr(config, key, None)
        if entries is not None:
            setattr(new, key, [entries[layer] for layer in selection.layers])
    for key in family.per_layer_counts:
        count = getattr(config, key, None)
        if count is not None:
            setattr(new, key, sum(layer < count for layer in selection.layers))
    for count in ("layers", "heads", "kv_heads", "head_dim", "ffn", "hidden", "vocab"):
        _write(new, getattr(family.config, count), getattr(shape, count))
    for count in ("encoder_layers", "encoder_heads", "encoder_ffn"):
        _write(new, getattr(family.config, count), getattr(shape, count))
    for key, flag in family.vocab_copies.items():
        if getattr(config, flag):
            setattr(new, key, shape.vocab)
    if len(selection.layers) < shape_of(config, family).layers:
        for key in family.per_layer_patterns:
            vars(new).pop(key, None)
    if selection.vocab is not None:
        renumber_tokens(new, {old: i for i, old in enumerate(selection.vocab)})
    return new


def compact_model(model: Any, family: Family, selection: Selection) -> Any:
    """Build the compact model of `selection` from a loaded transformers model.

    Returns:
        A model of the same class on the CPU, in eval mode; tied weights stay tied. Its dtype is
        the source's, but float32 where a scale had to be taken up by weights.
    """
    tied = shares_head(model, family)
    slicer = Slicer.of(model.config, family, selection, tied)
    dtype = slicer.dtype({p.dtype for p in model.parameters()})
    compact = empty_compact(type(model), model.config, slicer, dtype)
    if not tied:
        untie_head(compact, family)
    load_tensors(compact, _slices(model, compact, slicer))
    if (generation := getattr(model, "generation_config", None)) is not None:
        compact.generation_config = compact_generation_config(generation, selection)
    return compact.eval()


def layers_of(model: Any, family: Family, layers: Iterable[int]) -> Any:
    """Some layers of a model as a model of their own, with the very same weights in memory.

    Args:
        model: a loaded causal model; it stays as it is.
        family: its table.
        layers: kept blocks, ascending.

    Raises:
        DraftsmithError: a layer that the model does not have.
    """
    selection = Selection.of_layers(shape_of(model.config, family), layers)
    slicer = Slicer.of(model.config, family, selection, shares_head(model, family))
    with torch.device("meta"):
        view = type(model)._from_config(compact_config(model.config, family, selection))
    state = {**dict(model.named_buffers()), **model.state_dict(keep_vars=True)}
    for name, tensor in state.items():
        # Buffers that are not saved, as rotary frequencies, belong to no layer.
        known = template_of(name)[0] in family.tensors
        new = slicer.name(name) if known else name
        if new is not None:
            module, _, kind = new.rpartition(".")
            setattr(view.get_submodule(module), kind, tensor)
    return view.eval()


def empty_compact(model_class: Any, config: Any, slicer: Slicer, dtype: torch.dtype) -> Any:
    """The compact model with the weights that its class starts from."""
    new = compact_config(config, slicer.family, slicer.selection)
    model = model_class._from_config(new, dtype=dtype)
    if not slicer.family.is_tied(config):
        untie_head(model, slicer.family)
    return model


def own_tensors(model: Any) -> dict[str, Tensor]:
    """The state dict with every storage once: a tied tensor under its first name alone."""
    seen: set[int] = set()
    own = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            own[name] = tensor
    return own


def load_tensors(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy tensors in, strictly: each has its place, and none is left without.

    Raises:
        DraftsmithError: naming what is missing, left over or of another shape.
    """
    places = model.state_dict(keep_vars=True)
    filled = set()
    with torch.no_grad():
        for name, tensor in tensors:
            if name not in places:
                raise DraftsmithError(f"{name}: the compact model has no such tensor")
            if tensor.shape != places[name].shape:
                raise DraftsmithError(
                    f"{name}: cut to {tuple(tensor.shape)}, but the compact model has "
                    f"{tuple(places[name].shape)}"
                )
            places[name].copy_(tensor)
            filled.add(id(places[name]))
    if missing := [name for name, tensor in places.items() if id(tensor) not in filled]:
        raise DraftsmithError(f"{missing[0]}: the compact model needs it, the source lacks it")


def _slices(model: Any, compact: Any, slicer: Slicer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a model, cut; those that the compact model has apart under each name."""
    places, own = compact.state_dict(keep_vars=True), own_tensors(model)
    filled: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        known = template_of(name)[0] in slicer.family.tensors
        if not (known or name in own) or (new := slicer.name(name)) is None:
            continue
        if id(places.get(new)) not in filled:
            filled.add(id(places.get(new)))
            yield new, slicer.cut(name, tensor)


def _factors(
    config: Any, family: Family, source: Shape, selection: Selection, tied: bool
) -> dict[str, tuple[float, float]]:
    """Compact tensors that take up a factor which the model derives from its width."""
    ratio = source.hidden / len(selection.hidden)
    factors: dict[str, tuple[float, float]] = {}

    def put(templates: Iterable[str], factor: float, offset: float) -> None:
        for template in templates:
            factors[template.format(last=len(selection.layers) - 1)] = (factor, offset)

    for scale in family.scales:
        if ratio == 1.0 or (scale.flag and not getattr(config, scale.flag)):
            continue
        factor = ratio**scale.power
        put(scale.tensors, factor, 0.0)
        if tied:
            put(scale.tied, 1 / factor, scale.offset)
    return factors


def _choose(
    axis: Axis,
    kept: Mapping[Axis, Any],
    choose: Callable[[Axis, tuple[int, ...]], Iterable[int]],
) -> Any:
    def pick(*place: int) -> tuple[int, ...]:
        return tuple(sorted(choose(axis, place)))

    outer = _outer(axis, kept.get("ffn_layers"))
    if outer is None:
        return pick()
    if WITHIN.get(outer) is None:
        return tuple(pick(entry) for entry in kept[outer])
    return tuple(
        tuple(pick(layer, group) for group in groups)
        for layer, groups in zip(kept[WITHIN[outer]], kept[outer], strict=True)
    )


def _outer(axis: Axis, ffn_layers: object) -> Axis | None:
    """The axis in whose kept entries another is cut."""
    return "ffn_layers" if axis == "ffn" and ffn_layers is not None else WITHIN.get(axis)


def _check_tie(tie: tuple[Axis, ...], source: Shape, shape: Shape, family: Family) -> None:
    first, *others = tie
    for axis in others:
        if getattr(shape, axis) * getattr(source, first) != getattr(shape, first) * getattr(
            source, axis
        ):
            raise DraftsmithError(
                f"{first} {getattr(shape, first)} and {axis} {getattr(shape, axis)}: "
                f"{', '.join(tie)} of {family.name} are cut in the same ratio"
            )


def _write(config: Any, key: str | None, value: int) -> None:
    if key is not None:
        setattr(config, key, value)


def _short(values: Iterable[Any]) -> str:
    listed = list(values)
    return ", ".join(map(str, listed[:6])) + (" …" if len(listed) > 6 else "")
