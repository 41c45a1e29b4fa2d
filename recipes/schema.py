"""The settings of every stage: one definition gives YAML key, default, range and documentation.

This module imports nothing of the package, nor torch, so every layer may use it.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=True)

PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class DataSettings:
    """Where the prompts of the traces come from."""

    source: Annotated[
        Literal["self", "corpus", "prompts"],
        Field(
            description="self: an instruct target writes user turns itself and answers them; "
            "corpus: it continues the beginnings of texts; prompts: it answers a file of prompts"
        ),
    ] = "self"
    path: Annotated[
        tuple[str, ...],
        Field(
            description="files of prompts, or files and folders of a corpus: .jsonl, .jsonl.zst, "
            ".jsonl.gz, .parquet (unused by source: self). For a target that hears: files with "
            "rows of `audio`, or folders of .wav and .flac, as prompts"
        ),
    ] = ()
    text_key: Annotated[str, Field(description="the field of a corpus row that holds its text")] = (
        "text"
    )
    openings: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="how self-written user turns begin, taken in turn; '' leaves it to the "
            "target",
        ),
    ] = ("",)
    prompt_tokens: Annotated[
        PositiveInt,
        Field(description="most tokens of a self-written prompt, or of a text's beginning"),
    ] = 48
    prompt_temperature: Annotated[
        PositiveFloat, Field(description="temperature at which user turns are written")
    ] = 0.9

    @model_validator(mode="after")
    def _path_where_needed(self) -> "DataSettings":
        if self.source != "self" and not self.path:
            raise ValueError(f"source {self.source!r} needs path; set it to your files")
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class TraceSettings:
    """Texts that the target writes, with its own top-n log-probabilities."""

    engine: Annotated[
        Literal["transformers", "vllm"],
        Field(
            description="what runs the target: transformers, on any machine; vllm (pip install "
            "vllm; an HF folder), for a target of billions of parameters on GPUs, with batch in "
            "the hundreds"
        ),
    ] = "transformers"
    tokens: Annotated[PositiveInt, Field(description="answer tokens to write before stopping")] = (
        60_000
    )
    top_n: Annotated[
        PositiveInt, Field(description="log-probabilities kept for each answer token")
    ] = 64
    batch: Annotated[PositiveInt, Field(description="rows written at once by one worker")] = 48
    max_new_tokens: Annotated[PositiveInt, Field(description="most tokens of one answer")] = 128
    sampled_share: Annotated[
        Share, Field(description="share of the answers that are sampled; the others are greedy")
    ] = 0.5
    beams: Annotated[
        PositiveInt,
        Field(
            description="of an encoder–decoder: beams of the answers that are not sampled; 1 is "
            "greedy. Held-out answers are always greedy, since that is how they are replayed"
        ),
    ] = 1
    temperature: Annotated[
        PositiveFloat, Field(description="temperature of the sampled answers")
    ] = 1.0
    validation_share: Annotated[
        float, Field(ge=0, lt=1, description="share of the rows that training never sees")
    ] = 0.05
    workers: Annotated[
        int,
        Field(
            ge=0,
            description="processes that write, each with the target in memory and, on a CPU, one "
            "thread; 0: one a core. With engine: vllm, GPUs that share the target; 0: one",
        ),
    ] = 0

    @model_validator(mode="after")
    def _vllm_searches_no_beams(self) -> "TraceSettings":
        if self.engine == "vllm" and self.beams > 1:
            raise ValueError(
                f"beams {self.beams}: engine vllm writes answers token by token; set engine: "
                "transformers, or leave beams out"
            )
        return self

    @model_validator(mode="after")
    def _vllm_knows_one_temperature(self) -> "TraceSettings":
        if self.engine == "vllm" and self.sampled_share and self.temperature != 1.0:
            raise ValueError(
                f"temperature {self.temperature}: engine vllm gives log-probabilities at the "
                "temperature of the draw alone, and traces need them at 1 too; set temperature: "
                "1.0, sampled_share: 0.0 or engine: transformers"
            )
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ShapeSettings:
    """The drafter's counts; what is left out stays as in the source."""

    layers: Annotated[PositiveInt | None, Field(description="decoder layers")] = None
    kv_heads: Annotated[PositiveInt | None, Field(description="key/value heads")] = None
    heads_per_group: Annotated[
        PositiveInt | None, Field(description="query heads that share one KV head")
    ] = None
    heads: Annotated[
        PositiveInt | None,
        Field(description="query heads in all (kv_heads x heads_per_group); instead of these two"),
    ] = None
    ffn: Annotated[PositiveInt | None, Field(description="FFN width")] = None
    hidden: Annotated[PositiveInt | None, Field(description="width of the residual stream")] = None
    encoder_layers: Annotated[PositiveInt | None, Field(description="encoder layers")] = None
    encoder_ffn: Annotated[PositiveInt | None, Field(description="FFN width of the encoder")] = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class DomainSettings:
    """One kind of text in a mixture."""

    path: Annotated[
        tuple[str, ...],
        Field(
            min_length=1,
            description="files and folders (.jsonl, .jsonl.zst, .jsonl.gz, .parquet), or "
            "hub:OWNER/NAME?config=C&split=S&revision=R, which is streamed (split: train)",
        ),
    ]
    weight: Annotated[
        PositiveFloat, Field(description="share of the tokens, over the sum of all weights")
    ] = 1.0


