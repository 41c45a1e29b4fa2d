"""A GGUF file for llama.cpp, with the target's own vocabulary so that it takes the pair."""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftsmith.checkpoints.export.base import Candidate, Job, Report, check_uniform
from draftsmith.checkpoints.export.gguf_vocabulary import (
    check_vocabulary,
    comparable,
    write_vocabulary,
)
from draftsmith.checkpoints.export.parity import (
    TOLERANCE,
    Answers,
    Parity,
    Questions,
    answers_of,
    check_parity,
    questions_for,
)
from draftsmith.checkpoints.export.processes import is_installed, read_back
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.families.base import Family, Gguf, template_of
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.gguf_files import gguf_names
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.loading import load_config, load_model, load_tokenizer
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import write_file
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings

_RUNTIME = "llama.cpp"
# Largest difference of its logits, relative to their scale, from the model that a file holds: it
# rounds what goes into a matrix to a type near the matrix's.
_ROUNDING = {"F32": 5e-5, "F16": 1e-2, "BF16": 6e-2}
_ROUNDING |= dict.fromkeys(("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"), 0.25)
# Of its K-quants.
_SUPER_BLOCK = 256
# The tensor of what rotary frequencies are divided by.
_FACTORS = "rope_freqs.weight"
_LAUNCH = (
    "llama-server -m TARGET.gguf -md {file} --spec-type draft-simple "
    "--spec-draft-n-max {lookahead} --spec-draft-n-min 0 --spec-draft-p-min 0"
)


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the file, then let llama.cpp and transformers read it back, as far as they can.

    Raises:
        DraftsmithError: shapes differ between layers, or the file reads back wrong.
    """
    kind = settings.gguf_type
    path = folder / f"drafter-{kind}.gguf"
    write(job, path, kind)
    launch = _LAUNCH.format(file=path.name, lookahead=settings.lookahead)
    return Report((path.name,), launch, _read_back(job, path, kind), tuple(_notes(job, settings)))


def write(job: Job, path: Path, tensor_type: str) -> None:
    """Write the file alone.

    Args:
        job: the drafter, and the target whose vocabulary is written.
        path: the file.
        tensor_type: of the matrices; norms and biases stay F32.

    Raises:
        DraftsmithError: shapes differ between layers.
    """
    check_uniform("gguf", job)
    write_file(path, lambda partial: _write(job, partial, tensor_type))


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what can't be written, or can't be read back here; returns notes.

    Raises:
        RequestError: naming what has no GGUF form here, and what to do instead.
    """
    config, family = candidate.config, candidate.family
    if candidate.token_map is not None:
        raise RequestError(
            "export gguf: the drafter has a cut vocabulary, and llama.cpp needs the target's; "
            "export it to hf"
        )
    if family.gguf is None:
        raise RequestError(f"export gguf: family {family.name} has no GGUF architecture here")
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        raise RequestError(
            f"export gguf: attention windows (here of {window} tokens) are not written; "
            "set export.to: [hf]"
        )
    form = _form(candidate)
    _check_rope(config, form)
    _check_tensors(config, family, form)
    _check_blocks(candidate.shape, settings.gguf_type)
    check_vocabulary(candidate.target, candidate.shape.vocab)
    if not _transformers_reads(candidate) and not is_installed(_RUNTIME):
        raise RequestError(
            "export gguf: of this shape, biases or rotary scaling, only llama.cpp itself can read "
            "the file back; pip install 'draftsmith[llama-cpp]', or set export.to: [hf]"
        )
    return tuple(_notes(candidate, settings))


def _form(candidate: Candidate) -> Gguf:
    """How the drafter is written; pruned heads need not be as wide as the residual stream."""
    form, shape = candidate.family.gguf, candidate.shape
    assert form is not None
    same_width = shape.heads * shape.head_dim == shape.hidden
    return form if same_width else form.other_width or form


def _rope(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return {"rope_type": "default"} | rope


def _check_rope(config: Any, form: Gguf) -> None:
    """Refuse scalings of rotary frequencies that llama.cpp does not compute alike."""
    rope = _rope(config)
    kind = rope["rope_type"]
    taken = {"default", "linear", "yarn"} | ({"llama3"} if form.scaled_frequencies else set())
    if kind not in taken:
        raise RequestError(
            f"export gguf: rotary scaling {kind!r} has no form in llama.cpp's architecture "
            f"{form.architecture}; set export.to: [hf]"
        )
    own = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None}
    for key, value in own.items() if kind == "yarn" else ():
        if rope.get(key, value) not in (value, None):
            raise RequestError(
                f"export gguf: rotary scaling 'yarn' with {key} {rope[key]} is not written; "
                "set export.to: [hf]"
            )


