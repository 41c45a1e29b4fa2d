"""How fast is packed text, and what does it cost beside tokenising alone?

    .venv/bin/python benchmarks/mixture.py FILE_OR_FOLDER... [--quick] [--tokenizer MODEL]
        [--sequence T] [--batch N]

Each file is a domain of the same weight. Draws packed batches from the mixture, and tokenises texts
of the same files in order, without shuffling, packing and batches; the two are interleaved, and
each goes on from repeat to repeat where it was. Prints `tokens_per_second` of both (median,
smallest, largest), `stream_over_tokenizing` (time for as many tokens), `resume_seconds` (from
opening the files to the first batch after a state in the middle) and `state_bytes`.
"""

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Iterator

from common import TARGET, interleaved, report

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_tokenizer, quiet_transformers
from draftsmith.data.corpus import corpus_files, file_domain, read_texts
from draftsmith.data.mixture import Encode, document_encoder
from draftsmith.distill.batches import MixtureStream
from draftsmith.recipes.schema import DomainSettings, MixtureSettings

REPEATS = 5


def settings_of(paths: list[str], sequence: int) -> MixtureSettings:
    """A domain for each file."""
    files = corpus_files(paths)
    domains = {file_domain(file): DomainSettings(path=(str(file),)) for file in files}
    return MixtureSettings(domains=domains, sequence=sequence)


class Tokenizing:
    """Tokens of the same files in turn, and nothing else."""

    def __init__(self, settings: MixtureSettings, encode: Encode) -> None:
        """Begin with the first text of each file."""
        self._files = [corpus_files(domain.path) for domain in settings.domains.values()]
        self._encode = encode
        self._texts = [self._endless(number) for number in range(len(self._files))]
        self._taken = [0] * len(self._files)

    def tokens(self, count: int) -> int:
        """Tokenise at least so many, from each file equally many; returns how many they were."""
        before = sum(self._taken)
        while sum(self._taken) - before < count:
            least = self._taken.index(min(self._taken))
            self._taken[least] += len(self._encode(next(self._texts[least])))
        return sum(self._taken) - before

    def _endless(self, number: int) -> Iterator[str]:
        while True:
            yield from read_texts(self._files[number], Counter())


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [statistics.median(values), min(values), max(values)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_FOLDER")
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--tokenizer", default=TARGET, metavar="MODEL")
    parser.add_argument("--sequence", type=int, default=512, metavar="T")
    parser.add_argument("--batch", type=int, default=4, metavar="N")
    arguments = parser.parse_args()
    quiet_transformers()
    tokenizer = load_tokenizer(resolve(arguments.tokenizer))
    settings = settings_of(arguments.paths, arguments.sequence)
    stream = MixtureStream(settings, tokenizer, arguments.batch, seed=0)
    plain = Tokenizing(settings, document_encoder(tokenizer))
    steps = (50_000 if arguments.quick else 500_000) // (arguments.batch * arguments.sequence) + 1
    tokens: dict[str, list[int]] = {"stream": [], "tokenizing": []}

    def draw() -> None:
        tokens["stream"].append(sum(stream.step(1)[0].ids.numel() for _ in range(steps)))

    def tokenize() -> None:
        tokens["tokenizing"].append(plain.tokens(steps * arguments.batch * arguments.sequence))

    seconds = interleaved({"stream": draw, "tokenizing": tokenize}, REPEATS)
    per_token = {n: [s / t for s, t in zip(seconds[n], tokens[n][1:], strict=True)] for n in tokens}
    pairs = zip(per_token["stream"], per_token["tokenizing"], strict=True)
    state = stream.state_dict()
    start = time.perf_counter()
    again = MixtureStream(settings, tokenizer, arguments.batch, seed=0)
    again.load_state_dict(state)
    again.step(1)
    report(
        {
            "tokens_per_second": {n: spread([1 / s for s in per_token[n]]) for n in per_token},
            "stream_over_tokenizing": spread([a / b for a, b in pairs]),
            "resume_seconds": time.perf_counter() - start,
            "state_bytes": len(json.dumps(state)),
            "domains": len(settings.domains),
            "sequence": arguments.sequence,
            "batch": arguments.batch,
        }
    )


if __name__ == "__main__":
    main()
