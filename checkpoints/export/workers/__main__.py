"""`python workers RUNTIME REQUEST ANSWER`: let a runtime do what is asked."""

import importlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any


def read(worker: ModuleType, folder: Path, path: str, **questions: Any) -> dict[str, Any]:
    """What an export says; logits, which are many, are left in a file of their own."""
    found = worker.read(path, questions)
    if (logits := found.pop("logits", None)) is not None:
        import numpy

        numpy.save(folder / "logits.npy", numpy.asarray(logits, numpy.float32))
    return {"reader": worker.VERSION} | found


def speculate(
    worker: ModuleType, prompts: list[list[int]], lookaheads: list[int], **pair: Any
) -> dict[str, Any]:
    """Every prompt by the target alone and with drafts, in turn, so that all meet the same machine.

    Each way first answers a prompt that is not counted: it pays for allocations and code paths.
    """
    both, ways = worker.Pair(lookaheads=lookaheads, **pair), [0, *lookaheads]
    texts: dict[str, list[Any]] = {str(way): [] for way in ways}
    for way in ways:
        both.generate(prompts[0], way)
    for number, prompt in enumerate(prompts):
        # Whoever comes first meets a cold cache; take turns.
        for way in ways if number % 2 == 0 else ways[::-1]:
            texts[str(way)].append(both.generate(prompt, way))
        print(f"prompt {number + 1} of {len(prompts)}", flush=True)
    return {"runtime": worker.VERSION, "texts": texts}


def end_with_parent() -> None:
    """A parent that was killed can't say stop."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Read the request, do it, write the answer."""
    end_with_parent()
    runtime, request, answer = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    asked = json.loads(request.read_text(encoding="utf-8"))
    worker, task = importlib.import_module(f"{runtime}_worker"), asked.pop("task")
    if task == "read":
        found = read(worker, answer.parent, **asked)
    elif task == "speculate":
        found = speculate(worker, **asked)
    else:
        found = getattr(worker, task)(**asked)
    answer.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
