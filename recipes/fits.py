"""Ways to run a stage, and whether each of them fits what there is."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.distill.estimate import Memory

# Share of the free memory that allocators may keep of what was freed; benchmarks/plan_memory.py
# measures how much.
RESERVE = 0.15


@dataclass(frozen=True)
class Text:
    """The text to learn from.

    Attributes:
        measured: whether it comes from traces that are there; else from the recipe alone.
        rows: texts to train on.
        longest: tokens of the longest, prompt included, none beyond max_length.
        mean_answer: mean answer tokens of a row.
        answer_tokens: of all rows.
        asked_rows: rows that the recipe's steps take, all micro-batches together.
        memory: bytes of the traces in the host's memory, in each process.
        longest_source: tokens of the longest text that an encoder reads; 0 without one.
    """

    measured: bool
    rows: int
    longest: int
    mean_answer: float
    answer_tokens: int
    asked_rows: int
    memory: int
    longest_source: int = 0

    @property
    def asked_tokens(self) -> int:
        """Answer tokens that the recipe's steps take."""
        return round(self.asked_rows * self.mean_answer)

    @property
    def epochs(self) -> float:
        """How often each row is seen."""
        return self.asked_rows / max(1, self.rows)


@dataclass(frozen=True)
class Fit:
    """One way to run the stage, and whether it fits.

    Attributes:
        name: what a person calls it.
        zero: ZeRO stage; 0: plain torch.
        processes: that share a step.
        chosen: whether it is what the recipe says for so many processes.
        memory: of one process on its device, at the worst moment.
        traces: bytes of the host's memory for traces, in one process.
        available: bytes that one process may take on its device.
        on_host: whether that is the host's memory.
    """

    name: str
    zero: int
    processes: int
    chosen: bool
    memory: Memory
    traces: int
    available: int
    on_host: bool

    @property
    def total(self) -> int:
        """Bytes on the device; on a CPU the traces lie there too."""
        return self.memory.total + (self.traces if self.on_host else 0)

    @property
    def fits(self) -> bool:
        """Whether that is there."""
        return self.total <= self.available

    @property
    def tight(self) -> bool:
        """Whether it fits, but leaves less than allocators may keep of what was freed."""
        return self.fits and self.total > (1 - RESERVE) * self.available


@dataclass(frozen=True)
class Device:
    """What one process has.

    Attributes:
        kind: `cpu` or `cuda`.
        name: as its maker calls it.
        memory: bytes of one device, or of the host.
        available: of which nobody uses so many now.
        host_available: of the host's memory.
        own: bytes of the host's memory that this process uses, mostly libraries.
    """

    kind: str
    name: str
    memory: int
    available: int
    host_available: int
    own: int

    def share(self, processes: int) -> int:
        """Bytes that each of so many processes may add: all share a CPU's memory.

        A further process needs the libraries that this one has loaded.
        """
        if self.kind != "cpu":
            return self.available
        return (self.available + self.own) // processes - self.own


def that_fit(ways: Iterable[Fit]) -> tuple[Fit, ...]:
    """Those that fit with some room."""
    return tuple(fit for fit in ways if fit.fits and not fit.tight)


def way_name(zero: int, processes: int) -> str:
    """What a person calls it."""
    if zero:
        return f"ZeRO {zero}, {processes} processes"
    return "one process" if processes == 1 else f"{processes} processes, all whole"


def plain_fit(fit: Fit) -> dict[str, Any]:
    """For JSON."""
    memory = asdict(fit.memory)
    moment = memory.pop("moment")
    return {
        "name": fit.name,
        "zero": fit.zero,
        "processes": fit.processes,
        "chosen": fit.chosen,
        "moment": moment,
        **{f"{name}_bytes": count for name, count in memory.items()},
        "traces_bytes": fit.traces,
        "total_bytes": fit.total,
        "available_bytes": fit.available,
        "fits": fit.fits,
        "tight": fit.tight,
    }


def gb(count: int) -> str:
    """Bytes in words."""
    return f"{count / 1e9:,.2f} GB"
