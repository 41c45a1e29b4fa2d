"""What a family table states: which tensors there are, and which axis each dimension is.

Masks, slicing, parameter counts and exports work on axis names alone. A new family is one new
file in this folder that defines `FAMILY`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any, Literal, get_args

Axis = Literal[
    "layers",
    "kv_heads",
    "heads_per_group",
    "ffn",
    "cross_heads",
    "encoder_layers",
    "encoder_heads",
    "encoder_ffn",
    "hidden",
    "vocab",
    "ffn_layers",
]
# The axes that a shape counts. Where attention and FFN are cut apart, `layers` are those whose
# attention is kept, and `ffn_layers` as many whose FFN is.
AXES: tuple[Axis, ...] = tuple(axis for axis in get_args(Axis) if axis != "ffn_layers")

# What is chosen anew inside every kept entry of another axis; the others are chosen once.
WITHIN: Mapping[Axis, Axis] = {
    "kv_heads": "layers",
    "heads_per_group": "kv_heads",
    "ffn": "layers",
    "cross_heads": "layers",
    "encoder_heads": "encoder_layers",
    "encoder_ffn": "encoder_layers",
}

# A tensor dimension -> the counts whose product is its size, outermost first. Only axes are cut.
DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden",),
    "vocab": ("vocab",),
    "ffn": ("ffn",),
    "query": ("kv_heads", "heads_per_group", "head_dim"),
    "key_value": ("kv_heads", "head_dim"),
    "head": ("kv_heads", "heads_per_group"),
    "head_dim": ("head_dim",),
    "cross": ("cross_heads", "head_dim"),
    "encoder_ffn": ("encoder_ffn",),
    "encoder_query": ("encoder_heads", "encoder_head_dim"),
    "encoder_head": ("encoder_heads",),
}
# Dimensions that no axis shortens; the config alone says how long they are.
FIXED = frozenset({"positions", "buckets", "mel_bins", "kernel", "source_vocab", "one"})

Tensors = dict[str, tuple[str, ...]]
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Stack:
    """Where masks act in a stack of blocks, as module names; `{layer}` is the block's number.

    Attributes:
        block: a transformer block, which adds to the residual stream.
        layers: the axis that counts the blocks.
        inputs: axis -> the module whose input its mask multiplies: the output projection for
            heads, the down projection for an FFN.
        norms: the norms over the residual stream, inside the blocks and after them.
        centred: whether norms subtract the mean (LayerNorm) or not (RMSNorm).
        post_norm: whether the stream itself is normalised, so that blocks read it directly.
        returns_more: whether a block returns more than the stream, so that it can't be left out.
        channels: convolutions before the blocks whose output channels, dimension 1, are `hidden`.
        additions: module whose output attention adds to the stream, and the same of the FFN; none:
            the two can't be cut apart.
        ffn_part: what belongs to the FFN, as names inside a block; all else is attention's.
    """

    block: str = "model.layers.{layer}"
    layers: Axis = "layers"
    inputs: Mapping[Axis, str] = dataclass_field(
        default_factory=lambda: {
            "kv_heads": "model.layers.{layer}.self_attn.o_proj",
            "ffn": "model.layers.{layer}.mlp.down_proj",
        }
    )
    norms: tuple[str, ...] = (
        "model.layers.{layer}.input_layernorm",
        "model.layers.{layer}.post_attention_layernorm",
        "model.norm",
    )
    centred: bool = False
    post_norm: bool = False
    returns_more: bool = False
    channels: tuple[str, ...] = ()
    additions: tuple[str, str] | None = None
    ffn_part: tuple[str, ...] = ("mlp", "post_attention_layernorm")

    def is_ffn(self, template: str) -> bool:
        """Whether a tensor inside a block belongs to its FFN."""
        part = template.removeprefix(self.block + ".").split(".", 1)[0]
        return self.additions is not None and part in self.ffn_part


# Where a block's attention and FFN add what they compute as it is.
HALVES = ("model.layers.{layer}.self_attn", "model.layers.{layer}.mlp")


@dataclass(frozen=True)
class ConfigKeys:
    """Which config field holds each size; None where the family derives it from others.

    Attributes:
        context: positions that the decoder can tell apart; None: any number.
        mel_bins: frequency bands of the sound that an encoder hears; None: it reads tokens.
        frames: positions of that encoder, one for every two frames of sound.
        activation: name of the FFN's activation.
        dropout: rate of dropout on what blocks add; None: there is none.
        activation_dropout: inside the FFN.
        attention_dropout: on attention's probabilities.
    """

    layers: str = "num_hidden_layers"
    kv_heads: str | None = "num_key_value_heads"
    heads: str = "num_attention_heads"
    head_dim: str | None = "head_dim"
    ffn: str = "intermediate_size"
    hidden: str = "hidden_size"
    vocab: str = "vocab_size"
    context: str | None = "max_position_embeddings"
    encoder_layers: str | None = None
    encoder_heads: str | None = None
    encoder_ffn: str | None = None
    mel_bins: str | None = None
    frames: str = "max_source_positions"
    activation: str = "hidden_act"
    dropout: str | None = None
    activation_dropout: str | None = None
    attention_dropout: str | None = None


@dataclass(frozen=True)
class HiddenScale:
    """A factor hidden**power in the model's code, which a cut model must keep at its old value.

    Attributes:
        power: 0.5 for embeddings that are multiplied by the root of the width.
        tensors: templates that take up the change, by (old / new)**power.
        tied: where the head is the embedding, templates that undo the change before it; `{last}`
            is the last decoder block.
        flag: config field that switches the factor on; None: always on.
        offset: added to the gains of `tied` by the model (norms that learn gain - 1).
    """

    power: float
    tensors: tuple[str, ...]
    tied: tuple[str, ...] = ()
    flag: str | None = None
    offset: float = 0.0


@dataclass(frozen=True)
class Gguf:
    """How the family is written as GGUF; tensor names come from the gguf package.

    Attributes:
        architecture: value of `general.architecture`.
        interleaved: whether llama.cpp rotates neighbouring pairs in this architecture, so that
            the rows of q and k are stored reordered.
        biases: whether llama.cpp reads biases of projections in it.
        scaled_frequencies: whether it reads a factor for each rotary frequency.
        other_width: how it is written if the heads together are not as wide as the residual
            stream, which llama.cpp then refuses in this architecture; None: it takes any width.
    """

    architecture: str
    interleaved: bool = False
    biases: bool = True
    scaled_frequencies: bool = False
    other_width: "Gguf | None" = None


# Reads whatever a gated pre-norm decoder without norms per head may have.
PLAIN_GGUF = Gguf("llama", interleaved=True, scaled_frequencies=True)


@dataclass(frozen=True)
class Family:
    """A model family as a table.

    Attributes:
        name: transformers' `model_type`.
        tensors: weight-name template -> the dimension (of `DIMENSIONS` or `FIXED`) at each place;
            a tensor with several names under its first.
        optional: templates that a model may lack (biases, an untied head).
        rebuilt: templates that files may lack -> the method of their module that makes them anew;
            empty: zeros.
        ignored: templates of left-overs in old checkpoints that mean nothing.
        stacks: where masks act; the decoder first.
        config: names of the sizes in the config.
        per_layer_config: config fields with one entry a decoder layer; they follow the kept layers.
        per_layer_counts: config fields that count leading layers (0 .. n-1) of some kind.
        ties: axes that are cut in the same ratio, since the config has one count for them or
            derives one from the other.
        same_in_all_layers: axes on which every layer keeps the same entries.
        first_block: templates that only the first block has; if it goes, they move on.
        per_layer_patterns: config fields that say which layers have windows by a period; they go
            when layers go, since `layer_types` says it exactly.
        hidden_multiple: what readers need the hidden width to be a multiple of.
        cache_of_encoder: whether transformers sizes the decoder's cache by the encoder's layers.
        hidden_of_heads: whether readers refuse a hidden width that heads don't divide.
        scales: factors that the model derives from its hidden width.
        tied: config field that says whether the head is the embedding.
        tied_head_power: hidden**power multiplies the logits of a tied head only.
        vocab_copies: config fields that repeat the vocabulary -> the flag under which they do.
        head: the projection to the vocabulary.
        positions: the decoder's table of positions, if it has one and takes no positions.
        auto: transformers' class that loads the family.
        rotated: templates whose rows are rotated by position (q and k).
        zero_start: whether the decoder starts from the padding, the last token, as from nothing.
        gguf: how to write it, or none.
        derives_head_dim: runtimes that take hidden / heads for the width of a head, whatever the
            config says.
    """

    name: str
    tensors: Mapping[str, tuple[str, ...]]
    optional: frozenset[str] = frozenset()
    rebuilt: Mapping[str, str] = dataclass_field(default_factory=dict)
    ignored: frozenset[str] = frozenset({"model.layers.{layer}.self_attn.rotary_emb.inv_freq"})
    stacks: tuple[Stack, ...] = (Stack(additions=HALVES),)
    config: ConfigKeys = dataclass_field(default_factory=ConfigKeys)
    per_layer_config: tuple[str, ...] = ("layer_types",)
    per_layer_counts: tuple[str, ...] = ("max_window_layers",)
    per_layer_patterns: tuple[str, ...] = ("sliding_window_pattern", "_sliding_window_pattern")
    hidden_multiple: int = 1
    cache_of_encoder: bool = False
    ties: tuple[tuple[Axis, ...], ...] = ()
    same_in_all_layers: frozenset[Axis] = frozenset()
    first_block: frozenset[str] = frozenset()
    hidden_of_heads: bool = False
    scales: tuple[HiddenScale, ...] = ()
    tied: str = "tie_word_embeddings"
    tied_head_power: float = 0.0
    vocab_copies: Mapping[str, str] = dataclass_field(default_factory=dict)
    head: str = "lm_head"
    positions: str | None = None
    auto: str = "AutoModelForCausalLM"
    zero_start: bool = False
    rotated: frozenset[str] = frozenset(
        f"model.layers.{{layer}}.self_attn.{p}_proj.{kind}"
        for p in "qk"
        for kind in ("weight", "bias")
    )
    gguf: Gguf | None = None
    derives_head_dim: frozenset[str] = frozenset()

    @property
    def has_encoder(self) -> bool:
        """Whether an encoder reads the input."""
        return self.config.encoder_layers is not None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that its tensors have."""
        counts = {c for dims in self.tensors.values() for d in dims for c in DIMENSIONS.get(d, ())}
        layers = {stack.layers for stack in self.stacks}
        return tuple(axis for axis in AXES if axis in counts | layers)

    def stack_of(self, template: str) -> Stack | None:
        """The stack that a tensor inside a block belongs to."""
        return next((s for s in self.stacks if template.startswith(s.block + ".")), None)

    def tied_with(self, axis: Axis) -> tuple[Axis, ...]:
        """The axes that are cut in the same ratio as `axis`, itself included."""
        return next((tie for tie in self.ties if axis in tie), (axis,))

    def one_vocabulary(self, config: Any) -> bool:
        """Whether an encoder reads the tokens that the decoder writes, with the same embedding."""
        own = any("source_vocab" in dimensions for dimensions in self.tensors.values())
        return not own or any(getattr(config, flag) for flag in self.vocab_copies.values())

    def says_unnamed(self, config: Any) -> bool:
        """Whether a model says tokens for which its tokenizer may have no string.

        Where the decoder has a vocabulary of its own, and times within a sound.
        """
        return self.config.mel_bins is not None or not self.one_vocabulary(config)

    def is_tied(self, config: Any) -> bool:
        """Whether the head is the embedding."""
        return bool(getattr(config, self.tied))


