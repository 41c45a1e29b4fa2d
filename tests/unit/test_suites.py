"""Rows of public suites, in files and on a hub that is made up here: no test needs a network."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from draftsmith.data.chat import (
    encode_chat,
    encode_text,
    prompt_file,
    prompt_inputs,
    read_prompts,
    suites,
)
from draftsmith.data.suites import READY, HubSet, Row, file_rows, hub_rows, hub_set
from draftsmith.errors import RequestError
from tests.conftest import make_tokenizer
from tests.unit.test_chat import BOS, BOS_TEMPLATE, post_processed

TEXT = "how many apples are left?"
CODE = 'def f(x):\n    """Return x{0}."""\n'
MT_BENCH = {"question_id": 81, "category": "writing", "turns": [TEXT, "now in one word"]}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": CODE, "entry_point": "f", "test": "assert f(1)"}
GSM8K = {"question": TEXT, "answer": "nine minus three is six\n#### 6"}
MMLU = {
    "question": "how many?",
    "subject": "abstract_algebra",
    "choices": ["one", "two", "three", "six"],
    "answer": 3,
}
HELLASWAG = {"ind": 24, "activity_label": "eating", "ctx": "she eats", "endings": ["a", "b"]}
CNN = {"article": TEXT, "highlights": "apples", "id": "ab12"}
XSUM = {"document": TEXT, "summary": "apples", "id": "34"}

# A row as it is published, and the prompt, name and domain that are made of it.
PUBLISHED: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "mt-bench": (MT_BENCH, TEXT, "81", "writing"),
    "mt-bench on the hub": (
        {"prompt": [TEXT, "and now?"], "prompt_id": 7, "category": "math", "reference": []},
        TEXT,
        "7",
        "math",
    ),
    "humaneval": (HUMANEVAL, CODE, "HumanEval/0", "set"),
    "gsm8k": (GSM8K, TEXT, "1", "set"),
    "pairs": ({"source": TEXT, "target": "neun"}, TEXT, "1", "set"),
    "mmlu": (
        MMLU,
        "how many?\nA. one\nB. two\nC. three\nD. six\nAnswer:",
        "1",
        "abstract_algebra",
    ),
    "hellaswag": (HELLASWAG, "she eats", "24", "set"),
    "cnn_dailymail": (CNN, f"Summarize:\n{TEXT}", "ab12", "set"),
    "xsum": (XSUM, f"Summarize in one sentence:\n{TEXT}", "34", "set"),
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".zst":
        data = zstandard.compress(data)
    path.write_bytes(data)
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Puts rows on the hub; returns the list of the calls that will ask for them."""

    def put(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        import datasets

        calls: list[dict[str, Any]] = []

        def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
            calls.append({"path": path, "name": name, **options})
            return datasets.Dataset.from_list(rows).to_iterable_dataset()

        monkeypatch.setattr("datasets.load_dataset", load_dataset)
        return calls

    return put


# --- files


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_published_row_is_told_by_its_fields(tmp_path: Path, case: str) -> None:
    row, content, name, domain = PUBLISHED[case]
    path = write(tmp_path / "set.jsonl", [row])
    more = case.startswith("mt-bench")
    assert list(file_rows(path)) == [
        Row(f"{path}:1", name, domain, content, plain=False, more_turns=more)
    ]


@pytest.mark.parametrize("name", ["set.jsonl", "set.jsonl.gz", "set.jsonl.zst", "set.parquet"])
def test_all_kinds_of_files_are_read(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, [MMLU, MMLU | {"question": "how few?"}]
    if name.endswith(".parquet"):
        from datasets import Dataset

        Dataset.from_list(rows).to_parquet(path)
    else:
        write(path, rows)
    found = list(file_rows(path))
    assert [r.name for r in found] == ["1", "2"]
    assert [str(r.content)[:8] for r in found] == ["how many", "how few?"]
    assert {r.domain for r in found} == {"abstract_algebra"}
    write(tmp_path / "set.jsonl", [GSM8K])
    assert next(file_rows(tmp_path / "set.jsonl")).domain == "set"


def test_the_domain_of_a_packed_file_is_its_name(tmp_path: Path) -> None:
    path = write(tmp_path / "HumanEval.jsonl.gz", [HUMANEVAL])
    assert next(file_rows(path)).domain == "HumanEval"


def test_the_names_of_this_package_come_first(tmp_path: Path) -> None:
    """A row that says prompt, id and domain means them, whatever else it holds."""
    row = GSM8K | MMLU | {"prompt": "mine", "id": "a", "domain": "d"}
    [found] = file_rows(write(tmp_path / "set.jsonl", [row]))
    assert (found.content, found.name, found.domain) == ("mine", "a", "d")


def test_a_table_with_empty_columns(tmp_path: Path) -> None:
    """Where formats are mixed in one table, each row has the columns of all."""
    from datasets import Dataset

    rows = [{"prompt": TEXT, "turns": None}, {"prompt": None, "turns": ["she has"]}]
    Dataset.from_list(rows).to_parquet(tmp_path / "set.parquet")
    assert [r.content for r in file_rows(tmp_path / "set.parquet")] == [TEXT, "she has"]


def test_left_out_turns_are_told(
    tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = str(write(tmp_path / "set.jsonl", [MT_BENCH, MT_BENCH | {"turns": [TEXT]}]))
    prompts = read_prompts(spec, tokenizer)
    chat = encode_chat(tokenizer, [{"role": "user", "content": TEXT}])
    assert [list(p.ids) for p in prompts] == [chat, chat]
    assert "1 of 2 rows have further turns, left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"turns": []}, "of no known format"),
        ({"turns": "hello"}, r"there is no turns\[0\]"),
        ({"turns": [{"role": "user"}]}, r"turns\[0\] is a dict, not text"),
        ({"turns": [" "]}, "is empty"),
        (MMLU | {"choices": ["one"]}, r"there is no choices\[1\]"),
        ({"inputs": TEXT}, "the row's fields: inputs"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(
    tmp_path: Path, row: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path / "set.jsonl", [MT_BENCH, row])
    with pytest.raises(RequestError, match=rf"set\.jsonl:2: .*{reason}"):
        list(file_rows(path))


@pytest.mark.parametrize("name", ["set.jsonl.gz", "set.jsonl.zst"])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [{"text": str(i) * 50} for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RequestError, match=r"set\.jsonl\.\w+: the file is cut off; get it anew"):
        list(file_rows(path))


@pytest.mark.parametrize("name", ["set.jsonl.gz", "set.jsonl.zst", "set.parquet"])
def test_a_file_that_is_something_else_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"<html>not found</html>")
    with pytest.raises(RequestError, match="the file is damaged; get it anew"):
        list(file_rows(tmp_path / name))


# --- A3


@pytest.mark.parametrize("case", PUBLISHED)
def test_A3_one_bos_in_every_format(tmp_path: Path, case: str) -> None:
    row, content, *_ = PUBLISHED[case]
    spec = str(write(tmp_path / "set.jsonl", [row]))
    instruct = post_processed(BOS_TEMPLATE, "<s> $A")
    [prompt] = read_prompts(spec, instruct)
    assert list(prompt.ids) == encode_chat(instruct, [{"role": "user", "content": content}])
    assert prompt.ids[0] == BOS
    assert prompt.ids.count(BOS) == 1
    base = post_processed(None, "<s> $A")
    [prompt] = read_prompts(spec, base)
    assert list(prompt.ids) == encode_text(base, content)
    assert prompt.ids.count(BOS) == 1


def test_A3_one_bos_for_a_set_of_the_hub(hub: Any) -> None:
    hub([GSM8K])
    instruct = post_processed(BOS_TEMPLATE, "<s> $A")
    [turn] = read_prompts("gsm8k", instruct)
    [plain] = read_prompts("gsm8k?text={question}", instruct)
    assert list(turn.ids) == encode_chat(instruct, [{"role": "user", "content": TEXT}])
    assert list(plain.ids) == encode_text(instruct, TEXT)
    assert turn.ids.count(BOS) == plain.ids.count(BOS) == 1


# --- specs


def test_a_spec_is_read() -> None:
    spec = (
        "hub:cais/mmlu?config=all&split=dev&revision=abc&prompt=Q+A: {question}%0A{choices[0]} "
        "%26 100%25&id=subject&domain=subject&seed=0&max_chars=200&limit=50"
    )
    assert hub_set(spec) == HubSet(
        "cais/mmlu",
        config="all",
        split="dev",
        revision="abc",
        prompt="Q+A: {question}\n{choices[0]} & 100%",
        id="subject",
        domain="subject",
        seed=0,
        max_chars=200,
        limit=50,
    )


def test_the_library_takes_what_it_is_asked(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`load_dataset` itself, with a folder of the set's name in place of the hub."""
    (tmp_path / "some" / "set").mkdir(parents=True)
    write(tmp_path / "some" / "set" / "test.jsonl", [MMLU | {"question": str(i)} for i in range(5)])
    monkeypatch.chdir(tmp_path)
    prompts = read_prompts("hub:some/set?seed=3&id=question&limit=4", tokenizer)
    assert len({p.name for p in prompts}) == 4
    with pytest.raises(RequestError, match=r"hub:some/set .*split dev.*hub did not give it"):
        read_prompts("hub:some/set?split=dev", tokenizer)


def test_a_ready_set_can_be_changed() -> None:
    assert hub_set("mmlu") == hub_set("hub:mmlu") == READY["mmlu"]
    changed = hub_set("mmlu?limit=9&split=dev")
    assert changed == HubSet("cais/mmlu", config="all", split="dev", limit=9)


@pytest.mark.parametrize("spec", ["quick", "p.jsonl", "./mmlu", "cais/mmlu", "data/hub:x"])
def test_what_is_no_set_of_the_hub(spec: str) -> None:
    assert hub_set(spec) is None


def test_ready_sets_and_shipped_suites_have_different_names() -> None:
    assert not set(READY) & set(suites())


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("hub:", "'' is no id of a data set.*gsm8k"),
        ("hub:a/b/c", "'a/b/c' is no id"),
        ("hub:a/b?splt=test", "there is no option 'splt'; there are config, split, .*%26"),
        ("hub:a/b?dataset=c", "there is no option 'dataset'"),
        ("hub:a/b?prompt={a}&b", "there is no option 'b'.*%26"),
        ("hub:a/b?split=test&split=dev", "split is given twice"),
        ("hub:a/b?split=", "split has no value"),
        ("hub:a/b?split", "split has no value"),
        ("hub:a/b?limit=0", "limit=0: give a whole number from 1 up"),
        ("hub:a/b?seed=-1", "seed=-1: give a whole number from 0 up"),
        ("hub:a/b?max_chars=1e3", "max_chars=1e3: give a whole number"),
        ("hub:a/b?prompt={a", r"prompt=\{a: .*write fields of a row as"),
        ("hub:a/b?prompt=a", "prompt=a: it names no field"),
        ("hub:a/b?prompt={}", "is no plain field"),
        ("hub:a/b?prompt={a[x]}", r"\{a\[x\]\} is no plain field"),
        ("hub:a/b?prompt={a!r}", r"\{a\} is no plain field"),
        ("hub:a/b?text={a:>9}", r"text=.*\{a\} is no plain field"),
        ("hub:a/b?prompt={a}&text={b}", "prompt and text exclude each other"),
        ("hub:a/b?domain={a}", "domain={a}: give the name of one field, without braces"),
        ("hub:a/b?id=a[", "give the name of one field"),
    ],
)
def test_a_wrong_spec_is_refused_before_the_hub_is_asked(
    hub: Any, tokenizer: Any, spec: str, reason: str
) -> None:
    calls = hub([GSM8K])
    with pytest.raises(RequestError, match=rf"prompts {spec[:4]}.*{reason}"):
        read_prompts(spec, tokenizer)
    assert calls == []


# --- the hub


def test_the_hub_is_asked_for_what_the_spec_says(hub: Any, tokenizer: Any) -> None:
    calls = hub([MMLU])
    read_prompts("hub:some/set?config=c&split=s&revision=r&prompt={question}", tokenizer)
    asked = {"path": "some/set", "name": "c", "split": "s", "revision": "r", "streaming": True}
    assert calls == [asked]


@pytest.mark.parametrize(
    ("name", "case"),
    [("mt-bench", "mt-bench on the hub"), *((n, n) for n in READY if n != "mt-bench")],
)
def test_ready_sets_need_no_mapping(hub: Any, tokenizer: Any, name: str, case: str) -> None:
    row, content, label, domain = PUBLISHED[case]
    calls = hub([row])
    [prompt] = read_prompts(name, tokenizer)
    assert list(prompt.ids) == encode_chat(tokenizer, [{"role": "user", "content": content}])
    assert (prompt.name, prompt.domain) == (label, domain.replace("set", name))
    assert calls[0]["path"] == READY[name].dataset


def test_a_mapping_makes_prompts_of_any_fields(hub: Any) -> None:
    hub([{"q": "how", "n": 3, "meta": ["x"]}, {"q": "what {a}", "n": 4, "meta": ["y"]}])
    found = hub_set("hub:some/set?prompt={q}: {n} {{}}&id=n&domain=meta[0]")
    assert found is not None
    assert [(r.content, r.name, r.domain) for r in hub_rows(found)] == [
        ("how: 3 {}", "3", "x"),
        ("what {a}: 4 {}", "4", "y"),
    ]


def test_a_mapping_keeps_the_rest_of_a_known_format(hub: Any, tokenizer: Any) -> None:
    hub([MMLU])
    [prompt] = read_prompts("mmlu?prompt={question}", tokenizer)
    assert prompt.domain == "abstract_algebra"
    assert list(prompt.ids) == encode_chat(tokenizer, [{"role": "user", "content": "how many?"}])


def test_a_mapping_of_turns_leaves_nothing_to_tell(
    hub: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    hub([MT_BENCH])
    read_prompts("hub:some/set?prompt={turns[0]} {turns[1]}", tokenizer)
    assert "further turns" not in capsys.readouterr().err


def test_chats_of_the_hub_are_chats(hub: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": TEXT}]
    hub([{"prompt": "other", "messages": chat}])
    [prompt] = read_prompts("hub:some/chats?split=test_sft", tokenizer)
    assert list(prompt.ids) == encode_chat(tokenizer, chat)
    with pytest.raises(RequestError, match=r"hub:some/chats: row 1: messages need a chat templ"):
        read_prompts("hub:some/chats", make_tokenizer(template=None))


def test_the_smaller_limit_counts(hub: Any, tokenizer: Any) -> None:
    hub([GSM8K] * 9)
    counts = [len(read_prompts("gsm8k?limit=4", tokenizer, n)) for n in (None, 2, 6)]
    assert counts == [4, 2, 4]


def test_longer_prompts_are_left_out_before_the_limit(hub: Any, tokenizer: Any) -> None:
    hub([{"text": "a" * n} for n in (3, 9, 2, 1)])
    spec = "hub:some/set?max_chars=3&limit=2"
    assert [p.name for p in read_prompts(spec, tokenizer)] == ["1", "3"]
    hub([{"text": "aaa"}])
    with pytest.raises(RequestError, match="no row was left; check split= and max_chars="):
        read_prompts("hub:some/set?max_chars=2", tokenizer)


def test_a_seed_mixes_the_whole_set(hub: Any, tokenizer: Any) -> None:
    """MMLU's rows are sorted by subject: the first ones are of one."""
    hub([MMLU | {"subject": str(i // 100)} for i in range(1000)])
    domains = [p.domain for p in read_prompts("mmlu?seed=1&limit=40", tokenizer)]
    assert len(set(domains)) > 5
    assert domains == [p.domain for p in read_prompts("mmlu?seed=1&limit=40", tokenizer)]
    assert domains != [p.domain for p in read_prompts("mmlu?seed=2&limit=40", tokenizer)]


def test_a_bad_row_of_the_hub_is_named(hub: Any, tokenizer: Any) -> None:
    hub([{"q": TEXT}, {"q": None}])
    with pytest.raises(RequestError, match=r"hub:some/set: row 2: there is no q .*fields: q"):
        read_prompts("hub:some/set?prompt={q}", tokenizer)
    with pytest.raises(RequestError, match=r"row 1: no prompt.*give prompt=\{field\}"):
        read_prompts("hub:some/set", tokenizer)
    with pytest.raises(RequestError, match=r"row 1: there is no topic"):
        read_prompts("hub:some/set?prompt={q}&domain=topic", tokenizer)


@pytest.mark.parametrize(
    "error", [ConnectionError("no network"), ValueError("no split\n 'test'"), KeyError()]
)
def test_what_the_hub_does_not_give(
    monkeypatch: pytest.MonkeyPatch, tokenizer: Any, error: Exception
) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    with pytest.raises(RequestError) as caught:
        read_prompts("xsum", tokenizer)
    said = str(caught.value)
    assert said.startswith("prompts hub:EdinburghNLP/xsum (config none, split test): the hub did")
    assert (" ".join(str(error).split()) or "KeyError") in said
    assert "refs/convert/parquet" in said
    assert "\n" not in said


def test_a_line_that_breaks_on_the_way(monkeypatch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    def rows(*_: Any, **__: Any) -> Any:
        yield GSM8K
        raise TimeoutError("read timed out")

    monkeypatch.setattr("datasets.load_dataset", rows)
    assert len(read_prompts("gsm8k?limit=1", tokenizer)) == 1
    with pytest.raises(RequestError, match="read timed out"):
        read_prompts("gsm8k", tokenizer)


def test_a_run_does_not_ask_the_hub_what_it_depends_on(hub: Any) -> None:
    calls = hub([GSM8K])
    assert prompt_inputs("gsm8k?limit=3") == {}
    with pytest.raises(RequestError, match="no option"):
        prompt_inputs("gsm8k?lim=3")
    with pytest.raises(RequestError, match="of the hub is no file"):
        prompt_file("gsm8k")
    assert calls == []


# --- real files


@pytest.mark.shared
@pytest.mark.parametrize(("name", "first"), [("gsm8k", "gsm8k-test-0013"), ("humaneval", None)])
def test_real_files(shared: Path, tokenizer: Any, name: str, first: str | None) -> None:
    prompts = read_prompts(str(shared / "data" / "prompts" / f"{name}.jsonl"), tokenizer)
    assert prompts[0].name == (first or "HumanEval/0")
    assert {p.domain for p in prompts} == {name}
    assert len({p.name for p in prompts}) == len(prompts) >= 100
