"""The processes that a launcher started for one run, known before torch is imported."""

import os


def launched_processes() -> int:
    """How many there are; 1: none was launched."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def is_main() -> bool:
    """Whether this process is the one that writes and talks."""
    return launched_processes() == 1 or os.environ["RANK"] == "0"
