"""A CTranslate2 folder: the drafter in a quick engine that has no speculative decoding of its own.

It is useful where you verify yourself, and for encoder–decoders. CTranslate2's converter serves
models as they are published; it leaves out what only pruned ones need (a head's width apart from
hidden / heads, other numbers of heads in encoder and decoder) and some scales. The runtime reads
all of it, so it is stated after the conversion.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.checkpoints.export.base import Candidate, Job, Report
from draftsmith.checkpoints.export.parity import (
    TOLERANCE,
    Answers,
    Questions,
    check_parity,
    questions_for,
)
from draftsmith.checkpoints.export.processes import read_back
from draftsmith.checkpoints.families.base import Family
from draftsmith.checkpoints.generation import decoder_start
from draftsmith.checkpoints.layout import narrowest_window
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.checkpoints.pair import check_tokenizer_rows, context_of
from draftsmith.checkpoints.shape import Shape
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import ExportSettings

NAME = "ctranslate2"
_PLACE = f"export {NAME}"
_NOTE = (
    "it has no draft model in its API: the folder serves the drafter alone, where you verify "
    "yourself"
)
_TENSOR_TYPES = {"float32": "F32", "float16": "F16", "int8": "Q8_0"}
# Where a prompt of sound begins, and what lets the text follow without times.
_SOUND_PROMPT = ("<|startoftranscript|>", "<|notimestamps|>")
# How the config's rotary parameters are called in CTranslate2.
_ROTATION = {
    "rope_theta": ("rotary_base", np.float32),
    "factor": ("rotary_scaling_factor", np.float32),
    "low_freq_factor": ("rotary_low_freq_factor", np.float32),
    "high_freq_factor": ("rotary_high_freq_factor", np.float32),
    "original_max_position_embeddings": ("original_max_position_embeddings", np.int32),
}
_LAUNCH = {
    "TransformerDecoder": """\
drafter = ctranslate2.Generator("{folder}")
drafter.generate_batch([tokens], max_length={lookahead}, include_prompt_in_result=False)""",
    "Transformer": """\
drafter = ctranslate2.Translator("{folder}")
drafter.translate_batch([tokens], [written], beam_size=1, max_decoding_length={lookahead})""",
}
_LAUNCH_SOUND = """\
drafter = ctranslate2.models.{kind}("{folder}")
drafter.generate(features, [written], beam_size=1)"""


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what CTranslate2 can't take, or would compute otherwise.

    Raises:
        RequestError: naming it, and what to do instead.
    """
    if settings.precision not in _TENSOR_TYPES:
        raise RequestError(
            f"{_PLACE}: precision {settings.precision} is none of its tensor types "
            f"({', '.join(_TENSOR_TYPES)}); set export.precision: int8"
        )
    if importlib.util.find_spec(NAME) is None:
        raise RequestError(f"{_PLACE}: not installed; pip install 'draftsmith[{NAME}]'")
    _check_kind(candidate)
    _check_windows(candidate, settings)
    _check_rotation(candidate.config)
    tokenizer = load_tokenizer(candidate.target)
    check_tokenizer_rows(tokenizer, candidate.shape.vocab, candidate.target.spec)
    _check_tokens(candidate, tokenizer.get_vocab())
    return (_NOTE,)


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Convert the model in memory, then let CTranslate2 answer.

    Raises:
        DraftsmithError: the converter failed, or the folder reads back wrong.
    """
    path = folder / NAME
    tokenizer = load_tokenizer(job.target)
    kind = _convert(job, tokenizer, path, settings.precision)
    questions = _questions(job, tokenizer)
    # Weights are judged apart from what this CPU's 8-bit products add to their rounding.
    answers = read_back(NAME, path, questions, compute_type="float32")
    tolerance = TOLERANCE[_TENSOR_TYPES[settings.precision]]
    notes: tuple[str, ...] = (_NOTE,)
    if settings.precision == "int8":
        served = read_back(NAME, path, questions, compute_type="default")
        notes += tuple(_coarse(served, answers, tolerance))
    if job.family.zero_start:
        answers = _with_padding(answers, job.model, questions)
    parity = check_parity(answers, job.model, None, questions, tolerance, str(path))
    launch = _LAUNCH.get(kind, _LAUNCH_SOUND)
    return Report(
        (NAME,),
        launch.format(folder=NAME, kind=kind, lookahead=settings.lookahead),
        parity,
        notes,
    )


def _coarse(served: Answers, exact: Answers, tolerance: float) -> Iterator[str]:
    """Tells where this CPU can't be trusted with 8-bit products: without VNNI they overflow."""
    if served.logits is None or exact.logits is None:
        return
    difference, scale = (served.logits - exact.logits).abs().max(), exact.logits.abs().max()
    if not difference <= tolerance * scale:
        yield (
            f"8-bit products on this CPU change logits by {difference:.3g} (largest logit "
            f"{scale:.3g}), as they do without VNNI; serve it here with compute_type='float32'"
        )


