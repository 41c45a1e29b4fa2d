"""llama.cpp through xllamacpp's server, which runs in this process and answers over HTTP.

It tells no logits but the log-probabilities of the likeliest tokens, so that is what `read`
returns: [T, V], NaN where it was not asked.
"""

import json
import re
import time
from collections.abc import Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy
import xllamacpp

VERSION = f"llama.cpp (xllamacpp {xllamacpp.__version__})"
# Likeliest tokens that are told of a position: all of a small vocabulary.
_TOLD = 256
# Tokens of a prompt and its answer that fit; more costs memory in each of a pair's servers.
_CONTEXT = 4096
# The same for what an export is asked.
_SHORT_CONTEXT = 512
# One way to an answer only: the likeliest token, and no penalty that would make it another.
_GREEDY = {"samplers": ["top_k"], "top_k": 1, "seed": 0, "return_tokens": True}
# The server is in this process, whatever proxy the environment names.
_OPENER = build_opener(ProxyHandler({}))


class Server:
    """A model, or a target with its drafter, that answers requests one at a time."""

    def __init__(self, params: xllamacpp.CommonParams) -> None:
        """Load what `params` name."""
        # A single request gets the whole context, and nothing is kept for the next.
        params.n_parallel, params.cache_ram_mib = 1, 0
        params.verbosity, params.ui, params.endpoint_metrics = -1, False, True
        self._server = xllamacpp.Server(params)

    def ask(self, path: str, **request: Any) -> dict[str, Any]:
        """The answer to a request; without one, what there is at the path.

        Raises:
            RuntimeError: with what llama.cpp says is wrong.
        """
        body = json.dumps(request).encode() if request else None
        url, headers = self._server.listening_address + path, {"Content-Type": "application/json"}
        try:
            # A connection of its own: those that are kept are closed while others have their turn.
            with _OPENER.open(Request(url, body, headers)) as response:
                answer: dict[str, Any] = json.load(response)
        except HTTPError as error:
            raise RuntimeError(f"llama.cpp: {path}: {error.read().decode()}") from None
        return answer

    def passes(self) -> int:
        """Forward passes of the target so far, those over a prompt included."""
        metrics = self._server.handle_metrics()
        found = re.search(r"^llamacpp:n_decode_total (\d+)", str(metrics), re.MULTILINE)
        if found is None:
            raise RuntimeError("llama.cpp: its metrics don't tell n_decode_total")
        return int(found[1])


def read(path: str, questions: dict[str, Any]) -> dict[str, Any]:
    """What a GGUF file says; computed in float32 wherever llama.cpp lets one choose."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = path, _SHORT_CONTEXT
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    # Flash attention, which is 1, would round to half precision.
    params.flash_attn_type = 0
    server = Server(params)
    greedy = server.ask(
        "/completion",
        prompt=questions["prompt"],
        n_predict=questions["new_tokens"],
        cache_prompt=False,
        **_GREEDY,
    )
    return {
        "logits": _log_probabilities(server, questions["inputs"]["input_ids"][0]),
        "greedy": greedy["tokens"],
        "strings": [_split(server, string) for string in questions["strings"]],
    }


def _split(server: Server, string: str) -> list[int]:
    found = server.ask("/tokenize", content=string, parse_special=True, add_special=False)
    ids: list[int] = found["tokens"]
    return ids


def _log_probabilities(server: Server, ids: Sequence[int]) -> Any:
    """Of the token after each prefix, [T, V]; what precedes it stays in the cache."""
    about = server.ask("/v1/models")["data"][0]["meta"]
    told = numpy.full((len(ids), about["n_vocab"]), numpy.nan, numpy.float32)
    # Of a token that is a part of a character nothing is told, so another is drawn. That changes
    # no probability, for those are told before anything is done to draw.
    whole = {"logit_bias": [[_split(server, "a")[-1], 1e6]]}
    # A prompt must leave room for an answer.
    for position in range(min(len(ids), about["n_ctx_train"] - 1)):
        prefix = ids[: position + 1]
        answer = server.ask(
            "/completion", prompt=prefix, n_predict=1, n_probs=_TOLD, **_GREEDY, **whole
        )
        for token in answer["completion_probabilities"][0]["top_logprobs"]:
            told[position, token["id"]] = token["logprob"]
    return told


class Pair:
    """A target alone, and with a drafter for each lookahead, which a server can't change.

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
        """Load every way; the weights, which are mapped, are shared."""
        self._max_new_tokens, self._stop_ids = max_new_tokens, set(stop_ids)
        self._servers = {
            lookahead: Server(_params(target, drafter, lookahead, threads))
            for lookahead in (0, *lookaheads)
        }

    def generate(self, prompt: list[int], lookahead: int) -> dict[str, Any]:
        """The greedy text after some ids; see the package's docstring.

        Raises:
            RuntimeError: it goes on after a stop id, for llama.cpp stops where the file says.
        """
        server, passes = self._servers[lookahead], self._servers[lookahead].passes()
        start = time.perf_counter()
        answer = server.ask(
            "/completion",
            prompt=prompt,
            n_predict=self._max_new_tokens,
            cache_prompt=False,
            **_GREEDY,
        )
        seconds = time.perf_counter() - start
        tokens, timings, passes = answer["tokens"], answer["timings"], server.passes() - passes
        if passed := self._stop_ids.intersection(tokens[:-1]):
            raise RuntimeError(
                f"llama.cpp: the target's file does not say that id {min(passed)} ends a text; "
                "give a target whose tokenizer.ggml.eos_token_id or eot_token_id does"
            )
        # Every pass adds a token of the target's, but a last one that kept a stop id. llama.cpp
        # counts what it had accepted after that as well.
        kept = min(timings.get("draft_n_accepted", 0), len(tokens) - passes + 1)
        return {
            "tokens": tokens,
            "seconds": seconds,
            "drafted": timings.get("draft_n", 0) if lookahead else None,
            "accepted": kept if lookahead else None,
            "passes": passes,
        }


def _params(target: str, drafter: str, lookahead: int, threads: int) -> Any:
    """Of a server whose rounds propose `lookahead` tokens, however unsure the drafter is."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx = target, _CONTEXT
    draft = params.speculative.draft
    if lookahead:
        params.speculative.types = [
            xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
        ]
        draft.mparams.path = drafter
        draft.n_max, draft.n_min, draft.p_min = lookahead, 0, 0.0
    for cpu in (params.cpuparams, params.cpuparams_batch, draft.cpuparams, draft.cpuparams_batch):
        cpu.n_threads = threads
    return params
