"""Mixtures: shares, what is held out, and streams that go on exactly where they stopped."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from draftsmith.data.mixture import (
    FilePart,
    Mixture,
    ShuffledDocuments,
    Texts,
    check_mixture,
    document_encoder,
)
from draftsmith.data.packing import PackedRow, Packer
from draftsmith.distill.batches import Batch, MixtureStream
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import DomainSettings, MixtureSettings
from tests.conftest import make_tokenizer

TOKENIZER = make_tokenizer()
EOS = 2


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def frames(data: bytes) -> bytes:
    """Many of them, which end anywhere."""
    compress = zstandard.ZstdCompressor().compress
    return b"".join(compress(data[i : i + 50]) for i in range(0, len(data), 50))


def parquet(data: bytes) -> bytes:
    table = pa.table({"text": [json.loads(line)["text"] for line in data.splitlines()]})
    file = io.BytesIO()
    pq.write_table(table, file, row_group_size=3)
    return file.getvalue()


PACK: dict[str, Callable[[bytes], bytes]] = {
    ".jsonl": bytes,
    ".jsonl.gz": gzip.compress,
    ".jsonl.zst": frames,
    ".parquet": parquet,
}


def write(folder: Path, name: str, texts: list[str]) -> str:
    """A file of texts, packed by the end of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix = name[name.index(".") :]
    (folder / name).write_bytes(PACK[suffix](jsonl(texts)))
    return str(folder / name)


def word(number: int) -> str:
    """A number in letters: the tiny tokenizer knows no digits."""
    return np.base_repr(number, 8).translate(str.maketrans("01234567", "lmnoprst"))


def texts_of(domain: str, count: int) -> list[str]:
    """Texts of different lengths, none twice."""
    return [f"{domain} {word(i)}" + " is a word" * (i % 4) for i in range(count)]


def mixture_of(paths: dict[str, Any], **changes: Any) -> MixtureSettings:
    """Settings of domains: path, paths, or (paths, weight)."""
    domains = {}
    for name, value in paths.items():
        path, weight = value if isinstance(value, tuple) else (value, 1.0)
        path = (path,) if isinstance(path, str) else tuple(path)
        domains[name] = DomainSettings(path=path, weight=weight)
    small: dict[str, Any] = {"sequence": 16, "shuffle_buffer": 4, "held_out": 1}
    return MixtureSettings(domains=domains, **{**small, **changes})


@pytest.fixture
def three(tmp_path: Path) -> MixtureSettings:
    """Three domains in all kinds of files, one of them of two."""
    write(tmp_path / "c", "1.jsonl.gz", texts_of("c", 12))
    write(tmp_path / "c", "2.parquet", texts_of("d", 9))
    return mixture_of(
        {
            "a": (write(tmp_path, "a.jsonl.zst", texts_of("a", 25)), 1.0),
            "b": (write(tmp_path, "b.jsonl", texts_of("b", 17)), 2.0),
            "c": (str(tmp_path / "c"), 5.0),
        }
    )


Plain = tuple[list[int], tuple[int, ...], str]


def plain(row: PackedRow) -> Plain:
    return row.tokens.tolist(), row.starts, row.domain


def draw(mixture: Mixture, count: int) -> list[Plain]:
    return [plain(mixture.next_row()) for _ in range(count)]


def saved(state: dict[str, Any]) -> Any:
    """The state as a save gives it back."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert json.loads(json.dumps(state)) == state
    return torch.load(file, weights_only=True)


def documents_in(rows: list[Plain]) -> list[str]:
    """The texts of one domain's sequences in order, without the one that is cut at the end."""
    tokens = [token for row in rows for token in row[0]]
    found, document = [], []
    for token in tokens:
        if token == EOS:
            found.append(TOKENIZER.decode(document))
            document = []
        else:
            document.append(token)
    return found


def one_domain(tmp_path: Path, count: int, **changes: Any) -> tuple[MixtureSettings, list[str]]:
    texts = texts_of("x", count)
    return mixture_of({"x": write(tmp_path, "x.jsonl", texts)}, **changes), texts