@dataclass(frozen=True, config=STRICT, kw_only=True)
class MixtureSettings:
    """RedPajama-like text by domain, packed into sequences of one length."""

    domains: Annotated[
        dict[str, DomainSettings], Field(min_length=1, description="name -> where, and how much")
    ]
    text_key: Annotated[str, Field(description="the field of a row that holds its text")] = "text"
    sequence: Annotated[int, Field(ge=2, description="tokens of a packed sequence")] = 512
    separate_documents: Annotated[
        bool,
        Field(
            description="documents that share a sequence don't see one another, and each counts "
            "its positions from 0"
        ),
    ] = True
    shuffle_buffer: Annotated[
        int,
        Field(
            ge=0,
            description="documents of a domain that are read and shuffled together; 0: in order",
        ),
    ] = 256
    held_out: Annotated[
        PositiveInt,
        Field(
            description="sequences of each domain that are kept to measure it, and never learned"
        ),
    ] = 8
    update: Annotated[
        Literal["none", "loss", "acceptance"],
        Field(
            description="how shares change: loss, towards domains whose loss is furthest above "
            "their reference (LLM-Shearing); acceptance, towards those where the target would "
            "accept least (needs teacher: live, and no reference)"
        ),
    ] = "none"
    update_every: Annotated[PositiveInt, Field(description="steps between two updates")] = 50
    update_rate: Annotated[
        PositiveFloat, Field(description="factor of the excess in the exponent of an update")
    ] = 1.0
    reference: Annotated[
        dict[str, PositiveFloat],
        Field(description="domain -> loss in nats that update: loss compares with"),
    ] = field(default_factory=dict)

    @model_validator(mode="after")
    def _reference_where_needed(self) -> "MixtureSettings":
        if self.update == "loss" and set(self.reference) != set(self.domains):
            raise ValueError(
                f"reference: update: loss compares every domain; give a loss for each of "
                f"{', '.join(sorted(self.domains))} and for no other, or set update: acceptance"
            )
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class PruneSettings:
    """Learnable-mask pruning of the source to an exact shape."""

    shape: Annotated[ShapeSettings, Field(description="the drafter's shape")] = field(
        default_factory=ShapeSettings
    )
    draft_ms: Annotated[
        PositiveFloat | None,
        Field(
            description="budget instead of counts: most milliseconds of a drafter's pass by the "
            "table `latency`; what `shape` names stays fixed, the other axes share the budget"
        ),
    ] = None
    latency: Annotated[
        str | None,
        Field(description="table of the source's measured latencies, from `draftsmith profile`"),
    ] = None
    axes: Annotated[
        tuple[
            Literal[
                "layers",
                "kv_heads",
                "heads_per_group",
                "ffn",
                "hidden",
                "encoder_layers",
                "encoder_ffn",
            ],
            ...,
        ]
        | None,
        Field(description="axes that may be cut; default: those that the shape changes"),
    ] = None
    encoder_repeat: Annotated[
        PositiveInt,
        Field(
            description="times that each encoder layer which is kept comes in the drafter, in "
            "order: 2 makes 12 layers of 6; drafters that share the target's encoder have 1"
        ),
    ] = 1
    method: Annotated[
        Literal["masks", "first", "last", "uniform", "random", "block-influence", "importance"],
        Field(
            description="masks: learned. Baselines: first, last, uniform choose by position, "
            "random by the seed; block-influence keeps the layers that change their input most, "
            "importance also the widths with the largest activations"
        ),
    ] = "masks"
    apart: Annotated[
        bool,
        Field(
            description="choose the layers whose attention and whose FFN are kept apart: a block "
            "of the drafter may join the attention of a layer with the FFN of a later one"
        ),
    ] = False
    objective: Annotated[
        Literal["kd", "acceptance", "ce"],
        Field(
            description="what masks minimise on the target's texts: kd, forward KL to its "
            "distributions; acceptance, 1 - acceptance under sampling; ce, cross-entropy of the "
            "texts"
        ),
    ] = "kd"
    teacher: Annotated[
        Literal["traces", "live"],
        Field(
            description="of kd and acceptance: the top_n log-probabilities of the traces, or the "
            "target itself, in memory"
        ),
    ] = "traces"
    mixture: Annotated[
        MixtureSettings | None,
        Field(description="text to learn from instead of the target's own; none: the traces"),
    ] = None
    steps: Annotated[PositiveInt, Field(description="mask training steps")] = 60
    warmup: Annotated[
        int, Field(ge=0, description="steps over which the wanted count falls to the shape's")
    ] = 20
    batch: Annotated[PositiveInt, Field(description="rows a micro-batch")] = 4
    accumulate: Annotated[
        PositiveInt,
        Field(description="micro-batches a step, over all processes; a multiple of their number"),
    ] = 1
    max_length: Annotated[
        PositiveInt, Field(description="tokens of a row, prompt included; longer rows are cut")
    ] = 192
    vocab_limit: Annotated[
        PositiveInt | None,
        Field(description="as distill.vocab_limit, for the loss that the masks see"),
    ] = None
    mask_lr: Annotated[
        PositiveFloat,
        Field(
            description="learning rate of log alpha (Adam); too small for the warm-up, all masks "
            "close together at full speed, whatever they are worth"
        ),
    ] = 0.5
    weights_lr: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="learning rate of the weights beside the masks; 0: they stay as they are",
        ),
    ] = 0.0
    clip: Annotated[
        PositiveFloat | None,
        Field(description="largest gradient norm, of masks and of weights apart; none: any"),
    ] = None
    zero: Annotated[
        Literal[1, 2, 3],
        Field(description="as distill.zero, for weights that learn in many processes"),
    ] = 2
    checkpoint_activations: Annotated[
        bool,
        Field(description="compute activations again in the backward pass: less memory, slower"),
    ] = False
    lambda_lr: Annotated[
        PositiveFloat, Field(description="rate of the gradient ascent on the multipliers")
    ] = 20.0
    penalty: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            le=10_000,
            description="where the quadratic multiplier starts; large, the expected count follows "
            "the wanted one closely",
        ),
    ] = 1000.0
    init_log_alpha: Annotated[
        float, Field(ge=-4.6, le=4.6, description="where every log alpha starts")
    ] = 2.0
    exchange: Annotated[
        int,
        Field(
            ge=0,
            description="most exchanges of a kept layer for a cut one that lowers the loss, after "
            "the masks have chosen; 0: none",
        ),
    ] = 3
    race: Annotated[
        int,
        Field(
            ge=0,
            description="steps for which the layers that masks, block influence, even spacing and "
            "exchange propose are distilled; those that emit most per round on held-out traces are "
            "kept. 0: the loss before distillation decides",
        ),
    ] = 0
    race_lr: Annotated[PositiveFloat, Field(description="learning rate of the race")] = 1.5e-3
    save_every: Annotated[
        PositiveInt,
        Field(description="steps between two checkpoints, which hold weights that learn too"),
    ] = 10
    snap: Annotated[
        bool,
        Field(
            description="cut to the exact shape by log alpha where the masks have not converged; "
            "false: fail instead"
        ),
    ] = True

    @model_validator(mode="after")
    def _budget_has_a_table(self) -> "PruneSettings":
        if (self.draft_ms is None) != (self.latency is None):
            raise ValueError(
                "draft_ms and latency go together; give both (`draftsmith profile TARGET` writes "
                "the table), or neither and a shape"
            )
        if self.draft_ms is not None and (self.method != "masks" or self.apart):
            raise ValueError(
                f"draft_ms {self.draft_ms}: only learned masks of whole layers share out a budget; "
                "give a shape, or set method: masks and leave apart out"
            )
        return self

    @model_validator(mode="after")
    def _apart_has_layers(self) -> "PruneSettings":
        if self.apart and (self.shape.layers is None or self.method != "masks"):
            raise ValueError(
                "apart: learned masks choose the halves of so many layers; set shape.layers and "
                "method: masks, or leave apart out"
            )
        return self

    @model_validator(mode="after")
    def _target_where_needed(self) -> "PruneSettings":
        if self.teacher == "live" and self.objective == "ce":
            raise ValueError(
                "teacher live: objective ce learns the tokens of the text alone; set objective: "
                "kd or acceptance, or leave teacher out"
            )
        if self.mixture is None:
            return self
        if self.objective != "ce" and self.teacher == "traces":
            raise ValueError(
                f"objective {self.objective}: no trace tells what the target says of a mixture; "
                "set teacher: live, or objective: ce"
            )
        measures = {"none": self.objective, "loss": "ce", "acceptance": "acceptance"}
        if self.objective != (needed := measures[self.mixture.update]):
            raise ValueError(
                f"mixture.update {self.mixture.update}: domains are measured by the objective, "
                f"which is {self.objective}; set objective: {needed}, or another update"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "PruneSettings":
        if self.method == "masks" and self.warmup > self.steps:
            raise ValueError(
                f"warmup {self.warmup} is longer than the run of {self.steps} steps; "
                "shorten warmup or raise steps"
            )
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class BlockSettings:
    """A drafter that proposes a whole block in one pass (Spec-Drafter, Xia et al. 2022)."""

    size: Annotated[PositiveInt, Field(description="tokens of a block, one for each mask")] = 8
    prefixes: Annotated[
        PositiveInt,
        Field(
            description="beginnings of random length of each text from which a step drafts; they "
            "share a pass of the encoder"
        ),
    ] = 1
    glancing: Annotated[
        Share,
        Field(
            description="share of a block's mistakes that is revealed instead of masked, at the "
            "first step"
        ),
    ] = 0.5
    glancing_end: Annotated[Share, Field(description="the same at the last step")] = 0.3


@dataclass(frozen=True, config=STRICT, kw_only=True)
class DistillSettings:
    """Logit-level distillation of the compact model on the traces."""

    loss: Annotated[
        Literal[
            "forward_kl",
            "reverse_kl",
            "jensen_shannon",
            "skew_kl",
            "skew_reverse_kl",
            "total_variation",
            "hybrid",
            "sequence",
        ],
        Field(
            description="distance between the target's and the drafter's distributions; hybrid: KL "
            "where little is accepted, total variation where much is; sequence: cross-entropy of "
            "the tokens that the target wrote (sequence-level distillation)"
        ),
    ] = "forward_kl"
    label_smoothing: Annotated[
        float,
        Field(
            ge=0,
            lt=1,
            description="of sequence: the share of the label that is spread over all tokens",
        ),
    ] = 0.0
    beta: Annotated[
        float, Field(gt=0, lt=1, description="of jensen_shannon: the target's share of the mixture")
    ] = 0.5
    alpha: Annotated[
        float, Field(gt=0, lt=1, description="of skew_kl and skew_reverse_kl: how much is mixed in")
    ] = 0.1
    temperature: Annotated[
        PositiveFloat,
        Field(description="softens both distributions; beside cross_entropy, with a factor T²"),
    ] = 1.0
    teacher: Annotated[
        Literal["traces", "live"],
        Field(
            description="traces: the top_n log-probabilities that they hold; live: the target "
            "itself, in memory, with all of its logits"
        ),
    ] = "traces"
    shard_teacher: Annotated[
        bool,
        Field(description="cut a live target into the parts of many processes (DeepSpeed ZeRO 3)"),
    ] = False
    on_policy: Annotated[
        Share,
        Field(
            description="share of the steps that learn from real rounds of the drafter, what it "
            "proposes after a mistake included, as a live target judges it"
        ),
    ] = 0.0
    on_policy_warmup: Annotated[
        int, Field(ge=0, description="steps over which that share rises from 0")
    ] = 0
    lookahead: Annotated[
        PositiveInt, Field(description="lookahead of those rounds, and of the replays")
    ] = 3
    position_decay: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="what a position counts against the one before it in a round of the "
            "drafter; 1: all alike, and no rounds are looked for",
        ),
    ] = 1.0
    domain_weights: Annotated[
        dict[str, PositiveFloat],
        Field(description="what tokens of a domain count; 1 for domains that are not named"),
    ] = field(default_factory=dict)
    hidden_matching: Annotated[
        float,
        Field(
            ge=0,
            allow_inf_nan=False,
            description="factor of the distance between what each kept layer reads in the drafter "
            "and in a live target that is the source",
        ),
    ] = 0.0
    cross_entropy: Annotated[
        Share,
        Field(
            description="share of the loss that is cross-entropy on the target's likeliest token, "
            "which alone counts in greedy decoding"
        ),
    ] = 0.0
    block: Annotated[
        BlockSettings | None,
        Field(description="make a drafter that proposes blocks; none: it drafts token by token"),
    ] = None
    steps: Annotated[PositiveInt, Field(description="optimizer steps")] = 600
    batch: Annotated[PositiveInt, Field(description="rows a micro-batch")] = 8
    accumulate: Annotated[
        PositiveInt,
        Field(description="micro-batches a step, over all processes; a multiple of their number"),
    ] = 1
    zero: Annotated[
        Literal[1, 2, 3],
        Field(
            description="of many processes (DeepSpeed ZeRO): 1 shares out the optimizer's state, 2 "
            "the gradients too, 3 the weights too"
        ),
    ] = 2
    max_length: Annotated[
        PositiveInt, Field(description="tokens of a row, prompt included; longer rows are cut")
    ] = 256
    lr: Annotated[PositiveFloat, Field(description="peak learning rate (AdamW)")] = 1e-3
    warmup: Annotated[int, Field(ge=0, description="steps of linear warm-up")] = 20
    weight_decay: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="decoupled weight decay of AdamW")
    ] = 0.01
    clip: Annotated[PositiveFloat, Field(description="largest gradient norm")] = 1.0
    train: Annotated[
        Literal["layers", "decoder", "all"],
        Field(
            description="layers: embeddings and head stay the target's; decoder: an encoder too, "
            "so that the target's pass serves both; all: everything learns"
        ),
    ] = "all"
    lora_rank: Annotated[
        int,
        Field(ge=0, description="LoRA adapters of this rank learn, and are merged; 0: the weights"),
    ] = 0
    lora_alpha: Annotated[
        PositiveFloat, Field(description="factor of the adapters, over their rank")
    ] = 32.0
    lora_axes: Annotated[
        tuple[
            Literal["kv_heads", "ffn", "cross_heads", "encoder_heads", "encoder_ffn", "hidden"], ...
        ],
        Field(
            min_length=1,
            description="what adapters stand beside: kv_heads, all projections of attention; ffn; "
            "hidden, both",
        ),
    ] = ("kv_heads", "ffn")
    checkpoint_activations: Annotated[
        bool,
        Field(description="compute activations again in the backward pass: less memory, slower"),
    ] = False
    vocab_limit: Annotated[
        PositiveInt | None,
        Field(
            description="normalise the drafter over the commonest tokens of the traces only: "
            "cheaper head, approximate loss; none: the whole vocabulary"
        ),
    ] = None
    evaluate_every: Annotated[
        PositiveInt, Field(description="steps between two replays of the held-out traces")
    ] = 100
    patience: Annotated[
        int,
        Field(
            ge=0,
            description="end after so many replays without a higher predicted speedup, and keep "
            "the best weights; 0: all steps are done, and the last weights kept",
        ),
    ] = 0
    draft_cost: Annotated[
        PositiveFloat | None,
        Field(
            description="time of a drafter's pass over that of a plain step of the target, for the "
            "predicted speedup; none: as many times as it has layers"
        ),
    ] = None
    verify_cost: Annotated[
        PositiveFloat,
        Field(description="time of a verification over that of a plain step; 1 on most GPUs"),
    ] = 1.0
    save_every: Annotated[PositiveInt, Field(description="steps between two checkpoints")] = 100

    @model_validator(mode="after")
    def _target_where_needed(self) -> "DistillSettings":
        for name in ("on_policy", "hidden_matching", "shard_teacher"):
            if self.teacher == "traces" and (value := getattr(self, name)):
                raise ValueError(
                    f"{name} {value}: only the target itself can judge that; set teacher: live, "
                    f"or leave {name} out"
                )
        return self

    @model_validator(mode="after")
    def _sequences_are_given(self) -> "DistillSettings":
        if self.label_smoothing and self.loss != "sequence":
            raise ValueError(
                f"label_smoothing {self.label_smoothing}: {self.loss} learns from distributions, "
                "which are no labels; set loss: sequence, or leave label_smoothing out"
            )
        taken = {"teacher": "traces", "temperature": 1.0, "cross_entropy": 0.0}
        other = [name for name, value in taken.items() if getattr(self, name) != value]
        if self.loss == "sequence" and other:
            raise ValueError(
                f"{other[0]} {getattr(self, other[0])}: loss sequence is the cross-entropy of the "
                f"tokens that the target wrote, and nothing else of it; leave {other[0]} out, or "
                "set another loss"
            )
        return self

    @model_validator(mode="after")
    def _blocks_have_no_rounds(self) -> "DistillSettings":
        # A live target reads texts, and no masks.
        taken = {"teacher": "traces", "on_policy": 0.0, "hidden_matching": 0.0}
        taken |= {"position_decay": 1.0, "lora_rank": 0}
        other = [name for name, value in taken.items() if getattr(self, name) != value]
        if self.block is not None and (other or self.train != "all"):
            name = other[0] if other else "train"
            raise ValueError(
                f"{name} {getattr(self, name)}: a drafter of blocks learns whole, from masks after "
                f"the target's text; leave {name} out, or leave block out"
            )
        if self.block is not None and self.lookahead > self.block.size:
            raise ValueError(
                f"lookahead {self.lookahead}: blocks have {self.block.size} tokens; make it at "
                "most that"
            )
        return self

    @model_validator(mode="after")
    def _warmup_fits(self) -> "DistillSettings":
        if self.warmup > self.steps:
            raise ValueError(
                f"warmup {self.warmup} is longer than the run of {self.steps} steps; "
                "shorten warmup or raise steps"
            )
        return self


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ScoreSettings:
    """Real speculative decoding on prompts that training never saw, and replay for every k."""

    prompts: Annotated[
        str,
        Field(
            description="a file of prompts (JSONL or parquet), quick, or a set of the hub: mmlu, "
            "gsm8k, hub:OWNER/NAME?prompt={field}; or a folder of .wav and .flac"
        ),
    ] = "quick"
    limit: Annotated[PositiveInt | None, Field(description="use the first prompts only")] = None
    decode_prompts: Annotated[
        PositiveInt | None,
        Field(description="prompts decoded for real and timed; the others are replayed"),
    ] = None
    max_new_tokens: Annotated[PositiveInt, Field(description="tokens written for each prompt")] = 64
    min_new_tokens: Annotated[
        int, Field(ge=0, description="tokens before which no text may end by an EOS")
    ] = 0
    stop: Annotated[
        tuple[str, ...], Field(description="strings that end a text, as the EOS does")
    ] = ()
    lookahead: Annotated[
        tuple[PositiveInt, ...], Field(min_length=1, description="lookaheads decoded for real")
    ] = (3,)
    replay_lookahead: Annotated[
        PositiveInt,
        Field(
            description="replay scores every lookahead from 1 to this, or to the largest decoded"
        ),
    ] = 8
    runtime: Annotated[
        Literal["torch", "transformers", "llama.cpp", "ort-genai", "openvino", "vllm"],
        Field(
            description="what decodes: torch is draftsmith's own; the others, where they are "
            "installed, draft by themselves and are asked for their own counters"
        ),
    ] = "torch"
    mode: Annotated[
        Literal["both", "decode", "replay"],
        Field(description="decode for real, replay the target's texts, or both"),
    ] = "both"
    batch: Annotated[PositiveInt, Field(description="texts decoded together")] = 1
    verify: Annotated[
        Literal["greedy", "sampling", "top_beta"],
        Field(description="greedy and sampling are exact, top_beta is lossy"),
    ] = "greedy"
    temperature: Annotated[
        float, Field(ge=0, allow_inf_nan=False, description="of sampling; 0 is greedy")
    ] = 0.0
    top_k: Annotated[
        PositiveInt | None, Field(description="of sampling: so many of the likeliest tokens")
    ] = None
    top_p: Annotated[
        float | None,
        Field(gt=0, le=1, description="of sampling: the likeliest tokens that hold this mass"),
    ] = None
    min_p: Annotated[
        Share | None,
        Field(description="of sampling: tokens with this share of the likeliest's probability"),
    ] = None
    samples: Annotated[
        int,
        Field(
            ge=0,
            description="of sampling: compare so many short texts of every prompt, drawn with and "
            "without drafts; 0: none",
        ),
    ] = 0
    beta: Annotated[PositiveInt, Field(description="top_beta: among so many likeliest tokens")] = 3
    tau: Annotated[
        float,
        Field(
            ge=0, allow_inf_nan=False, description="top_beta: within so many nats of the likeliest"
        ),
    ] = 1.0
    confidence: Annotated[
        Share, Field(description="stop drafting where the drafter is less sure; 0: never")
    ] = 0.0

    @model_validator(mode="after")
    def _runtimes_are_greedy(self) -> "ScoreSettings":
        plain = {"verify": "greedy", "temperature": 0.0, "batch": 1, "confidence": 0.0}
        plain |= {"samples": 0, "stop": (), "min_new_tokens": 0}
        other = [name for name, value in plain.items() if getattr(self, name) != value]
        if self.mode == "replay":
            other.append("mode")
        if self.runtime != "torch" and other:
            raise ValueError(
                f"{other[0]} {getattr(self, other[0])}: other runtimes decode for real, greedily "
                "and one text at a time; leave it out, or set runtime: torch"
            )
        return self

    @model_validator(mode="after")
    def _draws_where_it_draws(self) -> "ScoreSettings":
        drawn = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        if self.verify != "sampling" and (set_ := {k: v for k, v in drawn.items() if v}):
            name, value = next(iter(set_.items()))
            raise ValueError(
                f"{name} {value}: only verify sampling draws; set verify: sampling, or leave "
                f"{', '.join(set_)} out"
            )
        if self.mode == "replay" and (
            self.verify == "top_beta" or (self.temperature and self.confidence)
        ):
            raise ValueError(
                "mode replay: what a lossy verifier keeps, or a draft that is drawn and stops when "
                "unsure, can't be computed from a finished text; use mode: decode"
            )
        if self.samples and not self.temperature:
            raise ValueError(
                f"samples {self.samples}: there is nothing to compare unless verify: sampling "
                "draws; set it and a temperature, or leave samples out"
            )
        return self


