"""Shapes: a model's counts along every axis, and which counts a drafter may have."""

from dataclasses import asdict, dataclass, replace
from typing import Any

from draftsmith.checkpoints.families.base import AXES, Axis, Dim, Family
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ShapeSettings


@dataclass(frozen=True)
class Shape:
    """Counts of a decoder; query heads are kv_heads x heads_per_group."""

    layers: int
    kv_heads: int
    heads_per_group: int
    head_dim: int
    ffn: int
    hidden: int
    vocab: int

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.kv_heads * self.heads_per_group

    def size(self, dim: Dim) -> int:
        """Entries of a tensor dimension."""
        if dim == "query":
            return self.heads * self.head_dim
        if dim == "key_value":
            return self.kv_heads * self.head_dim
        return int(getattr(self, dim))

    def __str__(self) -> str:
        """One line for tables and messages."""
        return (
            f"{self.layers} layers, {self.heads} heads / {self.kv_heads} KV of {self.head_dim}, "
            f"FFN {self.ffn}, hidden {self.hidden}, vocabulary {self.vocab}"
        )


def shape_of(config: Any, family: Family) -> Shape:
    """Read the shape from a transformers config."""
    keys = family.config
    heads = getattr(config, keys.heads)
    kv_heads = getattr(config, keys.kv_heads, None) or heads
    hidden = getattr(config, keys.hidden)
    return Shape(
        layers=getattr(config, keys.layers),
        kv_heads=kv_heads,
        heads_per_group=heads // kv_heads,
        head_dim=getattr(config, keys.head_dim, None) or hidden // heads,
        ffn=getattr(config, keys.ffn),
        hidden=hidden,
        vocab=getattr(config, keys.vocab),
    )


def resolve_shape(
    source: Shape, wanted: ShapeSettings, axes: tuple[Axis, ...] | None = None
) -> Shape:
    """The drafter's full shape, or the reason why it can't be had.

    Args:
        source: the shape that is cut.
        wanted: what the recipe asks for; None keeps the source's count.
        axes: the axes that may be cut; None allows all.

    Raises:
        RequestError: a count is illegal (the legal ones are listed), or on a forbidden axis.
    """
    values = {k: v for k, v in asdict(wanted).items() if v is not None and k != "heads"}
    if wanted.heads is not None:
        values |= _from_heads(source, wanted)
    for axis in AXES:
        value, most = values.get(axis, getattr(source, axis)), getattr(source, axis)
        if value > most:
            raise RequestError(
                f"recipe.prune.shape.{axis}: {value} is not among {_legal(most)}, which the "
                "source has"
            )
        if value != most and axes is not None and axis not in axes:
            raise RequestError(
                f"recipe.prune.shape.{axis}: {value} asks to cut {axis} from {most}, but "
                f"recipe.prune.axes has only {', '.join(axes) or 'nothing'}; add {axis} to it"
            )
    return replace(source, **values)


def changed_axes(source: Shape, drafter: Shape) -> tuple[Axis, ...]:
    """The axes along which `drafter` is smaller."""
    return tuple(a for a in AXES if getattr(drafter, a) != getattr(source, a))


def _from_heads(source: Shape, wanted: ShapeSettings) -> dict[str, int]:
    """Split a number of query heads into groups; multi-head attention cuts whole groups of one."""
    heads = wanted.heads or source.heads
    if wanted.heads_per_group is not None:
        raise RequestError(
            "recipe.prune.shape.heads: give either heads or heads_per_group, not both"
        )
    if wanted.kv_heads is not None and wanted.kv_heads > source.kv_heads:
        raise RequestError(
            f"recipe.prune.shape.kv_heads: {wanted.kv_heads} is not among "
            f"{_legal(source.kv_heads)}, which the source has"
        )
    alone = source.heads_per_group == 1
    kv_heads = wanted.kv_heads or (min(heads, source.heads) if alone else source.kv_heads)
    per_group, rest = divmod(heads, kv_heads)
    if rest or not per_group or per_group > source.heads_per_group:
        whole = alone and wanted.kv_heads is None
        legal = (
            _legal(source.heads)
            if whole
            else ", ".join(str(kv_heads * m) for m in range(1, source.heads_per_group + 1))
        )
        raise RequestError(
            f"recipe.prune.shape.heads: {heads} query heads don't share {kv_heads} KV heads "
            f"evenly; legal {'here' if whole else f'with {kv_heads} KV heads'}: {legal}"
        )
    return {"kv_heads": kv_heads, "heads_per_group": per_group}


def _legal(most: int) -> str:
    return ", ".join(map(str, range(1, most + 1))) if most <= 16 else f"1 … {most}"
