"""Marian (Opus-MT): post-norm, sinusoidal positions that transformers rebuilds and doesn't save.

Encoder and decoder share one embedding, or each has its own vocabulary.
"""

from dataclasses import replace

from draftsmith.checkpoints.families.base import BartBuild, Family, HiddenScale

_BUILD = BartBuild(post_norm=True)
_OWN = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
_POSITIONS = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
_LAST_NORM = "model.decoder.layers.{last}.final_layer_norm."
FAMILY = Family(
    "marian",
    {
        "model.shared.weight": ("vocab", "hidden"),
        _OWN[0]: ("source_vocab", "hidden"),
        _OWN[1]: ("vocab", "hidden"),
        "lm_head.weight": ("vocab", "hidden"),
        **dict.fromkeys(_POSITIONS, ("positions", "hidden")),
        "final_logits_bias": ("one", "vocab"),
        **_BUILD.tensors(),
    },
    optional=frozenset({"model.shared.weight", *_OWN, "lm_head.weight"}),
    rebuilt={**dict.fromkeys(_POSITIONS, "create_weight"), "final_logits_bias": ""},
    stacks=_BUILD.stacks(),
    config=replace(_BUILD.config, vocab="decoder_vocab_size"),
    ties=_BUILD.ties,
    scales=(
        HiddenScale(
            power=0.5,
            tensors=("model.shared.weight", *_OWN),
            tied=(_LAST_NORM + "weight", _LAST_NORM + "bias"),
            flag="scale_embedding",
        ),
    ),
    vocab_copies={"vocab_size": "share_encoder_decoder_embeddings"},
    positions="model.decoder.embed_positions",
    zero_start=True,
    auto="AutoModelForSeq2SeqLM",
)
