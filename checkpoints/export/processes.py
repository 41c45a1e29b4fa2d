"""Runtimes run in a process of their own (`workers/`), some in a Python of their own."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.checkpoints.export.parity import Answers, Questions
from draftsmith.errors import DraftsmithError, RequestError

_WORKERS = Path(__file__).parent / "workers"
# Runtime -> the module that it is, and how it is installed.
_RUNTIMES = {
    "transformers": ("transformers", "pip install transformers"),
    "llama.cpp": ("xllamacpp", "pip install 'draftsmith[llama-cpp]'"),
    "onnx": ("onnxruntime", "pip install 'draftsmith[onnx]'"),
    "ort-genai": ("onnxruntime_genai", "pip install 'draftsmith[onnx]'"),
    "ctranslate2": ("ctranslate2", "pip install 'draftsmith[ctranslate2]'"),
    "openvino": ("openvino_genai", "make openvino"),
    "vllm": ("vllm", "make vllm"),
}
# Characters of a failed worker's reason that are shown.
_LONGEST = 300
# Lines of a failed worker's output that --debug shows.
_TAIL = 40


def interpreter_of(runtime: str) -> Path:
    """The Python in which a runtime is installed.

    `DRAFTSMITH_OPENVINO_PYTHON` (and so on) names one; else this one if it has the runtime; else
    the environment in a folder of the runtime's name within this one's, where `make` puts it.

    Raises:
        RequestError: there is none, with how to install it.
    """
    module, install = _RUNTIMES[runtime]
    name = _name(runtime)
    variable = f"DRAFTSMITH_{name.upper()}_PYTHON"
    named = os.environ.get(variable)
    found = [Path(named).absolute()] if named else [Path(sys.executable), _nested(name)]
    for python in found:
        if python.is_file() and _has(python, module):
            return python
    if named:
        raise RequestError(
            f"{runtime}: {variable}={named} is no Python that has the module {module}; give the "
            f"path of one, or leave it out and {install}"
        )
    raise RequestError(
        f"{runtime}: this Python has no module {module}; {install}, or name a Python that has it "
        f"by {variable}"
    )


def is_installed(runtime: str) -> bool:
    """Whether there is a Python with a runtime."""
    try:
        interpreter_of(runtime)
    except RequestError:
        return False
    return True


def ask(runtime: str, task: str, **request: Any) -> dict[str, Any]:
    """Let a runtime's worker do a task.

    Args:
        runtime: name of the runtime; its worker is `workers/NAME_worker.py`.
        task: `read`, `speculate`, or a function of that worker.
        request: its arguments, as JSON can hold them.

    Returns:
        What it answers; logits as a numpy array.

    Raises:
        RequestError: the runtime is not installed.
        DraftsmithError: the worker failed; the last lines that it printed are told.
    """
    python, name = interpreter_of(runtime), _name(runtime)
    with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
        question, answer = Path(folder) / "request.json", Path(folder) / "answer.json"
        question.write_text(json.dumps({"task": task, **request}), encoding="utf-8")
        # Apart from our own process group, so that Ctrl-C reaches it through us alone.
        process = subprocess.Popen(
            [str(python), str(_WORKERS), name, str(question), str(answer)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate()
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        if process.returncode or not answer.is_file():
            lines = printed.strip().splitlines() or ["it printed nothing"]
            raise DraftsmithError(
                f"{runtime}: its worker ended with {process.returncode} at {task!r}: "
                f"{_reason(lines)}"
            ) from RuntimeError("\n".join(lines[-_TAIL:]))
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        if (logits := Path(folder) / "logits.npy").is_file():
            found["logits"] = np.load(logits)
        return found


def read_back(runtime: str, path: Path, questions: Questions, **options: Any) -> Answers:
    """Ask a runtime what an export says.

    Args:
        runtime: name of the runtime.
        path: the export.
        questions: what is asked.
        options: what only this runtime's worker is told.

    Raises:
        RequestError: the runtime is not installed.
        DraftsmithError: it can't load the export.
    """
    inputs = {name: value.tolist() for name, value in questions.inputs.items()}
    # Workers link and move files; a relative path would mean another one there.
    asked = asdict(questions) | {"inputs": inputs} | options
    found = ask(runtime, "read", path=str(path.absolute()), **asked)
    logits = found.get("logits")
    return Answers(
        found["reader"],
        None if logits is None else torch.from_numpy(logits),
        found.get("greedy"),
        found.get("strings"),
    )


def _reason(lines: Sequence[str]) -> str:
    """What the last exception says, which may take several lines; without one, the last line."""
    raised = [i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line)]
    told = " ".join(lines[raised[-1] :] if raised else lines[-1:])
    return told if len(told) <= _LONGEST else f"{told[:_LONGEST]} …"


def _name(runtime: str) -> str:
    """As it stands in names of files and variables."""
    return runtime.replace(".", "_").replace("-", "_")


def _nested(name: str) -> Path:
    return Path(sys.prefix) / name / "bin" / "python"


@functools.cache
def _has(python: Path, module: str) -> bool:
    """Whether a Python knows a module; asked without importing it."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    try:
        # Where no folder has the name of a module: Python looks there too.
        return subprocess.run([python, "-c", code], check=False, cwd=_WORKERS).returncode == 0
    except OSError:
        return False
