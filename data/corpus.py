"""RedPajama-like text: rows of JSONL (plain, .gz, .zst) or parquet, of which only the text counts.

Rows of real corpora change their shape from line to line, so a row is read for its text field
alone; what cannot be used is skipped and counted, never fatal (cases A28, A29).
"""

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import zstandard

from draftsmith.errors import RequestError

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


def corpus_files(paths: Sequence[str], place: str = "data.path") -> list[Path]:
    """The data files under `paths` (files or folders), sorted.

    Args:
        paths: files and folders.
        place: where the recipe names them, for errors.

    Raises:
        RequestError: a path is missing, of an unknown kind, or a folder without data.
    """
    found: list[Path] = []
    for name in paths:
        path = Path(name).expanduser()
        if not path.exists():
            raise RequestError(f"{place}: {name}: there is no such file or folder")
        members = sorted(p for p in path.rglob("*") if _is_data(p)) if path.is_dir() else [path]
        if not members or not all(map(_is_data, members)):
            raise RequestError(f"{place}: {name}: no file that ends in {', '.join(SUFFIXES)}")
        found += members
    return found


def read_rows(path: Path, counts: Counter[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and content of the rows of one file that are JSON objects.

    The others are counted in `counts`.
    """
    if path.name.endswith(".parquet"):
        yield from enumerate(parquet_rows(path, counts), start=1)
        return
    for number, line in enumerate(lines_of(path, counts), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            counts["not_json"] += 1
            continue
        if isinstance(row, dict):
            yield number, row
        else:
            counts["not_an_object"] += 1


def read_texts(
    files: Sequence[Path], counts: Counter[str], text_key: str = "text", blank: bool = False
) -> Iterator[str]:
    """Yield the usable texts of `files` in order.

    Args:
        files: data files, as from `corpus_files`.
        counts: filled with `rows` (used) and, by reason, the rows and files that were not.
        text_key: the field that holds the text.
        blank: whether texts of nothing but space are usable.
    """
    for path in files:
        for _, row in read_rows(path, counts):
            text = usable_text(row, text_key, counts, blank)
            if text is not None:
                yield text


def usable_text(
    row: Mapping[str, Any], text_key: str, counts: Counter[str], blank: bool = False
) -> str | None:
    """The text of a row, or None where it has none that can be used; either is counted."""
    text = row.get(text_key)
    if not isinstance(text, str):
        counts["no_text"] += 1
    elif not (blank or text.strip()):
        counts["empty_text"] += 1
    elif not is_unicode(text):
        counts["not_unicode"] += 1
    else:
        counts["rows"] += 1
        return text
    return None


def count_rows(files: Sequence[Path], text_key: str = "text") -> Counter[str]:
    """Read everything once and count what is usable and, by reason, what is not."""
    counts: Counter[str] = Counter()
    for _ in read_texts(files, counts, text_key):
        pass
    return counts


def corpus_dataset(files: Sequence[Path], text_key: str = "text", blank: bool = False) -> Any:
    """The texts as a `datasets.IterableDataset`, for shuffling, mixing and exact resuming."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(
        _examples, gen_kwargs={"files": list(files), "text_key": text_key, "blank": blank}
    )


def _examples(files: Sequence[Path], text_key: str, blank: bool) -> Iterator[dict[str, str]]:
    for text in read_texts(files, Counter(), text_key, blank):
        yield {"text": text}


def file_domain(path: Path) -> str:
    """What a file's texts are called in figures by domain: its name without the endings."""
    return Path(path.name.removesuffix(".gz").removesuffix(".zst")).stem


def _is_data(path: Path) -> bool:
    return path.is_file() and path.name.endswith(SUFFIXES)


def is_unicode(text: str) -> bool:
    """JSON can hold half a surrogate pair, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parquet_rows(path: Path, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """The rows of a .parquet file; a damaged one is counted."""
    from datasets import load_dataset
    from pyarrow import ArrowException

    try:
        yield from load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    except ArrowException:
        counts["damaged_files"] += 1


def lines_of(path: Path, counts: Counter[str]) -> Iterator[bytes]:
    """The lines of a file, decompressed by the end of its name; what is cut off is counted."""
    with path.open("rb") as file:
        if path.name.endswith(".zst"):
            yield from _split_lines(_zstd_chunks(file, counts))
        elif path.name.endswith(".gz"):
            yield from _gzip_lines(file, counts)
        else:
            yield from file


def _zstd_chunks(file: BinaryIO, counts: Counter[str]) -> Iterator[bytes]:
    # A .zst file may be many frames. They are opened one by one: a reader that stops after the
    # first loses the rest without a word, and only a frame's own end tells that it is whole.
    frame = None
    try:
        while block := file.read(io.DEFAULT_BUFFER_SIZE * 16):
            while block:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(block)
                if not frame.eof:
                    break
                block, frame = frame.unused_data, None
    except zstandard.ZstdError:
        counts["damaged_files"] += 1
        return
    if frame is not None:
        counts["truncated_files"] += 1


def _gzip_lines(file: BinaryIO, counts: Counter[str]) -> Iterator[bytes]:
    try:
        yield from gzip.GzipFile(fileobj=file)
    except EOFError:
        counts["truncated_files"] += 1
    except (gzip.BadGzipFile, zlib.error, OSError):
        counts["damaged_files"] += 1


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    if rest:
        yield rest
