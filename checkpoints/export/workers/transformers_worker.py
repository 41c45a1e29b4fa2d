"""transformers: `generate` with an assistant model, in float32 on the CPU.

The loop is the library's own. What it drafts and accepts is counted where it asks for drafts and
where it tells what came of them.
"""

import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation import AssistedCandidateGenerator, utils

VERSION = f"transformers {transformers.__version__}"


class Counted(AssistedCandidateGenerator):
    """Drafts as the library does, and counts over all of them since `reset`.

    Attributes:
        drafted: proposed tokens.
        accepted: those that became text.
        passes: of the target.
    """

    drafted = accepted = passes = 0

    @classmethod
    def reset(cls) -> None:
        """Count anew."""
        cls.drafted = cls.accepted = cls.passes = 0

    def get_candidates(self, input_ids: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The text so far and drafts, [1, T + drafts]."""
        candidates, logits = super().get_candidates(input_ids, **kwargs)
        self._known, self._candidates = input_ids.shape[1], candidates[0].tolist()
        return candidates, logits

    def update_candidate_strategy(
        self, input_ids: Tensor, scores: Tensor, num_matches: int
    ) -> None:
        """Hear the text after a pass of the target, [1, T]."""
        drafts = self._candidates[self._known :]
        # The library's count leaves out an accepted draft that ends the text.
        pairs = zip(drafts, input_ids[0, self._known :].tolist(), strict=False)
        Counted.accepted += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        Counted.drafted += len(drafts)
        Counted.passes += 1
        super().update_candidate_strategy(input_ids, scores, num_matches)


class Pair:
    """Target and drafter."""

    def __init__(
        self,
        target: str,
        drafter: str,
        lookaheads: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        threads: int,
    ) -> None:
        """Load both folders."""
        if threads:
            torch.set_num_threads(threads)
        # Where the library looks for what it drafts with.
        utils.AssistedCandidateGenerator = Counted
        self._target, self._drafter = _load(target), _load(drafter)
        self._limits = {
            "max_new_tokens": max_new_tokens,
            "eos_token_id": list(stop_ids) or None,
            "pad_token_id": 0,
        }

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], lookahead: int) -> dict[str, Any]:
        """The greedy text after `prompt`; with lookahead 0 by the target alone."""
        Counted.reset()
        assistant = {}
        if lookahead:
            config = self._drafter.generation_config
            config.num_assistant_tokens = lookahead
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            assistant = {"assistant_model": self._drafter}
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        text = self._target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            **self._limits,
            **assistant,
        )
        seconds = time.perf_counter() - start
        tokens = text[0, len(prompt) :].tolist()
        return {
            "tokens": tokens,
            "seconds": seconds,
            "drafted": Counted.drafted if lookahead else None,
            "accepted": Counted.accepted if lookahead else None,
            "passes": Counted.passes if lookahead else len(tokens),
        }


def _load(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # Plainly the likeliest token: no penalties that a checkpoint may ask for.
    model.generation_config = GenerationConfig()
    return model
