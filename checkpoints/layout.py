"""What a config implies without any weight: tensors, parameters, bytes, keys and values.

transformers builds the model on the meta device, so models of any size are counted in a second.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from draftsmith.checkpoints.families.base import AXES, Axis, Family
from draftsmith.checkpoints.shape import Shape, resolve_shape, shape_of
from draftsmith.checkpoints.slicing import Selection, compact_config
from draftsmith.errors import DraftsmithError


@dataclass(frozen=True)
class Layout:
    """The tensors of a model.

    Attributes:
        shapes: name -> shape, of every tensor of the state dict.
        aliases: name -> the earlier name of the same tensor (a tied head, a shared embedding).
        trained: names of parameters; the others are buffers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    trained: frozenset[str]

    def parameters(self, count_head: str | None = None) -> int:
        """Parameters, each tensor once.

        Args:
            count_head: name of a head to count though it is tied, as some papers do.
        """
        return sum(
            prod(shape)
            for name, shape in self.shapes.items()
            if name in self.trained and (name not in self.aliases or name == count_head)
        )


def layout_of(config: Any, family: Family) -> Layout:
    """The tensors that a model of this config has, as transformers builds it."""
    model = meta_model(config, family)
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    for name, tensor in state.items():
        first.setdefault(id(tensor), name)
    head = f"{family.head}.weight"
    return Layout(
        shapes={name: tuple(tensor.shape) for name, tensor in state.items()},
        # transformers ties some heads whatever the config says, until weights are loaded.
        aliases={
            n: first[id(t)]
            for n, t in state.items()
            if first[id(t)] != n and (n != head or family.is_tied(config))
        },
        trained=frozenset(n for n, t in state.items() if isinstance(t, torch.nn.Parameter)),
    )


def meta_model(config: Any, family: Family, device: str = "meta") -> Any:
    """The model of a config as transformers builds it; on the meta device it takes no memory."""
    import transformers

    with torch.device(device):
        return getattr(transformers, family.auto).from_config(config)


def with_counts(config: Any, family: Family, counts: Mapping[str, int | None]) -> Any:
    """A copy of a config with other counts, as pruning would write it.

    Args:
        config: the source's.
        family: its table.
        counts: as for `resolve_shape`.

    Raises:
        RequestError: a count is illegal.
    """
    source = shape_of(config, family)
    shape = resolve_shape(source, counts, family)
    selection: Selection = Selection.choose(source, lambda axis, place: range(getattr(shape, axis)))
    return compact_config(config, family, selection)


def parameters_per_axis(config: Any, family: Family) -> dict[Axis, int]:
    """What one entry less along each axis saves, in parameters: one layer, one head, one channel.

    Where axes are tied, the smallest step that all of them allow, divided by its length.
    """
    source = shape_of(config, family)
    whole = layout_of(config, family).parameters()
    saved: dict[Axis, int] = {}
    for axis in AXES:
        if axis not in family.axes or axis == "vocab":
            continue
        for count in range(getattr(source, axis) - 1, 0, -1):
            try:
                smaller = with_counts(config, family, {axis: count})
            except DraftsmithError:
                continue
            cut = getattr(source, axis) - count
            saved[axis] = (whole - layout_of(smaller, family).parameters()) // cut
            break
    return saved


def cache_bytes(
    config: Any, family: Family, tokens: int, *, bytes_per_value: int = 2, encoder_tokens: int = 0
) -> int:
    """Bytes of keys and values for one text.

    Args:
        config: of the model.
        family: its table.
        tokens: length of the text; a layer with a window keeps no more than the window.
        bytes_per_value: 2 for half precision.
        encoder_tokens: positions that the encoder gives to cross attention.
    """
    shape = shape_of(config, family)
    kept = sum(min(tokens, window or tokens) for window in _windows(config, shape))
    own = kept * shape.kv_heads * shape.head_dim
    cross = shape.layers * encoder_tokens * shape.cross_heads * shape.head_dim
    return 2 * bytes_per_value * (own + cross)


def narrowest_window(config: Any, family: Family) -> int | None:
    """Tokens of the narrowest attention window of a decoder; none: all layers see everything."""
    windows = _windows(config, shape_of(config, family))
    return min((window for window in windows if window), default=None)


def _windows(config: Any, shape: Shape) -> list[int | None]:
    """Each decoder layer's attention window; None: it sees everything."""
    window = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * shape.layers
    return [window if kind == "sliding_attention" else None for kind in types]
