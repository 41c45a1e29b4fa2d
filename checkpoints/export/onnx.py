"""ONNX files with a KV cache, which onnxruntime runs.

onnxruntime-genai's model builder writes them, in operators that onnxruntime has kernels of its own
for (grouped-query attention with rotary positions, packed weights).
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftsmith.checkpoints.export.base import Candidate, Job, Report, check_uniform
from draftsmith.checkpoints.export.parity import TOLERANCE, check_parity, questions_for
from draftsmith.checkpoints.export.processes import ask, read_back
from draftsmith.checkpoints.saving import save_model
from draftsmith.data.files import new_folder, storage
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings

_NAME = "onnx"
# Precision -> the builder's name, and the difference of logits that it explains. Four bits a
# weight, rounded, are felt in small models.
_PRECISIONS = {
    "float32": ("fp32", TOLERANCE["F32"]),
    "int8": ("int8", TOLERANCE["Q8_0"]),
    "int4": ("int4", 0.6),
}
# What onnxruntime's attention needs a head's width to be a multiple of.
_HEAD_DIM = 16
_LAUNCH = f"""\
session = onnxruntime.InferenceSession("{_NAME}/model.onnx")
# Inputs: input_ids, attention_mask, past_key_values.N.key and .value (of no positions at first);
# outputs: logits and present.N.key and .value, the next step's past."""


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what the builder can't write, or writes wrong.

    Raises:
        RequestError: with the reason and the cure.
    """
    check_buildable(_NAME, candidate, settings)
    return ()


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Build the folder, have onnxruntime read it back, compare.

    Raises:
        DraftsmithError: the builder failed, or what it wrote computes something else.
    """
    final = folder / _NAME
    with new_folder(final) as path:
        build(job, path, settings.precision)
        questions = questions_for(job.config, job.family)
        allowed = tolerance(settings.precision)
        answers = read_back("onnx", path, questions, tolerance=allowed)
        parity = check_parity(answers, job.model, None, questions, allowed, str(final))
    return Report((_NAME,), _LAUNCH, parity)


def build(job: Job, path: Path, precision: str) -> None:
    """Write `model.onnx`, `genai_config.json` and the target's tokenizer into a folder.

    Args:
        job: what is exported; `check_buildable` has passed.
        path: an existing folder.
        precision: as in `ExportSettings`.

    Raises:
        DraftsmithError: shapes differ between layers, or the builder failed.
    """
    check_uniform(_NAME, job)
    with storage(path), tempfile.TemporaryDirectory(prefix="draftsmith-") as source:
        save_model(job.model, job.target, Path(source))
        ask(
            "ort-genai",
            "build",
            source=source,
            path=str(path),
            precision=_PRECISIONS[precision][0],
            head_dim=job.shape.head_dim,
        )


def tolerance(precision: str) -> float:
    """Largest difference of logits that a precision explains, relative to their scale."""
    return _PRECISIONS[precision][1]


def check_buildable(runtime: str, candidate: Candidate, settings: ExportSettings) -> None:
    """Refuse what onnxruntime-genai's builder can't write for a CPU, or writes wrong.

    Args:
        runtime: who asks; named in errors.
        candidate: the drafter.
        settings: the recipe's `export`.

    Raises:
        RequestError: with the reason and the cure, or there is no Python with the builder.
    """
    if settings.precision not in _PRECISIONS:
        raise RequestError(
            f"export {runtime}: export.precision: {settings.precision} is not computed on CPUs; "
            f"set it to {', '.join(_PRECISIONS)}"
        )
    if problem := next(_problems(candidate), None):
        raise RequestError(f"export {runtime}: {problem}")
    if missing := ask("ort-genai", "missing_modules")["modules"]:
        raise RequestError(
            f"export {runtime}: the model builder of onnxruntime-genai needs {', '.join(missing)}; "
            "pip install 'draftsmith[onnx]'"
        )


def _problems(candidate: Candidate) -> Iterator[str]:
    config, shape = candidate.config, candidate.shape
    if candidate.family.has_encoder:
        yield (
            f"{candidate.family.name} has an encoder, and onnxruntime-genai's builder writes "
            "decoders alone; set export.to: [hf]"
        )
    if shape.head_dim % _HEAD_DIM:
        yield (
            f"head_dim {shape.head_dim} is not a multiple of {_HEAD_DIM}, which onnxruntime's "
            "attention needs; set export.to: [hf]"
        )
    window = getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        yield f"attention windows (here of {window} tokens) are built wrong; set export.to: [hf]"
    if (rope := _rope_type(config)) not in ("default", "llama3"):
        yield f"rotary scaling {rope!r} is not built right; set export.to: [hf]"
    widths = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim)
    if shape.vocab in (*widths, shape.ffn, shape.hidden):
        yield (
            f"a projection is as wide as the vocabulary ({shape.vocab}), and the builder takes it "
            "for the head; set prune.shape to another width"
        )


def _rope_type(config: object) -> str:
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "by kind of layer"
    kind: str = rope.get("rope_type", "default")
    return kind
