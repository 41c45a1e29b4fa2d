"""Head projection and loss in one pass over chunks of tokens: all logits together never exist.

For a chunk of tokens the logits, the loss and its gradients with respect to logits, hidden states
and head weight are computed at once, in the forward pass, and the logits are dropped; the backward
pass only multiplies by what comes from above (Hsu et al. 2024, Liger Kernel's fused linear
cross-entropy; here for any loss and any signal of the target).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from draftsmith.checkpoints.families import family_of
from draftsmith.checkpoints.heads import head_bias, head_scale, head_softcap
from draftsmith.data.traces import TraceRow
from draftsmith.distill.losses import (
    Columns,
    Loss,
    Pair,
    Signal,
    TargetLogits,
    Traces,
    select,
)

# Memory for the tensors of one chunk, but never so little that its products wait for the weights:
# each chunk reads the whole head several times.
CHUNK_BYTES = 256 * 2**20
LEAST_TOKENS = 24


@dataclass(frozen=True)
class Projection:
    """From hidden states to logits, as the families do it: cap · tanh(scale · (W h + b) / cap).

    Attributes:
        weight: W, [V, H].
        bias: b, [V]; none: 0.
        scale: factor of the logits (Cohere, Granite, T5).
        softcap: bound of the logits (Gemma 2); none: no bound.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def of(cls, model: Any) -> Self:
        """The head of a model, on its very own weight."""
        family = family_of(model.config.model_type, "model")
        return cls(
            model.get_output_embeddings().weight,
            head_bias(model, family),
            head_scale(model, family),
            head_softcap(model),
        )

    def copied(self) -> Self:
        """The same on tensors of its own."""
        bias = None if self.bias is None else self.bias.detach().clone()
        return replace(self, weight=self.weight.detach().clone(), bias=bias)

    def over(self, columns: Columns) -> Self:
        """The rows of `columns` alone."""
        bias = None if self.bias is None else select(self.bias, columns)
        return replace(self, weight=select(self.weight, columns), bias=bias)

    def __call__(self, hidden_AH: Tensor) -> Tensor:
        """Logits [A, V] of hidden states [A, H]."""
        raw_AV = nn.functional.linear(hidden_AH, self.weight, self.bias)
        return self.shaped(raw_AV)

    def shaped(self, raw_AV: Tensor) -> Tensor:
        """Scale and bound what comes out of the product."""
        if self.scale != 1.0:
            raw_AV = raw_AV * self.scale
        if self.softcap is not None:
            raw_AV = self.softcap * torch.tanh(raw_AV / self.softcap)
        return raw_AV


def head_logits(model: Any, hidden_AH: Tensor) -> Tensor:
    """Logits [A, V] through the head's own module, around which alone ZeRO-3 gathers its weight."""
    head, projection = model.get_output_embeddings(), Projection.of(model)
    raw_AV = head(hidden_AH)
    if head.bias is None and projection.bias is not None:
        raw_AV = raw_AV + projection.bias
    return projection.shaped(raw_AV)


@dataclass(frozen=True)
class LiveTarget:
    """A target in memory: its logits too exist for one chunk at a time, without gradients.

    Attributes:
        hidden: [A, H], its final hidden states, after the last norm; H is its own width.
        head: its projection.
    """

    hidden: Tensor
    head: Projection
    copies: ClassVar[int] = TargetLogits.copies

    def __getitem__(self, rows: slice) -> Self:
        """The same at some of the positions."""
        return replace(self, hidden=self.hidden[rows])

    def over(self, columns: Columns) -> Self:
        """The target normalised over `columns` alone, as the drafter is."""
        return replace(self, head=self.head.over(columns))

    def against(self, logits_AV: Tensor) -> Pair:
        """Every id is an outcome. Raises as `TargetLogits.against`."""
        with torch.no_grad():
            target_AV = self.head(self.hidden)
        return TargetLogits(target_AV).against(logits_AV)


