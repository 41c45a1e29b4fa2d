"""Ways to choose what is kept without training, to compare masks with.

Each gives every thing that can be cut a score; the highest are kept, as those with the highest log
alpha of learned masks are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.families.base import Axis, Family
from draftsmith.checkpoints.shape import Shape, changed_axes
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.seeds import derived_seed
from draftsmith.data.traces import TraceRow
from draftsmith.distill.batches import BatchStream
from draftsmith.distill.states import hidden_at_answers
from draftsmith.errors import RequestError
from draftsmith.prune.masks import LearnableMasks, mask_shape

Scores = dict[Axis, Tensor]
# What `watched` scores.
WATCHED: tuple[Axis, ...] = ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")
STACKS: tuple[Axis, ...] = ("layers", "encoder_layers")
# Batches of traces over which activations are averaged.
CALIBRATION_BATCHES = 16
# Tells these draws from others of the same seed.
_RANDOM = 11


def select_by_position(method: str, source: Shape, drafter: Shape) -> Selection:
    """`first`, `last` or `uniform`: looks at nothing.

    Widths are cut to their first entries (`last`: to their last).

    Args:
        method: one of the three.
        source: the shape that is cut.
        drafter: the shape that comes out.
    """
    direction = 1.0 if method == "last" else -1.0
    scores = {
        axis: direction * torch.arange(getattr(source, axis)).expand(mask_shape(axis, source))
        for axis in changed_axes(source, drafter)
    }
    for axis in scores.keys() & set(STACKS) if method == "uniform" else ():
        # First and last always stay: they read the embeddings and write for the head.
        most = getattr(source, axis)
        spread = torch.linspace(0, most - 1, getattr(drafter, axis)).round().long()
        scores[axis] = torch.zeros(most).index_fill(0, spread, 1.0)
    return select(scores, source, drafter)


def select_at_random(source: Shape, drafter: Shape, seed: int) -> Selection:
    """Anything, by the seed."""
    generator = torch.Generator().manual_seed(derived_seed(seed, _RANDOM))
    axes = changed_axes(source, drafter)
    scores = {axis: torch.rand(mask_shape(axis, source), generator=generator) for axis in axes}
    return select(scores, source, drafter)


def select_by_activations(
    method: str,
    model: Any,
    family: Family,
    source: Shape,
    drafter: Shape,
    rows: Sequence[TraceRow],
    *,
    batch: int,
    max_length: int,
    seed: int,
) -> Selection:
    """`block-influence` (layers alone) or `importance` (widths as well), averaged over traces.

    Args:
        method: one of the two.
        model: the source.
        family: its table.
        source: its shape.
        drafter: the shape that comes out.
        rows: of the traces.
        batch: rows that are run together.
        max_length: most tokens of a row.
        seed: of the rows that are looked at.

    Raises:
        RequestError: `block-influence` is asked to cut widths.
    """
    check_method(method, source, drafter)
    axes = changed_axes(source, drafter)
    stream = BatchStream(rows, batch, max_length, seed)
    count = min(CALIBRATION_BATCHES, stream.batches_per_epoch)
    with watched(model, family, source) as scores, torch.inference_mode():
        for number in range(count):
            hidden_at_answers(model, stream[number].to(model.device))
    return select({axis: scores[axis] for axis in axes}, source, drafter)


def check_method(method: str, source: Shape, drafter: Shape) -> None:
    """Refuse a method that can't cut to a shape.

    Raises:
        RequestError: `block-influence` is asked to cut widths, or either an encoder.
    """
    changed = changed_axes(source, drafter)
    if method == "importance" and (other := [axis for axis in changed if axis not in WATCHED]):
        raise RequestError(
            f"recipe.prune.method: importance: it looks at {', '.join(WATCHED)}, but the shape "
            f"cuts {', '.join(other)} as well; use masks"
        )
    if method == "block-influence" and (other := [axis for axis in changed if axis != "layers"]):
        raise RequestError(
            f"recipe.prune.method: block-influence: it ranks layers, but the shape cuts "
            f"{', '.join(other)} as well; use {'importance' if {*other} <= {*WATCHED} else 'masks'}"
        )


def select(scores: Mapping[Axis, Tensor], source: Shape, drafter: Shape) -> Selection:
    """The highest scores of every axis, ties by index."""
    masks = LearnableMasks(tuple(scores), source, init=0.0)
    with torch.no_grad():
        for axis, values in scores.items():
            masks.log_alpha[axis].copy_(values)
    return masks.select(source, drafter)


@contextmanager
def watched(model: Any, family: Family, shape: Shape) -> Iterator[Scores]:
    """Add up what activations say of every axis, in each forward pass inside the context.

    - layers: block influence, 1 - cos(what a block reads, what it hands on) (Men et al. 2024,
      ShortGPT),
    - ffn: |activation| of each channel that the down projection reads; heads: the norm of each
      head that the output projection reads, KV heads the sum over their group; hidden: |output| of
      every norm over the residual stream (Muralidharan et al. 2024, Minitron).

    Sums over tokens, of the decoder; all tokens count alike, padding is not told apart.
    """
    stack = family.stacks[0]
    modules: dict[str, nn.Module] = dict(model.named_modules())
    scores: Scores = {axis: torch.zeros(mask_shape(axis, shape)) for axis in WATCHED}

    def influence(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            after = output[0] if isinstance(output, tuple) else output
            similarity = nn.functional.cosine_similarity(args[0].float(), after.float(), dim=-1)
            scores["layers"][layer] += (1 - similarity).sum().cpu()

        return hook

    def heads(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            grouped = args[0].float().unflatten(-1, (shape.kv_heads, shape.heads_per_group, -1))
            norms = grouped.norm(dim=-1).flatten(0, -3).sum(0).cpu()
            scores["heads_per_group"][layer] += norms
            scores["kv_heads"][layer] += norms.sum(-1)

        return hook

    def channels(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            scores["ffn"][layer] += args[0].float().abs().flatten(0, -2).sum(0).cpu()

        return hook

    def stream(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        scores["hidden"] += output.float().abs().flatten(0, -2).sum(0).cpu()

    with ExitStack() as hooks:
        for layer in range(shape.layers):
            block = modules[stack.block.format(layer=layer)]
            hooks.callback(block.register_forward_hook(influence(layer)).remove)
            for axis, watch in (("kv_heads", heads), ("ffn", channels)):
                module = modules[stack.inputs[axis].format(layer=layer)]  # type: ignore[index]
                hooks.callback(module.register_forward_pre_hook(watch(layer)).remove)
        for template in stack.norms:
            for layer in range(shape.layers if "{layer}" in template else 1):
                norm = modules[template.format(layer=layer)]
                hooks.callback(norm.register_forward_hook(stream).remove)
        yield scores
