"""An HF folder: transformers (`assistant_model`), vLLM and SGLang load it."""

from collections.abc import Sequence
from pathlib import Path

from draftsmith.checkpoints.export.base import HF, Candidate, Job, Report
from draftsmith.checkpoints.export.parity import check_readable
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.recipes.schema import ExportSettings

_LAUNCH = f"""\
drafter = AutoModelForCausalLM.from_pretrained("{HF}")
drafter.generation_config.num_assistant_tokens = {{lookahead}}
drafter.generation_config.num_assistant_tokens_schedule = "constant"
drafter.generation_config.assistant_confidence_threshold = 0.0
target.generate(**inputs, assistant_model=drafter, do_sample=False)"""


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Whatever draftsmith can cut, transformers can load."""
    return ()


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the folder, then load it as a user would and compare."""
    path = folder / HF
    path.mkdir(parents=True, exist_ok=True)
    save_model(job.model, job.target, path, job.token_map)
    written = resolve(str(path))
    model = load_model(written, device="cpu", target_ids=False)
    tokenizers = load_tokenizer(written), load_tokenizer(job.target)
    parity = check_readable(model, job.model, "F32", str(path), tokenizers)
    return Report((HF,), _LAUNCH.format(lookahead=settings.lookahead), parity)
