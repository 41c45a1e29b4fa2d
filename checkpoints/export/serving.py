"""What vLLM, SGLang and TensorRT-LLM share: rules of a pair on GPUs, and lengths that it serves.

All three load the HF folder that `hf` writes, as a model that drafts beside its target. Each rule
was read in the engine's own code; the release is named where a rule stands.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.checkpoints.export.base import Candidate
from draftsmith.checkpoints.loading import describe, load_config
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import write_file
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings


@dataclass(frozen=True)
class Serving:
    """A drafter and the target that it is served with, by their numbers.

    Attributes:
        runtime: name of the engine.
        candidate: the drafter.
        target: the target's shape.
        target_context: positions that the target can tell apart; None: any number.
        context: positions that the drafter can; None likewise.
        max_length: tokens that were asked for; None: as many as the engine takes.
    """

    runtime: str
    candidate: Candidate
    target: Shape
    target_context: int | None
    context: int | None
    max_length: int | None

    def refuse(self, what: str) -> RequestError:
        """The error that says why the engine can't serve this pair."""
        return RequestError(f"export {self.runtime}: {what}")

    @property
    def lengths(self) -> list[int]:
        """What limits a text: the contexts of both, and what was asked for; those that are known.

        The smallest is what both models can serve.
        """
        limits = (self.max_length, self.target_context, self.context)
        return [limit for limit in limits if limit is not None]


def serving(runtime: str, candidate: Candidate, settings: ExportSettings) -> Serving:
    """Check what every engine asks for; it looks at configs alone.

    Raises:
        RequestError: an encoder, a cut vocabulary, counts that GPUs can't share, or texts longer
            than the target can read.
    """
    config = load_config(candidate.target)
    family, shape = describe(config, candidate.target)
    found = Serving(
        runtime,
        candidate,
        shape,
        context_of(config, family),
        context_of(candidate.config, candidate.family),
        settings.max_length,
    )
    _check_kind(found)
    _check_head_dim(found)
    for name, counts in (("the drafter", candidate.shape), ("the target", shape)):
        _check_split(found, name, counts, settings.tensor_parallel)
    if settings.max_length and settings.max_length > (found.target_context or settings.max_length):
        raise found.refuse(
            f"export.max_length: {settings.max_length} is more than the {found.target_context} "
            "positions of the target; set it to that or less"
        )
    return found


def _check_kind(pair: Serving) -> None:
    if pair.candidate.family.has_encoder:
        raise pair.refuse(
            f"{pair.candidate.family.name} has an encoder, and a model drafts there for decoders "
            "alone; set export.to: [hf]"
        )
    if pair.candidate.token_map is not None:
        raise pair.refuse(
            "the drafter has a cut vocabulary, and the engine takes its rows for the target's ids; "
            "set export.to: [hf]"
        )


def _check_head_dim(pair: Serving) -> None:
    """Case A14: heads were cut, so that they no longer fill the hidden width."""
    shape, family = pair.candidate.shape, pair.candidate.family
    if pair.runtime in family.derives_head_dim and shape.heads * shape.head_dim != shape.hidden:
        raise pair.refuse(
            f"{shape.heads} heads of {shape.head_dim} don't make hidden {shape.hidden}, and for "
            f"family {family.name} the engine takes hidden / heads for head_dim; keep all heads "
            "(prune.shape.kv_heads and heads_per_group) and the whole hidden width"
        )


def _check_split(pair: Serving, name: str, shape: Shape, gpus: int) -> None:
    """The same in vLLM 0.32, SGLang 0.5 and TensorRT-LLM 1.3.

    A vocabulary needs no check: all three pad it until it can be shared.
    """
    # With fewer KV heads than GPUs, several GPUs hold the same one.
    kv_heads = shape.kv_heads % gpus if shape.kv_heads >= gpus else gpus % shape.kv_heads
    for what, count, rest in (
        ("heads", shape.heads, shape.heads % gpus),
        ("KV heads", shape.kv_heads, kv_heads),
        ("FFN", shape.ffn, shape.ffn % gpus),
    ):
        if rest:
            raise pair.refuse(
                f"{name}'s {what} ({count}) can't be shared by {gpus} GPUs; set "
                "export.tensor_parallel to a number that divides them, or prune.shape to counts "
                "that it divides"
            )


def check_same_rows(pair: Serving) -> None:
    """Refuse heads that are padded to different sizes (case A1).

    Raises:
        RequestError: naming both sizes.
    """
    rows = pair.candidate.shape.vocab
    if rows != pair.target.vocab:
        raise pair.refuse(
            f"the drafter's head has {rows} rows and the target's {pair.target.vocab}, and the "
            "engine compares them; cut the drafter from the target itself"
        )


def check_length(pair: Serving) -> None:
    """Refuse texts longer than the drafter can read (case A11).

    Raises:
        RequestError: with the length that both can.
    """
    if pair.max_length and pair.max_length > (pair.context or pair.max_length):
        raise pair.refuse(
            f"export.max_length: {pair.max_length} is more than the {pair.context} positions of "
            f"the drafter, and past them the engine fails; set it to {pair.context} or less"
        )


def length_notes(pair: Serving) -> Iterator[str]:
    """What a drafter with the shorter context means where the engine must be kept within it."""
    if pair.context and pair.context < (pair.target_context or pair.context + 1):
        yield (
            f"the drafter knows {pair.context} positions, the target "
            f"{pair.target_context or 'any number'}: the pair is started for texts of "
            f"{min(pair.lengths)} tokens at most"
        )


def target_notes(pair: Serving) -> Iterator[str]:
    """How the target must be there."""
    target = pair.candidate.target
    if target.gguf:
        yield (
            "the engine loads the target as an HF folder, and it is a GGUF file: "
            f"`draftsmith export {target.spec} --target {target.spec} --to hf --out DIR` writes one"
        )


def write_yaml(path: Path, content: Mapping[str, Any]) -> None:
    """Write a configuration file, keys in their order."""
    from ruamel.yaml import YAML

    write_file(path, lambda partial: YAML().dump(dict(content), partial))
