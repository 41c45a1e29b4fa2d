"""Memory of training, from counts alone: nothing is built, loaded or measured.

**What stays.** Weights are float32 (4 bytes), AdamW keeps two more float32 values for each that
learns, a gradient is one more.

**What autograd keeps** of each token in a block is in distill/activations.py. With activation
checkpointing only the block inputs are kept, and one block at a time anew. Outside of blocks: the
last norm, and the hidden states at the answers. Pruning runs the whole source.

**An encoder** keeps as much of its own tokens where it learns, or what stands before it does, and
its output in any case. One that stays as it is keeps nothing else. The decoder's cross-attention
keeps keys and values of every token of a row's source.

**When it is the most** is one of a few moments of a step, see `moments`. Each is derived by adding
up what is alive then; benchmarks/plan_memory.py compares the largest with measured peaks.

**Many processes** (DeepSpeed ZeRO as distill/deepspeed_engine.py sets it up): stages 1 and 2 keep
whole weights and each rank a float32 copy of the part that it updates; gradients travel through a
bucket of DeepSpeed's default size; stage 3 cuts the weights, but keeps up to its default of 10⁹
gathered parameters alive.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from draftsmith.checkpoints.families.base import (
    DIMENSIONS,
    WITHIN,
    Axis,
    Family,
    Stack,
    template_of,
)
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.distill.activations import FLOAT, Block, block_of, in_block, masked_block
from draftsmith.distill.deepspeed_engine import WHOLE_BELOW
from draftsmith.distill.engine import learns
from draftsmith.distill.head_loss import chunk_tokens
from draftsmith.distill.losses import TargetLogits, Traces
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import DistillSettings

# Axes whose masks let gradients into an encoder.
ENCODER_AXES: frozenset[Axis] = frozenset(
    {"encoder_layers", "encoder_heads", "encoder_ffn", "hidden"}
)
# DeepSpeed's defaults, in elements: `reduce_bucket_size` and `stage3_max_live_parameters`.
BUCKET, LIVE = 500_000_000, 1_000_000_000
# Tensors as large as a chunk's logits that are alive at once: over traces the logits, the gradient
# through `gather`, and twice that through `logsumexp`; over a live target as many as chunks are
# planned for.
_COPIES: Mapping[str, int] = {"traces": 4, "live": 16}


@dataclass(frozen=True)
class Counts:
    """What a drafter is made of, and what of it learns.

    Attributes:
        shape: its counts.
        parameters: each tensor once, without adapters.
        adapters: parameters of adapters, or of masks.
        learning: parameters that learn.
        whole: parameters in tensors that ZeRO-3 leaves whole.
        projections: parameters of the blocks' projections, which autocast copies.
        tied: whether the head is the embedding.
        head_learns: whether the head's weight does.
        norm_learns: whether the last norm's gain does.
        block: what autograd keeps in each block of the decoder.
        width: bytes of a weight; less than a float32's only where none learns.
        encoder: what it keeps in each block of the encoder; none where that has no gradients.
        encoder_learning: parameters of the encoder that learn.
    """

    shape: Shape
    parameters: int
    adapters: int
    learning: int
    whole: int
    projections: int
    tied: bool
    head_learns: bool
    norm_learns: bool
    block: Block
    width: int = FLOAT
    encoder: Block | None = None
    encoder_learning: int = 0

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.shape.vocab * self.shape.hidden


@dataclass(frozen=True)
class Teacher:
    """The target in memory; all zero where traces speak for it.

    Attributes:
        weights: bytes, of this process's part.
        work: bytes of its forward pass for a micro-batch at most.
        answers: bytes of its hidden states at the answers of a step.
    """

    weights: int = 0
    work: int = 0
    answers: int = 0


@dataclass(frozen=True)
class Work:
    """What one process does in a step.

    Attributes:
        rows: of a micro-batch, as a decoder reads them.
        length: T, tokens of its longest row.
        answers: A, answer tokens of a micro-batch at most.
        micro_batches: so many in a step.
        top_n: log-probabilities of the target at each answer token.
        width: bytes of a value in the dtype of matrix products, 4 or 2.
        checkpoint: whether activations are computed again.
        columns: ids over which the loss is normalised; none: all.
        teacher: the target in memory, if it is live.
        device: `cuda` takes memory when it is asked for, `cpu` when it is written.
        source_length: S, tokens of the longest source; 0 without an encoder.
        rows_of_source: rows that share a source and its encoder's pass.
    """

    rows: int
    length: int
    answers: int
    micro_batches: int = 1
    top_n: int = 64
    width: int = FLOAT
    checkpoint: bool = False
    columns: int | None = None
    teacher: Teacher = field(default_factory=Teacher)
    device: str = "cpu"
    source_length: int = 0
    rows_of_source: int = 1

    @property
    def tokens(self) -> int:
        """Of a micro-batch, padding included."""
        return self.rows * self.length

    @property
    def source_tokens(self) -> int:
        """What an encoder reads for a micro-batch, padding included."""
        return self.rows // self.rows_of_source * self.source_length


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at one moment.

    Attributes:
        moment: what is being done.
        weights: the drafter's, frozen and learning, and ZeRO's copies of them.
        gradients: of weights, with DeepSpeed's bucket.
        optimizer: AdamW's state.
        activations: what autograd keeps, the backward pass's own tensors, and the batches.
        head: the chunked head loss, or the logits of a replayed row.
        teacher: the target, if it is live.
    """

    moment: str
    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    teacher: int

    @property
    def total(self) -> int:
        """All of them."""
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.head)
        return sum(parts) + self.teacher


