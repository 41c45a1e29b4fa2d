"""Let espeak-ng read sentences of a corpus, as sounds to train and to score drafters that hear.

Writes 16 kHz mono files and `speech.jsonl` with rows {"id", "audio", "text"}. Which sentences,
voices and speeds depends on the seed alone, and a file is named by what is said in it and how: a
killed run goes on, and a second run says nothing twice. `--skip` passes over the sentences of
another run with the same corpus and seed; `--clips` adds real sounds, resampled and cut to 30 s.

    python benchmarks/seq2seq/make_speech.py --corpus TEXT.jsonl.zst --sentences 400 --out train
    python benchmarks/seq2seq/make_speech.py --corpus TEXT.jsonl.zst --skip 400 --sentences 100 \
        --clips REAL.wav --out test
"""

import argparse
import hashlib
import json
import math
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from numpy.typing import NDArray
from scipy.signal import resample_poly

from draftsmith.data.corpus import corpus_files, read_texts
from draftsmith.data.files import write_file, write_text
from draftsmith.data.progress import Progress
from draftsmith.errors import RequestError

sys.path.append(str(Path(__file__).parents[1]))
from common import report

RATE = 16_000
MOST_SECONDS = 30
ROWS = "speech.jsonl"
FEWEST_WORDS, MOST_WORDS = 4, 25
_END = re.compile(r"(?<=[.!?])\s+")
# Words of plain letters, with the signs that a voice reads as pauses.
_SENTENCE = re.compile(r"[A-Z][a-z']*(,? [A-Za-z]+('[a-z]+)?)+[.!?]")
_ACCENTS = ("en-us", "en-gb", "en-gb-scotland", "en-gb-x-rp")
_SPEAKERS = ("", "+m3", "+m7", "+f2", "+f4")
_WORDS_A_MINUTE = (130, 150, 170)


@dataclass(frozen=True)
class Utterance:
    """What is said, and how."""

    text: str
    voice: str
    speed: int

    @property
    def name(self) -> str:
        """By which its file is known."""
        spoken = f"{self.voice} {self.speed} {self.text}".encode()
        return hashlib.blake2b(spoken, digest_size=8).hexdigest()


def sentences(files: Sequence[Path], text_key: str) -> list[str]:
    """The sentences of a corpus that a voice can read as they are written, each once."""
    found: dict[str, None] = {}
    for text in read_texts(files, Counter(), text_key):
        for sentence in _END.split(text):
            words = len(sentence.split(maxsplit=MOST_WORDS))
            if FEWEST_WORDS <= words <= MOST_WORDS and _SENTENCE.fullmatch(sentence):
                found[sentence] = None
    return list(found)


def utterances(texts: Sequence[str], skip: int, count: int, seed: int) -> list[Utterance]:
    """`count` of the sentences in an order of the seed, after the first `skip`."""
    rng = random.Random(seed)
    spoken = [
        Utterance(text, rng.choice(_ACCENTS) + rng.choice(_SPEAKERS), rng.choice(_WORDS_A_MINUTE))
        for text in rng.sample(texts, len(texts))
    ]
    if len(spoken) < skip + count:
        raise RequestError(
            f"--sentences {count}: {len(spoken)} sentences of {FEWEST_WORDS} to {MOST_WORDS} plain "
            f"words, {skip} of them skipped; give a larger --corpus"
        )
    return spoken[skip : skip + count]


def at_rate(samples: NDArray[Any], rate: int) -> NDArray[Any]:
    """Samples [S] at 16 kHz."""
    common = math.gcd(RATE, rate)
    resampled: NDArray[Any] = resample_poly(samples, RATE // common, rate // common)
    return resampled.clip(-1, 1)


def write_sound(path: Path, samples: NDArray[Any]) -> None:
    """A whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, lambda partial: soundfile.write(partial, samples, RATE, format="WAV"))


def say(utterance: Utterance, path: Path) -> None:
    """Let it be said into a file."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.wav"
        subprocess.run(
            ["espeak-ng", "-v", utterance.voice, "-s", str(utterance.speed), "-w", str(raw)],
            input=utterance.text,
            text=True,
            check=True,
        )
        samples, rate = soundfile.read(raw)
    write_sound(path, at_rate(samples, rate))


def add_clip(clip: Path, path: Path) -> None:
    """Copy a real sound: one channel, 16 kHz, no longer than an encoder hears."""
    samples_SC, rate = soundfile.read(clip, always_2d=True)
    mono = samples_SC[: MOST_SECONDS * rate].mean(axis=1)
    write_sound(path, at_rate(mono, rate)[: MOST_SECONDS * RATE])


def seconds_of(paths: Sequence[Path]) -> float:
    """How long they are together."""
    return float(np.sum([soundfile.info(path).duration for path in paths]))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", nargs="+", required=True, help="files or folders of text")
    parser.add_argument("--text-key", default="text")
    parser.add_argument("--sentences", type=int, default=400)
    parser.add_argument("--skip", type=int, default=0, help="sentences to pass over first")
    parser.add_argument("--clips", type=Path, nargs="*", default=[], help="real sounds to add")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if shutil.which("espeak-ng") is None:
        sys.exit("espeak-ng: not installed, and it reads the sentences; apt-get install espeak-ng")
    try:
        texts = sentences(corpus_files(args.corpus, "--corpus"), args.text_key)
        chosen = utterances(texts, args.skip, args.sentences, args.seed)
    except RequestError as error:
        sys.exit(str(error))
    rows = []
    with Progress("speech", len(chosen), "sentences") as progress:
        for utterance in chosen:
            audio = f"spoken/{utterance.name}.wav"
            if not (args.out / audio).is_file():
                say(utterance, args.out / audio)
            rows.append({"id": utterance.name, "audio": audio, "text": utterance.text})
            progress.update(1)
    for clip in args.clips:
        audio = f"clips/{clip.stem}.wav"
        add_clip(clip, args.out / audio)
        rows.append({"id": clip.stem, "audio": audio})
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_text(args.out / ROWS, "".join(lines))
    paths = [args.out / row["audio"] for row in rows]
    report({"rows": len(rows), "seconds": round(seconds_of(paths)), "file": str(args.out / ROWS)})


if __name__ == "__main__":
    main()
