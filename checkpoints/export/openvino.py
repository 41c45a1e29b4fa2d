"""OpenVINO models, which OpenVINO GenAI runs with a drafter on Intel's CPUs, GPUs and NPUs.

optimum-intel converts an HF folder. It needs an older transformers than ours, hence a Python of
its own; how a model is computed is compared afterwards, so a config read otherwise is noticed.
"""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

from draftsmith.checkpoints.export.base import Candidate, Job, Report
from draftsmith.checkpoints.export.parity import TOLERANCE, Parity, check_parity, questions_for
from draftsmith.checkpoints.export.processes import ask, read_back
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import new_folder, storage
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ExportSettings

_NAME = "openvino"
# Precision -> optimum-intel's name, and the tensor type of GGUF that errs as much.
_FORMATS = {
    "float32": ("fp32", "F32"),
    "float16": ("fp16", "F16"),
    "int8": ("int8", "Q8_0"),
    "int4": ("int4", "Q4_0"),
}
# Smaller groups would take more for their scales than four bits save.
_GROUP, _SMALLEST_GROUP = 128, 16
_LAUNCH = f"""\
drafter = openvino_genai.draft_model("{_NAME}", "CPU")
pipeline = openvino_genai.LLMPipeline("TARGET", "CPU", draft_model=drafter)
pipeline.generate(prompt, max_new_tokens=200, num_assistant_tokens={{lookahead}})"""
_TARGET_TOO = (
    "the target must be an OpenVINO model too: draftsmith export TARGET --target TARGET --to "
    "openvino writes one"
)


_CURE = "run make openvino again, which installs releases that fit, or set export.to: [hf]"


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Refuse what OpenVINO GenAI can't draft with.

    Raises:
        RequestError: an encoder, a cut vocabulary, a model type that the converter does not take,
            or no OpenVINO.
    """
    if candidate.family.has_encoder:
        raise RequestError(
            f"export openvino: {candidate.family.name} is an encoder–decoder, and OpenVINO GenAI "
            "drafts for decoders alone; set export.to: [hf]"
        )
    if candidate.token_map is not None:
        raise RequestError(
            "export openvino: the drafter has a cut vocabulary, and OpenVINO GenAI needs the "
            "target's; export it to hf"
        )
    found = ask("openvino", "check", model_type=candidate.config.model_type)
    if found["refused"]:
        raise RequestError(f"export openvino: {found['refused']}; {_CURE}")
    return (_TARGET_TOO,)


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Convert, have OpenVINO read it back, compare; a folder that differs is not kept.

    Raises:
        DraftsmithError: the converter failed, or what it wrote computes something else.
    """
    weight_format, _ = _FORMATS[settings.precision]
    final = folder / _NAME
    with storage(folder), tempfile.TemporaryDirectory() as source, new_folder(final) as path:
        save_model(job.model, job.target, Path(source))
        ask(
            "openvino",
            "convert",
            source=source,
            path=str(path),
            weight_format=weight_format,
            group_size=_group_size(job.shape) if settings.precision == "int4" else None,
        )
        parity = _compare(job, path, final, settings.precision)
    return Report((_NAME,), _LAUNCH.format(lookahead=settings.lookahead), parity)


def _group_size(shape: Shape) -> int:
    """How many weights of a row share a scale at four bits: what divides every row; -1: all.

    optimum-intel's default is 128, and it refuses a model with a row that this does not divide.
    """
    size = math.gcd(_GROUP, shape.hidden, shape.ffn, shape.heads * shape.head_dim)
    return size if size >= _SMALLEST_GROUP else -1


def _compare(job: Job, path: Path, final: Path, precision: str) -> Parity:
    questions = questions_for(job.config, job.family)
    answers = read_back("openvino", path, questions)
    tolerance = TOLERANCE[_FORMATS[precision][1]]
    tokenizer = load_tokenizer(job.target)
    return check_parity(answers, job.model, tokenizer, questions, tolerance, str(final))
