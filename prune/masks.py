"""Hard-concrete masks and how they act on a model.

A mask multiplies activations through hooks; no weight is touched and no model code copied.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from draftsmith.checkpoints.families.base import AXES, WITHIN, Axis, Family, Stack
from draftsmith.checkpoints.shape import Shape
from draftsmith.checkpoints.slicing import Selection

# Louizos et al. 2018, section 4.2.
GAMMA, ZETA, BETA = -0.1, 1.1, 2 / 3
# LLM-Shearing keeps log alpha between log 1e-2 and log 1e2.
LOG_ALPHA_BOUND = math.log(1e2)
# Keeps the logarithms of the noise finite.
_EPSILON = 1e-6

Masks = Mapping[Axis, Tensor]


def mask_shape(axis: Axis, shape: Shape) -> tuple[int, ...]:
    """Dimensions of an axis' mask: one value for each thing that can be cut."""
    outer = WITHIN.get(axis)
    return (*(mask_shape(outer, shape) if outer else ()), getattr(shape, axis))


def sample(log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Draw hard-concrete z in [0, 1] (Louizos et al. 2018, equations 10 to 12).

    Args:
        log_alpha: location of each mask.
        noise: uniform on (0, 1), same shape.
    """
    u = noise.clamp(_EPSILON, 1 - _EPSILON)
    s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def deterministic(log_alpha: Tensor) -> Tensor:
    """The z in [0, 1] of a mask without noise (Louizos et al. 2018, equation 13)."""
    return (torch.sigmoid(log_alpha) * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def probability_open(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0) (Louizos et al. 2018, equation 12)."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


def share_open(log_alpha: Tensor) -> Tensor:
    """What a mask counts for: P(z ≠ 0) on the scale from its lower bound, 0, to its upper, 1.

    At the lower bound 5 of 100 closed masks are still open. Where 4 layers of 30 stay, those cut
    would count for 1.2, and no decided choice could meet the constraint.
    """
    bounds = torch.tensor([-LOG_ALPHA_BOUND, LOG_ALPHA_BOUND], dtype=torch.float64)
    closed, opened = probability_open(bounds).tolist()
    return (probability_open(log_alpha) - closed) / (opened - closed)


class LearnableMasks(nn.Module):
    """The log alpha of every mask on the axes that are cut.

    Attributes:
        log_alpha: axis -> parameter, of `mask_shape`.
    """

    def __init__(self, axes: tuple[Axis, ...], shape: Shape, init: float) -> None:
        """All masks alike, at log alpha `init`."""
        super().__init__()
        self.axes = axes
        self.log_alpha = nn.ParameterDict(
            {axis: nn.Parameter(torch.full(mask_shape(axis, shape), init)) for axis in axes}
        )

    def sample(self, generator: torch.Generator) -> dict[Axis, Tensor]:
        """One draw of every mask; the noise comes from `generator`, on the masks' device."""
        return {
            axis: sample(
                self.log_alpha[axis],
                torch.rand(
                    self.log_alpha[axis].shape,
                    generator=generator,
                    device=self.log_alpha[axis].device,
                ),
            )
            for axis in self.axes
        }

    def gates(self) -> dict[Axis, Tensor]:
        """The masks without noise, as after training."""
        return {axis: deterministic(self.log_alpha[axis]) for axis in self.axes}

    def expected_share(self, axis: Axis) -> Tensor:
        """Expected kept share along an axis: [] for layers and hidden, else [layers, …]."""
        return share_open(self.log_alpha[axis]).mean(-1)

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep log alpha where its gradient lives."""
        for parameter in self.log_alpha.values():
            parameter.clamp_(-LOG_ALPHA_BOUND, LOG_ALPHA_BOUND)

    def parts(self, count: int) -> tuple[int, ...]:
        """The blocks with the highest log alpha; ties are broken by index.

        Where attention and FFN are cut apart, the halves with the highest sum that make blocks,
        each an attention and an FFN of its layer or a later one: 2 l is the attention of layer l,
        2 l + 1 its FFN.

        Args:
            count: blocks to keep.
        """
        attention = self.log_alpha["layers"].detach()
        if "ffn_layers" not in self.axes:
            return _top(attention, count)
        ffn = self.log_alpha["ffn_layers"].detach()
        return _alternating(torch.stack([attention, ffn], dim=1).flatten().tolist(), 2 * count)

    def select(
        self, source: Shape, drafter: Shape, parts: tuple[int, ...] | None = None
    ) -> Selection:
        """The indices with the highest log alpha, exactly as many as the shape wants.

        Ties are broken by index. `parts` fixes the kept blocks or halves from outside.
        """
        values = {axis: p.detach() for axis, p in self.log_alpha.items()}
        if parts is None and "layers" in values:
            parts = self.parts(drafter.layers)
        ffn_layers = None
        if parts is not None and "ffn_layers" in values:
            ffn_layers = [part // 2 for part in parts if part % 2]
            parts = tuple(part // 2 for part in parts if not part % 2)

        def choose(axis: Axis, place: tuple[int, ...]) -> Iterable[int]:
            if axis == "layers" and parts is not None:
                return parts
            if axis not in values:
                return range(getattr(source, axis))
            return _top(values[axis][place], getattr(drafter, axis))

        selection: Selection = Selection.choose(source, choose, ffn_layers)
        return selection


def hard_masks(selection: Selection, source: Shape) -> dict[Axis, Tensor]:
    """The 0/1 masks under which the source computes what the compact model computes."""
    masks: dict[Axis, Tensor] = {}
    for axis in (*AXES, "ffn_layers"):
        if getattr(source, axis) and getattr(selection, axis) is not None:
            masks[axis] = torch.zeros(mask_shape(axis, source))
            for place, kept in selection.places(axis):
                masks[axis][place][list(kept)] = 1
    return masks


@contextmanager
def applied(model: Any, family: Family, shape: Shape, masks: Masks) -> Iterator[None]:
    """Let masks act on every forward inside the context.

    Args:
        model: a transformers model of the family.
        family: its table, which names the modules.
        shape: its shape.
        masks: axis -> values in [0, 1] of `mask_shape`; axes left out are open.
    """
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for stack in family.stacks:
            _apply_to_blocks(hooks, modules, stack, shape, masks)
            if "hidden" in masks:
                _apply_to_stream(hooks, modules, stack, shape, masks["hidden"])
        if (vocab := masks.get("vocab")) is not None:
            hooks.callback(model.register_forward_hook(_close_tokens(vocab)).remove)
        yield


def _apply_to_blocks(
    hooks: ExitStack, modules: dict[str, nn.Module], stack: Stack, shape: Shape, masks: Masks
) -> None:
    """Masks of heads, FFN channels and whole blocks."""
    for layer in range(getattr(shape, stack.layers)):
        for axis, name in stack.inputs.items():
            heads = axis == "kv_heads"
            z = _head_mask(masks, layer, shape) if heads else _inner(masks, axis, layer)
            if z is not None:
                module = modules[name.format(layer=layer)]
                hooks.callback(module.register_forward_pre_hook(_scale_input(z, module)).remove)
        if (z := _inner(masks, stack.layers, layer)) is None:
            continue
        if "ffn_layers" in masks and stack.additions is not None:
            halves = zip(stack.additions, (z, masks["ffn_layers"][layer]), strict=True)
            for name, half in halves:
                module = modules[name.format(layer=layer)]
                hooks.callback(module.register_forward_hook(_scale_output(half)).remove)
            continue
        block = modules[stack.block.format(layer=layer)]
        if stack.returns_more or not _skipped(hooks, block, z):
            hooks.callback(block.register_forward_hook(_scale_addition(z)).remove)


def _apply_to_stream(
    hooks: ExitStack, modules: dict[str, nn.Module], stack: Stack, shape: Shape, z: Tensor
) -> None:
    """The mask of the residual stream, which is read through norms alone.

    Where the stream itself is normalised, blocks read it directly: what enters the first is
    masked too. A convolution's channels that become the stream are masked where they arise.
    """
    for template in stack.norms:
        layers = range(getattr(shape, stack.layers)) if "{layer}" in template else range(1)
        for layer in layers:
            norm = modules[template.format(layer=layer)]
            if stack.centred:
                read, write = _scale_input(z), _layer_norm_of_kept(z)
            else:
                # Norm(c x) / c with c = √(width / kept) divides by the kept dimensions alone, and
                # gives epsilon its weight.
                c = (z.numel() / z.sum().clamp_min(_EPSILON)).sqrt()
                read, write = _scale_input(z * c), _scale_output(1 / c)
            hooks.callback(norm.register_forward_pre_hook(read).remove)
            hooks.callback(norm.register_forward_hook(write).remove)
    if stack.post_norm:
        first = modules[stack.block.format(layer=0)]
        hooks.callback(first.register_forward_pre_hook(_scale_input(z)).remove)
    for name in stack.channels:
        hooks.callback(modules[name].register_forward_hook(_scale_channels(z)).remove)


def _top(values: Tensor, count: int) -> tuple[int, ...]:
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    return tuple(sorted(order.tolist()))


def _alternating(values: list[float], count: int) -> tuple[int, ...]:
    """The ascending, alternately even and odd indices, even first, with the highest sum.

    Args:
        values: of all indices.
        count: how many are wanted, an even number.
    """
    # best[c]: sum and indices of c chosen ones so far; of equal sums the earlier indices.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for index, value in enumerate(values):
        longer = [
            (total + value, (*chosen, index))
            for place, (total, chosen) in enumerate(best)
            if place % 2 == index % 2 and place < count
        ]
        for total, chosen in longer:
            if len(chosen) == len(best):
                best.append((total, chosen))
            elif total > best[len(chosen)][0]:
                best[len(chosen)] = (total, chosen)
    return best[count][1]


def _inner(masks: Masks, axis: Axis, layer: int) -> Tensor | None:
    return masks[axis][layer] if axis in masks else None


def _head_mask(masks: Masks, layer: int, shape: Shape) -> Tensor | None:
    """Mask of a block's query heads, [heads]."""
    if "kv_heads" not in masks and "heads_per_group" not in masks:
        return None
    heads = torch.ones(shape.kv_heads, shape.heads_per_group)
    if "kv_heads" in masks:
        heads = heads.to(masks["kv_heads"].device) * masks["kv_heads"][layer][:, None]
    if "heads_per_group" in masks:
        heads = heads.to(masks["heads_per_group"].device) * masks["heads_per_group"][layer]
    return heads.flatten()


def _skipped(hooks: ExitStack, block: nn.Module, z: Tensor) -> bool:
    """Let a closed block pass its input on without computing; whether it is closed.

    A hard-concrete z of exactly 0 has no gradient, so nothing is lost, and late in a run most
    blocks are closed. Only on a CPU: elsewhere, looking at z would wait for the device. Not where
    weights learn: theirs must be a gradient of 0, since ZeRO 3 takes that of an earlier step for
    one that is missing, and a plain optimizer leaves the weight alone.
    """
    learning = torch.is_grad_enabled() and any(p.requires_grad for p in block.parameters())
    if learning or z.device.type != "cpu" or float(z.detach()) != 0.0:
        return False
    block.forward = lambda hidden_states, *args, **kwargs: hidden_states
    hooks.callback(lambda: delattr(block, "forward"))
    return True


class _Scaled(torch.autograd.Function):
    """x · z, which keeps its result for the backward pass instead of x.

    What reads the result keeps it anyway, so that a mask costs no memory: ∂z = Σ ∂y · y / z. Where
    z is 0 it gets no gradient; a hard-concrete 0 has none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, z: Tensor) -> Tensor:
        y = x * z
        ctx.save_for_backward(y, z)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, z = ctx.saved_tensors
        of_x, of_z = ctx.needs_input_grad
        summed = (gradient * y).sum_to_size(z.shape) / z if of_z else None
        return (
            gradient * z if of_x else None,
            None if summed is None else summed.where(z != 0, torch.zeros_like(z)),
        )


def _scaled(x: Tensor, z: Tensor) -> Tensor:
    scaled: Tensor = _Scaled.apply(x, z.to(x.dtype))
    return scaled


def _scale_input(z: Tensor, module: nn.Module | None = None) -> Callable[..., Any]:
    """Multiply a module's first input; a head's value covers all its channels."""
    # Of the module, for a weight may lie in parts elsewhere (ZeRO 3).
    width = z.numel() if module is None else int(module.in_features)  # type: ignore[arg-type]
    wide = z.repeat_interleave(width // z.numel())

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (_scaled(args[0], wide), *args[1:])

    return hook


def _scale_output(z: Tensor) -> Callable[..., Any]:
    """Multiply what a module computes; what else it returns stays."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (_scaled(output[0], z), *output[1:])
        return _scaled(output, z)

    return hook


def _scale_channels(z: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...], output_BCT: Tensor) -> Tensor:
        return output_BCT * z.to(output_BCT.dtype)[:, None]

    return hook


def _scale_addition(z: Tensor) -> Callable[..., Any]:
    """Scale what a block adds to the residual stream; what else it returns stays."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (args[0] + z.to(output[0].dtype) * (output[0] - args[0]), *output[1:])
        return args[0] + z.to(output.dtype) * (output - args[0])

    return hook


def _close_tokens(z_V: Tensor) -> Callable[..., Any]:
    """Make the logits of cut tokens -inf."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> Any:
        output["logits"] = output.logits + z_V.log().to(output.logits.dtype)
        return output

    return hook


def _layer_norm_of_kept(z: Tensor) -> Callable[..., Any]:
    """Replace a LayerNorm's statistics by those of the kept dimensions.

    Its output is not zero where its input is, so the mask acts on it once more.
    """

    def hook(module: nn.LayerNorm, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x, kept = args[0].float(), z.float()
        count = kept.sum()
        centred = x - x.sum(-1, keepdim=True) / count
        variance = (kept * centred.square()).sum(-1, keepdim=True) / count
        normal = centred * (variance + module.eps).rsqrt()
        affine = normal * module.weight.float() + module.bias.float()
        return (affine * kept).to(output.dtype)

    return hook