def counts_of(config: Any, family: Family, settings: DistillSettings) -> Counts:
    """Count a drafter of a config under the recipe's settings, as `trainable_parameters` frees it.

    Args:
        config: the drafter's, cut already.
        family: its table.
        settings: the recipe's `distill`.

    Raises:
        RequestError: adapters are asked for along axes that no projection has.
    """
    shape, layout = shape_of(config, family), layout_of(config, family)
    own = {n: s for n, s in layout.shapes.items() if n in layout.trained - layout.aliases.keys()}
    adapted = _adapted(own, family, settings)
    adapters = sum(settings.lora_rank * sum(own[name]) for name in adapted)
    free = [n for n in own if not settings.lora_rank and learns(n, family, settings)]
    head = f"{family.head}.weight"
    first = layout.aliases.get(head, head)
    part = partial(
        block_of, config, family, layout, shape, adapted=frozenset(adapted), rank=settings.lora_rank
    )
    moving = _before_decoder(free or adapted, family)
    in_encoder = [name for name in moving if in_block(name, family)]
    return Counts(
        shape=shape,
        parameters=layout.parameters(),
        adapters=adapters,
        learning=adapters or sum(prod(own[name]) for name in free),
        whole=sum(prod(s) for s in own.values() if prod(s) < WHOLE_BELOW),
        projections=_projections(own, family, encoder=bool(moving)),
        tied=first != head,
        head_learns=first in free,
        norm_learns=not settings.lora_rank,
        block=part(family.stacks[0], learns=not settings.lora_rank),
        encoder=part(family.stacks[1], learns=not settings.lora_rank) if moving else None,
        encoder_learning=0 if adapters else sum(prod(own[name]) for name in in_encoder),
    )


def masked_counts(
    config: Any,
    family: Family,
    axes: Collection[Axis],
    *,
    learn: bool,
    width: int = FLOAT,
    draws: bool = False,
) -> Counts:
    """Count a source under masks, as `learn_masks` trains it.

    Args:
        config: the source's, uncut.
        family: its table.
        axes: that have masks.
        learn: whether its weights learn too.
        width: bytes of a weight that doesn't.
        draws: whether dropout is on.
    """
    shape, layout = shape_of(config, family), layout_of(config, family)
    own = {n: s for n, s in layout.shapes.items() if n in layout.trained - layout.aliases.keys()}
    masks = sum(_mask_count(axis, shape) for axis in axes)
    head = f"{family.head}.weight"

    def part(stack: Stack) -> Block:
        plain = block_of(config, family, layout, shape, stack, learns=learn, draws=draws)
        return masked_block(plain, config, family, layout, shape, stack, axes, learns=learn)

    moving = family.has_encoder and (learn or any(a in ENCODER_AXES for a in axes))
    free = [name for name in own if learn and template_of(name)[0] not in family.rebuilt]
    in_encoder = [name for name in _before_decoder(free, family) if in_block(name, family)]
    return Counts(
        shape=shape,
        parameters=layout.parameters(),
        adapters=masks,
        learning=masks + sum(prod(own[name]) for name in free),
        whole=sum(prod(s) for s in own.values() if prod(s) < WHOLE_BELOW),
        projections=_projections(own, family, encoder=moving),
        tied=head in layout.aliases,
        head_learns=learn,
        norm_learns=learn,
        block=part(family.stacks[0]),
        width=FLOAT if learn else width,
        encoder=part(family.stacks[1]) if moving else None,
        encoder_learning=sum(prod(own[name]) for name in in_encoder),
    )


