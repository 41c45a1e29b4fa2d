"""At which batch size does drafting stop paying?

    .venv/bin/python benchmarks/load.py [--quick] [--drafter DIR] [--target MODEL] [-k K]
        [--tokens N]

Decodes the same 16 texts in groups of 1 to 16, by the target alone and with drafts, interleaved.
Prints `speedup_by_batch` (seconds alone over seconds with drafts, median, smallest, largest),
`tokens_per_second_alone` and, as `pays_up_to`, the largest batch from which on every smaller one
paid too (0: none does).
"""

import argparse
import statistics

from common import LAYERS, TARGET, interleaved, ratio, report

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Limits, decode_batch
from draftsmith.accept.drafters import AutoregressiveDrafter, Drafter, PromptLookup
from draftsmith.accept.verify import Greedy
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import (
    describe,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from draftsmith.checkpoints.pair import own_vocabulary
from draftsmith.checkpoints.slicing import layers_of
from draftsmith.data.chat import read_prompts


class Bench:
    """A pair and prompts, decoded in batches of any size."""

    def __init__(
        self, target: str, drafter: str | None, texts: int, tokens: int, lookahead: int
    ) -> None:
        """Without a drafter, four of SmolLM2's own layers draft."""
        reference = resolve(target)
        tokenizer = load_tokenizer(reference)
        model = load_model(reference)
        if drafter is None:
            small = layers_of(model, describe(model.config, reference)[0], LAYERS)
        else:
            small = load_model(resolve(drafter))
        self.vocabulary = own_vocabulary(tokenizer, model.config.vocab_size)
        self.target, self.lookahead = CachedModel(model), lookahead
        # Without stop ids all texts are equally long, so that a batch stays full.
        self.limits = Limits(tokens)
        self.proposer = AutoregressiveDrafter(CachedModel(small), self.vocabulary, frozenset())
        self.prompts = [list(p.ids) for p in read_prompts("quick", tokenizer, texts)]

    def decode(self, proposer: Drafter, lookahead: int, batch: int) -> list[list[int]]:
        """All prompts, so many at once."""
        found = []
        for start in range(0, len(self.prompts), batch):
            group = self.prompts[start : start + batch]
            rows = decode_batch(
                self.target,
                proposer,
                group,
                lookahead,
                self.limits,
                self.vocabulary,
                verifiers=[Greedy()] * len(group),
                seeds=range(len(group)),
            )
            found += [row.tokens for row in rows]
        return found

    def alone(self, batch: int) -> list[list[int]]:
        """The target, without proposals."""
        return self.decode(PromptLookup(frozenset()), 0, batch)

    def drafted(self, batch: int) -> list[list[int]]:
        """With drafts."""
        return self.decode(self.proposer, self.lookahead, batch)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--drafter", metavar="DIR", help="a finished drafter of the target")
    parser.add_argument("--target", metavar="MODEL", default=TARGET)
    parser.add_argument("-k", type=int, default=3, help="lookahead")
    parser.add_argument("--tokens", type=int, default=24, help="of each text")
    arguments = parser.parse_args()
    quiet_transformers()
    texts, tokens = (4, 8) if arguments.quick else (16, arguments.tokens)
    bench = Bench(arguments.target, arguments.drafter, texts, tokens, arguments.k)
    speedups, rates, equal = {}, {}, True
    for batch in (1, 4) if arguments.quick else (1, 2, 4, 8, 16):
        equal &= bench.alone(batch) == bench.drafted(batch)
        seconds = interleaved(
            {
                "alone": lambda b=batch: bench.alone(b),  # type: ignore[misc]
                "drafted": lambda b=batch: bench.drafted(b),  # type: ignore[misc]
            },
            5,
        )
        speedups[batch] = ratio(seconds, "alone", "drafted")
        rates[batch] = len(bench.prompts) * tokens / statistics.median(seconds["alone"])
    paying = 0
    for batch, speedup in speedups.items():
        if speedup["median"] <= 1.0:
            break
        paying = batch
    report(
        {
            "speedup_by_batch": speedups,
            "tokens_per_second_alone": rates,
            "pays_up_to": paying,
            "equal_tokens": equal,
            "lookahead": arguments.k,
        }
    )


if __name__ == "__main__":
    main()
