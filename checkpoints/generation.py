"""Generation settings: what ends a text, what keeps a model from being saved, ids that move."""

import copy
import inspect
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftsmith.errors import DraftsmithError, RequestError

if TYPE_CHECKING:
    from draftsmith.checkpoints.slicing import Selection

# Fields that hold one id or several, all of which the model needs.
_TOKEN_ID = re.compile(r"token_ids?$")
# Fields that may lose entries with the tokens that they name.
_TOKEN_LISTS = ("suppress_tokens", "begin_suppress_tokens")
_TOKEN_SEQUENCES = ("bad_words_ids",)
_PLACED_TOKENS = ("forced_decoder_ids",)
_NAMED_TOKENS = ("lang_to_id", "task_to_id")

# Settings of sampling and of beams with their neutral values; without do_sample or beams, any
# other value makes transformers refuse to save.
_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 50,
    "typical_p": 1.0,
    "min_p": None,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
_BEAMS = {"early_stopping": False, "length_penalty": 1.0}
_OUTPUTS = {"output_scores": None, "output_logits": None, "output_attentions": None}


def repair_generation_config(model: Any) -> list[str]:
    """Drop generation settings that contradict each other (case A20).

    transformers refuses to save a model with them, which would lose a whole run at its end.

    Returns:
        The settings that were dropped; a warning names them.
    """
    config = model.generation_config
    if config is None or config.do_sample:
        return []
    neutral: dict[str, Any] = dict(_SAMPLING)
    if (config.num_beams or 1) == 1:
        neutral |= _BEAMS
    if not config.return_dict_in_generate:
        neutral |= _OUTPUTS
    dropped = [
        key
        for key, default in neutral.items()
        if (value := getattr(config, key, None)) is not None
        and value is not False
        and value != default
    ]
    for key in dropped:
        setattr(config, key, None)
    if dropped:
        warnings.warn(
            f"generation_config: do_sample is false, so {', '.join(dropped)} was dropped",
            stacklevel=2,
        )
    return dropped


def stop_ids(model: Any) -> frozenset[int]:
    """The ids that end a text, from the generation config or the config; one or a list."""
    ids: set[int] = set()
    for config in (model.generation_config, model.config):
        ids |= _ids(config, "eos_token_id")
    return frozenset(ids)


def special_ids(model: Any) -> frozenset[int]:
    """The ids by which a model's texts begin, end and are padded, whatever its tokenizer names."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    configs = (model.generation_config, model.config)
    return frozenset().union(*(_ids(config, name) for config in configs for name in names))


def cache_argument(model: Any) -> str:
    """Under which name a model takes its key/value cache: `cache` from transformers 5.24 on."""
    parameters = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def banned_ids(model: Any) -> frozenset[int]:
    """The ids that the generation config never lets a text hold."""
    config = model.generation_config
    alone = {ids[0] for ids in getattr(config, "bad_words_ids", None) or () if len(ids) == 1}
    return frozenset(i for i in _ids(config, "suppress_tokens") | alone if i >= 0)


def never_first(model: Any) -> frozenset[int]:
    """The ids with which the generation config lets no text begin."""
    return frozenset(_ids(model.generation_config, "begin_suppress_tokens"))


def decoder_start(model: Any) -> list[int]:
    """What the decoder of an encoder–decoder reads before it writes, forced tokens included.

    Raises:
        RequestError: neither config says with which token it begins.
    """
    config = model.generation_config
    first = [
        getattr(place, name, None)
        for place in (config, model.config)
        for name in ("decoder_start_token_id", "bos_token_id")
    ]
    if (begin := next((i for i in first if i is not None), None)) is None:
        raise RequestError(
            "generation_config.json: decoder_start_token_id is missing, so it is not known what "
            "the decoder reads first; take the file from the original checkpoint"
        )
    forced = [i for _, i in sorted(getattr(config, "forced_decoder_ids", None) or ())]
    first_word = sorted(_ids(config, "forced_bos_token_id"))
    return [begin, *(forced or first_word)]


def beam_settings(
    model: Any,
    beams: int,
    max_new_tokens: int,
    *,
    said: Collection[int],
    start: Sequence[int],
    end: Collection[int],
) -> Any:
    """A `GenerationConfig` of beam search with the bans of greedy decoding, and no other.

    How a search values length and when it stops are the model's own.

    Args:
        model: that searches.
        beams: of the search.
        max_new_tokens: most tokens of a text.
        said: ids that may be said.
        start: what the decoder reads first.
        end: ids that end a text.
    """
    from transformers import GenerationConfig

    own, rows = model.generation_config, model.get_output_embeddings().weight.shape[0]
    return GenerationConfig(
        num_beams=beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        length_penalty=own.length_penalty,
        early_stopping=own.early_stopping,
        suppress_tokens=sorted(set(range(rows)).difference(said)) or None,
        begin_suppress_tokens=sorted(never_first(model)) or None,
        # Over the ids that may be said, as greedy decoding and sampling.
        renormalize_logits=True,
        decoder_start_token_id=start[0],
        eos_token_id=sorted(end) or None,
        # Behind an end, where nothing is read.
        pad_token_id=0,
    )


def _ids(config: Any, name: str) -> set[int]:
    """The ids in a field that holds one, several or none; negative ones stand for nothing."""
    found = getattr(config, name, None)
    return {i for i in (found if isinstance(found, list) else [found]) if i is not None and i >= 0}


def compact_generation_config(config: Any, selection: "Selection") -> Any:
    """The generation config of what `selection` keeps: moved ids, layers and heads."""
    new = copy.deepcopy(config)
    if (heads := getattr(config, "alignment_heads", None)) is not None:
        # Pairs of a decoder layer and one of its cross-attention heads.
        position = {layer: i for i, layer in enumerate(selection.layers)}
        moved = [
            [position[layer], selection.cross_heads[position[layer]].index(head)]
            for layer, head in heads
            if layer in position and head in selection.cross_heads[position[layer]]
        ]
        new.alignment_heads = moved or None
    if selection.vocab is not None:
        renumber_tokens(new, {old: i for i, old in enumerate(selection.vocab)})
    return new


def renumber_tokens(config: Any, new: Mapping[int, int]) -> None:
    """Give the special ids of a config or generation config other numbers, in place.

    Args:
        config: lists of tokens to suppress, ban or force lose those that have no new number.
        new: old id -> new id. Negative ids stand for nothing and stay.

    Raises:
        DraftsmithError: a special token that the model needs has no new number.
    """
    for key, value in list(vars(config).items()):
        if value is None:
            continue
        if key in _TOKEN_LISTS:
            setattr(config, key, [new[i] for i in value if i in new])
        elif key in _TOKEN_SEQUENCES:
            kept = [[new[i] for i in ids] for ids in value if all(i in new for i in ids)]
            setattr(config, key, kept or None)
        elif key in _PLACED_TOKENS:
            kept = [[place, new[i]] for place, i in value if i in new]
            setattr(config, key, kept or None)
        elif key in _NAMED_TOKENS:
            setattr(config, key, {name: new[i] for name, i in value.items() if i in new})
        elif _TOKEN_ID.search(key):
            ids = [_new_id(key, i, new) for i in (value if isinstance(value, list) else [value])]
            setattr(config, key, ids if isinstance(value, list) else ids[0])


def _new_id(key: str, old: int, new: Mapping[int, int]) -> int:
    if old < 0:
        return old
    if old not in new:
        raise DraftsmithError(f"vocab: {key} {old} is not among the kept tokens; keep it")
    return new[old]
