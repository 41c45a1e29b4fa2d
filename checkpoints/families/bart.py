"""BART: post-norm, learned positions with an offset of two rows."""

from draftsmith.checkpoints.families.base import BartBuild, Family, HiddenScale

_BUILD = BartBuild(post_norm=True, embedding_norm=True)
# One tensor, unless the config unties them all.
_EMBEDDINGS = tuple(
    f"model.{name}.weight" for name in ("shared", "encoder.embed_tokens", "decoder.embed_tokens")
)
_LAST_NORM = "model.decoder.layers.{last}.final_layer_norm."
FAMILY = Family(
    "bart",
    {
        **dict.fromkeys(_EMBEDDINGS, ("vocab", "hidden")),
        "lm_head.weight": ("vocab", "hidden"),
        "model.encoder.embed_positions.weight": ("positions", "hidden"),
        "model.decoder.embed_positions.weight": ("positions", "hidden"),
        "final_logits_bias": ("one", "vocab"),
        **_BUILD.tensors(),
    },
    optional=frozenset({*_EMBEDDINGS[1:], "lm_head.weight"}),
    rebuilt={"final_logits_bias": ""},
    ignored=frozenset({"model.encoder.version", "model.decoder.version"}),
    stacks=_BUILD.stacks(),
    config=_BUILD.config,
    ties=_BUILD.ties,
    scales=(
        HiddenScale(
            power=0.5,
            tensors=_EMBEDDINGS,
            tied=(_LAST_NORM + "weight", _LAST_NORM + "bias"),
            flag="scale_embedding",
        ),
    ),
    positions="model.decoder.embed_positions",
    auto="AutoModelForSeq2SeqLM",
)
