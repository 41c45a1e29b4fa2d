"""Hard-concrete masks and how they act on a model.

A mask multiplies activations through hooks; no weight is touched and no model code copied.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.checkpoints.families.base import Axis, Family
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
    return {
        "layers": (shape.layers,),
        "kv_heads": (shape.layers, shape.kv_heads),
        "heads_per_group": (shape.layers, shape.kv_heads, shape.heads_per_group),
        "ffn": (shape.layers, shape.ffn),
        "hidden": (shape.hidden,),
    }[axis]


def sample(log_alpha: Tensor, noise: Tensor) -> Tensor:
    """Draw hard-concrete z in [0, 1] (Louizos et al. 2018, equations 10 to 12).

    Args:
        log_alpha: location of each mask.
        noise: uniform on (0, 1), same shape.
    """
    u = noise.clamp(_EPSILON, 1 - _EPSILON)
    s = torch.sigmoid((u.log() - (-u).log1p() + log_alpha) / BETA)
    return (s * (ZETA - GAMMA) + GAMMA).clamp(0.0, 1.0)


def probability_open(log_alpha: Tensor) -> Tensor:
    """P(z ≠ 0) (Louizos et al. 2018, equation 12)."""
    return torch.sigmoid(log_alpha - BETA * math.log(-GAMMA / ZETA))


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

    def expected_share(self, axis: Axis) -> Tensor:
        """Expected kept share along an axis: [] for layers and hidden, else [layers, …]."""
        return probability_open(self.log_alpha[axis]).mean(-1)

    @torch.no_grad()
    def clamp(self) -> None:
        """Keep log alpha where its gradient lives."""
        for parameter in self.log_alpha.values():
            parameter.clamp_(-LOG_ALPHA_BOUND, LOG_ALPHA_BOUND)

    def select(
        self, source: Shape, drafter: Shape, layers: tuple[int, ...] | None = None
    ) -> Selection:
        """The indices with the highest log alpha, exactly as many as the shape wants.

        Ties are broken by index. `layers` fixes the kept layers from outside.
        """
        full = Selection.of_layers(source, range(source.layers))
        values = {axis: p.detach() for axis, p in self.log_alpha.items()}
        if layers is None:
            cut = "layers" in values
            layers = _top(values["layers"], drafter.layers) if cut else full.layers
        kv_heads, heads, ffn = [], [], []
        for layer in layers:
            groups = (
                _top(values["kv_heads"][layer], drafter.kv_heads)
                if "kv_heads" in values
                else full.kv_heads[layer]
            )
            kv_heads.append(groups)
            heads.append(
                tuple(
                    _top(values["heads_per_group"][layer, group], drafter.heads_per_group)
                    if "heads_per_group" in values
                    else full.heads[layer][group]
                    for group in groups
                )
            )
            ffn.append(
                _top(values["ffn"][layer], drafter.ffn) if "ffn" in values else full.ffn[layer]
            )
        hidden = _top(values["hidden"], drafter.hidden) if "hidden" in values else full.hidden
        return Selection(layers, tuple(kv_heads), tuple(heads), tuple(ffn), hidden)


def hard_masks(selection: Selection, source: Shape) -> dict[Axis, Tensor]:
    """The 0/1 masks under which the source computes what the compact model computes."""
    masks: dict[Axis, Tensor] = {
        axis: torch.zeros(mask_shape(axis, source))
        for axis in ("layers", "kv_heads", "heads_per_group", "ffn", "hidden")
    }
    masks["hidden"][list(selection.hidden)] = 1
    for i, layer in enumerate(selection.layers):
        masks["layers"][layer] = 1
        masks["kv_heads"][layer, list(selection.kv_heads[i])] = 1
        for group, heads in zip(selection.kv_heads[i], selection.heads[i], strict=True):
            masks["heads_per_group"][layer, group, list(heads)] = 1
        masks["ffn"][layer, list(selection.ffn[i])] = 1
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
    names = family.modules
    with ExitStack() as stack:

        def before(name: str, hook: Callable[..., Any]) -> None:
            stack.callback(modules[name].register_forward_pre_hook(hook).remove)

        def after(name: str, hook: Callable[..., Any]) -> None:
            stack.callback(modules[name].register_forward_hook(hook).remove)

        for layer in range(shape.layers):
            if (heads := _head_mask(masks, layer, shape)) is not None:
                before(names.attention_out.format(layer=layer), _scale_input(heads))
            if "ffn" in masks:
                before(names.ffn_down.format(layer=layer), _scale_input(masks["ffn"][layer]))
            block = names.block.format(layer=layer)
            if "layers" in masks and not _skipped(stack, modules[block], masks["layers"][layer]):
                after(block, _scale_addition(masks["layers"][layer]))
        if (hidden := masks.get("hidden")) is not None:
            # The residual stream is read through norms alone: masked there, it is masked.
            for norm in _residual_norms(family, shape):
                before(norm, _scale_input(hidden))
                after(norm, _norm_of_kept(hidden, names.norm_epsilon))
        yield


def _top(values: Tensor, count: int) -> tuple[int, ...]:
    order = torch.sort(values, descending=True, stable=True).indices[:count]
    return tuple(sorted(order.tolist()))


def _residual_norms(family: Family, shape: Shape) -> Iterator[str]:
    for layer in range(shape.layers):
        for norm in family.modules.norms:
            yield norm.format(layer=layer)
    yield family.modules.final_norm


def _head_mask(masks: Masks, layer: int, shape: Shape) -> Tensor | None:
    """Mask of the input of a block's output projection, [heads · head_dim]."""
    if "kv_heads" not in masks and "heads_per_group" not in masks:
        return None
    heads = torch.ones(shape.kv_heads, shape.heads_per_group)
    if "kv_heads" in masks:
        heads = heads.to(masks["kv_heads"].device) * masks["kv_heads"][layer][:, None]
    if "heads_per_group" in masks:
        heads = heads.to(masks["heads_per_group"].device) * masks["heads_per_group"][layer]
    return heads.flatten().repeat_interleave(shape.head_dim)


def _skipped(stack: ExitStack, block: nn.Module, z: Tensor) -> bool:
    """Let a closed block pass its input on without computing; whether it is closed.

    A hard-concrete z of exactly 0 has no gradient, so nothing is lost, and late in a run most
    blocks are closed. Only on a CPU: elsewhere, looking at z would wait for the device.
    """
    if z.device.type != "cpu" or float(z.detach()) != 0.0:
        return False
    block.forward = lambda hidden_states, *args, **kwargs: hidden_states
    stack.callback(lambda: delattr(block, "forward"))
    return True


def _scale_input(z: Tensor) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * z.to(args[0].dtype), *args[1:])

    return hook


def _scale_addition(z: Tensor) -> Callable[..., Any]:
    """Scale what a block adds to the residual stream."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return args[0] + z.to(output.dtype) * (output - args[0])

    return hook


def _norm_of_kept(z: Tensor, epsilon_name: str) -> Callable[..., Any]:
    """Correct an RMS norm that divided by the full width: only kept dimensions count.

    The masked input is zero elsewhere, so its sum of squares is right; the divisor, and with it
    epsilon's weight, is not.
    """

    def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = args[0].float()
        epsilon = float(getattr(module, epsilon_name))
        squares = x.square().sum(-1, keepdim=True)
        wrong = (squares / x.shape[-1] + epsilon).rsqrt()
        right = (squares / z.float().sum() + epsilon).rsqrt()
        return output * (right / wrong).to(output.dtype)

    return hook
