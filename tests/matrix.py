"""One set of variants for all families: a new family file joins every test by existing."""

import copy
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from draftsmith.checkpoints.export.parity import example_inputs
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import AXES, Axis, Family
from draftsmith.checkpoints.shape import Shape, resolve_shape, shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.errors import RequestError
from draftsmith.prune.masks import applied, hard_masks
from tests.conftest import TINY_VOCAB, make_model

# What makes a family's tiny model show all that its table states; without an entry it is tried
# as it is.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {},
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"head_dim": 6, "hidden_size": 40},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 500_000.0,
            }
        },
    ],
    "mistral": [{}, {"sliding_window": 8}],
    "qwen2": [{}, {"tie_word_embeddings": True}],
    "qwen3": [{}, {"attention_bias": True}],
    "gemma3_text": [
        {"attention_bias": True},
        {
            "tie_word_embeddings": True,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ],
    "t5": [{}, {"feed_forward_proj": "gated-gelu"}, {"tie_word_embeddings": True}],
    "bart": [{}, {"tie_word_embeddings": True, "scale_embedding": True}],
    "marian": [
        {"tie_word_embeddings": True, "scale_embedding": True},
        {
            "tie_word_embeddings": True,
            "scale_embedding": True,
            "share_encoder_decoder_embeddings": False,
            "vocab_size": 70,
        },
        {},
    ],
    "whisper": [{}, {"tie_word_embeddings": True}],
}
# Tokens that a cut vocabulary keeps: all special ones, and those that `inputs` draws.
FIRST_KEPT = 60
KEPT_TOKENS = (*range(FIRST_KEPT), 70, 75, 95)
TOKENS = 16


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every family with every variant."""
    for family in sorted(families()):
        yield from ((family, variant) for variant in VARIANTS.get(family, [{}]))


def inputs(model: Any, family: Family) -> dict[str, torch.Tensor]:
    """Inputs, alike for a model and what is cut from it: all their ids are kept."""
    config = copy.copy(model.config)
    config.vocab_size = FIRST_KEPT
    setattr(config, family.config.vocab, FIRST_KEPT)
    given = example_inputs(config, family, TOKENS)
    return {
        name: value % FIRST_KEPT if value.dtype == torch.long else value
        for name, value in given.items()
    }


def logits(model: Any, family: Family) -> torch.Tensor:
    """Logits [1, T, V] on `inputs`."""
    with torch.inference_mode():
        found: torch.Tensor = model(**inputs(model, family)).logits
    return found


def smaller(shape: Shape, family: Family, axis: Axis) -> Shape | None:
    """The largest legal shape that is cut along `axis` to at most three quarters; None: none."""
    for count in range(max(1, getattr(shape, axis) * 3 // 4), 0, -1):
        try:
            found = resolve_shape(shape, {axis: count}, family)
        except RequestError:
            continue
        if found != shape:
            return found
    return None


def cuts(shape: Shape, family: Family) -> Iterator[tuple[str, Shape]]:
    """Every axis cut alone, and all of them together."""
    together = shape
    for axis in family.axes:
        if axis == "vocab":
            continue
        cut = smaller(shape, family, axis)
        if cut is None:
            continue
        yield axis, cut
        changed = {a: getattr(cut, a) for a in AXES if getattr(cut, a) != getattr(shape, a)}
        together = Shape(**{**vars(together), **changed})
    yield "all", together


def random_selection(shape: Shape, drafter: Shape, family: Family, seed: int) -> Selection:
    """A selection of the drafter's counts, with other indices in every layer and group."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[object, list[int]] = {}

    def choose(axis: Axis, place: tuple[int, ...]) -> list[int]:
        key = axis if axis in family.same_in_all_layers else (axis, place)
        if key not in drawn:
            order = torch.randperm(getattr(shape, axis), generator=generator)
            drawn[key] = order[: getattr(drafter, axis)].tolist()
        return drawn[key]

    selection: Selection = Selection.choose(shape, choose)
    return selection


def both(model: Any, selection: Selection) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Logits of the hard-masked source and of the compact model, and that model."""
    family = families()[model.config.model_type]
    shape = shape_of(model.config, family)
    compact = compact_model(model, family, selection)
    with applied(model, family, shape, hard_masks(selection, shape)):
        masked = logits(model, family)
    if selection.vocab is not None:
        masked = masked[..., list(selection.vocab)]
    return masked, logits(compact, family), compact


def case_names(cases: list[tuple[Any, ...]]) -> list[str]:
    """Readable names of (family, variant, …)."""
    return [
        "-".join(str(part) if not isinstance(part, Mapping) else _short(part) for part in case[:3])
        for case in cases
    ]


def matrix() -> list[tuple[str, dict[str, Any], str]]:
    """(family, variant, what is cut) of all families, variants and axes."""
    found = []
    for name, variant in variants():
        family = families()[name]
        shape = shape_of(make_model(name, **variant).config, family)
        axes = [axis for axis, _ in cuts(shape, family)]
        found += [(name, variant, axis) for axis in itertools.chain(axes, ["vocab"])]
    return found


def selection_for(model: Any, family: Family, axis: str, seed: int = 3) -> Selection:
    """The selection of a case of `matrix`."""
    shape = shape_of(model.config, family)
    drafter = dict(cuts(shape, family)).get(axis, shape)
    selection = random_selection(shape, drafter, family, seed)
    if axis not in ("vocab", "all"):
        return selection
    kept = tuple(t for t in KEPT_TOKENS if t < shape.vocab)
    return Selection(**{**vars(selection), "vocab": kept})


def _short(variant: Mapping[str, Any]) -> str:
    return ",".join(variant) or "plain"


assert max(KEPT_TOKENS) < TINY_VOCAB