@dataclass(frozen=True)
class HeadLoss:
    """Head projection and loss in one, over the whole vocabulary or a part of it.

    Attributes:
        loss: as `make_loss` gives it.
        columns: ids over which both distributions are normalised, in rising order, or the first so
            many; none: all. Where target and drafter pad their vocabularies differently: the ids
            that both have (case A26).
        chunk_bytes: memory for the tensors of one chunk of tokens; none: as `chunk_tokens`.
    """

    loss: Loss
    columns: Columns | None = None
    chunk_bytes: int | None = None

    @classmethod
    def over_commonest(
        cls,
        loss: Loss,
        rows: Sequence[TraceRow],
        vocab: int,
        most: int | None,
        shared: int | None = None,
    ) -> "HeadLoss":
        """Normalise over the `most` ids that the target's top n name most often in `rows`.

        Args:
            loss: as `make_loss` gives it.
            rows: of the traces.
            vocab: the drafter's ids.
            most: how many are wanted; none: all.
            shared: how many of them a live target has too; none: all (case A26).
        """
        both = vocab if shared is None else min(vocab, shared)
        if most is None or most >= both:
            return cls(loss, None if shared in (None, vocab) else both)
        counts = np.zeros(both, np.int64)
        for row in rows:
            # The target's vocabulary may be padded further than the drafter's.
            counts += np.bincount(row.top_ids[row.top_ids < both], minlength=both)
        columns = np.sort(np.argsort(-counts, kind="stable")[:most])
        return cls(loss, torch.from_numpy(columns.copy()))

    def weight(self, head_VH: Tensor) -> Tensor:
        """The rows of the head that are used, [V', H]."""
        return head_VH if self.columns is None else select(head_VH, self.columns)

    def __call__(
        self,
        hidden_AH: Tensor,
        head: Projection | Tensor,
        signal: Signal,
        weights_A: Tensor | None = None,
    ) -> Tensor:
        """Weighted sum of the loss over A positions.

        Args:
            hidden_AH: the drafter's final hidden states.
            head: the drafter's projection, or its weight [V', H], with the rows of `columns` alone.
            signal: the target's, with all of its ids.
            weights_A: what each position counts; none: 1.
        """
        projection = Projection(head) if isinstance(head, Tensor) else head
        signal = signal if self.columns is None else signal.over(self.columns)

        def loss_of(raw_CV: Tensor, rows: slice) -> Tensor:
            pair = signal[rows].against(projection.shaped(raw_CV))
            return self.loss(pair if weights_A is None else replace(pair, weights=weights_A[rows]))[
                0
            ]

        weight, bias = projection.weight, projection.bias
        chunk = chunk_tokens(len(hidden_AH), len(weight), self.chunk_bytes, signal.copies)
        # Inside of a Function grad mode is always off.
        learning = torch.is_grad_enabled()
        total: Tensor = _ChunkedLoss.apply(hidden_AH, weight, bias, loss_of, chunk, learning)
        return total

    @torch.no_grad()
    def likeliest(self, hidden_AH: Tensor, head: Projection) -> Tensor:
        """The drafter's likeliest id at A positions, a chunk at a time; arguments as for a call."""
        chunk = chunk_tokens(len(hidden_AH), len(head.weight), self.chunk_bytes, copies=2)
        dtype = _product_dtype(hidden_AH)
        head = replace(head, weight=head.weight.to(dtype))
        parts = hidden_AH.to(dtype).split(chunk)
        places_A = torch.cat([head(part).argmax(-1) for part in parts])
        if isinstance(self.columns, Tensor):
            return self.columns.to(places_A.device)[places_A]
        return places_A


