"""Runtimes in processes of their own: what they are asked, and how they fail."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith.checkpoints.export import processes
from draftsmith.errors import DraftsmithError, RequestError

WORKERS = Path(processes.__file__).parent / "workers"


@pytest.mark.parametrize("file", sorted(WORKERS.glob("*.py")), ids=lambda f: f.stem)
def test_workers_import_nothing_of_ours(file: Path) -> None:
    """They run in a Python that may not have draftsmith, torch or transformers."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not [n for n in names if n.split(".")[0] == "draftsmith"]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of workers with one that is written here; returns its file."""
    monkeypatch.setattr(processes, "_WORKERS", tmp_path)
    monkeypatch.setitem(processes._RUNTIMES, "toy", ("json", "pip install toy"))
    (tmp_path / "__main__.py").write_text((WORKERS / "__main__.py").read_text())
    return tmp_path / "toy_worker.py"


def test_a_worker_is_asked_and_answers(scripted: Path) -> None:
    scripted.write_text("def double(n): print('noise'); return {'twice': 2 * n}\n")
    assert processes.ask("toy", "double", n=21) == {"twice": 42}


def test_speculation_takes_turns_after_a_warm_up(scripted: Path) -> None:
    scripted.write_text(
        "VERSION = 'toy 1'\n"
        "class Pair:\n"
        "    def __init__(self, **given): self.log = []\n"
        "    def generate(self, prompt, lookahead):\n"
        "        self.log.append((prompt[0], lookahead))\n"
        "        return {'tokens': prompt, 'seconds': 0, 'log': list(self.log)}\n"
    )
    found = processes.ask(
        "toy", "speculate", prompts=[[7], [8]], lookaheads=[2, 4], target="t", drafter="d"
    )
    assert found["runtime"] == "toy 1"
    assert [text["tokens"] for text in found["texts"]["4"]] == [[7], [8]]
    last = found["texts"]["0"][1]["log"]
    warm = [[7, 0], [7, 2], [7, 4]]
    assert last == [*warm, *warm, [8, 4], [8, 2], [8, 0]]


def test_a_worker_that_fails_tells_its_last_lines(scripted: Path) -> None:
    scripted.write_text("def fall(): raise SystemError('the disk is on fire')\n")
    with pytest.raises(
        DraftsmithError, match=r"toy: .*'fall': SystemError: the disk is on fire$"
    ) as e:
        processes.ask("toy", "fall")
    assert "Traceback" in str(e.value.__cause__), "--debug shows the rest"
    scripted.write_text("def fall(): raise ValueError('no such type\\n\\nupdate the library')\n")
    with pytest.raises(DraftsmithError, match=r"ValueError: no such type  update the library$"):
        processes.ask("toy", "fall")
    scripted.write_text("import os\ndef fall(): os._exit(9)\n")
    with pytest.raises(DraftsmithError, match=r"ended with 9 at 'fall': it printed nothing"):
        processes.ask("toy", "fall")


def test_a_runtime_that_is_missing_is_told_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(processes._RUNTIMES, "toy", ("no_such_module", "pip install toy"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(RequestError, match="no module no_such_module; pip install toy, or name"):
        processes.ask("toy", "read")
    monkeypatch.setenv("DRAFTSMITH_TOY_PYTHON", str(tmp_path / "python"))
    with pytest.raises(RequestError, match=r"DRAFTSMITH_TOY_PYTHON=.* is no Python that has"):
        processes.interpreter_of("toy")
    (tmp_path / "python").write_text("not a program")
    for mode in (0o600, 0o700):
        (tmp_path / "python").chmod(mode)
        with pytest.raises(RequestError, match=r"DRAFTSMITH_TOY_PYTHON=.* is no Python that has"):
            processes.interpreter_of("toy")


def test_a_folder_of_a_modules_name_is_no_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As exports leave them where people work."""
    (tmp_path / "no_such_module").mkdir()
    monkeypatch.chdir(tmp_path)
    processes._has.cache_clear()
    assert not processes._has(Path(sys.executable), "no_such_module")


def test_a_worker_ends_with_its_parent(scripted: Path, tmp_path: Path) -> None:
    """Also where the parent is killed, which can't say stop."""
    scripted.write_text(
        "import os, pathlib, time\n"
        f"def wait(): pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid())); "
        "time.sleep(60); return {}\n"
    )
    code = (
        "from pathlib import Path\n"
        "from draftsmith.checkpoints.export import processes\n"
        f"processes._WORKERS = Path({str(tmp_path)!r})\n"
        "processes._RUNTIMES['toy'] = ('json', 'pip install toy')\n"
        "processes.ask('toy', 'wait')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
        time.sleep(0.1)
    worker = int((tmp_path / "pid").read_text())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not Path(f"/proc/{worker}").exists()


def test_a_runtimes_own_environment_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that `make` puts within ours, if ours lacks the runtime."""
    monkeypatch.setitem(processes._RUNTIMES, "toy", ("no_such_module", "make toy"))
    monkeypatch.setattr(processes, "_has", lambda python, module: "toy" in python.parts)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    python = tmp_path / "toy" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert processes.interpreter_of("toy") == python