def template_of(name: str) -> tuple[str, int | None]:
    """Split a weight name into its template and block number."""
    match = _LAYER.search(name)
    if match is None:
        return name, None
    return f"{name[: match.start()]}{{layer}}{name[match.end() :]}", int(match.group())


def decoder_tensors(
    *,
    attention_bias: bool = False,
    output_bias: bool = False,
    ffn_bias: bool = False,
    qk_norm: bool = False,
) -> tuple[Tensors, frozenset[str]]:
    """The tensors of a gated pre-norm decoder, which most families share.

    Args:
        attention_bias: q, k and v may have biases.
        output_bias: the heads' output projection may have one.
        ffn_bias: the FFN's projections may have them.
        qk_norm: queries and keys are normalised per head.

    Returns:
        The table, and which of its tensors a checkpoint may lack.
    """
    block = "model.layers.{layer}."
    tensors: Tensors = {
        "model.embed_tokens.weight": ("vocab", "hidden"),
        block + "input_layernorm.weight": ("hidden",),
        block + "self_attn.q_proj.weight": ("query", "hidden"),
        block + "self_attn.k_proj.weight": ("key_value", "hidden"),
        block + "self_attn.v_proj.weight": ("key_value", "hidden"),
        block + "self_attn.o_proj.weight": ("hidden", "query"),
        block + "post_attention_layernorm.weight": ("hidden",),
        block + "mlp.gate_proj.weight": ("ffn", "hidden"),
        block + "mlp.up_proj.weight": ("ffn", "hidden"),
        block + "mlp.down_proj.weight": ("hidden", "ffn"),
        "model.norm.weight": ("hidden",),
        "lm_head.weight": ("vocab", "hidden"),
    }
    biases: Tensors = {}
    if attention_bias:
        biases |= {
            block + "self_attn.q_proj.bias": ("query",),
            block + "self_attn.k_proj.bias": ("key_value",),
            block + "self_attn.v_proj.bias": ("key_value",),
        }
    if output_bias:
        biases[block + "self_attn.o_proj.bias"] = ("hidden",)
    if ffn_bias:
        biases |= {
            block + "mlp.gate_proj.bias": ("ffn",),
            block + "mlp.up_proj.bias": ("ffn",),
            block + "mlp.down_proj.bias": ("hidden",),
        }
    if qk_norm:
        tensors |= {
            block + "self_attn.q_norm.weight": ("head_dim",),
            block + "self_attn.k_norm.weight": ("head_dim",),
        }
    return tensors | biases, frozenset(biases) | {"lm_head.weight"}


