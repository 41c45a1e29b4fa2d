"""Shapes: a model's counts along every axis, and which counts a drafter may have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from draftsmith.checkpoints.families.base import AXES, DIMENSIONS, FIXED, Axis, Family
from draftsmith.errors import RequestError


@dataclass(frozen=True)
class Shape:
    """Counts of a model; query heads are kv_heads x heads_per_group.

    The first seven are the decoder's; the others are 0 where there is no encoder.
    """

    layers: int
    kv_heads: int
    heads_per_group: int
    head_dim: int
    ffn: int
    hidden: int
    vocab: int
    cross_heads: int = 0
    encoder_layers: int = 0
    encoder_heads: int = 0
    encoder_head_dim: int = 0
    encoder_ffn: int = 0

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.heads_per_group

    @property
    def ffn_layers(self) -> int:
        """Layers that have an FFN: all."""
        return self.layers

    def size(self, dimension: str) -> int | None:
        """Entries of a tensor dimension; None where the shape does not say."""
        if dimension in FIXED:
            return None
        return math.prod(getattr(self, count) for count in DIMENSIONS[dimension])

    def __str__(self) -> str:
        """One line for tables and messages."""
        decoder = (
            f"{self.layers} layers, {self.heads} heads / {self.kv_heads} KV of {self.head_dim}, "
            f"FFN {self.ffn}"
        )
        both = f"hidden {self.hidden}, vocabulary {self.vocab}"
        if not self.encoder_layers:
            return f"{decoder}, {both}"
        return (
            f"encoder {self.encoder_layers} layers, {self.encoder_heads} heads of "
            f"{self.encoder_head_dim}, FFN {self.encoder_ffn}; decoder {decoder}; {both}"
        )


def shape_of(config: Any, family: Family) -> Shape:
    """Read the shape from a transformers config.

    Raises:
        RequestError: a size that is missing, not a positive whole number, or not divisible where
            another is derived from it.
    """
    keys = family.config
    hidden = _count(config, keys.hidden)
    heads = _count(config, keys.heads)
    kv_heads = _count(config, keys.kv_heads, default=heads)
    shape = Shape(
        layers=_count(config, keys.layers),
        kv_heads=kv_heads,
        heads_per_group=_ratio(config, keys.heads, heads, keys.kv_heads, kv_heads),
        head_dim=_count(config, keys.head_dim, default=0)
        or _ratio(config, keys.hidden, hidden, keys.heads, heads),
        ffn=_count(config, keys.ffn),
        hidden=hidden,
        vocab=_count(config, keys.vocab),
    )
    if not family.has_encoder:
        return shape
    encoder_heads = _count(config, keys.encoder_heads)
    return replace(
        shape,
        cross_heads=heads,
        encoder_layers=_count(config, keys.encoder_layers),
        encoder_heads=encoder_heads,
        encoder_head_dim=_count(config, keys.head_dim, default=0)
        or _ratio(config, keys.hidden, hidden, keys.encoder_heads, encoder_heads),
        encoder_ffn=_count(config, keys.encoder_ffn),
    )


def resolve_shape(
    source: Shape,
    wanted: Mapping[str, int | None],
    family: Family,
    axes: tuple[Axis, ...] | None = None,
) -> Shape:
    """The drafter's full shape, or the reason why it can't be had.

    Args:
        source: the shape that is cut.
        wanted: axis -> count; None keeps the source's. `heads` may stand for kv_heads and
            heads_per_group.
        family: the source's table, which ties axes to one another.
        axes: the axes that may be cut; None allows all.

    Raises:
        RequestError: a count is illegal (the legal ones are listed), or on a forbidden axis.
    """
    values = {k: v for k, v in wanted.items() if v is not None and k != "heads"}
    if (heads := wanted.get("heads")) is not None:
        values |= _from_heads(source, heads, wanted)
    for name in values:
        if name not in family.axes:
            raise RequestError(
                f"{_place(name)}: {family.name} has no such axis; its axes are "
                f"{', '.join(family.axes)}"
            )
    for axis in AXES:
        value, most = values.get(axis, getattr(source, axis)), getattr(source, axis)
        if not (1 if most else 0) <= value <= most:
            raise RequestError(
                f"{_place(axis)}: {value} is not among {_legal(range(1, most + 1))}, which the "
                "source has"
            )
        if value != most and axes is not None and axis not in axes:
            raise RequestError(
                f"{_place(axis)}: {value} asks to cut {axis} from {most}, but "
                f"recipe.prune.axes has only {', '.join(axes) or 'nothing'}; add {axis} to it"
            )
    shape = replace(source, **_with_ties(source, values, family))
    check_shape(shape, family)
    return shape


def check_shape(shape: Shape, family: Family) -> None:
    """Refuse a shape that readers of the family's config don't take.

    Raises:
        RequestError: naming the legal widths.
    """
    if shape.hidden % family.hidden_multiple:
        raise RequestError(
            f"{_place('hidden')}: {shape.hidden} is no multiple of {family.hidden_multiple}, which "
            f"transformers needs of a {family.name}"
        )
    if family.hidden_of_heads and shape.hidden % shape.heads:
        widths = range(shape.heads, shape.hidden + shape.heads, shape.heads)
        heads = [h for h in range(1, shape.heads + 1) if shape.hidden % h == 0]
        raise RequestError(
            f"{_place('hidden')}: {shape.hidden} is no multiple of {shape.heads} query heads, and "
            f"transformers refuses such a {family.name} config though head_dim is written; legal "
            f"with {shape.heads} heads: {_legal(widths)}; legal heads with {shape.hidden}: "
            f"{_legal(heads)}"
        )


def changed_axes(source: Shape, drafter: Shape) -> tuple[Axis, ...]:
    """The axes along which `drafter` is smaller."""
    return tuple(a for a in AXES if getattr(drafter, a) != getattr(source, a))


def _with_ties(source: Shape, values: Mapping[str, int], family: Family) -> dict[str, int]:
    """Let tied axes follow: all are cut in the same ratio, to whole numbers."""
    found = dict(values)
    for tie in family.ties:
        given = {axis: values[axis] for axis in tie if axis in values}
        if not given:
            continue
        first, value = next(iter(given.items()))
        ratio = Fraction(value, getattr(source, first))
        legal = _legal_with(source, first, tie)
        together = f"{', '.join(tie)} of {family.name} are cut in the same ratio"
        if value not in legal:
            raise RequestError(f"{_place(first)}: {value} is not among {_legal(legal)}: {together}")
        for axis in tie:
            follows = int(getattr(source, axis) * ratio)
            if given.get(axis, follows) != follows:
                raise RequestError(
                    f"{_place(axis)}: {given[axis]} does not go with {first} {value}: {together}; "
                    f"leave it out, or write {follows}"
                )
            found[axis] = follows
    return found


def _legal_with(source: Shape, axis: Axis, tie: tuple[Axis, ...]) -> list[int]:
    """Counts on `axis` for which every tied axis has a whole count too."""
    most = getattr(source, axis)
    step = most // math.gcd(*(getattr(source, other) for other in tie))
    return list(range(step, most + 1, step))


def _from_heads(source: Shape, heads: int, wanted: Mapping[str, int | None]) -> dict[str, int]:
    """Split a number of query heads into groups; multi-head attention cuts whole groups of one."""
    if wanted.get("heads_per_group") is not None:
        raise RequestError(
            "recipe.prune.shape.heads: give either heads or heads_per_group, not both"
        )
    asked = wanted.get("kv_heads")
    if asked is not None and asked > source.kv_heads:
        raise RequestError(
            f"recipe.prune.shape.kv_heads: {asked} is not among "
            f"{_legal(range(1, source.kv_heads + 1))}, which the source has"
        )
    alone = source.heads_per_group == 1
    if asked is not None and asked < 1:
        raise RequestError(f"recipe.prune.shape.kv_heads: {asked} is not among 1, 2, …")
    kv_heads = asked or (min(heads, source.heads) if alone else source.kv_heads)
    per_group, rest = divmod(heads, kv_heads)
    if rest or not per_group or per_group > source.heads_per_group:
        whole = alone and asked is None
        legal = (
            range(1, source.heads + 1)
            if whole
            else range(kv_heads, kv_heads * source.heads_per_group + 1, kv_heads)
        )
        raise RequestError(
            f"recipe.prune.shape.heads: {heads} query heads don't share {kv_heads} KV heads "
            f"evenly; legal {'here' if whole else f'with {kv_heads} KV heads'}: {_legal(legal)}"
        )
    return {"kv_heads": kv_heads, "heads_per_group": per_group}


def _count(config: Any, key: str | None, default: int | None = None) -> int:
    value = None if key is None else getattr(config, key, None)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RequestError(
            f"config: {key} is {value!r}, which is no positive whole number; get config.json again"
        )
    return value


def _ratio(config: Any, key: str, value: int, of: str | None, by: int) -> int:
    whole, rest = divmod(value, by)
    if rest or not whole:
        raise RequestError(
            f"config: {key} {value} is no multiple of {of or 'heads'} {by}; get config.json again"
        )
    return whole


def _place(axis: str) -> str:
    return f"recipe.prune.shape.{axis}"


def _legal(counts: "range | list[int]") -> str:
    listed = list(counts)
    if len(listed) <= 16:
        return ", ".join(map(str, listed))
    if listed[1] - listed[0] == 1:
        return f"{listed[0]} … {listed[-1]}"
    return f"{listed[0]}, {listed[1]} … {listed[-1]}"
