"""Traces by vLLM, for targets that transformers would write with too slowly.

vLLM is asked for *processed* log-probabilities: those of the distribution from which it draws, so
that ids that may not be said have no part in them, just as in `trace.Writer`. Its default, raw
ones, are of all rows of the head, padding too. Processed ones are at the temperature of the draw,
and at another one nothing gives the normaliser over all ids; so draws are at 1 (`TraceSettings`
refuses others), where they are what a store holds.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from draftsmith.checkpoints.checksums import verify_checksums
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.checkpoints.generation import banned_ids, never_first, stop_ids
from draftsmith.checkpoints.loading import check_files, describe, load_configs
from draftsmith.checkpoints.pair import context_of, own_vocabulary
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import TraceSettings

if TYPE_CHECKING:
    # trace.py makes the writer.
    from draftsmith.distill.trace import Sample

# Finite, since infinite biases may be refused; e to this is 0 in float32.
_BAN = -1000.0
# vLLM's model runners take no more biases than this; allowed ids, which would be nearly all,
# neither.
_MOST_BANS = 1024


def check_vllm(target: ModelRef) -> None:
    """Refuse what vLLM can't write with, before any work.

    Raises:
        RequestError: vLLM is not installed, or the target is not a whole HF folder of its own.
    """
    place = "recipe.trace.engine: vllm"
    if importlib.util.find_spec("vllm") is None:
        raise RequestError(
            f"{place}: vLLM is not installed; pip install vllm, or set engine: transformers"
        )
    if target.gguf:
        raise RequestError(
            f"{place}: {target.spec} is a GGUF, and vLLM needs an HF folder; write one with "
            f"`draftsmith export {target.spec} --target {target.spec} --to hf --out DIR` and set "
            "target: DIR/hf, or set engine: transformers"
        )
    config = load_configs(target).config
    family, shape = describe(config, target)
    if TokenMap.read(target.folder, shape.vocab) is not None:
        raise RequestError(
            f"{place}: {target.spec} has a cut vocabulary, which vLLM would not map back; set "
            "engine: transformers"
        )
    check_files(target, config, family)
    verify_checksums(target.folder)


class VllmWriter:
    """A target that writes text in vLLM; the same as `trace.Writer` to those who use it.

    Attributes:
        vocabulary: ids that may be said.
        stop_ids: ids that end an answer.
        context: most tokens of a row, prompt and answer.
        device: of the generator of the draws.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        target: ModelRef,
        tokenizer: Any,
        settings: TraceSettings,
        *,
        dtype: torch.dtype,
        seed: int,
        longest_prompt: int,
    ) -> None:
        """Load the target into vLLM, which starts processes of its own.

        Args:
            target: an HF folder, as `check_vllm` lets through.
            tokenizer: the target's.
            settings: of the traces.
            dtype: of the weights.
            seed: of vLLM itself; rows have seeds of their own.
            longest_prompt: tokens; room is kept for it and an answer, not for the whole context,
                whose cache may not fit beside the weights.

        Raises:
            DraftsmithError: vLLM can't be imported or can't load the target.
        """
        configs = load_configs(target)
        family, shape = describe(configs.config, target)
        self.vocabulary = own_vocabulary(tokenizer, shape.vocab).without(banned_ids(configs))
        self.stop_ids = stop_ids(configs)
        self._never_first = {i for i in never_first(configs) if self.vocabulary.has(i)}
        # Padding of the head too.
        self._banned = {i for i in range(shape.vocab) if not self.vocabulary.has(i)}
        self._usable = self.vocabulary.size - len(self.vocabulary.holes)
        self._spec = target.spec
        self.context = longest_prompt + settings.max_new_tokens
        if (context := context_of(configs.config, family)) is not None:
            self.context = min(self.context, context)
        self._check_bans()
        with self._one_error():
            self._vllm: Any = importlib.import_module("vllm")
            self._engine = self._vllm.LLM(
                model=str(target.folder),
                dtype=str(dtype).removeprefix("torch."),
                seed=seed,
                max_model_len=self.context,
                max_logprobs=settings.top_n,
                logprobs_mode="processed_logprobs",
                # Else vLLM takes defaults of sampling from generation_config.json.
                generation_config="vllm",
                tensor_parallel_size=settings.workers or 1,
            )

    def close(self) -> None:
        """End vLLM's processes, so that the stages to come have the GPUs' memory."""
        self._engine.llm_engine.engine_core.shutdown()

    def write(
        self,
        samples: "Sequence[Sample]",
        max_new_tokens: int,
        *,
        temperature: float,
        generator: torch.Generator,
        end: frozenset[int],
        top_n: int = 0,
        on_step: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Continue every sample in place until an id of `end` or `max_new_tokens`.

        Arguments as of `trace.Writer.write`; `on_step` is told once, when all have ended.

        Raises:
            DraftsmithError: vLLM failed, or gave other than it was asked for.
        """
        go_on = partial(
            self._continue,
            temperature=temperature,
            generator=generator,
            end=end,
            top_n=min(top_n, self._usable),
        )
        going, left = list(samples), max_new_tokens
        if self._never_first:
            # vLLM has no ban for one place alone.
            go_on(going, 1, self._banned | self._never_first)
            going, left = [s for s in going if s.tokens[-1] not in end], left - 1
        if going and left:
            go_on(going, left, self._banned)
        on_step(sum(len(s.tokens) for s in samples))

    def _continue(
        self,
        samples: "Sequence[Sample]",
        tokens: int,
        banned: set[int],
        *,
        temperature: float,
        generator: torch.Generator,
        end: frozenset[int],
        top_n: int,
    ) -> None:
        seeds = torch.randint(2**31, (len(samples),), generator=generator).tolist()
        with self._one_error():
            prompts = [
                self._vllm.TokensPrompt(prompt_token_ids=[*s.prompt, *s.tokens]) for s in samples
            ]
            parameters = [
                self._vllm.SamplingParams(
                    temperature=temperature if sample.sampled else 0.0,
                    seed=seed,
                    max_tokens=tokens,
                    # What ends a row is said here alone.
                    ignore_eos=True,
                    stop_token_ids=sorted(end),
                    logprobs=top_n or None,
                    logit_bias=dict.fromkeys(sorted(banned), _BAN) or None,
                    detokenize=False,
                )
                for sample, seed in zip(samples, seeds, strict=True)
            ]
            outputs = self._engine.generate(prompts, parameters, use_tqdm=False)
            written = [output.outputs[0] for output in outputs]
        if len(written) != len(samples):
            raise self._wrong(f"{len(written)} texts for {len(samples)} prompts")
        for sample, text in zip(samples, written, strict=True):
            self._take(sample, text, tokens, end, top_n)

    def _take(
        self, sample: "Sample", text: Any, most: int, end: frozenset[int], top_n: int
    ) -> None:
        """Add to a sample what vLLM wrote, checked."""
        ids = list(text.token_ids)
        ended = bool(ids) and ids[-1] in end
        if not ids or len(ids) > most or (len(ids) < most and not ended) or end & set(ids[:-1]):
            raise self._wrong(f"a text of {len(ids)} tokens that does not end where it should")
        if unsaid := [i for i in ids if not self.vocabulary.has(i)]:
            raise self._wrong(f"id {unsaid[0]}, which may not be said")
        sample.tokens += ids
        found = [{i: p.logprob for i, p in place.items()} for place in text.logprobs or ()]
        if top_n and len(found) != len(ids):
            raise self._wrong(f"log-probabilities of {len(found)} tokens, not {len(ids)}")
        for token, logprobs in zip(ids, found, strict=False):
            self._record(sample, token, logprobs, top_n)

    def _record(self, sample: "Sample", token: int, logprobs: dict[int, float], top_n: int) -> None:
        """Add what vLLM thought of a chosen token: the top n, and the token if it isn't there."""
        if not math.isfinite(chosen := logprobs.get(token, math.nan)):
            raise self._wrong(f"no log-probability of id {token}, which it chose")
        apart = len(logprobs) > top_n
        top = [i for i in logprobs if not (apart and i == token)]
        if len(top) != top_n:
            raise self._wrong(f"{len(top)} log-probabilities of a token, not {top_n}")
        top.sort(key=logprobs.__getitem__, reverse=True)
        sample.logprobs.append(chosen)
        sample.top_ids.append(np.array(top))
        sample.top_logprobs.append(np.array([logprobs[i] for i in top], np.float32))

    def _check_bans(self) -> None:
        if (bans := len(self._banned | self._never_first)) > _MOST_BANS:
            raise RequestError(
                f"recipe.trace.engine: vllm: {self._spec} has {bans:,} ids that may not be said "
                f"(padding, suppressed tokens), and vLLM can ban {_MOST_BANS:,}; set engine: "
                "transformers"
            )

    def _wrong(self, what: str) -> DraftsmithError:
        return DraftsmithError(
            f"{self._spec}: vLLM gave {what}; try another version of vLLM, or set trace.engine: "
            "transformers"
        )

    @contextmanager
    def _one_error(self) -> Iterator[None]:
        """Turn whatever vLLM raises into one error with a cure."""
        try:
            yield
        except Exception as error:  # it raises what it likes
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = " ".join(lines[:3]) or repr(error)
            raise DraftsmithError(
                f"{self._spec}: vLLM failed: {reason}; where memory is short, set trace.workers "
                "to the number of GPUs or lower trace.max_new_tokens; where an argument is "
                "unknown, pip install -U vllm; else set trace.engine: transformers"
            ) from error
