"""Where a result came from: settings, inputs, versions, command; and whether it is still valid."""

import hashlib
import json
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from draftsmith import __version__
from draftsmith.checkpoints.formats import ModelRef
from draftsmith.data.files import fingerprint, write_json

FILE = "provenance.json"
_PACKAGES = ("torch", "transformers", "safetensors", "datasets", "gguf", "numpy")


def key_of(settings: Any) -> str:
    """A digest of everything that a stage's result depends on."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of draftsmith, Python and the packages that matter for results."""
    found = {"draftsmith": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The machine, as far as it says."""
    import torch

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [s for s in info.read_text().splitlines() if s.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"cpu": cpu, "threads": torch.get_num_threads(), "gpu": device}


def write(
    folder: Path,
    *,
    key: str,
    settings: Any,
    inputs: dict[str, str],
    seed: int | None,
    passing: tuple[str, ...] = (),
) -> None:
    """Write `provenance.json`, the mark of a complete output.

    Args:
        folder: the output.
        key: of everything that it depends on.
        settings: the resolved recipe.
        inputs: fingerprints of the files from outside.
        seed: of what was drawn; None: nothing was.
        passing: files and folders that will be gone.
    """
    write_json(
        folder / FILE,
        {
            "key": key,
            "settings": settings,
            "inputs": inputs,
            "seed": seed,
            "versions": versions(),
            "argv": sys.argv,
            "files": sorted(
                str(p.relative_to(folder))
                for p in folder.rglob("*")
                if p.is_file() and p.name != FILE and p.relative_to(folder).parts[0] not in passing
            ),
        },
    )


def write_command(folder: Path, settings: dict[str, Any], models: Iterable[ModelRef]) -> None:
    """Write the provenance of a command that needs no recipe: its options and its models."""
    inputs = {model.spec: fingerprint(model.path) for model in models}
    write(folder, key=key_of([settings, inputs]), settings=settings, inputs=inputs, seed=None)


def read_key(folder: Path) -> str | None:
    """The key of a complete output; none if there is no such, or a file of it is gone."""
    try:
        record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        complete = all((folder / name).is_file() for name in record["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(record["key"]) if complete else None
