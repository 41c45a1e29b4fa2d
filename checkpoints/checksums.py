"""The mark of a whole checkpoint: SHA256SUMS, which `sha256sum -c` reads as well."""

from collections.abc import Iterable
from pathlib import Path

from draftsmith.data.files import sha256, write_text
from draftsmith.errors import RequestError

FILE = "SHA256SUMS"


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    """Write the digests of files of a folder: the last step of saving a checkpoint."""
    lines = [f"{sha256(folder / name)}  {name}\n" for name in sorted(names)]
    write_text(folder / FILE, "".join(lines))


def verify_checksums(folder: Path) -> None:
    """Compare a checkpoint with its digests; one without them is from elsewhere and passes.

    Raises:
        RequestError: a file is gone or differs.
    """
    path = folder / FILE
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or Path(name).name != name:
            raise RequestError(f"{path}: damaged; get the checkpoint again")
        file = folder / name
        if not file.is_file():
            raise RequestError(f"{file}: is gone, but {FILE} lists it; get the checkpoint again")
        if sha256(file) != digest:
            raise RequestError(
                f"{file}: differs from its checksum in {FILE}, so it is damaged; get it again, or "
                f"delete {FILE} if you changed the file on purpose"
            )
