"""What the chunked head loss costs, against all logits at once.

    .venv/bin/python benchmarks/kd_loss.py [--quick] [--signals traces live] [--loss forward_kl]

One forward and backward pass of the loss with respect to hidden states and head weight, for both
signals of the target. Prints `chunked_over_plain_traces` and `chunked_over_plain_live`, of
- `peak_memory`: what the pass adds to its process at the worst moment, with the gradients of hidden
  states and weight and without the inputs; every pass in a process of its own,
- `process_memory`: all that the process holds then, inputs and libraries too,
- `time`.
`--quick` takes fewer tokens and a narrower head, but the whole vocabulary. The plain memory grows
with the tokens and the chunked one does not: only the full size shows what is saved.
"""

import argparse
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from common import interleaved, ratio, report

from draftsmith.distill.head_loss import HeadLoss, LiveTarget, Projection
from draftsmith.distill.losses import LOSSES, Signal, Traces, make_loss

VOCABULARY, TOP_N = 151_936, 32
FULL, QUICK = (2048, 576), (256, 64)
WAYS, SIGNALS, REPEATS = ("plain", "chunked"), ("traces", "live"), 5


def inputs(signal: str, tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor, Signal]:
    """Hidden states, head weight and the target's signal; nothing larger is made on the way."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).requires_grad_()
    weight = torch.empty(VOCABULARY, width).normal_(std=0.05).requires_grad_()
    if signal == "live":
        head = Projection(torch.empty(VOCABULARY, width).normal_(std=0.05))
        return hidden, weight, LiveTarget(torch.randn(tokens, width), head)
    first = torch.randint(VOCABULARY, (tokens, 1))
    top_ids = (first + 4_001 * torch.arange(TOP_N)) % VOCABULARY
    logprobs = torch.randn(tokens, TOP_N + 1).log_softmax(-1)[:, :TOP_N]
    return hidden, weight, Traces(top_ids, logprobs)


def one_pass(
    way: str, loss_name: str, signal_name: str, tokens: int, width: int
) -> Callable[[], None]:
    """Forward and backward, plain or chunked."""
    hidden, weight, signal = inputs(signal_name, tokens, width)
    loss = make_loss(loss_name)
    chunked = HeadLoss(loss)

    def work() -> None:
        hidden.grad = weight.grad = None
        if way == "plain":
            total, _ = loss(signal.against(hidden @ weight.T))
        else:
            total = chunked(hidden, weight, signal)
        (total / tokens).backward()

    return work


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM the most so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def added_memory(*case: Any) -> tuple[int, int]:
    """Bytes that a pass adds to this process at most, and the most that the process held."""
    work = one_pass(*case)
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before, resident("VmHWM")


def memory(*case: Any) -> tuple[int, int]:
    """`added_memory` in a process of its own, so that no earlier pass has left anything.

    A fork saves the imports; it is sound while this process has computed nothing itself.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("fork")) as pool:
        return pool.submit(added_memory, *case).result()


def measure_memory(cases: dict[str, tuple[Any, ...]], repeats: int) -> dict[str, Any]:
    """Memory of both ways, interleaved."""
    measured: dict[str, list[tuple[int, int]]] = {way: [] for way in cases}
    for _ in range(repeats):
        for way, case in cases.items():
            measured[way].append(memory(*case))
    added, whole = ({way: [float(b[i]) for b in measured[way]] for way in cases} for i in range(2))
    return {
        "peak_memory": ratio(added, "chunked", "plain"),
        "process_memory": ratio(whole, "chunked", "plain"),
        "added_gb": {way: statistics.median(values) / 1e9 for way, values in added.items()},
    }


def measure_time(cases: dict[str, tuple[Any, ...]], repeats: int) -> dict[str, Any]:
    """Time of both ways, interleaved."""
    seconds = interleaved({way: one_pass(*case) for way, case in cases.items()}, repeats)
    return {
        "time": ratio(seconds, "chunked", "plain"),
        "seconds": {way: statistics.median(values) for way, values in seconds.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--signals", nargs="+", choices=SIGNALS, default=SIGNALS)
    parser.add_argument("--loss", choices=sorted(LOSSES), default="forward_kl")
    arguments = parser.parse_args()
    tokens, width = QUICK if arguments.quick else FULL
    cases = {
        signal: {way: (way, arguments.loss, signal, tokens, width) for way in WAYS}
        for signal in arguments.signals
    }
    # All memory first: see `memory`.
    used = {signal: measure_memory(ways, REPEATS) for signal, ways in cases.items()}
    took = {signal: measure_time(ways, REPEATS) for signal, ways in cases.items()}
    figures = {f"chunked_over_plain_{signal}": used[signal] | took[signal] for signal in cases}
    size = {"tokens": tokens, "width": width, "vocabulary": VOCABULARY, "loss": arguments.loss}
    report({**figures, **size})


if __name__ == "__main__":
    main()
