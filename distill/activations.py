"""What autograd keeps of a token in one block, from the family's table and the config alone.

With width H, Q = heads x head_dim, K = KV heads x head_dim, FFN width F, float32 weights and
attention by SDPA:

    RMSNorm           its input (H) and 1/rms (1); the normed values (H) if its gain learns
    LayerNorm         its input (H), mean and 1/deviation (2)
    q, k, v, gate, up their input (H): one tensor for all that read it; under autocast each
                      projection keeps a cast of its own, in half precision
    norms of q and k  inputs, normed values and 1/rms, over Q + K
    SDPA              q, k, v and output (4 Q: a batch with padding has a mask, and for a mask keys
                      and values are repeated for every query head), log-sum-exp (one a query head),
                      and the mask as numbers: a row of T, or one a head where positions are added
                      to it. Dropout of attention has no fused kernel on a CPU: probabilities, noise
                      and their product, a row of T a head each, all in float32 as are q, k and v
    cross-attention   the same, where q and output are the token's, k and v of every token of the
                      source, and a row is as long as that
    FFN               what the activation keeps, its result and up (F each) where it is gated, and
                      the input of the down projection (F)
    dropout           its noise: on a CPU numbers, else a byte each

Residual additions and rotary embeddings keep nothing of their own. What a frozen projection reads
is not kept; an adapter keeps what it reads, and its `rank` values between its two factors. Under
autocast the residual stream, and what norms keep, stays float32; the rest is half precision, and
a half-precision copy of every projection's weight lives until the backward pass has used it.

A mask keeps its product with what it acts on, for each token: on heads Q; on the FFN F; on the
residual stream, after every norm, H; of a whole block H, what the block added, or 2 H, if attention
and FFN are cut apart. What a projection that learns reads, it keeps itself: there the products on
the FFN cost nothing and, in float32, those after norms neither. A LayerNorm is computed anew over
what is kept of the stream, and so keeps 3 H more, and 4 H if its gain learns.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from draftsmith.checkpoints.families.base import Axis, Family, Stack, template_of
from draftsmith.checkpoints.layout import Layout
from draftsmith.checkpoints.shape import Shape

# Bytes of a float32.
FLOAT = 4
# What heads read and write, as dimensions; of cross-attention, keys and values are of the source.
_OWN, _CROSS = ("query", "encoder_query"), "cross"
_FFN = ("ffn", "encoder_ffn")


@dataclass(frozen=True)
class Block:
    """Values that autograd keeps of one token in one block.

    Attributes:
        exact: in float32, whatever products are in.
        products: in the dtype of matrix products.
        shared: of projections' inputs in float32, where all that read one share it.
        cast: of the same under autocast, where each has a copy.
        noise: that dropout went over.
        heads: of attention.
        row_each: whether the mask has a row for each of them.
        drops: whether dropout goes over attention's probabilities.
        attended: of `products`, the queries, and keys and values that are not of a source.
        source: in the dtype of matrix products, of each token of a source.
        source_cast: of the same, under autocast alone.
    """

    exact: int
    products: int
    shared: int
    cast: int
    noise: int = 0
    heads: int = 1
    row_each: bool = False
    drops: bool = False
    attended: int = 0
    source: int = 0
    source_cast: int = 0

    def bytes_per_token(
        self, width: int, length: int, source_length: int = 0, device: str = "cpu"
    ) -> int:
        """Bytes of one token.

        Args:
            width: bytes of a value in the dtype of products, 4 or 2.
            length: T, tokens of a row.
            source_length: S, those of its source; 0: none.
            device: `cpu` or `cuda`, which drop differently.
        """
        inputs = self.shared * FLOAT if width == FLOAT else self.cast * width
        noise = self.noise * (width if device == "cpu" else 1)
        own = self.exact * FLOAT + self.products * width + inputs + noise
        pairs = length + source_length
        if self._is_unfused(device):
            rows = 3 * self.heads * pairs
            return own + self.attended * (FLOAT - width) + FLOAT * rows
        return own + (self.heads if self.row_each else 1) * pairs * width

    def bytes_per_source_token(self, width: int, device: str = "cpu") -> int:
        """Bytes that are kept of each token of a source; arguments as above."""
        cast = 0 if width == FLOAT else self.source_cast * width
        return self.source * (FLOAT if self._is_unfused(device) else width) + cast

    def _is_unfused(self, device: str) -> bool:
        return self.drops and device == "cpu"


def block_of(
    config: Any,
    family: Family,
    layout: Layout,
    shape: Shape,
    stack: Stack,
    *,
    learns: bool,
    adapted: Collection[str] = (),
    rank: int = 0,
    draws: bool = True,
) -> Block:
    """Add up the table of the module's docstring for one block of a stack.

    Args:
        config: of the model.
        family: its table.
        layout: its tensors.
        shape: its shape.
        stack: whose block it is.
        learns: whether its weights do.
        adapted: names of the projections that have an adapter.
        rank: of the adapters.
        draws: whether dropout is on.
    """
    dimensions = _dimensions(layout, family, stack)
    gains = sum(dims == ("hidden",) for dims in dimensions.values())
    of_norm = shape.hidden + 2 if stack.centred else shape.hidden * (1 + learns) + 1
    exact = gains * of_norm + _norms_of_heads(dimensions, shape, learns)
    writes = {d[0] for d in dimensions.values()}
    own = next(shape.size(name) or 0 for name in _OWN if name in writes)
    cross = (shape.size(_CROSS) or 0) if _CROSS in writes else 0
    heads = shape.heads if "query" in writes else shape.encoder_heads
    reading = {n: d[1] for n, d in dimensions.items() if len(d) == 2 and (learns or n in adapted)}
    of_source = {n for n in reading if dimensions[n][0] == _CROSS and not _is_of_queries(n)}
    here = {n: inner for n, inner in reading.items() if n not in of_source}
    # Projections that stand in the same module and have the same width read the same tensor.
    inputs = {(name.rsplit(".", 2)[0], inner) for name, inner in here.items()}
    wide = {name: shape.size(name) or 0 for name in ("hidden", *_OWN, _CROSS, *_FFN)}
    # SDPA keeps its output whoever reads it, and under autocast it is in half precision already;
    # adapters cast it, and what goes down, there and back.
    again = {"hidden"} if learns else {*wide}
    rate = 0.0 if not draws else _rate(config, family.config.dropout)
    inner_rate = 0.0 if not draws else _rate(config, family.config.activation_dropout)
    passes = _passes_result(config, family, dimensions) and not inner_rate
    ffn = next(shape.size(name) or 0 for name in _FFN if name in writes)
    # What goes into the down projection, where something keeps it already.
    known = learns or passes
    return Block(
        exact=exact + heads * (2 if cross else 1),
        products=4 * own
        + 2 * cross
        + ffn * (_kept_in_ffn(config, family, dimensions) + (learns and not passes))
        + (rank * len(here) if adapted else 0),
        shared=sum(wide[i] for _, i in inputs if i == "hidden" or (i in _FFN and not known)),
        cast=sum(wide[i] for i in here.values() if i in again),
        noise=gains * shape.hidden * bool(rate) + ffn * bool(inner_rate),
        heads=heads,
        row_each=any("buckets" in dims for dims in family.tensors.values()),
        drops=draws and _rate(config, family.config.attention_dropout) > 0,
        attended=3 * own + cross,
        source=2 * cross + (rank * len(of_source) if adapted else 0),
        source_cast=len(of_source) * shape.hidden,
    )


def masked_block(
    block: Block,
    config: Any,
    family: Family,
    layout: Layout,
    shape: Shape,
    stack: Stack,
    axes: Collection[Axis],
    *,
    learns: bool,
) -> Block:
    """Add what masks keep; arguments as `block_of`, with the axes that have masks."""
    exact, products, shared = block.exact, block.products, block.shared
    dimensions = _dimensions(layout, family, stack)
    if "ffn_layers" in axes:
        products += 2 * shape.hidden
    elif stack.layers in axes:
        exact += shape.hidden
    acted = {axis for axis in stack.inputs if axis in axes}
    if "heads_per_group" in axes and "kv_heads" in stack.inputs:
        acted.add("kv_heads")
    widths: Mapping[Axis, str] = {
        "kv_heads": "query",
        "cross_heads": "cross",
        "encoder_heads": "encoder_query",
    }
    products += sum(shape.size(widths[axis]) or 0 for axis in acted if axis in widths)
    if not learns or _passes_result(config, family, dimensions):
        products += sum(getattr(shape, axis) for axis in acted if axis in _FFN)
    if "hidden" in axes:
        gains = sum(dims == ("hidden",) for dims in dimensions.values())
        exact += gains * shape.hidden * (3 + learns if stack.centred else 1)
        if not stack.centred:
            # What projections would have kept is what was masked.
            shared = 0
    return replace(block, exact=exact, products=products, shared=shared)


def in_block(name: str, family: Family) -> bool:
    """Whether a tensor belongs to a block."""
    return family.stack_of(template_of(name)[0]) is not None


def _dimensions(layout: Layout, family: Family, stack: Stack) -> dict[str, tuple[str, ...]]:
    """Gain or projection of the first block -> its dimensions."""
    found = {}
    for name in layout.shapes:
        template, number = template_of(name)
        if number != 0 or not name.endswith(".weight") or family.stack_of(template) is not stack:
            continue
        if "buckets" not in (dims := family.tensors[template]):
            found[name] = dims
    return found


def _norms_of_heads(dimensions: Mapping[str, tuple[str, ...]], shape: Shape, learns: bool) -> int:
    """Values that norms of queries and keys keep."""
    heads = sum(dims == ("head_dim",) for dims in dimensions.values()) // 2
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return heads * ((query + key) * (1 + learns) + shape.heads + shape.kv_heads)


def _is_of_queries(name: str) -> bool:
    """Whether a projection makes queries: `q` or `q_proj` in all families."""
    return name.rsplit(".", 2)[1].startswith("q")


def _kept_in_ffn(config: Any, family: Family, dimensions: Mapping[str, tuple[str, ...]]) -> int:
    """Values of an FFN's width that are kept, whatever its down projection reads."""
    kept, with_result = _kept_by(getattr(config, family.config.activation))
    # Where it is gated, the product of both keeps both.
    return kept + (not with_result) + 1 if _is_gated(dimensions) else kept


def _passes_result(config: Any, family: Family, dimensions: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether the down projection reads what the activation has kept."""
    return not _is_gated(dimensions) and _kept_by(getattr(config, family.config.activation))[1]


def _is_gated(dimensions: Mapping[str, tuple[str, ...]]) -> bool:
    return sum(dims[0] in _FFN for dims in dimensions.values()) == 2


@lru_cache
def _kept_by(activation: str) -> tuple[int, bool]:
    """Tensors that autograd keeps of an activation, and whether its result is one of them."""
    from transformers.activations import ACT2FN

    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = ACT2FN[activation](torch.zeros(1, requires_grad=True))
    return len(kept), result.untyped_storage().data_ptr() in kept


def _rate(config: Any, key: str | None) -> float:
    return 0.0 if key is None else float(getattr(config, key))