@dataclass(frozen=True)
class BartBuild:
    """What the encoder–decoders with biased projections and LayerNorm share.

    They derive the width of a head from the hidden width, so both are cut together.

    Attributes:
        post_norm: norms follow the additions; otherwise they precede the layers, and each stack
            ends in one more.
        embedding_norm: each stack begins with a norm.
    """

    post_norm: bool
    embedding_norm: bool = False

    ties: tuple[tuple[Axis, ...], ...] = (("hidden", "kv_heads", "cross_heads", "encoder_heads"),)
    config: ConfigKeys = dataclass_field(
        default_factory=lambda: ConfigKeys(
            layers="decoder_layers",
            kv_heads=None,
            heads="decoder_attention_heads",
            head_dim=None,
            ffn="decoder_ffn_dim",
            hidden="d_model",
            encoder_layers="encoder_layers",
            encoder_heads="encoder_attention_heads",
            encoder_ffn="encoder_ffn_dim",
            activation="activation_function",
            dropout="dropout",
            activation_dropout="activation_dropout",
            attention_dropout="attention_dropout",
        )
    )

    def tensors(self) -> Tensors:
        """All tensors but those before the blocks and the head."""
        decoder, encoder = (f"model.{side}.layers.{{layer}}." for side in ("decoder", "encoder"))
        return {
            **_attention(decoder + "self_attn", "query"),
            **_attention(decoder + "encoder_attn", "cross"),
            **_ffn(decoder, "ffn"),
            **_attention(encoder + "self_attn", "encoder_query"),
            **_ffn(encoder, "encoder_ffn"),
            **{
                f"{norm}.{kind}": ("hidden",)
                for stack in self.stacks()
                for norm in stack.norms
                for kind in ("weight", "bias")
            },
        }

    def stacks(self, channels: tuple[str, ...] = ()) -> tuple[Stack, ...]:
        """Decoder and encoder; `channels` are convolutions before the encoder."""
        decoder, encoder = "model.decoder", "model.encoder"
        return (
            Stack(
                block=decoder + ".layers.{layer}",
                inputs={
                    "kv_heads": decoder + ".layers.{layer}.self_attn.out_proj",
                    "cross_heads": decoder + ".layers.{layer}.encoder_attn.out_proj",
                    "ffn": decoder + ".layers.{layer}.fc2",
                },
                norms=tuple(self._norms(decoder, ("self_attn", "encoder_attn"))),
                centred=True,
                post_norm=self.post_norm,
            ),
            Stack(
                block=encoder + ".layers.{layer}",
                layers="encoder_layers",
                inputs={
                    "encoder_heads": encoder + ".layers.{layer}.self_attn.out_proj",
                    "encoder_ffn": encoder + ".layers.{layer}.fc2",
                },
                norms=tuple(self._norms(encoder, ("self_attn",))),
                centred=True,
                post_norm=self.post_norm,
                channels=channels,
            ),
        )

    def _norms(self, side: str, attentions: tuple[str, ...]) -> Iterator[str]:
        yield from (f"{side}.layers.{{layer}}.{name}_layer_norm" for name in attentions)
        yield side + ".layers.{layer}.final_layer_norm"
        if self.embedding_norm:
            yield side + ".layernorm_embedding"
        if not self.post_norm:
            yield side + ".layer_norm"


def _attention(module: str, inner: str) -> Tensors:
    """Four projections with biases."""
    tensors: Tensors = {f"{module}.out_proj.bias": ("hidden",)}
    for p in "qkv":
        tensors[f"{module}.{p}_proj.weight"] = (inner, "hidden")
        tensors[f"{module}.{p}_proj.bias"] = (inner,)
    return {**tensors, f"{module}.out_proj.weight": ("hidden", inner)}


def _ffn(block: str, inner: str) -> Tensors:
    return {
        block + "fc1.weight": (inner, "hidden"),
        block + "fc1.bias": (inner,),
        block + "fc2.weight": ("hidden", inner),
        block + "fc2.bias": ("hidden",),
    }
