"""Figures of a training run for TensorBoard."""

from collections.abc import Mapping
from pathlib import Path

# Beside what a stage makes. Names of event files hold times and processes, so what is in it is no
# part of the result.
LOGS = "logs"


class Logs:
    """Writes scalars by step; one process of many does.

    Args:
        folder: of the event files.
        first_step: the first that this run makes; from there on, what an interrupted one wrote is
            not shown.
        on: whether this process writes.
    """

    def __init__(self, folder: Path, first_step: int, *, on: bool = True) -> None:
        """Open a file beside those of earlier runs."""
        self._writer = None
        if on:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures after so many steps."""
        if self._writer is not None:
            for name, value in figures.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()
