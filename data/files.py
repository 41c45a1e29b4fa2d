"""Writing that is whole or absent, and reading that is checked."""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from draftsmith.errors import DraftsmithError

PARTIAL = ".partial"
# A fingerprint reads this much of either end of a file: enough to tell models apart in a
# second, however large they are.
EDGE_BYTES = 1 << 20


@contextmanager
def storage(place: Path) -> Iterator[None]:
    """Turn the system's storage errors into one message with a cure."""
    try:
        yield
    except Exception as error:
        if _is_full(error):
            raise DraftsmithError(
                f"{place}: no space left on the device; free some or use --out with another disk, "
                "then start the same command again: finished work is kept"
            ) from error
        if isinstance(error, OSError) and error.errno in {errno.EACCES, errno.EROFS, errno.EPERM}:
            raise DraftsmithError(
                f"{place}: cannot be written ({error.strerror}); use --out with another folder"
            ) from error
        raise


def _is_full(error: Exception) -> bool:
    """Whether a disk is full; torch and safetensors tell it in errors of their own."""
    if isinstance(error, OSError):
        return error.errno in {errno.ENOSPC, errno.EDQUOT}
    text = str(error).lower()
    # The last is what torch says if a write within its archive fell short.
    signs = ("no space left", "file write failed", "unexpected pos")
    return any(sign in text for sign in signs)


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, then rename it: a reader sees all of it or none."""
    partial = path.with_name(path.name + PARTIAL)
    with storage(path):
        try:
            write(partial)
            _sync(partial)
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically; NaN is refused, since readers of other languages reject it."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def publish(partial: Path, final: Path) -> None:
    """Give a finished folder its name, in place of an older one."""
    with storage(final):
        if final.exists():
            old = final.with_name(final.name + ".old")
            shutil.rmtree(old, ignore_errors=True)
            os.replace(final, old)
            os.replace(partial, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(partial, final)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all went well and vanishes otherwise."""
    partial = final.with_name(final.name + PARTIAL)
    made = [p for p in partial.parents if not p.exists()]
    with storage(final):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    try:
        yield partial
        publish(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            parent.rmdir()
        raise


def sha256(path: Path) -> str:
    """Digest of a whole file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: Path) -> str:
    """Digest of a file's size and both ends, or of all files of a folder, by name."""
    digest = hashlib.sha256()
    members = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
    for member in members:
        size = member.stat().st_size
        digest.update(f"{member.relative_to(path)}\0{size}\0".encode())
        with member.open("rb") as file:
            digest.update(file.read(EDGE_BYTES))
            file.seek(max(0, size - EDGE_BYTES))
            digest.update(file.read(EDGE_BYTES))
    return digest.hexdigest()


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