def _check_kind(candidate: Candidate) -> None:
    # There is no public list of what it converts.
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    family, config = candidate.family, candidate.config
    if type(config).__name__ not in _MODEL_LOADERS:
        raise RequestError(
            f"{_PLACE}: its converter knows no {type(config).__name__}; set export.to: [hf]"
        )
    if family.has_encoder and not family.one_vocabulary(config):
        raise RequestError(
            f"{_PLACE}: the encoder has a vocabulary of its own, and the converter writes one for "
            "both; set export.to: [hf]"
        )


def _check_windows(candidate: Candidate, settings: ExportSettings) -> None:
    config, family = candidate.config, candidate.family
    window, context = narrowest_window(config, family), context_of(config, family)
    served = settings.max_length or context
    if window and (served is None or window < served):
        raise RequestError(
            f"{_PLACE}: attention windows (here of {window} tokens) can't be read past, and texts "
            f"may have {served}; set export.max_length: {window}, or export.to: [hf]"
        )


def _check_rotation(config: Any) -> None:
    from ctranslate2.converters.transformers import _SUPPORTED_ROPE_SCALING

    for rope in _rotations(config):
        kind = rope.get("rope_type", "default")
        # Factors of each frequency are read for few of its models.
        if "long_factor" in rope or kind not in {"default", *_SUPPORTED_ROPE_SCALING}:
            raise RequestError(
                f"{_PLACE}: rotary scaling {kind!r} is not converted; set export.to: [hf]"
            )


def _check_tokens(candidate: Candidate, vocabulary: dict[str, int]) -> None:
    """The runtime asks for some tokens by name, or at a place of the vocabulary."""
    family, last = candidate.family, candidate.shape.vocab - 1
    if family.zero_start and vocabulary.get("<pad>") != last:
        raise RequestError(
            f"{_PLACE}: the padding, from which this family's decoder starts, must be the last "
            f"token, <pad> = {last}, but is {vocabulary.get('<pad>')}; set export.to: [hf]"
        )
    if family.config.mel_bins and (gone := [t for t in _SOUND_PROMPT if t not in vocabulary]):
        raise RequestError(
            f"{_PLACE}: {candidate.target.spec} has no token {gone[0]}, by which the runtime finds "
            "its prompt; set export.to: [hf]"
        )