def _before_decoder(names: Iterable[str], family: Family) -> list[str]:
    """Those of an encoder, and those that it reads through: gradients pass all that follows."""
    if not family.has_encoder:
        return []
    decoder = family.stacks[0]

    def is_before(name: str) -> bool:
        template = template_of(name)[0]
        own = template.startswith((f"{decoder.block}.", *(f"{norm}." for norm in decoder.norms)))
        return not own and not template.startswith(f"{family.head}.")

    return [name for name in names if is_before(name)]


def _projections(own: Mapping[str, tuple[int, ...]], family: Family, *, encoder: bool) -> int:
    """Parameters that autocast copies and keeps: those of blocks through which gradients go."""
    stacks = family.stacks if encoder else family.stacks[:1]
    return sum(
        prod(shape)
        for name, shape in own.items()
        if len(shape) > 1 and family.stack_of(template_of(name)[0]) in stacks
    )


def encoder_parameters(config: Any, family: Family) -> int:
    """Parameters of the encoder alone, its embedding not among them if the decoder has it too."""
    if not family.has_encoder:
        return 0
    layout, block = layout_of(config, family), family.stacks[1].block
    # The blocks are a list in the encoder.
    encoder = block.removesuffix(".{layer}").rpartition(".")[0]
    return sum(
        prod(shape)
        for name, shape in layout.shapes.items()
        if name.startswith(f"{encoder}.") and name in layout.trained - layout.aliases.keys()
    )


def moments(counts: Counts, work: Work, zero: int = 0, processes: int = 1) -> Iterator[Memory]:
    """What is alive in one process at the moments when it can be the most.

    - `teacher`: a live target reads the step's batches; the drafter has no activations yet.
    - `loss`: all activations are kept, and a chunk of the head is at work.
    - `backward`: all activations are kept, and the last block's gradients come beside them.
    - `encoder`: the decoder has been differentiated, and the encoder is about to be.
    - `gradients`: all gradients are there. A tied embedding has its own beside the head's until
      they are added, and both beside the sum of earlier micro-batches.
    - `replay`: held-out rows, one by one, with all logits of the row.

    Args:
        counts: of the drafter.
        work: of the process.
        zero: ZeRO stage; 0: plain torch in one process.
        processes: that share the work.
    """
    stay = Memory(
        "",
        _weights(counts, work, zero, processes),
        0,
        2 * FLOAT * _part(counts.learning, processes if zero else 1),
        work.micro_batches * work.answers * work.top_n * (FLOAT + 8),
        0,
        work.teacher.weights + work.teacher.answers,
    )
    held, whole = _gradients(counts, work, zero, processes)
    between = held if work.micro_batches > 1 or zero == 3 else 0
    kept = stay.activations + _kept(counts, work)
    head_gradient = _head_gradient(counts, work)
    casts = 0
    if work.width < counts.width:
        casts = work.width * (counts.projections + counts.adapters)
    reading = stay.teacher + work.teacher.work
    yield replace(stay, moment="teacher", gradients=held if zero == 3 else 0, teacher=reading)
    yield replace(
        stay,
        moment="loss",
        gradients=between,
        activations=kept + casts,
        head=_head_work(counts, work) + head_gradient,
    )
    blocks = counts.shape.layers + (counts.shape.encoder_layers if counts.encoder else 0)
    last = casts if not work.checkpoint else casts // blocks
    yield replace(
        stay,
        moment="backward",
        gradients=between + head_gradient,
        activations=kept + last + _backward_work(counts, work),
    )
    if counts.encoder is not None:
        yield replace(
            stay,
            moment="encoder",
            gradients=max(between, whole - FLOAT * counts.encoder_learning),
            activations=stay.activations + _encoder_work(counts, work),
        )
    both = 0
    if counts.head_learns and counts.tied:
        both = FLOAT * counts.head * (2 if work.micro_batches > 1 else 1)
    yield replace(stay, moment="gradients", gradients=whole + both)
    logits = FLOAT * work.length * counts.shape.vocab
    yield replace(stay, moment="replay", gradients=held if zero == 3 else 0, head=logits)


