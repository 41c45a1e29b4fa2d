"""vLLM in this process, in float32 and eagerly, one request at a time.

Several engines live in one process if each runs within it. Nothing is kept between requests, and
threads are not bound to cores, which other processes may be using.
"""

import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

# What its wheels for CPUs bring along: with another OpenMP its kernels are far slower, and it must
# be loaded before torch is.
_OPENMP = Path(sys.prefix) / "lib" / "libiomp5.so"
if _OPENMP.is_file() and str(_OPENMP) not in os.environ.get("LD_PRELOAD", ""):
    os.environ["LD_PRELOAD"] = f"{_OPENMP}:{os.environ.get('LD_PRELOAD', '')}".rstrip(":")
    os.execv(sys.executable, [sys.executable, *sys.argv])

# Read when vLLM is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)

# Its wheels for CPUs have a name of their own.
_WHEEL = packages_distributions()["vllm"][0]
VERSION = f"vLLM {version(_WHEEL)}"
# For keys and values of one text; vLLM reserves it for each engine.
_CACHE_BYTES = 1 << 30
# Entries of a vocabulary whose logits are asked for: vLLM tells each as an object of Python.
_TOLD = 4096


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What an HF folder says: the greedy text, tokens of strings, logits of a small vocabulary."""
    engine = _engine(path, max_logprobs=-1, logprobs_mode="raw_logits")
    prompt, tokenizer = questions["prompt"], engine.get_tokenizer()
    return {
        "logits": _logits(engine, questions["inputs"]["input_ids"][0]),
        "greedy": _ask(engine, prompt, questions["new_tokens"]).token_ids,
        "strings": [tokenizer.encode(s, add_special_tokens=False) for s in questions["strings"]],
    }


class Pair:
    """A target alone, and with a drafter for each lookahead, which an engine can't change.

    The first token of a text comes from the pass over its prompt, without a draft.
    """

    def __init__(
        self,
        target: str,
        drafter: str,
        lookaheads: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        threads: int,
    ) -> None:
        """Load every way; each holds weights of its own."""
        if threads:
            os.environ["OMP_NUM_THREADS"] = str(threads)
        self._limits: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": list(stop_ids),
        }
        self._engines = {0: _engine(target)}
        for lookahead in lookaheads:
            speculation = {
                "method": "draft_model",
                "model": drafter,
                "num_speculative_tokens": lookahead,
                # Heads that are padded to different sizes are mapped by the tokenizers.
                "use_heterogeneous_vocab": _rows(target) != _rows(drafter),
            }
            self._engines[lookahead] = _engine(
                target,
                speculative_config=speculation,
                per_request_spec_decode_metrics="summary",
            )

    def generate(self, prompt: list[int], lookahead: int) -> dict[str, Any]:
        """The greedy text after some ids; see the package's docstring."""
        start = time.perf_counter()
        answer = _ask(self._engines[lookahead], prompt, **self._limits)
        seconds = time.perf_counter() - start
        tokens = list(answer.token_ids)
        counts = {"drafted": None, "accepted": None, "passes": len(tokens)}
        if lookahead:
            counts |= _counts(answer.spec_decode_metrics, len(tokens))
        return {"tokens": tokens, "seconds": seconds} | counts


def _engine(path: str, **more: Any) -> Any:
    from vllm import LLM

    return LLM(
        path,
        dtype="float32",
        enforce_eager=True,
        seed=0,
        max_num_seqs=1,
        # As much of the model's context as the cache holds.
        max_model_len=-1,
        kv_cache_memory_bytes=_CACHE_BYTES,
        enable_prefix_caching=False,
        **more,
    )


def _rows(path: str) -> int:
    """Of the head."""
    from transformers import AutoConfig

    rows: int = AutoConfig.from_pretrained(path).vocab_size
    return rows


def _ask(engine: Any, prompt: list[int], max_new_tokens: int, stop_ids: Sequence[int] = ()) -> Any:
    """One greedy answer; only the ids that are given end it."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=max_new_tokens,
        stop_token_ids=list(stop_ids),
        ignore_eos=True,
        detokenize=False,
    )
    found = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    return found[0].outputs[0]


def _counts(metrics: Any, emitted: int) -> dict[str, int]:
    """What one request drafted, accepted and took, from vLLM's histogram of accepted drafts.

    Past the drafter's context vLLM verifies zeros, and counts them as drafted.
    """
    rounds = sum(metrics.histogram)
    accepted = sum(number * times for number, times in enumerate(metrics.histogram))
    # vLLM counts what a last round accepted past the end of the text.
    accepted = min(accepted, emitted - rounds)
    # Each pass emits a token of its own, unless an accepted draft is the last.
    passes = max(emitted - accepted, 1 + rounds)
    return {"drafted": metrics.num_draft_tokens, "accepted": accepted, "passes": passes}


def _logits(engine: Any, ids: list[int]) -> Any:
    """At every position, [T, V]: after a prompt's tokens, and of the one that follows."""
    import numpy
    from vllm import SamplingParams

    if engine.model_config.get_vocab_size() > _TOLD:
        return None
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )
    found = engine.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)[0]
    # Nothing is told of the first token, which follows none.
    told = [*found.prompt_logprobs[1:], *found.outputs[0].logprobs]
    return numpy.array([[row[i].logprob for i in range(len(row))] for row in told])
