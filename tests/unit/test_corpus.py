"""Reading corpora: every container, rows that cannot be used, damaged files, resuming."""

import gzip
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.corpus import corpus_dataset, corpus_files, read_rows, read_texts
from draftsmith.errors import RequestError

TEXTS = ["first", "zwei\nZeilen", "trois é", "四"]
# The last row gives a file enough bytes that ten fewer cut into its content.
LONG = "last " + "x1y2z3" * 20


def jsonl(rows: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def lines(*texts: str) -> bytes:
    return jsonl([{"text": text} for text in texts])


def frame(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def read(path: Path, data: bytes | None = None) -> tuple[list[str], dict[str, int]]:
    """Texts and counts of a file, which gets `data` first."""
    if data is not None:
        path.write_bytes(data)
    counts: Counter[str] = Counter()
    return list(read_texts([path], counts)), dict(counts)


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [
        (".jsonl", bytes),
        (".json", bytes),
        (".jsonl.gz", gzip.compress),
        (".jsonl.zst", frame),
    ],
)
def test_every_container_gives_the_same_texts(tmp_path: Path, suffix: str, pack: Any) -> None:
    texts, counts = read(tmp_path / f"a{suffix}", pack(lines(*TEXTS)))
    assert texts == TEXTS
    assert counts == {"rows": len(TEXTS)}


def test_parquet_gives_texts_and_counts_nulls(tmp_path: Path) -> None:
    table = pa.table({"text": [*TEXTS, None, " "], "meta": [{"n": i} for i in range(6)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    texts, counts = read(tmp_path / "a.parquet")
    assert texts == TEXTS
    assert counts == {"rows": 4, "no_text": 1, "empty_text": 1}


def test_another_text_key(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"content": "a", "text": "b"}]))
    assert list(read_texts([path], Counter(), text_key="content")) == ["a"]


def test_files_are_read_in_order_into_one_count(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines(name))
    counts: Counter[str] = Counter()
    assert list(read_texts(corpus_files([str(tmp_path)]), counts)) == ["a", "b"]
    assert counts["rows"] == 2


def test_no_newline_at_the_end(tmp_path: Path) -> None:
    for name, pack in (("a.jsonl", bytes), ("a.jsonl.zst", frame), ("a.jsonl.gz", gzip.compress)):
        assert read(tmp_path / name, pack(lines("a", "b").rstrip()))[0] == ["a", "b"]


# --- A28: rows of other shapes


def test_A28_rows_of_every_shape_are_used_or_counted(tmp_path: Path) -> None:
    data = jsonl(
        [
            {"text": "plain", "meta": {"source": "a"}},
            {"text": "other keys", "meta": {"url": "u", "nested": {"x": [1, {"y": None}]}}},
            {"text": "meta a string", "meta": "{'url': 'u'}"},
            {"text": "meta a number", "meta": 3},
            {"text": "no meta"},
            {"text": None},
            {"text": ""},
            {"text": "  \n"},
            {"text": 123},
            {"meta": {"text": "not here"}},
            ["text"],
        ]
    )
    texts, counts = read(tmp_path / "a.jsonl", data + b"\n" + lines("cut off")[:-4])
    assert texts == ["plain", "other keys", "meta a string", "meta a number", "no meta"]
    assert counts == {
        "rows": 5,
        "no_text": 3,
        "empty_text": 2,
        "not_an_object": 1,
        "not_json": 1,
    }


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b'{"text": "\xff"}',
        b"\x00\x01",
        b'{"text": "a", "meta": ' + b"9" * 5000 + b"}",
        b'{"text": "a", "meta": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["half", "not-utf8", "binary", "huge-number", "too-deep"],
)
def test_A28_a_line_that_no_parser_takes_costs_itself_only(tmp_path: Path, bad: bytes) -> None:
    texts, counts = read(tmp_path / "a.jsonl", lines("a") + bad + b"\n" + lines("b"))
    assert texts == ["a", "b"]
    assert counts == {"rows": 2, "not_json": 1}


def test_A28_texts_that_are_not_unicode_are_skipped(tmp_path: Path) -> None:
    """Half of a surrogate pair is legal JSON, but no tokenizer takes it."""
    texts, counts = read(tmp_path / "a.jsonl", b'{"text": "half \\ud83d"}\n' + lines("good"))
    assert texts == ["good"]
    assert sum(counts.values()) == 2


# --- A29: frames and damage


def test_A29_every_zstd_frame_is_read(tmp_path: Path) -> None:
    texts, counts = read(tmp_path / "a.jsonl.zst", frame(lines("a")) + frame(lines(LONG)))
    assert texts == ["a", LONG]
    assert counts == {"rows": 2}


def test_A29_skippable_and_empty_frames_are_no_end(tmp_path: Path) -> None:
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"
    data = skippable + frame(lines("a")) + frame(b"") + skippable + frame(lines("b"))
    assert read(tmp_path / "a.jsonl.zst", data) == (["a", "b"], {"rows": 2})


def test_A29_a_row_may_span_two_frames(tmp_path: Path) -> None:
    whole = lines("a", LONG)
    assert read(tmp_path / "a.jsonl.zst", frame(whole[:30]) + frame(whole[30:]))[0] == ["a", LONG]