def peak(
    counts: Counts, work: Work, zero: int = 0, processes: int = 1, *, replays: bool = True
) -> Memory:
    """The moment at which a process needs the most; arguments as `moments`.

    Args:
        counts: of the model.
        work: of the process.
        zero: ZeRO stage.
        processes: that share the work.
        replays: whether held-out rows are replayed between steps; masks are learned without.
    """
    found = moments(counts, work, zero, processes)
    return max((m for m in found if replays or m.moment != "replay"), key=lambda m: m.total)


def teacher_of(config: Any, family: Family, work: Work, parts: int = 1, reads: int = 0) -> Teacher:
    """A live target of `config`.

    Args:
        config: the target's.
        family: its table.
        work: of the process.
        parts: in so many its body is cut, with as much of it gathered as ZeRO-3 keeps alive; the
            head is whole in every process.
        reads: elements of what its layers read at one answer, for hidden matching.
    """
    shape, layout = shape_of(config, family), layout_of(config, family)
    weights = layout.parameters()
    if parts > 1:
        body = weights if family.is_tied(config) else weights - shape.vocab * shape.hidden
        weights = _part(body, parts) + min(body, LIVE) + shape.vocab * shape.hidden
    # Without gradients: the stream before and after, a norm's output, and a block's widest part.
    widest = max(3 * shape.ffn, 4 * shape.heads * shape.head_dim)
    passing = work.tokens * (3 * shape.hidden + widest)
    if shape.encoder_layers:
        # The encoder is done before the decoder begins, and leaves its output.
        wide = max(3 * shape.encoder_ffn, 4 * shape.encoder_heads * shape.encoder_head_dim)
        passing = max(passing, work.source_tokens * (3 * shape.hidden + wide))
        passing += work.source_tokens * shape.hidden
    # A step's answers are all read before the drafter learns from the first.
    answers = work.micro_batches * work.answers * (shape.hidden + reads)
    return Teacher(work.width * weights, work.width * passing, work.width * answers)


def _adapted(
    own: Mapping[str, tuple[int, ...]], family: Family, settings: DistillSettings
) -> list[str]:
    """Names of the projections that have an adapter."""
    if not settings.lora_rank:
        return []

    def along(name: str) -> bool:
        dimensions = family.tensors[template_of(name)[0]]
        if "buckets" in dimensions:
            # A table of positions is no projection.
            return False
        return bool({c for d in dimensions for c in DIMENSIONS.get(d, ())} & set(axes))

    axes = settings.lora_axes
    names = [n for n, s in own.items() if in_block(n, family) and len(s) == 2 and along(n)]
    if not names:
        raise RequestError(
            f"recipe.distill.lora_axes: no projection of {family.name} has {' or '.join(axes)}; "
            f"its axes are {', '.join(family.axes)}"
        )
    return names


def _mask_count(axis: Axis, shape: Shape) -> int:
    """Masks along an axis: those chosen within another have one for each of its entries."""
    outer = WITHIN.get(axis)
    count: int = getattr(shape, axis)
    return count * (_mask_count(outer, shape) if outer else 1)