def _rotations(config: Any) -> list[dict[str, Any]]:
    """The rotary parameters; one for each kind of layer where there are several."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([rope] if rope else [])


def _convert(job: Job, tokenizer: Any, path: Path, precision: str) -> str:
    """Write the folder; returns the kind of model that CTranslate2 takes it for."""
    from ctranslate2.converters import TransformersConverter

    kinds = []

    class Converter(TransformersConverter):
        """Takes the model from memory, and states what only pruned models need."""

        def load_model(self, *_: Any, **__: Any) -> Any:
            # Its loaders take the model apart, and some write into its weights.
            model = copy.deepcopy(job.model)
            # transformers knew it once; one of the loaders still asks.
            model.config.normalize_before = not job.family.stacks[0].post_norm
            return model

        def load_tokenizer(self, *_: Any, **__: Any) -> Any:
            return _with_all_rows(tokenizer, job.family, job.shape.vocab)

        def _load(self) -> Any:
            spec = super()._load()
            _complete(spec, job.model.config, job.family, job.shape)
            kinds.append(spec.name.removesuffix("Spec"))
            return spec

    with tempfile.TemporaryDirectory(prefix="draftsmith-") as config:
        job.model.config.save_pretrained(config)
        try:
            Converter(config).convert(str(path), quantization=precision)
        except Exception as error:  # it raises what it likes
            raise DraftsmithError(f"{_PLACE}: its converter failed: {error}") from error
    return str(kinds[0])


def _with_all_rows(tokenizer: Any, family: Family, rows: int) -> Any:
    """A tokenizer whose vocabulary names every row: the converter counts, whatever the ids say."""
    known = tokenizer.get_vocab()
    # Sound has tokens for times, which the converter names if the tokenizer does not.
    rows = max(known.values()) + 1 if family.config.mel_bins else rows
    whole = {f"[PAD{i}]": i for i in set(range(rows)).difference(known.values())} | known
    tokenizer = copy.copy(tokenizer)
    tokenizer.get_vocab = lambda: whole
    return tokenizer


def _complete(spec: Any, config: Any, family: Family, shape: Shape) -> None:
    """State in a converted model what its loader left out."""
    from ctranslate2.specs.model_spec import OPTIONAL

    if hasattr(spec.config, "layer_norm_epsilon"):
        spec.config.layer_norm_epsilon = getattr(config, "rms_norm_eps", None)
    kinds = getattr(config, "layer_types", None)
    for place, layer in enumerate(spec.decoder.layer):
        rope = getattr(config, "rope_parameters", None) or {}
        if kinds is not None:
            rope = rope.get(kinds[place], rope)
        _state(layer.self_attention, _attention(config, shape.head_dim) | _rotation(rope))
    spec.decoder.num_heads = np.int16(shape.heads)
    if family.tied_head_power:
        tied = np.float32(shape.hidden**family.tied_head_power)
        spec.decoder.scale_outputs = tied if family.is_tied(config) else OPTIONAL
    if family.has_encoder:
        spec.encoder.num_heads = np.int16(shape.encoder_heads)


def _state(attention: Any, values: dict[str, Any]) -> None:
    """Its specification takes no new names by assignment; the runtime reads them."""
    vars(attention).update(values)


def _attention(config: Any, head_dim: int) -> dict[str, Any]:
    stated: dict[str, Any] = {"head_dim": np.int32(head_dim)}
    if scale := getattr(config, "query_pre_attn_scalar", None):
        stated["queries_scale"] = np.float32(scale**-0.5)
    return stated


def _rotation(rope: dict[str, Any]) -> dict[str, Any]:
    from ctranslate2.converters.transformers import _SUPPORTED_ROPE_SCALING

    stated: dict[str, Any] = {
        name: kind(rope[key]) for key, (name, kind) in _ROTATION.items() if key in rope
    }
    if (scaling := _SUPPORTED_ROPE_SCALING.get(rope.get("rope_type"))) is not None:
        stated["rotary_scaling_type"] = np.int8(scaling)
    return stated


def _questions(job: Job, tokenizer: Any) -> Questions:
    """What can be asked there: a decoder beside an encoder begins with a token of its own."""
    questions = questions_for(job.model.config, job.family)
    if not job.family.has_encoder:
        return questions
    start = decoder_start(job.model)[0]
    inputs = dict(questions.inputs)
    # The last token may be the padding, which is not kept as a token.
    for name in {"input_ids", "decoder_input_ids"}.intersection(inputs):
        inputs[name] = inputs[name].clamp(max=job.shape.vocab - 2)
    inputs["decoder_input_ids"][:, 0] = start
    prompt = tuple(inputs["decoder_input_ids"][0, : len(questions.prompt)].tolist())
    if job.family.config.mel_bins:
        prompt = tuple(tokenizer.convert_tokens_to_ids(list(_SOUND_PROMPT)))
    return replace(questions, inputs=inputs, prompt=prompt)


@torch.inference_mode()
def _with_padding(answers: Answers, model: Any, questions: Questions) -> Answers:
    """The padding has no logit there; the model's own stands in, so that it is not compared."""
    assert answers.logits is not None
    logits = model(**questions.inputs).logits[0].clone()
    logits[:, : answers.logits.shape[-1]] = answers.logits
    return replace(answers, logits=logits)