Format = Literal[
    "hf",
    "gguf",
    "onnx",
    "ort-genai",
    "openvino",
    "ctranslate2",
    "vllm",
    "sglang",
    "tensorrt-llm",
]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ExportSettings:
    """The runtimes to write for."""

    to: Annotated[tuple[Format, ...], Field(min_length=1, description="runtimes to write for")] = (
        "hf",
        "gguf",
    )
    gguf_type: Annotated[
        Literal["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"],
        Field(description="tensor type of the GGUF's matrices"),
    ] = "F32"
    precision: Annotated[
        Literal["float32", "float16", "int8", "int4"],
        Field(description="of weights for onnx, ort-genai, openvino and ctranslate2"),
    ] = "float32"
    lookahead: Annotated[
        PositiveInt, Field(description="proposals of a round that launch configurations ask for")
    ] = 4
    tensor_parallel: Annotated[
        PositiveInt, Field(description="GPUs that share a layer in vllm, sglang, tensorrt-llm")
    ] = 1
    max_length: Annotated[
        PositiveInt | None,
        Field(description="tokens of a text that the runtime is to serve; none: the target's"),
    ] = None


@dataclass(frozen=True, config=STRICT, kw_only=True)
class Recipe:
    """From a target to a scored, exported drafter."""

    target: Annotated[
        str,
        Field(
            description="the model whose output must come out: an HF folder, a hub id, a .gguf "
            "file, or package:MODULE/FILE.gguf"
        ),
    ]
    source: Annotated[
        str | None,
        Field(description="the model that is pruned: a member of its family; none: the target"),
    ] = None
    description: Annotated[str, Field(description="one line for `draftsmith recipes list`")] = ""
    seed: Annotated[int, Field(ge=0, lt=2**31, description="seed of everything that is drawn")] = 0
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Field(
            description="of traces, masks and distillation; auto: bfloat16 where the device "
            "multiplies it in hardware. Scores on a CPU are always float32"
        ),
    ] = "auto"
    threads: Annotated[
        int, Field(ge=0, description="threads of training and scoring; 0: one a core")
    ] = 0
    data: Annotated[DataSettings, Field(description="prompts")] = field(
        default_factory=DataSettings
    )
    trace: Annotated[TraceSettings, Field(description="the target's own text")] = field(
        default_factory=TraceSettings
    )
    prune: Annotated[PruneSettings, Field(description="masks and shape")] = field(
        default_factory=PruneSettings
    )
    distill: Annotated[DistillSettings, Field(description="recovery")] = field(
        default_factory=DistillSettings
    )
    score: Annotated[ScoreSettings, Field(description="acceptance and speed")] = field(
        default_factory=ScoreSettings
    )
    export: Annotated[ExportSettings, Field(description="formats out")] = field(
        default_factory=ExportSettings
    )