def _part(elements: int, parts: int) -> int:
    return -(-elements // parts)


def _weights(counts: Counts, work: Work, zero: int, processes: int) -> int:
    """Bytes of the weights that are trained, or masked, in one process."""
    own, more = counts.parameters, counts.adapters
    if work.columns is not None and work.columns < counts.shape.vocab and not counts.head_learns:
        more += work.columns * counts.shape.hidden
    if zero in (1, 2):
        more += _part(counts.learning, processes)
    if zero == 3:
        cut = max(0, own + more - counts.whole)
        own, more = counts.whole + _part(cut, processes) + min(cut, LIVE), 0
    return counts.width * own + FLOAT * more


def _gradients(counts: Counts, work: Work, zero: int, processes: int) -> tuple[int, int]:
    """Bytes that are held between micro-batches, and at the end of a backward pass."""
    if not zero:
        return FLOAT * counts.learning, FLOAT * counts.learning
    bucket = BUCKET if work.device != "cpu" else min(BUCKET, counts.learning)
    part = _part(counts.learning, processes)
    held = counts.learning if zero == 1 else part
    if zero == 3:
        held += bucket
        return FLOAT * held, FLOAT * held
    return FLOAT * held, FLOAT * (held + bucket)


def _kept(counts: Counts, work: Work) -> int:
    """Bytes that autograd keeps at the end of the forward pass, and the loss's hidden states."""
    shape = counts.shape
    each = _bytes_of_block(counts, work)
    blocks = shape.layers * (FLOAT * shape.hidden * work.tokens if work.checkpoint else each)
    last = FLOAT * shape.hidden * (1 + counts.norm_learns)
    # The mask of the whole batch is one byte a pair of tokens, those of a source too.
    pairs = work.tokens * (work.length + work.source_length)
    answers = FLOAT * work.answers * shape.hidden
    return blocks + work.tokens * last + pairs + answers + _kept_of_sources(counts, work)


def _bytes_of_block(counts: Counts, work: Work) -> int:
    """Bytes that a block of the decoder keeps of a micro-batch, its sources' keys included."""
    token = counts.block.bytes_per_token(work.width, work.length, work.source_length, work.device)
    of_source = counts.block.bytes_per_source_token(work.width, work.device)
    return work.tokens * token + work.rows * work.source_length * of_source


def _kept_of_sources(counts: Counts, work: Work) -> int:
    """Bytes that an encoder keeps: its output, and all that its gradients need."""
    shape, tokens = counts.shape, work.source_tokens
    # Rows that share a source read copies of its states.
    copies = work.rows * work.source_length * (work.rows_of_source > 1)
    output = FLOAT * shape.hidden * (tokens + copies)
    if counts.encoder is None:
        return output
    each = counts.encoder.bytes_per_token(work.width, work.source_length, device=work.device)
    block = FLOAT * shape.hidden if work.checkpoint else each
    last = FLOAT * shape.hidden * (1 + counts.norm_learns)
    return output + tokens * (shape.encoder_layers * block + last + work.source_length)


def _columns(counts: Counts, work: Work) -> int:
    return min(work.columns or counts.shape.vocab, counts.shape.vocab)


def _head_gradient(counts: Counts, work: Work) -> int:
    """Bytes of the gradients of hidden states and head weight that the loss makes at once."""
    hidden = work.answers * counts.shape.hidden
    if not counts.head_learns:
        return FLOAT * hidden
    return FLOAT * (hidden + _columns(counts, work) * counts.shape.hidden)


def _head_work(counts: Counts, work: Work) -> int:
    """Bytes of a chunk's tensors, and of the head in half precision.

    A chunk needs the most while the loss is differentiated or, under autocast, when its part of the
    head's gradient is added up: that is in half precision first, and a CPU makes a float32 copy.
    """
    columns, cast = _columns(counts, work), work.width != FLOAT
    picked = columns * counts.shape.hidden
    live = bool(work.teacher.work)
    planned = TargetLogits.copies if live else Traces.copies
    logits = chunk_tokens(work.answers, columns, copies=planned) * columns
    copies = _COPIES["live" if live else "traces"]
    loss = logits * (FLOAT * copies + (work.width if cast else 0))
    adding = 0
    if cast and counts.head_learns:
        copy = FLOAT if work.device == "cpu" else 0
        adding = logits * 2 * work.width + picked * (work.width + copy)
    cut = FLOAT * picked if counts.head_learns and columns < counts.shape.vocab else 0
    return max(loss, adding) + cut + (work.width * picked if cast else 0)


def _backward_work(counts: Counts, work: Work) -> int:
    """Bytes of gradients of activations while the last block's FFN is differentiated.

    Those of the residual stream and of what goes into the down projection; from the latter come two
    as wide, while only its own input has been freed. With checkpointing the block is there anew.
    """
    shape = counts.shape
    each = FLOAT * shape.hidden + work.width * 2 * shape.ffn
    return work.tokens * each + (_bytes_of_block(counts, work) if work.checkpoint else 0)


def _encoder_work(counts: Counts, work: Work) -> int:
    """Bytes of the same in the encoder, with all that it keeps."""
    shape = counts.shape
    each = FLOAT * shape.hidden + work.width * 2 * shape.encoder_ffn
    if work.checkpoint and counts.encoder is not None:
        each += counts.encoder.bytes_per_token(work.width, work.source_length, device=work.device)
    if work.width < counts.width:
        each_copy = work.width * counts.projections * shape.encoder_layers
        copies = each_copy // (shape.layers + shape.encoder_layers)
    else:
        copies = 0
    return work.source_tokens * each + _kept_of_sources(counts, work) + copies
