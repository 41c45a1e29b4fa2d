"""From a choice of indices to the compact model: one slicer for every family and axis."""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.checkpoints.families.base import Dim, Family
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.errors import DraftsmithError

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Selection:
    """What is kept, in the source's numbering; every tuple is ascending.

    Attributes:
        layers: kept blocks.
        kv_heads: for each kept block, the kept KV heads.
        heads: for each kept block and kept KV head, the kept query heads of its group
            (0 … heads_per_group - 1).
        ffn: for each kept block, the kept FFN channels.
        hidden: the kept dimensions of the residual stream.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[tuple[int, ...], ...], ...]
    ffn: tuple[tuple[int, ...], ...]
    hidden: tuple[int, ...]

    @classmethod
    def of_layers(cls, shape: Shape, layers: Iterable[int]) -> "Selection":
        """Keep some blocks of `shape`, each at full width."""
        kept = tuple(layers)
        groups = tuple(range(shape.kv_heads))
        return cls(
            layers=kept,
            kv_heads=(groups,) * len(kept),
            heads=((tuple(range(shape.heads_per_group)),) * len(groups),) * len(kept),
            ffn=(tuple(range(shape.ffn)),) * len(kept),
            hidden=tuple(range(shape.hidden)),
        )

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Selection":
        """Read what `to_plain` wrote."""
        return cls(**{key: _tuples(value) for key, value in plain.items()})

    def to_plain(self) -> dict[str, Any]:
        """As lists, for JSON."""
        return asdict(self)

    def shape(self, source: Shape) -> Shape:
        """The shape that comes out.

        Raises:
            DraftsmithError: the counts differ between layers or groups, naming where.
        """
        return Shape(
            layers=len(self.layers),
            kv_heads=_uniform("kv_heads", self.layers, map(len, self.kv_heads)),
            heads_per_group=_uniform(
                "heads_per_group",
                [
                    layer
                    for layer, groups in zip(self.layers, self.heads, strict=True)
                    for _ in groups
                ],
                [len(group) for groups in self.heads for group in groups],
            ),
            head_dim=source.head_dim,
            ffn=_uniform("ffn", self.layers, map(len, self.ffn)),
            hidden=len(self.hidden),
            vocab=source.vocab,
        )

    def index(self, dim: Dim, layer: int | None, source: Shape) -> Tensor | None:
        """Indices kept along a dimension; None keeps all.

        Args:
            dim: the dimension's axis.
            layer: position among the kept layers, for dimensions inside a block.
            source: the shape that is cut.
        """
        if dim in ("vocab", "head_dim"):
            return None
        if dim == "hidden":
            return torch.tensor(self.hidden)
        assert layer is not None
        if dim == "ffn":
            return torch.tensor(self.ffn[layer])
        per_head = torch.arange(source.head_dim)
        starts = (
            list(self.kv_heads[layer])
            if dim == "key_value"
            else [
                group * source.heads_per_group + head
                for group, heads in zip(self.kv_heads[layer], self.heads[layer], strict=True)
                for head in heads
            ]
        )
        return (torch.tensor(starts)[:, None] * source.head_dim + per_head).flatten()


def template_of(name: str) -> tuple[str, int | None]:
    """Split a weight name into its template and block number."""
    match = _LAYER.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}{{layer}}{name[match.end() :]}", int(match.group())


def slice_state_dict(
    state: Mapping[str, Tensor], family: Family, source: Shape, selection: Selection
) -> dict[str, Tensor]:
    """Cut every tensor of `state` to `selection` and renumber the blocks.

    Raises:
        DraftsmithError: a tensor that the family's table does not know.
    """
    position = {layer: i for i, layer in enumerate(selection.layers)}
    compact: dict[str, Tensor] = {}
    for name, tensor in state.items():
        template, layer = template_of(name)
        if template not in family.tensors:
            raise DraftsmithError(
                f"{name}: not in the table of family {family.name}; report the model, please"
            )
        if layer is not None and layer not in position:
            continue
        at = None if layer is None else position[layer]
        for axis, dim in enumerate(family.tensors[template]):
            index = selection.index(dim, at, source)
            if index is not None:
                tensor = tensor.index_select(axis, index.to(tensor.device))
        # A copy of its own: nothing of the source stays alive, nothing is shared on saving.
        compact[template.format(layer=at)] = tensor.detach().clone()
    return compact


def compact_config(config: Any, family: Family, selection: Selection) -> Any:
    """The config of the compact model: counts, per-layer lists, an explicit head_dim."""
    source = shape_of(config, family)
    shape = selection.shape(source)
    new = copy.deepcopy(config)
    keys = family.config
    for key in family.per_layer_config:
        entries = getattr(config, key, None)
        if entries is not None:
            setattr(new, key, [entries[layer] for layer in selection.layers])
    for key in family.per_layer_counts:
        count = getattr(config, key, None)
        if count is not None:
            setattr(new, key, sum(layer < count for layer in selection.layers))
    setattr(new, keys.layers, shape.layers)
    setattr(new, keys.heads, shape.heads)
    setattr(new, keys.kv_heads, shape.kv_heads)
    setattr(new, keys.head_dim, shape.head_dim)
    setattr(new, keys.ffn, shape.ffn)
    setattr(new, keys.hidden, shape.hidden)
    return new


def compact_model(model: Any, family: Family, selection: Selection) -> Any:
    """Build the compact model of `selection` from a loaded transformers model.

    Returns:
        A model of the same class and dtype on the CPU, in eval mode; tied weights stay tied.
    """
    config = compact_config(model.config, family, selection)
    state = slice_state_dict(model.state_dict(), family, shape_of(model.config, family), selection)
    compact = type(model)._from_config(config, dtype=model.dtype)
    compact.load_state_dict(state, strict=True)
    if getattr(model, "generation_config", None) is not None:
        compact.generation_config = copy.deepcopy(model.generation_config)
    return compact.eval()


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list | tuple) else value


def _uniform(axis: str, layers: Iterable[int], counts: Iterable[int]) -> int:
    seen: dict[int, int] = {}
    for layer, count in zip(layers, counts, strict=True):
        seen.setdefault(count, layer)
    if len(seen) != 1:
        detail = ", ".join(f"{count} in layer {layer}" for count, layer in seen.items())
        raise DraftsmithError(f"{axis} differs between layers: {detail}; a drafter is uniform")
    return next(iter(seen))