# --- what comes out


def test_every_text_once_an_epoch_in_other_orders(tmp_path: Path) -> None:
    settings, texts = one_domain(tmp_path, 20)
    mixture = Mixture(settings, TOKENIZER, seed=0)
    kept = documents_in([plain(row) for row in mixture.held_out["x"]])
    found = documents_in(draw(mixture, 60))
    learned = texts[len(kept) + 1 :]
    first, second = found[: len(learned)], found[len(learned) : 2 * len(learned)]
    assert kept == texts[: len(kept)]
    assert sorted(first) == sorted(second) == sorted(learned)
    assert first != second
    assert first != learned


def test_a_buffer_of_none_keeps_the_order(tmp_path: Path) -> None:
    settings, texts = one_domain(tmp_path, 20, shuffle_buffer=0)
    mixture = Mixture(settings, TOKENIZER, seed=0)
    kept = documents_in([plain(row) for row in mixture.held_out["x"]])
    learned = texts[len(kept) + 1 :]
    assert documents_in(draw(mixture, 30))[: len(learned)] == learned


def test_files_come_in_another_order_each_epoch(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{i}.jsonl", [i * 2] * 3) for i in "abcdef"]
    settings = mixture_of({"x": paths}, shuffle_buffer=0, sequence=4)
    found = documents_in(draw(Mixture(settings, TOKENIZER, seed=0), 60))
    orders = [list(dict.fromkeys(found[i : i + 16])) for i in (0, 16, 32)]
    assert len({tuple(order) for order in orders}) > 1
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_what_is_held_out_is_never_learned(three: MixtureSettings) -> None:
    mixture = Mixture(three, TOKENIZER, seed=0)
    rows = draw(mixture, 200)
    assert min(mixture.drawn.values()) > 8
    for domain, held_out in mixture.held_out.items():
        kept = documents_in([plain(row) for row in held_out])
        assert kept
        assert kept[0].startswith(f"{domain} l")
        learned = documents_in([row for row in rows if row[2] == domain])
        assert not set(kept) & set(learned)


def test_held_out_sequences_are_the_first_of_each_domain(tmp_path: Path) -> None:
    settings, texts = one_domain(tmp_path, 40, held_out=4)
    for seed in (0, 1):
        rows = [plain(row) for row in Mixture(settings, TOKENIZER, seed).held_out["x"]]
        assert len(rows) == 4
        found = documents_in(rows)
        assert found == texts[: len(found)]


def test_documents_end_in_one_eos_and_begin_as_the_tokenizer_says(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    settings, texts = one_domain(tmp_path, 9, shuffle_buffer=0)
    adding = make_tokenizer()
    adding.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    for tokenizer, bos in ((TOKENIZER, []), (adding, [1])):
        row = Mixture(settings, tokenizer, seed=0).held_out["x"][0]
        first = tokenizer(texts[0], add_special_tokens=False)["input_ids"]
        assert row.tokens.tolist()[: row.starts[1]] == [*bos, *first, EOS]


def test_domains_come_in_their_shares(three: MixtureSettings) -> None:
    mixture = Mixture(three, TOKENIZER, seed=0)
    assert mixture.shares == {"a": 1 / 8, "b": 2 / 8, "c": 5 / 8}
    draw(mixture, 400)
    assert mixture.drawn == pytest.approx({"a": 50, "b": 100, "c": 250}, abs=35)
    before = Counter(mixture.drawn)
    mixture.shares = {"a": 3.0, "b": 0.0, "c": 1.0}
    assert mixture.shares == {"a": 0.75, "b": 0.0, "c": 0.25}
    draw(mixture, 200)
    after = Counter(mixture.drawn) - before
    assert after["b"] == 0
    assert after["a"] == pytest.approx(150, abs=25)


def test_a_domain_is_the_same_beside_others(three: MixtureSettings) -> None:
    alone = mixture_of({"b": list(three.domains["b"].path)})
    rows = [row for row in draw(Mixture(three, TOKENIZER, seed=0), 60) if row[2] == "b"]
    assert rows == draw(Mixture(alone, TOKENIZER, seed=0), len(rows))
    assert rows != draw(Mixture(alone, TOKENIZER, seed=1), len(rows))


@pytest.mark.parametrize(
    "shares",
    [
        {"a": 1.0, "b": 1.0},
        {"a": 0.0, "b": 0.0, "c": 0.0},
        {"a": -1.0, "b": 1.0, "c": 1.0},
        {"a": float("nan"), "b": 1.0, "c": 1.0},
    ],
)
def test_shares_that_are_none(three: MixtureSettings, shares: dict[str, float]) -> None:
    mixture = Mixture(three, TOKENIZER, seed=0)
    with pytest.raises(DraftsmithError, match="give a share of 0 or more for each of a, b, c"):
        mixture.shares = shares


# --- resuming


@pytest.mark.parametrize("done", range(0, 40, 3))
def test_the_stream_goes_on_exactly(three: MixtureSettings, done: int) -> None:
    whole = Mixture(three, TOKENIZER, seed=3)
    draw(whole, done)
    state = saved(whole.state_dict())
    whole.shares = {"a": 2.0, "b": 1.0, "c": 1.0}
    expected = draw(whole, 45)
    again = Mixture(three, TOKENIZER, seed=3)
    draw(again, 2)
    again.load_state_dict(state)
    again.shares = {"a": 2.0, "b": 1.0, "c": 1.0}
    assert draw(again, 45) == expected
    assert again.state_dict() == whole.state_dict()


@pytest.mark.parametrize("kind", sorted(PACK))
@pytest.mark.parametrize("done", [0, 1, 7, 12])
def test_files_of_any_kind_go_on_exactly(tmp_path: Path, kind: str, done: int) -> None:
    paths = [write(tmp_path, f"{domain}{kind}", texts_of(domain, 7)) for domain in "ab"]
    settings = mixture_of({"x": paths}, shuffle_buffer=3)
    whole, again = (Mixture(settings, TOKENIZER, seed=0) for _ in range(2))
    draw(whole, done)
    again.load_state_dict(saved(whole.state_dict()))
    assert draw(again, 12) == draw(whole, 12)


class Rows:
    """What `datasets` does for a file: rows, and the number of them that were read."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.read = texts, 0

    def __iter__(self) -> Iterator[dict[str, str]]:
        for text in self.texts[self.read :]:
            self.read += 1
            yield {"text": text}

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


@dataclass(frozen=True)
class ListPart(FilePart):
    """Texts that stand in no file."""

    texts: tuple[str, ...] = ()

    def rows(self) -> Any:
        return Rows(list(self.texts))


PARTS = st.lists(
    st.tuples(st.lists(st.integers(0, 9), max_size=7), st.integers(0, 7)), min_size=1, max_size=4
)


@hypothesis_settings(deadline=None)
@given(
    parts=PARTS,
    sequence=st.integers(2, 12),
    block=st.integers(1, 9),
    done=st.integers(0, 40),
    seed=st.integers(0, 5),
)
def test_any_stream_goes_on_exactly(
    parts: list[tuple[list[int], int]], sequence: int, block: int, done: int, seed: int
) -> None:
    """Any lengths of texts (none too), files, texts left out, blocks and sequences, any place."""
    lists = [tuple(f"{i} {word(n)}" * n for i, n in enumerate(ns)) for ns, _ in parts]
    skip = [count for _, count in parts]
    learned = [text for texts, n in zip(lists, skip, strict=True) for text in texts[n:]]
    assume(any(learned))

    def packer() -> Packer:
        files = [ListPart(Path("x"), "text", texts) for texts in lists]
        documents = ShuffledDocuments(
            Texts(files, seed, skip), document_encoder(TOKENIZER), block, seed
        )
        return Packer(documents, sequence, "x")

    whole, again = packer(), packer()
    rows = [whole.next_row() for _ in range(done)]
    again.load_state_dict(saved(whole.state_dict()))
    for _ in range(20):
        rows.append(whole.next_row())
        assert plain(again.next_row()) == plain(rows[-1])
    # Every text comes as often as any other, but for the epoch at hand.
    tokens = np.concatenate([row.tokens for row in rows])
    whole_epochs = len(tokens) // sum(len(document_encoder(TOKENIZER)(text)) for text in learned)
    found = Counter(documents_in([plain(row) for row in rows]))
    expected = Counter(TOKENIZER.decode(TOKENIZER(text)["input_ids"]) for text in learned if text)
    if whole_epochs > 1:
        assert all(found[text] >= n * (whole_epochs - 1) for text, n in expected.items())
        assert all(found[text] <= n * (whole_epochs + 1) for text, n in expected.items())


def test_states_are_small(tmp_path: Path) -> None:
    settings, _ = one_domain(tmp_path, 60, shuffle_buffer=50)
    mixture = Mixture(settings, TOKENIZER, seed=0)
    draw(mixture, 30)
    assert len(json.dumps(mixture.state_dict())) < 600


def test_the_state_of_other_domains_is_refused(three: MixtureSettings, tmp_path: Path) -> None:
    settings, _ = one_domain(tmp_path, 9)
    state = Mixture(settings, TOKENIZER, seed=0).state_dict()
    with pytest.raises(DraftsmithError, match="of the domains x, the recipe has a, b, c"):
        Mixture(three, TOKENIZER, seed=0).load_state_dict(state)


# --- batches


def equal(one: Batch, other: Batch) -> bool:
    parts = [(getattr(one, n), getattr(other, n)) for n in ("ids", "position_ids", "labels")]
    return all(torch.equal(a, b) for a, b in parts)


def test_steps_are_the_same_however_they_are_cut(three: MixtureSettings) -> None:
    whole = MixtureStream(three, TOKENIZER, batch=4, seed=0)
    parts = MixtureStream(three, TOKENIZER, batch=2, seed=0)
    for _ in range(5):
        ids = torch.cat([batch.ids for batch in whole.step(1)])
        assert torch.equal(torch.cat([batch.ids for batch in parts.step(2)]), ids)


def test_a_stream_of_batches_goes_on_exactly(three: MixtureSettings) -> None:
    stream = MixtureStream(three, TOKENIZER, batch=2, seed=0)
    stream.step(3)
    stream.shares = {"a": 1.0, "b": 1.0, "c": 2.0}
    state = saved(stream.state_dict())
    again = MixtureStream(three, TOKENIZER, batch=2, seed=0)
    again.load_state_dict(state)
    assert again.shares == stream.shares == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert all(map(equal, again.step(4), stream.step(4)))


def test_held_out_batches_hold_every_sequence(three: MixtureSettings) -> None:
    from dataclasses import replace

    stream = MixtureStream(replace(three, held_out=3), TOKENIZER, batch=2, seed=0)
    assert set(stream.held_out) == {"a", "b", "c"}
    for batches in stream.held_out.values():
        assert [len(batch.ids) for batch in batches] == [2, 1]


# --- wrong requests


def test_too_few_texts_are_told_before_the_start(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(jsonl(["a word", "is a word"]) + b'{"text": null}\n{"n": 1}\nno json\n')
    settings = mixture_of({"x": str(path)}, held_out=8)
    message = (
        r"recipe\.prune\.mixture\.domains\.x: .*x\.jsonl: 2 usable texts are too few for 8 "
        r"held-out sequences of 16 tokens.*not used: no_text: 2, not_json: 1.*lower"
    )
    for call in (
        lambda: check_mixture(settings, TOKENIZER, 10),
        lambda: Mixture(settings, TOKENIZER, seed=0),
    ):
        with pytest.raises(RequestError, match=message):
            call()


def test_one_text_must_be_left_to_learn_from(tmp_path: Path) -> None:
    for texts in (["n" * 40], ["n" * 40, "n"]):
        settings = mixture_of({"x": write(tmp_path, "x.jsonl", texts)})
        if len(texts) > 1:
            assert len(draw(Mixture(settings, TOKENIZER, seed=0), 9)) == 9
            continue
        with pytest.raises(RequestError, match="1 usable texts are too few"):
            Mixture(settings, TOKENIZER, seed=0)


def test_texts_that_vanish_are_an_error(tmp_path: Path) -> None:
    settings, _ = one_domain(tmp_path, 9)
    mixture = Mixture(settings, TOKENIZER, seed=0)
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(DraftsmithError, match=r"x\.jsonl: no text is left to learn from"):
        draw(mixture, 1)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.jsonl", r"mixture\.domains\.x\.path: .*missing.*no such file or folder"),
        (".", r"mixture\.domains\.x\.path: .*no file that ends in"),
        ("hub:", r"domains\.x\.path: hub:: write hub:OWNER/NAME"),
        ("hub:a/b?splt=train", r"splt=train: write hub:OWNER/NAME.*config=C&split=S&revision=R"),
        ("hub:a/b?split=a&split=b", "write hub:OWNER/NAME"),
        ("hub:a/b?split", "write hub:OWNER/NAME"),
    ],
)
def test_wrong_paths(tmp_path: Path, path: str, message: str) -> None:
    path = path if path.startswith("hub:") else str(tmp_path / path)
    with pytest.raises(RequestError, match=message):
        check_mixture(mixture_of({"x": path}), TOKENIZER, 10)


def test_a_tokenizer_without_eos(tmp_path: Path) -> None:
    settings, _ = one_domain(tmp_path, 9)
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(RequestError, match="no eos_token"):
        Mixture(settings, tokenizer, seed=0)


# --- sizes


def test_sizes_are_compared_with_what_the_run_takes(three: MixtureSettings) -> None:
    tokens = {
        "a": sum(len(TOKENIZER(t)["input_ids"]) + 1 for t in texts_of("a", 25)),
        "b": sum(len(TOKENIZER(t)["input_ids"]) + 1 for t in texts_of("b", 17)),
    }
    sizes = check_mixture(three, TOKENIZER, 400)
    assert {n: sizes[n].needed for n in sizes} == {"a": 66, "b": 116, "c": 266}
    assert {n: sizes[n].tokens for n in tokens} == tokens
    assert sizes["b"].epochs == pytest.approx(116 / tokens["b"])


def test_a_domain_that_is_read_too_often_is_told(three: MixtureSettings) -> None:
    with pytest.warns(UserWarning, match=r"domains\.c: the run reads its .* tokens \d+\.\d times"):
        check_mixture(three, TOKENIZER, 3000)


def test_long_corpora_are_read_only_as_far_as_needed(tmp_path: Path) -> None:
    settings, texts = one_domain(tmp_path, 900)
    size = check_mixture(settings, TOKENIZER, 2000)["x"]
    whole = sum(len(TOKENIZER(t)["input_ids"]) + 1 for t in texts)
    assert size.tokens is not None
    assert size.needed <= size.tokens < size.needed + 60 < whole
    assert size.epochs is not None
    assert size.epochs <= 1
    with pytest.warns(UserWarning, match=r"10\.\d times; past 4 times"):
        size = check_mixture(settings, TOKENIZER, 10 * whole)["x"]
    assert size.tokens == pytest.approx(whole, rel=0.1)


# --- rows and files that can't be used


@pytest.mark.filterwarnings("ignore:recipe.prune.mixture.*teaches little")
def test_A28_rows_of_every_shape_are_passed_over(tmp_path: Path) -> None:
    rows = [
        {"text": "nested", "meta": {"x": [1, {"y": None}]}},
        {"text": "other meta", "meta": "{'url': 'u'}"},
        {"text": None},
        {"text": ""},
        {"text": "  \n"},
        {"text": 123},
        {"meta": {"text": "not here"}},
        ["text"],
    ]
    path = tmp_path / "x.jsonl"
    bad = b"".join(json.dumps(row).encode() + b"\n" for row in rows) + b'{"text": "half \\ud83d"}\n'
    path.write_bytes(jsonl(["n" * 40]) + bad + jsonl(["last"]) + b'{"text": "cut')
    settings = mixture_of({"x": str(path)})
    found = documents_in(draw(Mixture(settings, TOKENIZER, seed=0), 9))
    assert set(found) == {"nested", "other meta", "last"}
    assert check_mixture(settings, TOKENIZER, 10**3)["x"].skipped == {
        "no_text": 3,
        "empty_text": 2,
        "not_an_object": 1,
        "not_unicode": 1,
        "not_json": 1,
    }


@pytest.mark.filterwarnings("ignore:recipe.prune.mixture.*teaches little")
def test_A29_every_frame_is_learned_and_damage_is_counted(tmp_path: Path) -> None:
    compress = zstandard.ZstdCompressor().compress
    long = ["n" * 40], [f"{word(i)} words" for i in range(9)], [f"{word(73**60)}"]
    data = b"".join(compress(jsonl(texts)) for texts in long)
    path = tmp_path / "x.jsonl.zst"
    for cut, last in ((0, True), (10, False)):
        path.write_bytes(data[: len(data) - cut])
        settings = mixture_of({"x": str(path)})
        found = set(documents_in(draw(Mixture(settings, TOKENIZER, seed=0), 40)))
        assert found == {*long[1], *(long[2] if last else ())}
        skipped = check_mixture(settings, TOKENIZER, 10**3)["x"].skipped
        assert skipped == ({} if last else {"truncated_files": 1})


# --- the hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """`load_dataset` itself, with files of the set's name in place of the hub; its calls."""
    import datasets

    load, calls = datasets.load_dataset, []

    def stand_in(name: str, config: str | None, *, revision: str | None, **options: Any) -> Any:
        calls.append((name, config, options["split"], revision))
        folder = tmp_path / name
        if not folder.is_dir():
            raise FileNotFoundError(f"no set {name}")
        files = {"train": sorted(map(str, folder.glob("*.parquet")))}
        return load("parquet", data_files=files, **options)

    monkeypatch.setattr(datasets, "load_dataset", stand_in)
    return calls


def test_a_set_of_the_hub_is_streamed_and_goes_on_exactly(hub: list[Any], tmp_path: Path) -> None:
    texts = texts_of("h", 30)
    write(tmp_path / "some" / "set", "1.parquet", [*texts[:14], " "])
    write(tmp_path / "some" / "set", "2.parquet", texts[14:])
    settings = mixture_of({"x": "hub:some/set?config=en&split=train&revision=abc"})
    whole = Mixture(settings, TOKENIZER, seed=0)
    assert set(hub) == {("some/set", "en", "train", "abc")}
    kept = len(documents_in([plain(row) for row in whole.held_out["x"]])) + 1
    found = documents_in(draw(whole, 40))
    assert sorted(found[: 30 - kept]) == sorted(texts[kept:])
    for done in (0, 1, 5, 11, 17, 24, 33):
        whole, again = (Mixture(settings, TOKENIZER, seed=0) for _ in range(2))
        draw(whole, done)
        again.load_state_dict(saved(whole.state_dict()))
        assert draw(again, 25) == draw(whole, 25), done


def test_a_set_of_the_hub_is_checked_but_not_counted(hub: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "some" / "set", "1.parquet", texts_of("h", 30))
    size = check_mixture(mixture_of({"x": "hub:some/set"}), TOKENIZER, 10**6)["x"]
    assert size.tokens is None
    assert size.epochs is None
    assert hub == [("some/set", None, "train", None)]


def test_wrong_sets_of_the_hub(hub: list[Any], tmp_path: Path) -> None:
    write(tmp_path / "some" / "set", "1.parquet", texts_of("h", 30))
    for path, changes, message in (
        ("hub:no/set", {}, r"domains\.x\.path: hub:no/set: the hub did not give it \(no set no/"),
        ("hub:some/set?split=dev", {}, r"hub did not give it .*check name, config=, split="),
        ("hub:some/set", {"text_key": "body"}, r"no field 'body', only text; set .*text_key"),
    ):
        with pytest.raises(RequestError, match=message):
            check_mixture(mixture_of({"x": path}, **changes), TOKENIZER, 10)
