"""How much memory does cutting a checkpoint take, tensor by tensor and loaded whole?

    .venv/bin/python benchmarks/streaming.py [--quick]

Writes a synthetic llama checkpoint of 2 GiB in half precision (--quick: 0.4 GiB), cuts half of its
layers, FFN and width out of it in processes of their own, and prints `peak_over_output` for both
ways: the peak of anonymous memory above that of the idle process, over the bytes of the output.
The largest input tensor is stated beside it, `largest_input_over_output`.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from common import report
from safetensors.torch import save_file
from transformers import AutoConfig

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.layout import layout_of
from draftsmith.checkpoints.loading import load_model, quiet_transformers
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.checkpoints.streaming import compact_checkpoint

FAMILY = families()["llama"]
WAYS = ("streamed", "loaded")
REPEATS = 5


def config(layers: int) -> Any:
    """A llama of about 46 M parameters a layer."""
    return AutoConfig.for_model(
        "llama",
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )


def write_checkpoint(folder: Path, layers: int) -> int:
    """Write it in shards of 256 MiB; returns its bytes."""
    layout = layout_of(config(layers), FAMILY)
    config(layers).save_pretrained(folder)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, shape in layout.shapes.items():
        if name in layout.aliases:
            continue
        if sum(t.nbytes for t in shards[-1].values()) > 1 << 28:
            shards.append({})
        shards[-1][name] = torch.randn(shape).mul_(0.02).half()
    index = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return sum(t.nbytes for shard in shards for t in shard.values())


def half_of(source: Any) -> Selection:
    """Every second layer, FFN channel and dimension."""
    shape = shape_of(source, FAMILY)
    cut = {"layers", "ffn", "hidden"}
    selection: Selection = Selection.choose(
        shape, lambda axis, place: range(0, getattr(shape, axis), 2 if axis in cut else 1)
    )
    return selection


class PeakMemory:
    """The largest anonymous memory of this process, in bytes, looked at every millisecond."""

    def __enter__(self) -> "PeakMemory":
        """Start looking."""
        self.before = self.peak = self._now()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(s for s in lines if s.startswith("RssAnon")).split()[1]) << 10


def child(way: str, folder: Path) -> None:
    """Cut in this process and print what it took."""
    quiet_transformers()
    torch.set_num_threads(1)
    ref = resolve(str(folder))
    selection = half_of(AutoConfig.from_pretrained(folder))
    start = time.perf_counter()
    with PeakMemory() as memory:
        if way == "streamed":
            model = compact_checkpoint(ref, selection)
        else:
            model = compact_model(load_model(ref, "cpu", torch.float16), FAMILY, selection)
    seconds = time.perf_counter() - start
    output = sum(p.nbytes for p in model.parameters())
    print(
        json.dumps(
            {
                "output_bytes": output,
                "peak_over_output": (memory.peak - memory.before) / output,
                "seconds": seconds,
                "max_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
            }
        )
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--child", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], Path(arguments.child[1]))
        return
    layers = 4 if arguments.quick else 22
    with tempfile.TemporaryDirectory() as name:
        size = write_checkpoint(Path(name), layers)
        runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for _ in range(REPEATS):
            for way in WAYS:
                command = [sys.executable, __file__, "--child", way, name]
                runs[way].append(json.loads(subprocess.check_output(command)))
    output = runs["streamed"][0]["output_bytes"]
    largest = max(prod(s) for s in layout_of(config(layers), FAMILY).shapes.values()) * 2
    report(
        {
            "input_bytes": size,
            "output_bytes": output,
            "largest_input_over_output": largest / output,
            **{
                way: {
                    key: [
                        statistics.median(run[key] for run in runs[way]),
                        min(run[key] for run in runs[way]),
                        max(run[key] for run in runs[way]),
                    ]
                    for key in ("peak_over_output", "seconds")
                }
                for way in WAYS
            },
        }
    )


if __name__ == "__main__":
    main()
