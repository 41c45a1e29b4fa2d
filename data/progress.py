"""How long work shows that it goes on: a tqdm bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from draftsmith.data.processes import is_main

# Plain lines are for logs: often enough to see life, seldom enough to read.
_SECONDS_BETWEEN_LINES = 20.0
_quiet = False


def set_quiet(quiet: bool) -> None:
    """Show nothing at all (`--quiet`); of many processes one alone shows anything."""
    global _quiet
    _quiet = quiet or not is_main()


def say(text: str) -> None:
    """A line for the user, on stderr so that stdout stays for results."""
    if not _quiet:
        tqdm.write(text, file=sys.stderr)


class Progress:
    """A bar with rate and time left.

    Args:
        name: what is going on.
        total: units in all.
        unit: their name.
        done: units that an earlier run did.
    """

    def __init__(self, name: str, total: int, unit: str, done: int = 0) -> None:
        """Show the start."""
        terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=name,
            unit=f" {unit}",
            disable=_quiet or not terminal,
            dynamic_ncols=True,
            leave=True,
        )
        self._plain = not terminal and not _quiet
        self._name, self._total, self._unit = name, total, unit
        self._done, self._first = done, done
        self._start = self._last_line = time.monotonic()

    def update(self, amount: int = 1, note: str = "") -> None:
        """`amount` more units are done; `note` is shown beside the bar."""
        self._done += amount
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(amount)
        if self._plain and time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            self._line(note)

    def _line(self, note: str) -> None:
        seconds = time.monotonic() - self._start
        rate = (self._done - self._first) / seconds if seconds else 0.0
        parts = [f"{self._name}: {self._done}/{self._total} {self._unit}"]
        if rate:
            left = max(0.0, (self._total - self._done) / rate)
            parts += [f"{rate:.1f} {self._unit}/s", f"{left:.0f} s left"]
        say(", ".join([*parts, note] if note else parts))

    def __enter__(self) -> "Progress":
        """Use as a context."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the bar."""
        self._bar.close()
        if self._plain and kind is None:
            self._line("done")
