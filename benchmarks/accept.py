"""What does the evaluator cost beyond the models themselves, and beside transformers' own?

    .venv/bin/python benchmarks/accept.py [--quick] [--drafter DIR]

Target SmolLM2-135M, drafter four of its layers (or DIR), k = 4, batch 1, float32, greedy. Prints

- `decode_over_forwards`: seconds of speculative decoding over those of its model forwards;
- `transformers_over_draftsmith`: seconds of transformers' assisted generation with the same pair,
  prompts and lookahead over ours, interleaved, prompt by prompt;
- `real_over_replay`: seconds of decoding for k in 1, 4, 8 over those of replaying all three from
  the same texts;
- `equal_tokens`: whether both ways of decoding, and the target alone, gave the same tokens.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import LAYERS, TARGET, interleaved, ratio, report

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Limits, greedy_decode, speculative_decode
from draftsmith.accept.drafters import AutoregressiveDrafter
from draftsmith.accept.replay import greedy_matches, replay
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import stop_ids
from draftsmith.checkpoints.loading import (
    describe,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from draftsmith.checkpoints.pair import SharedVocabulary, own_vocabulary
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.data.chat import read_prompts

LOOKAHEAD, SWEEP, PROMPTS = 4, (1, 4, 8), 8


class Bench:
    """The pair, the prompts, and every way of decoding them."""

    def __init__(self, drafter: str | None, tokens: int) -> None:
        """Load or cut the drafter."""
        reference = resolve(TARGET)
        tokenizer = load_tokenizer(reference)
        self.target = load_model(reference, device="cpu")
        if drafter is None:
            family, shape = describe(self.target.config, reference)
            layers = Selection.of_layers(shape, LAYERS)
            self.drafter = compact_model(self.target, family, layers)
        else:
            self.drafter = load_model(resolve(drafter), device="cpu")
        self.vocabulary: SharedVocabulary = own_vocabulary(tokenizer, self.target.config.vocab_size)
        self.limits = Limits(tokens, stop_ids(self.target))
        self.prompts = [list(p.ids) for p in read_prompts("quick", tokenizer, PROMPTS)]
        self.ours = CachedModel(self.target)
        self.proposer = AutoregressiveDrafter(
            CachedModel(self.drafter), self.vocabulary, self.limits.stop_ids
        )

    def speculative(self, prompt: Sequence[int], lookahead: int = LOOKAHEAD) -> list[int]:
        """Ours."""
        return speculative_decode(
            self.ours, self.proposer, prompt, lookahead, self.limits, self.vocabulary
        ).tokens

    def plain(self, prompt: Sequence[int]) -> list[int]:
        """The target alone."""
        return greedy_decode(self.ours, prompt, self.limits, self.vocabulary).tokens

    def assisted(self, prompt: Sequence[int]) -> list[int]:
        """Transformers' own, with a fixed lookahead."""
        self.drafter.generation_config.num_assistant_tokens = LOOKAHEAD
        self.drafter.generation_config.num_assistant_tokens_schedule = "constant"
        self.drafter.generation_config.assistant_confidence_threshold = 0.0
        ids = torch.tensor([list(prompt)])
        out: torch.Tensor = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            assistant_model=self.drafter,
            max_new_tokens=self.limits.max_new_tokens,
            do_sample=False,
        )
        return out[0, len(prompt) :].tolist()

    def replayed(self, texts: Sequence[Sequence[int]]) -> None:
        """Rounds of all texts at all lookaheads."""
        for prompt, text in zip(self.prompts, texts, strict=True):
            matches = greedy_matches(self.proposer.model, prompt, text, self.vocabulary)
            for k in SWEEP:
                replay(matches, k, self.limits.max_new_tokens)


class ForwardSeconds:
    """Adds up the time inside the forwards of two models."""

    def __init__(self, *models: Any) -> None:
        """Start counting."""
        self.seconds = 0.0
        self.handles = []
        for model in models:
            self.handles += [
                model.register_forward_pre_hook(self._begin),
                model.register_forward_hook(self._end),
            ]

    def close(self) -> None:
        """Stop counting."""
        for handle in self.handles:
            handle.remove()

    def _begin(self, *args: object) -> None:
        self.then = time.perf_counter()

    def _end(self, *args: object) -> None:
        self.seconds += time.perf_counter() - self.then


def overhead(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Seconds of decoding and of its forwards, each prompt some times."""
    found: dict[str, list[float]] = {"decode": [], "forwards": []}
    for _ in range(repeats):
        for prompt in bench.prompts:
            counter = ForwardSeconds(bench.target, bench.drafter)
            start = time.perf_counter()
            bench.speculative(prompt)
            found["decode"].append(time.perf_counter() - start)
            counter.close()
            found["forwards"].append(counter.seconds)
    return found


def beside_transformers(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Seconds of both ways, prompt by prompt in turn."""
    found: dict[str, list[float]] = {"transformers": [], "draftsmith": []}
    for prompt in bench.prompts:
        seconds = interleaved(
            {
                "transformers": lambda p=prompt: bench.assisted(p),  # type: ignore[misc]
                "draftsmith": lambda p=prompt: bench.speculative(p),  # type: ignore[misc]
            },
            repeats,
        )
        for name, values in seconds.items():
            found[name] += values
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--drafter", metavar="DIR", help="a finished drafter of the target")
    arguments = parser.parse_args()
    quiet_transformers()
    bench = Bench(arguments.drafter, tokens=16 if arguments.quick else 32)
    if arguments.quick:
        bench.prompts = bench.prompts[:3]
    repeats = 1 if arguments.quick else 5
    texts = [bench.plain(prompt) for prompt in bench.prompts]
    equal = all(
        bench.speculative(prompt) == text == bench.assisted(prompt)
        for prompt, text in zip(bench.prompts, texts, strict=True)
    )
    sweep = interleaved(
        {
            "real": lambda: [bench.speculative(p, k) for p in bench.prompts for k in SWEEP],
            "replay": lambda: bench.replayed(texts),
        },
        repeats,
    )
    report(
        {
            "decode_over_forwards": ratio(overhead(bench, repeats), "decode", "forwards"),
            "transformers_over_draftsmith": ratio(
                beside_transformers(bench, repeats), "transformers", "draftsmith"
            ),
            "real_over_replay": ratio(sweep, "real", "replay"),
            "equal_tokens": equal,
            "prompts": len(bench.prompts),
            "tokens": bench.limits.max_new_tokens,
        }
    )


if __name__ == "__main__":
    main()