def _check_tensors(config: Any, family: Family, form: Gguf) -> None:
    """Refuse tensors that llama.cpp does not know; it would not load the file."""
    names = gguf_names(family, 1)
    for template in _templates(config, family):
        bias = template.endswith(".bias")
        if template.format(layer=0) not in names or (bias and not form.biases):
            raise RequestError(
                f"export gguf: {template} has no place in llama.cpp's architecture "
                f"{form.architecture}; set export.to: [hf]"
            )


def _templates(config: Any, family: Family) -> set[str]:
    """Names of the tensors that a model of this config has; the head may be the embedding."""
    found = {template_of(name)[0] for name in layout_of(config, family).shapes}
    return found - {f"{family.head}.weight"}


def _check_blocks(shape: Shape, tensor_type: str) -> None:
    import gguf

    block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor_type]][0]
    for width in _widths(shape):
        if width % block:
            raise RequestError(
                f"export gguf: rows of {width} can't be packed as {tensor_type} in blocks of "
                f"{block}; set export.gguf_type: F16 or F32"
            )


def _widths(shape: Shape) -> tuple[int, ...]:
    """Lengths of the matrices' rows."""
    return tuple(dict.fromkeys((shape.hidden, shape.ffn, shape.heads * shape.head_dim)))


def _notes(candidate: Candidate, settings: ExportSettings) -> Iterator[str]:
    context = context_of(candidate.config, candidate.family)
    target = load_config(candidate.target)
    served = settings.max_length or context_of(target, candidate.family)
    if context and served and context < served:
        yield (
            f"the drafter knows {context} positions, but texts of {served} are to be served: "
            f"past them llama.cpp keeps few of its drafts; start it with -c {context}"
        )
    if odd := [str(width) for width in _widths(candidate.shape) if width % _SUPER_BLOCK]:
        yield (
            f"rows of {' and '.join(odd)} are no multiple of {_SUPER_BLOCK}: if you pack the file "
            "to K-quants later, llama.cpp's quantizer takes other types for them"
        )
    form = _form(candidate)
    if form is not candidate.family.gguf:
        yield (
            f"{candidate.shape.heads} heads of {candidate.shape.head_dim} are not as wide as the "
            f"hidden width {candidate.shape.hidden}, which llama.cpp refuses in the family's own "
            f"architecture: the file is one of architecture {form.architecture}"
        )


def _transformers_reads(candidate: Candidate) -> bool:
    """Whether transformers can read the file: it knows no scalings, and no biases but usual ones.

    It builds a default config of the architecture with the sizes of the file.
    """
    from transformers import AutoConfig

    form, shape = _form(candidate), candidate.shape
    family = families().get(form.architecture)
    if family is None:
        return False
    keys = ("layers", "kv_heads", "heads", "head_dim", "ffn", "hidden", "vocab")
    sizes = {str(getattr(family.config, key)): getattr(shape, key) for key in keys}
    try:
        default = AutoConfig.for_model(form.architecture, **sizes)
    except Exception:  # transformers' configs refuse some shapes, each in its own way
        return False
    same = _templates(default, family) == _templates(candidate.config, candidate.family)
    return same and _rope(candidate.config)["rope_type"] == "default"


def _read_back(job: Job, path: Path, tensor_type: str) -> Parity | None:
    """Compare what transformers and llama.cpp say with what was meant; both must be right.

    What a coarse type explains would hide much. So they are compared with what the file should
    hold as well, which leaves nothing but the runtime's own rounding to explain.
    """
    questions = questions_for(job.config, job.family)
    questions = replace(questions, strings=comparable(job.target, questions.strings))
    tokenizer, place = load_tokenizer(job.target), str(path)
    held = _held(job.model, tensor_type)
    found = []
    for answers, rounding in _answers(job, path, questions, tensor_type, held):
        check_parity(answers, held, tokenizer, questions, rounding, place)
        tolerance = max(rounding, TOLERANCE[tensor_type])
        found.append(check_parity(answers, job.model, tokenizer, questions, tolerance, place))
    return _worse(found)