class LossHead(nn.Module):
    """A head that owns its weight and gives the loss instead of logits.

    The weight is a parameter of this module, though it may be that of another one too (a tied
    embedding): ZeRO-3 gathers parameters around the forward of the module that has them.

    Attributes:
        weight: [V, H], all of its rows; a frozen one has those of `head_loss.columns` alone.
        bias: [V], none where the family has none.
    """

    def __init__(
        self,
        head_loss: HeadLoss,
        weight: nn.Parameter,
        bias: nn.Parameter | None = None,
        *,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Set up.

        Args:
            head_loss: what to compute.
            weight: [V, H]; shared, not copied, unless it is frozen and cut to columns.
            bias: [V].
            scale: as in `Projection`.
            softcap: as in `Projection`.
        """
        super().__init__()
        self.head_loss, self.scale, self.softcap = head_loss, scale, softcap
        # Picking the rows of a frozen head once saves a copy of them in every step.
        self._cut = head_loss.columns is not None and not weight.requires_grad
        self.weight = self._own(weight)
        self.bias = None if bias is None else self._own(bias)

    @classmethod
    def of(cls, model: Any, head_loss: HeadLoss) -> Self:
        """The head of a model; by now it is known whether it learns."""
        logits, weight = Projection.of(model), model.get_output_embeddings().weight
        bias = logits.bias
        if bias is not None and not isinstance(bias, nn.Parameter):
            # A bias that is a buffer never learns.
            bias = nn.Parameter(bias.detach(), requires_grad=False)
        return cls(head_loss, weight, bias, scale=logits.scale, softcap=logits.softcap)

    def forward(
        self, hidden_AH: Tensor, signal: Signal | None, weights_A: Tensor | None = None
    ) -> Tensor:
        """Sum of the loss over A positions; without a signal the likeliest id at each, [A].

        One function for both: ZeRO-3 gathers the weight around this one alone. Arguments as
        `HeadLoss.__call__`.
        """
        head = Projection(self.weight, self.bias, self.scale, self.softcap)
        if self.head_loss.columns is not None and not self._cut:
            head = head.over(self.head_loss.columns)
        if signal is None:
            return self.head_loss.likeliest(hidden_AH, head)
        return self.head_loss(hidden_AH, head, signal, weights_A)

    def _own(self, parameter: nn.Parameter) -> nn.Parameter:
        if not self._cut:
            return parameter
        rows = self.head_loss.weight(parameter.detach())
        return nn.Parameter(rows, requires_grad=False)


def chunk_tokens(
    tokens: int,
    vocabulary: int,
    chunk_bytes: int | None = None,
    copies: int = Traces.copies,
) -> int:
    """Tokens of a chunk: as many as the memory holds, spread evenly over the chunks; at least 1.

    Args:
        tokens: in all.
        vocabulary: logits of each.
        chunk_bytes: memory; none: `CHUNK_BYTES`, or what `LEAST_TOKENS` take.
        copies: as `Signal.copies`.
    """
    least = LEAST_TOKENS if chunk_bytes is None else 1
    most = max(least, (chunk_bytes or CHUNK_BYTES) // (4 * copies * vocabulary))
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


class _ChunkedLoss(torch.autograd.Function):
    """A sum over tokens of a function of their raw logits W h + b, with the gradients at hand."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_AH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        loss_of: Callable[[Tensor, slice], Tensor],
        chunk: int,
        learning: bool,
    ) -> Tensor:
        """Sum the loss; keep the gradients of whatever wants one."""
        wanted = [learning and needed for needed in ctx.needs_input_grad]
        dtype = _product_dtype(hidden_AH)
        weight = weight_VH.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        gradients = _Gradients(hidden_AH, weight_VH, bias_V, wanted)
        total = torch.zeros((), dtype=_sum_dtype(hidden_AH), device=hidden_AH.device)
        for start in range(0, len(hidden_AH), chunk):
            rows = slice(start, start + chunk)
            hidden = hidden_AH[rows].to(dtype)
            raw_CV = nn.functional.linear(hidden, weight, bias)
            value, slope_CV = _value_and_slope(raw_CV, rows, loss_of, any(wanted))
            total += value
            if slope_CV is not None:
                gradients.add(slope_CV, rows, hidden, weight)
            # Else the next chunk's logits would be made beside these.
            del raw_CV, slope_CV
        ctx.gradients = gradients
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Hand the gradients out, in place: a copy of the weight's would double the memory."""
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "a chunked loss can be differentiated once; compute it again instead of "
                "retain_graph=True"
            )
        return *gradients.times(grad_output), None, None, None


class _Gradients:
    """Sums over chunks, in float32 at least, of what wants a gradient."""

    def __init__(
        self, hidden_AH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, wanted: Sequence[bool]
    ) -> None:
        self.dtypes = [None if x is None else x.dtype for x in (hidden_AH, weight_VH, bias_V)]
        self.hidden = torch.empty_like(hidden_AH) if wanted[0] else None
        self.weight = _zeros(weight_VH) if wanted[1] else None
        self.bias = _zeros(bias_V) if bias_V is not None and wanted[2] else None

    def add(self, slope_CV: Tensor, rows: slice, hidden_CH: Tensor, weight_VH: Tensor) -> None:
        """Take in a chunk: the loss's gradient with respect to its raw logits."""
        if self.hidden is not None:
            self.hidden[rows] = slope_CV @ weight_VH
        if self.weight is not None:
            if self.weight.dtype == slope_CV.dtype:
                self.weight.addmm_(slope_CV.T, hidden_CH)
            else:
                self.weight += slope_CV.T @ hidden_CH
        if self.bias is not None:
            self.bias += slope_CV.sum(0, dtype=self.bias.dtype)

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """All of them multiplied, in the dtypes of what they belong to."""
        sums = (self.hidden, self.weight, self.bias)
        return [
            None if x is None else x.mul_(factor).to(dtype)
            for x, dtype in zip(sums, self.dtypes, strict=True)
        ]


def _value_and_slope(
    raw_CV: Tensor, rows: slice, loss_of: Callable[[Tensor, slice], Tensor], wanted: bool
) -> tuple[Tensor, Tensor | None]:
    """A chunk's loss and its gradient with respect to the raw logits."""
    if not wanted:
        return loss_of(raw_CV, rows), None
    with torch.enable_grad():
        value = loss_of(raw_CV.requires_grad_(), rows)
    (slope_CV,) = torch.autograd.grad(value, raw_CV)
    return value.detach(), slope_CV


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """In which matrix products are done: autocast does not reach into them by itself here."""
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=_sum_dtype(x), device=x.device)
