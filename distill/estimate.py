"""Memory of training, from counts alone: nothing is built, loaded or measured.

**What stays.** Weights are float32 (4 bytes), AdamW keeps two more float32 values for each that
learns, a gradient is one more.

**What autograd keeps** of each token in a gated pre-norm block of width H, with Q = query heads x
head_dim, K = KV heads x head_dim, FFN width F, float32 weights and attention by SDPA:

    every norm        its input (H) and 1/rms (1); the normed values (H) if its gain learns
    q, k, v, gate, up their input (H): one tensor for all that read it; under autocast each
                      projection keeps a cast of its own, in half precision
    norms of q and k  inputs, normed values and 1/rms, over Q + K
    SDPA              q, k, v and output (4 Q: a batch with padding has a mask, and for a mask keys
                      and values are repeated for every query head), log-sum-exp (one a query head),
                      and the mask as numbers (a row of T)
    FFN               gate, its activation, up (3 F), and the input of the down projection (F)

Residual additions and rotary embeddings keep nothing of their own. What a frozen projection reads
is not kept; an adapter keeps what it reads, and its `rank` values between its two factors. Under
autocast the residual stream, and what norms keep, stays float32; the rest is half precision, and
a half-precision copy of every projection's weight lives until the backward pass has used it. With
activation checkpointing only the block inputs (H) are kept, and one block at a time anew. Outside
of blocks: the last norm, and the hidden states at the answers.

**What masks add.** Pruning runs the whole source. A mask keeps its product with what it acts on,
for each token: on heads Q; on the FFN F; on the residual stream, after every norm, H; of a whole
block H, what the block added, or 2 H, if attention and FFN are cut apart. What a projection that
learns reads, it keeps itself: there the products on the FFN cost nothing and, in float32, those
after norms neither.

**When it is the most** is one of a few moments of a step, see `moments`. Each is derived by adding
up what is alive then; benchmarks/plan_memory.py compares the largest with measured peaks.

**Many processes** (DeepSpeed ZeRO as distill/deepspeed_engine.py sets it up): stages 1 and 2 keep
whole weights and each rank a float32 copy of the part that it updates; gradients travel through a
bucket of DeepSpeed's default size; stage 3 cuts the weights, but keeps up to its default of 10⁹
gathered parameters alive.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from draftsmith.checkpoints.families.base import DIMENSIONS, WITHIN, Axis, Family, template_of
from draftsmith.checkpoints.layout import Layout, layout_of
from draftsmith.checkpoints.shape import Shape, shape_of
from draftsmith.distill.deepspeed_engine import WHOLE_BELOW
from draftsmith.distill.engine import learns
from draftsmith.distill.head_loss import chunk_tokens
from draftsmith.distill.losses import TargetLogits, Traces
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import DistillSettings

# Bytes of a float32.
FLOAT = 4
# DeepSpeed's defaults, in elements: `reduce_bucket_size` and `stage3_max_live_parameters`.
BUCKET, LIVE = 500_000_000, 1_000_000_000
# Tensors as large as a chunk's logits that are alive at once: over traces the logits, the gradient
# through `gather`, and twice that through `logsumexp`; over a live target as many as chunks are
# planned for.
_COPIES: Mapping[str, int] = {"traces": 4, "live": 16}


@dataclass(frozen=True)
class Block:
    """Values that autograd keeps of one token in one block.

    Attributes:
        exact: in float32, whatever products are in.
        products: in the dtype of matrix products.
        shared: of projections' inputs in float32, where all that read one share it.
        cast: of the same under autocast, where each has a copy.
    """

    exact: int
    products: int
    shared: int
    cast: int

    def bytes_per_token(self, width: int, length: int) -> int:
        """Bytes of one token.

        Args:
            width: bytes of a value in the dtype of products, 4 or 2.
            length: T, tokens of a row: a masked SDPA keeps the mask's row.
        """
        inputs = self.shared * FLOAT if width == FLOAT else self.cast * width
        return self.exact * FLOAT + (self.products + length) * width + inputs


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
        block: what autograd keeps in each block.
        width: bytes of a weight; less than a float32's only where none learns.
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
        rows: of a micro-batch.
        length: T, tokens of its longest row.
        answers: A, answer tokens of a micro-batch at most.
        micro_batches: so many in a step.
        top_n: log-probabilities of the target at each answer token.
        width: bytes of a value in the dtype of matrix products, 4 or 2.
        checkpoint: whether activations are computed again.
        columns: ids over which the loss is normalised; none: all.
        teacher: the target in memory, if it is live.
        device: `cuda` takes memory when it is asked for, `cpu` when it is written.
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

    @property
    def tokens(self) -> int:
        """Of a micro-batch, padding included."""
        return self.rows * self.length


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
    return Counts(
        shape=shape,
        parameters=layout.parameters(),
        adapters=adapters,
        learning=adapters or sum(prod(own[name]) for name in free),
        whole=sum(prod(s) for s in own.values() if prod(s) < WHOLE_BELOW),
        projections=sum(prod(s) for n, s in own.items() if _in_block(n, family) and len(s) > 1),
        tied=first != head,
        head_learns=first in free,
        norm_learns=not settings.lora_rank,
        block=_block(
            layout, family, shape, not settings.lora_rank, frozenset(adapted), settings.lora_rank
        ),
    )


def masked_counts(
    config: Any, family: Family, axes: Collection[Axis], *, learn: bool, width: int = FLOAT
) -> Counts:
    """Count a source under masks, as `learn_masks` trains it.

    Args:
        config: the source's, uncut.
        family: its table.
        axes: that have masks.
        learn: whether its weights learn too.
        width: bytes of a weight that doesn't.
    """
    shape, layout = shape_of(config, family), layout_of(config, family)
    own = {n: s for n, s in layout.shapes.items() if n in layout.trained - layout.aliases.keys()}
    masks = sum(_mask_count(axis, shape) for axis in axes)
    head = f"{family.head}.weight"
    return Counts(
        shape=shape,
        parameters=layout.parameters(),
        adapters=masks,
        learning=masks + (layout.parameters() if learn else 0),
        whole=sum(prod(s) for s in own.values() if prod(s) < WHOLE_BELOW),
        projections=sum(prod(s) for n, s in own.items() if _in_block(n, family) and len(s) > 1),
        tied=head in layout.aliases,
        head_learns=learn,
        norm_learns=learn,
        block=_masked(_block(layout, family, shape, learn), layout, family, shape, axes, learn),
        width=FLOAT if learn else width,
    )


def moments(counts: Counts, work: Work, zero: int = 0, processes: int = 1) -> Iterator[Memory]:
    """What is alive in one process at the moments when it can be the most.

    - `teacher`: a live target reads the step's batches; the drafter has no activations yet.
    - `loss`: all activations are kept, and a chunk of the head is at work.
    - `backward`: all activations are kept, and the last block's gradients come beside them.
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
    last = casts if not work.checkpoint else casts // counts.shape.layers
    yield replace(
        stay,
        moment="backward",
        gradients=between + head_gradient,
        activations=kept + last + _backward_work(counts, work),
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
    # A step's answers are all read before the drafter learns from the first.
    answers = work.micro_batches * work.answers * (shape.hidden + reads)
    return Teacher(work.width * weights, work.width * passing, work.width * answers)


def _in_block(name: str, family: Family) -> bool:
    return family.stack_of(template_of(name)[0]) is not None


def _adapted(
    own: Mapping[str, tuple[int, ...]], family: Family, settings: DistillSettings
) -> list[str]:
    """Names of the projections that have an adapter."""
    if not settings.lora_rank:
        return []

    def along(name: str) -> bool:
        dimensions = family.tensors[template_of(name)[0]]
        return bool({c for d in dimensions for c in DIMENSIONS.get(d, ())} & set(axes))

    axes = settings.lora_axes
    names = [n for n, s in own.items() if _in_block(n, family) and len(s) == 2 and along(n)]
    if not names:
        raise RequestError(
            f"recipe.distill.lora_axes: no projection of {family.name} has {' or '.join(axes)}; "
            f"its axes are {', '.join(family.axes)}"
        )
    return names


def _block(
    layout: Layout,
    family: Family,
    shape: Shape,
    learns: bool,
    adapted: Collection[str] = (),
    rank: int = 0,
) -> Block:
    """Add up the table of the module's docstring for one block.

    Args:
        layout: of the model.
        family: its table.
        shape: its shape.
        learns: whether its weights do.
        adapted: names of the projections that have an adapter.
        rank: of the adapters.
    """
    dimensions = _dimensions(layout, family)
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    exact = shape.heads
    for dims in dimensions.values():
        if dims == ("hidden",):
            exact += shape.hidden * (1 + learns) + 1
    heads = sum(dims == ("head_dim",) for dims in dimensions.values()) // 2
    exact += heads * ((query + key) * (1 + learns) + shape.heads + shape.kv_heads)
    reading = {n: d[1] for n, d in dimensions.items() if len(d) == 2 and (learns or n in adapted)}
    # Projections that stand in the same module and have the same width read the same tensor.
    inputs = {(name.rsplit(".", 2)[0], inner) for name, inner in reading.items()}
    wide = {"hidden": shape.hidden, "ffn": shape.ffn, "query": query}
    ranks = rank * len(reading) if adapted else 0
    # SDPA keeps its output whoever reads it, and under autocast it is in half precision already;
    # adapters cast it, and what goes down, there and back.
    again = {"hidden"} if learns else {"hidden", "ffn", "query"}
    down = shape.ffn if learns and "ffn" in reading.values() else 0
    return Block(
        exact=exact,
        products=4 * query + 3 * shape.ffn + down + ranks,
        shared=sum(wide[i] for _, i in inputs if i == "hidden" or (i == "ffn" and not learns)),
        cast=sum(wide[i] for i in reading.values() if i in again),
    )


def _dimensions(layout: Layout, family: Family) -> dict[str, tuple[str, ...]]:
    """Weight of the first block -> its dimensions."""
    names = [n for n in layout.shapes if _in_block(n, family) and template_of(n)[1] == 0]
    return {n: family.tensors[template_of(n)[0]] for n in names if n.endswith(".weight")}


def _masked(
    block: Block,
    layout: Layout,
    family: Family,
    shape: Shape,
    axes: Collection[Axis],
    learns: bool,
) -> Block:
    """Add what masks keep in a block."""
    exact, products, shared = block.exact, block.products, block.shared
    if "ffn_layers" in axes:
        products += 2 * shape.hidden
    elif "layers" in axes:
        exact += shape.hidden
    if {"kv_heads", "heads_per_group"} & set(axes):
        products += shape.heads * shape.head_dim
    if "ffn" in axes and not learns:
        products += shape.ffn
    if "hidden" in axes:
        norms = sum(dims == ("hidden",) for dims in _dimensions(layout, family).values())
        exact += norms * shape.hidden
        # What projections would have kept is what was masked.
        shared = 0
    return Block(exact, products, shared, block.cast)


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
    shape, block = counts.shape, counts.block.bytes_per_token(work.width, work.length)
    blocks = shape.layers * (FLOAT * shape.hidden if work.checkpoint else block)
    last = FLOAT * shape.hidden * (1 + counts.norm_learns)
    # The mask of the whole batch is one byte a pair of tokens.
    return work.tokens * (blocks + last + work.length) + FLOAT * work.answers * shape.hidden


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
    if work.checkpoint:
        each += counts.block.bytes_per_token(work.width, work.length)
    return work.tokens * each