@torch.no_grad()
def _held(model: Any, tensor_type: str) -> Any:
    """The model that the file should hold: its matrices as they come out of the tensor type."""
    from gguf import GGMLQuantizationType, quants

    if tensor_type == "F32":
        return model
    kind, held = GGMLQuantizationType[tensor_type], deepcopy(model)
    for weight in held.parameters():
        if weight.ndim > 1:
            packed = quants.quantize(weight.numpy(), kind)
            weight.copy_(torch.from_numpy(quants.dequantize(packed, kind)))
    return held


def _answers(
    job: Job, path: Path, questions: Questions, tensor_type: str, held: Any
) -> Iterator[tuple[Answers, float]]:
    """What each reader says, and what its own rounding explains."""
    if _transformers_reads(job):
        # How text is split is asked of llama.cpp: transformers reads some rules otherwise.
        model = load_model(resolve(str(path)), device="cpu")
        yield answers_of(model, questions), TOLERANCE["F32"]
    if is_installed(_RUNTIME):
        answers = read_back(_RUNTIME, path, questions)
        yield _with_logits(answers, held, questions), _ROUNDING[tensor_type]


@torch.inference_mode()
def _with_logits(answers: Answers, held: Any, questions: Questions) -> Answers:
    """llama.cpp tells log-probabilities of the likeliest tokens only; the others are taken over."""
    if answers.logits is None:
        return answers
    logits = held(**questions.inputs).logits[0].float()
    told = answers.logits + logits.logsumexp(-1, keepdim=True)
    return replace(answers, logits=torch.where(told.isnan(), logits, told))


def _worse(found: Sequence[Parity]) -> Parity | None:
    """One of two; llama.cpp, which comes last, tells more."""
    if len(found) < 2:
        return found[0] if found else None
    first, last = found
    return replace(
        last,
        reader=f"{first.reader}, {last.reader}",
        max_difference=max(first.max_difference or 0.0, last.max_difference or 0.0),
        top1_agreement=min(first.top1_agreement or 0.0, last.top1_agreement or 0.0),
    )


def _write(job: Job, path: Path, tensor_type: str) -> None:
    import gguf

    form, shape = _form(job), job.shape
    writer = gguf.GGUFWriter(path, form.architecture)
    _write_config(writer, job.model.config, shape, tensor_type)
    write_vocabulary(writer, job.target, shape.vocab)
    quantisation = gguf.GGMLQuantizationType[tensor_type]
    for name, array in _tensors(job, form):
        kind = gguf.GGMLQuantizationType.F32 if array.ndim == 1 else quantisation
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: Any, config: Any, shape: Shape, tensor_type: str) -> None:
    import gguf

    rope = _rope(config)
    writer.add_name("draftsmith drafter")
    writer.add_file_type(int(gguf.LlamaFileType[_file_type(tensor_type)]))
    writer.add_block_count(shape.layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10_000.0)))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(shape.vocab)
    _write_rope_scaling(writer, config)


def _write_rope_scaling(writer: Any, config: Any) -> None:
    import gguf

    rope = _rope(config)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        before = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        writer.add_rope_scaling_orig_ctx_len(before)
        if rope.get("attention_factor"):
            # llama.cpp multiplies it by the factor that is the default.
            usual = 0.1 * math.log(rope["factor"]) + 1.0
            writer.add_rope_scaling_attn_factors(rope["attention_factor"] / usual)


def _file_type(tensor_type: str) -> str:
    return "ALL_F32" if tensor_type == "F32" else f"MOSTLY_{tensor_type}"


def _tensors(job: Job, form: Gguf) -> Iterator[tuple[str, NDArray[np.float32]]]:
    names, head = gguf_names(job.family, job.shape.layers), f"{job.family.head}.weight"
    tied = job.family.is_tied(job.config)
    for name, tensor in job.model.state_dict().items():
        if tied and name == head:
            continue
        array = tensor.detach().float().cpu().numpy()
        if form.interleaved and template_of(name)[0] in job.family.rotated:
            array = _interleave(array, job.shape.head_dim)
        yield names[name], np.ascontiguousarray(array)
    if _rope(job.config)["rope_type"] == "llama3":
        yield _FACTORS, _frequency_factors(job.config, job.shape.head_dim)


def _frequency_factors(config: Any, head_dim: int) -> NDArray[np.float32]:
    """What llama.cpp divides each rotary frequency by, [head_dim / 2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = _rope(config)
    scaled, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    plain = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2) / head_dim)
    factors: NDArray[np.float32] = (plain / scaled).float().numpy()
    return factors


def _interleave(array: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Rows of each head from (first half, second half) to neighbouring rotary pairs."""
    heads = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return heads.swapaxes(1, 2).reshape(array.shape)