@pytest.mark.parametrize("missing", [1, 3, 10])
def test_A29_a_truncated_tail_is_counted(tmp_path: Path, missing: int) -> None:
    data = frame(lines("a")) + frame(lines(LONG))
    texts, counts = read(tmp_path / "a.jsonl.zst", data[:-missing])
    assert texts[0] == "a"
    assert set(texts) <= {"a", LONG}
    assert counts["truncated_files"] == 1


@pytest.mark.parametrize("junk", [b"junk that is no frame", b"ab", b"\0" * 16])
def test_A29_junk_after_the_last_frame_is_counted(tmp_path: Path, junk: bytes) -> None:
    texts, counts = read(tmp_path / "a.jsonl.zst", frame(lines("a")) + frame(lines("b")) + junk)
    assert texts == ["a", "b"]
    assert counts.get("damaged_files", 0) + counts.get("truncated_files", 0) == 1


def test_A29_gzip_members_truncation_and_junk(tmp_path: Path) -> None:
    data = gzip.compress(lines("a")) + gzip.compress(lines(LONG))
    path = tmp_path / "a.jsonl.gz"
    assert read(path, data) == (["a", LONG], {"rows": 2})
    assert read(path, data[:-20]) == (["a"], {"rows": 1, "truncated_files": 1})
    assert read(path, data + b"junk") == (["a", LONG], {"rows": 2, "damaged_files": 1})


def test_A29_broken_gzip_content_is_counted(tmp_path: Path) -> None:
    """A wrong block type is found by zlib, whose error is neither an OSError nor an EOFError."""
    second = bytearray(gzip.compress(lines(LONG)))
    second[10] = 0xFF  # the first byte after the header
    texts, counts = read(tmp_path / "a.jsonl.gz", gzip.compress(lines("a")) + bytes(second))
    assert texts == ["a"]
    assert counts["damaged_files"] == 1


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_A29_a_file_of_another_kind_is_counted(tmp_path: Path, name: str) -> None:
    assert read(tmp_path / name, lines("a")) == ([], {"damaged_files": 1})


def test_A29_a_damaged_parquet_is_counted_and_the_next_file_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * 50}), tmp_path / "a.parquet")
    os.truncate(tmp_path / "a.parquet", 100)
    (tmp_path / "b.jsonl").write_bytes(lines("b"))
    counts: Counter[str] = Counter()
    assert list(read_texts(corpus_files([str(tmp_path)]), counts)) == ["b"]
    assert counts["damaged_files"] + counts["truncated_files"] == 1


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=6),
)
def test_A29_any_texts_over_any_frames_come_back(texts: list[str], cuts: list[int]) -> None:
    """Frames may begin anywhere, inside a row or a character too."""
    data = lines(*texts)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl.zst"
        frames = [frame(data[a:b]) for a, b in pairwise(edges)]
        found, counts = read(path, b"".join(frames))
    assert found == [text for text in texts if text.strip()]
    assert sum(counts.values()) == len(texts)


# --- paths


@pytest.mark.parametrize("name", ["missing", "missing.jsonl"])
def test_missing_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=r"data\.path: .*missing.*no such file or folder"):
        corpus_files([str(tmp_path / name)])


def test_folder_without_data_and_unknown_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(RequestError, match=r"data\.path: .*no file that ends in \.jsonl"):
            corpus_files([str(path)])


def test_folders_are_searched_deeply_and_sorted(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    names = ["a.jsonl", "b.parquet", "sub/c.jsonl.zst", "sub/d.jsonl.gz"]
    for name in [*names, "readme.md"]:
        (tmp_path / name).touch()
    assert corpus_files([str(tmp_path)]) == [tmp_path / name for name in names]


def test_rows_keep_all_fields(tmp_path: Path) -> None:
    row = {"text": "a", "id": 3, "meta": {"x": [1]}}
    (tmp_path / "a.jsonl").write_bytes(jsonl([row]))
    assert list(read_rows(tmp_path / "a.jsonl", Counter())) == [(1, row)]


# --- datasets


def test_dataset_is_iterable_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    from datasets import IterableDataset

    (tmp_path / "a.jsonl.zst").write_bytes(frame(lines("a", "b")) + frame(lines("c")))
    (tmp_path / "b.jsonl").write_bytes(lines("d", "", "e"))
    files = corpus_files([str(tmp_path)])
    dataset = corpus_dataset(files)
    assert isinstance(dataset, IterableDataset)
    whole = [example["text"] for example in dataset]
    assert whole == ["a", "b", "c", "d", "e"]
    for seen in range(1, len(whole)):
        rows = iter(dataset)
        for _ in range(seen):
            next(rows)
        again = corpus_dataset(files)
        again.load_state_dict(dataset.state_dict())
        assert [example["text"] for example in again] == whole[seen:]


def test_dataset_reads_another_key(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"content": "a"}]))
    dataset = corpus_dataset([tmp_path / "a.jsonl"], text_key="content")
    assert list(dataset) == [{"text": "a"}]
