"""OpenVINO GenAI: models that optimum-intel converts, run on the CPU in float32 throughout."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai

VERSION = f"OpenVINO GenAI {openvino_genai.__version__}"
# Processors that can would compute in bfloat16 and store the cache in eight bits.
_EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    "EXECUTION_MODE_HINT": "ACCURACY",
}
# Tokens of a prompt that are read in one pass.
_MAX_PROMPT = 2**20
_NOT_COUNTED = {"drafted": None, "accepted": None, "passes": None}
_TASK = "text-generation-with-past"
# What the converter must have written for OpenVINO GenAI to load it.
_FILES = ("openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml")


def check(model_type: str) -> dict[str, Any]:
    """Whether the converter takes a model type; `refused` says why not, None: it does."""
    try:
        from optimum.exporters.openvino import model_configs  # noqa: F401  (registers the types)
        from optimum.exporters.tasks import TasksManager
    except ImportError as error:
        return {"refused": f"the Python of OpenVINO can't import optimum-intel ({error})"}
    from packaging.version import Version
    from transformers import __version__

    try:
        constructor = TasksManager.get_exporter_config_constructor(
            "openvino", model_type=model_type, task=_TASK, library_name="transformers"
        )
    except (KeyError, ValueError) as error:
        return {"refused": f"optimum-intel does not convert {model_type} ({error})"}
    newest = getattr(constructor.func, "MAX_TRANSFORMERS_VERSION", None)
    if newest is None or Version(__version__) <= Version(newest):
        return {"refused": None}
    return {
        "refused": f"optimum-intel converts {model_type} with transformers up to {newest} only, "
        f"and the Python of OpenVINO has {__version__}"
    }


def convert(
    source: str, path: str, weight_format: str, group_size: int | None = None
) -> dict[str, Any]:
    """An HF folder -> a folder that OpenVINO GenAI loads, tokenizer included.

    Args:
        source: the HF folder.
        path: an existing folder.
        weight_format: fp32, fp16, int8 or int4.
        group_size: weights of a row that share a scale; -1: all; None: optimum-intel's default.

    Raises:
        RuntimeError: the converter left something out.
    """
    # Nothing is to be fetched; and OpenVINO's tools report their use over the network except in CI.
    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "true"}
    from optimum.commands.optimum_cli import main

    options = {
        "--model": source,
        "--task": _TASK,
        "--library": "transformers",
        "--weight-format": weight_format,
    }
    if group_size is not None:
        options["--group-size"] = str(group_size)
    flat = [word for option in options.items() for word in option]
    # Its command line, since that alone knows how optimum-intel packs weights by default.
    sys.argv = ["optimum-cli", "export", "openvino", *flat, path]
    main()
    # A tokenizer that it can't convert is passed over in silence.
    if missing := [name for name in _FILES if not (Path(path) / name).is_file()]:
        raise RuntimeError(f"optimum-intel did not write {', '.join(missing)}")
    return {}


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What a converted model says: all logits of one pass, and what a pipeline makes of it."""
    pipeline = _pipeline(path, threads=1)
    tokenizer = pipeline.get_tokenizer()
    greedy = pipeline.generate(
        _inputs(questions["prompt"]),
        _config(max_new_tokens=questions["new_tokens"], ignore_eos=True),
    )
    return {
        "logits": _logits(path, questions["inputs"]["input_ids"][0]),
        "greedy": greedy.tokens[0],
        "strings": [_split(tokenizer, string) for string in questions["strings"]],
    }


class Pair:
    """A target alone, and the same with a drafter; the first token comes without a draft."""

    def __init__(
        self,
        target: str,
        drafter: str,
        lookaheads: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        threads: int,
    ) -> None:
        """Load the target twice: a pipeline that has a drafter always uses it."""
        draft = openvino_genai.draft_model(drafter, "CPU", **_properties(threads))
        self._alone = _pipeline(target, threads)
        self._both = _pipeline(target, threads, draft_model=draft)
        self._max_new_tokens, self._stop_ids = max_new_tokens, set(stop_ids)

    def generate(self, prompt: list[int], lookahead: int) -> dict[str, Any]:
        """The greedy text after some ids; see the package's docstring."""
        pipeline = self._both if lookahead else self._alone
        draft = {"num_assistant_tokens": lookahead} if lookahead else {}
        config = _config(
            max_new_tokens=self._max_new_tokens, stop_token_ids=self._stop_ids, **draft
        )
        start = time.perf_counter()
        answer = pipeline.generate(_inputs(prompt), config)
        seconds = time.perf_counter() - start
        counts = self._counts(answer, lookahead) if lookahead else _NOT_COUNTED
        return {"tokens": answer.tokens[0], "seconds": seconds, **counts}

    def _counts(self, answer: Any, lookahead: int) -> dict[str, Any]:
        """Of a text with drafts; OpenVINO GenAI leaves the round that ends it out of its own."""
        metrics, emitted = answer.extended_perf_metrics, len(answer.tokens[0])
        per_pass = metrics.main_model_metrics.raw_metrics.m_batch_sizes
        left = self._max_new_tokens - (emitted - per_pass[-1])
        return {
            "drafted": metrics.get_num_draft_tokens() + min(lookahead, left - 1),
            # Each pass adds a token of the target's own.
            "accepted": emitted - len(per_pass),
            "passes": len(per_pass),
        }


def _properties(threads: int) -> dict[str, Any]:
    return _EXACT | {"INFERENCE_NUM_THREADS": threads}


def _pipeline(path: str, threads: int, **more: Any) -> Any:
    """A pipeline that reads each prompt as if for the first time, in one pass.

    By default, a prompt that was answered before is not read again.
    """
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = _MAX_PROMPT
    return openvino_genai.LLMPipeline(
        path, "CPU", scheduler_config=scheduler, **_properties(threads), **more
    )


def _config(**options: Any) -> Any:
    return openvino_genai.GenerationConfig(do_sample=False, apply_chat_template=False, **options)


def _inputs(ids: Sequence[int]) -> Any:
    ids_1T = numpy.array([ids], numpy.int64)
    mask = openvino.Tensor(numpy.ones_like(ids_1T))
    return openvino_genai.TokenizedInputs(openvino.Tensor(ids_1T), mask)


def _split(tokenizer: Any, string: str) -> list[int]:
    found = tokenizer.encode(string, add_special_tokens=False)
    ids: list[int] = found.input_ids.data[0].tolist()
    return ids


def _logits(path: str, ids: Sequence[int]) -> Any:
    """At every position, [T, V]; a pipeline computes the last alone."""
    model = openvino.Core().compile_model(f"{path}/{_FILES[0]}", "CPU", _properties(1))
    ids_1T = numpy.array([ids], numpy.int64)
    known = {
        "input_ids": ids_1T,
        "attention_mask": numpy.ones_like(ids_1T),
        "position_ids": numpy.arange(len(ids), dtype=numpy.int64)[None],
        "beam_idx": numpy.zeros(1, numpy.int32),
    }
    names = {name for given in model.inputs for name in given.names}
    answer = model({name: value for name, value in known.items() if name in names})
    return answer["logits"][0]
