"""Generation settings: what ends a text, and what would keep a model from being saved."""

import warnings
from typing import Any

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
        eos = getattr(config, "eos_token_id", None)
        ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    return frozenset(ids)
