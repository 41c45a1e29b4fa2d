"""Whisper: convolutions over mel frames, pre-norm stacks, keys without bias."""

from dataclasses import replace

from draftsmith.checkpoints.families.base import BartBuild, Family

_BUILD = BartBuild(post_norm=False)
_CONVOLUTIONS = ("model.encoder.conv1", "model.encoder.conv2")
FAMILY = Family(
    "whisper",
    {
        "model.encoder.conv1.weight": ("hidden", "mel_bins", "kernel"),
        "model.encoder.conv2.weight": ("hidden", "hidden", "kernel"),
        **{f"{name}.bias": ("hidden",) for name in _CONVOLUTIONS},
        "model.encoder.embed_positions.weight": ("positions", "hidden"),
        "model.decoder.embed_positions.weight": ("positions", "hidden"),
        "model.decoder.embed_tokens.weight": ("vocab", "hidden"),
        "proj_out.weight": ("vocab", "hidden"),
        **{k: v for k, v in _BUILD.tensors().items() if not k.endswith("k_proj.bias")},
    },
    optional=frozenset({"proj_out.weight"}),
    stacks=_BUILD.stacks(_CONVOLUTIONS),
    config=replace(_BUILD.config, context="max_target_positions", mel_bins="num_mel_bins"),
    ties=_BUILD.ties,
    # Its encoder's sinusoids are built in halves, with a division by the half less one.
    hidden_multiple=4,
    head="proj_out",
    positions="model.decoder.embed_positions",
    auto="AutoModelForSpeechSeq2Seq",
)
