"""An HF folder: transformers (`assistant_model`), vLLM and SGLang load it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith import __version__
from draftsmith.checkpoints.blocks import Block
from draftsmith.checkpoints.export.base import HF, Candidate, Job, Report
from draftsmith.checkpoints.export.card import target_name
from draftsmith.checkpoints.export.parity import (
    TOLERANCE,
    Questions,
    answers_of,
    check_parity,
    questions_for,
)
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import cache_argument
from draftsmith.checkpoints.loading import load_model, load_tokenizer
from draftsmith.checkpoints.saving import save_model
from draftsmith.recipes.schema import ExportSettings

_LAUNCH = f"""\
drafter = {{auto}}.from_pretrained("{HF}")
drafter.generation_config.num_assistant_tokens = {{lookahead}}
drafter.generation_config.num_assistant_tokens_schedule = "constant"
drafter.generation_config.assistant_confidence_threshold = 0.0
target.generate(**inputs, assistant_model=drafter, do_sample=False)"""

# Runtimes draft token by token: blocks are verified by draftsmith, or by who asks for them.
_LAUNCH_BLOCKS = f"""\
drafter = AutoModel.from_pretrained("{HF}", trust_remote_code=True)
drafter.propose(text, **source)  # as many tokens as a block has, for the target to verify"""


def preflight(candidate: Candidate, settings: ExportSettings) -> Sequence[str]:
    """Whatever draftsmith can cut, transformers can load."""
    return ()


def export(job: Job, folder: Path, settings: ExportSettings) -> Report:
    """Write the folder, then load it as a user would and compare."""
    path = folder / HF
    path.mkdir(parents=True, exist_ok=True)
    about = {
        "draftsmith": __version__,
        "drafter_for": target_name(job.target),
        "shape": str(job.shape),
    }
    save_model(job.model, job.target, path, job.token_map, about)
    written = resolve(str(path))
    model = load_model(written, device="cpu", target_ids=False)
    questions = questions_for(model.config, job.family)
    answers = replace(
        answers_of(model, questions, load_tokenizer(written)), greedy=_greedy(model, questions)
    )
    own = load_tokenizer(job.target)
    parity = check_parity(answers, job.model, own, questions, TOLERANCE["F32"], str(path))
    launch = _LAUNCH if Block.of(job.config) is None else _LAUNCH_BLOCKS
    launch = launch.format(auto=job.family.auto, lookahead=settings.lookahead)
    return Report((HF,), launch, parity)


@torch.inference_mode()
def _greedy(model: Any, questions: Questions) -> list[int]:
    """The greedy text with a cache, as it is drafted; generation settings have no say."""
    inputs = dict(questions.inputs)
    decoder = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    inputs[decoder], found = torch.tensor([questions.prompt]), []
    for _ in range(questions.new_tokens):
        output = model(**inputs, use_cache=True)
        token = output.logits[:, -1:].argmax(-1)
        found.append(int(token))
        inputs = {decoder: token, cache_argument(model): output.past_key_values}
        if decoder != "input_ids":
            inputs["encoder_outputs"] = (output.encoder_last_hidden_state,)
    return found
