"""The target writes text: reproducible, resumable, with its own probabilities."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.accept.decode import Limits, greedy_decode
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.data.traces import (
    RowKey,
    TraceRow,
    TraceStore,
    read_shard,
    shard_name,
    write_index,
    write_shard,
)
from draftsmith.distill import trace
from draftsmith.distill.trace import Sample, Writer, write_batch, write_traces
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.inspection import inspect, render
from draftsmith.recipes.loading import validate
from draftsmith.recipes.schema import Recipe
from tests.conftest import make_model, make_tokenizer


def recipe_for(target: Path, **changes: Any) -> Recipe:
    plain: dict[str, Any] = {
        "target": str(target),
        "dtype": "float32",
        "data": {"openings": ["how ", "write "], "prompt_tokens": 10},
        "trace": {"tokens": 200, "batch": 6, "top_n": 8, "max_new_tokens": 12, "workers": 1},
    }
    for key, value in changes.items():
        plain[key] = plain[key] | value
    return validate(plain)


def writer(model: Any) -> Writer:
    return Writer(model, make_tokenizer())


def write(model: Any, samples: list[Sample], seed: int = 0, **changes: Any) -> None:
    arguments = {"temperature": 1.0, "end": frozenset({2}), "top_n": 8} | changes
    generator = torch.Generator().manual_seed(seed)
    writer(model).write(samples, 12, generator=generator, **arguments)


def test_greedy_rows_are_the_targets_greedy_output(tiny: Any) -> None:
    """Ragged prompts, rows that end at different times: each row is as if alone."""
    prompts = [[5, 6, 7], [9] * 9, list(range(20, 37)), [4]]
    stops = frozenset(range(40, 60))
    samples = [Sample(p, sampled=False) for p in prompts]
    write(tiny, samples, end=stops)
    w = writer(tiny)
    for sample in samples:
        alone = greedy_decode(w.model, sample.prompt, Limits(12, stops), w.vocabulary)
        assert sample.tokens == alone.tokens
    assert len({len(s.tokens) for s in samples}) > 1, "the test needs rows of different lengths"


def test_log_probabilities_are_the_targets(tiny: Any) -> None:
    samples = [Sample([5, 6, 7], sampled=True), Sample([9, 8], sampled=False)]
    write(tiny, samples, temperature=0.7)
    for sample in samples:
        row = sample.row(np.uint16)
        with torch.inference_mode():
            logits = tiny(input_ids=torch.tensor([row.tokens.tolist()])).logits[0]
        logprobs = logits[row.prompt_length - 1 : -1].log_softmax(-1)
        top = logprobs.topk(8)
        assert np.array_equal(row.top_ids, top.indices.numpy())
        assert np.allclose(row.top_logprobs, top.values.numpy(), atol=2e-3)
        warped = (logits[row.prompt_length - 1 : -1] / 0.7).log_softmax(-1)
        expected = (warped if sample.sampled else logprobs).gather(
            -1, torch.from_numpy(row.answer.astype(np.int64))[:, None]
        )
        assert np.allclose(row.logprobs, expected[:, 0].numpy(), atol=1e-4)


def test_sampling_follows_the_distribution(tiny: Any) -> None:
    """4,000 draws of one token against the target's probabilities."""
    samples = [Sample([5, 6, 7], sampled=True) for _ in range(4000)]
    generator = torch.Generator().manual_seed(0)
    w = writer(tiny)
    w.write(samples, 1, temperature=1.3, generator=generator, end=frozenset())
    with torch.inference_mode():
        logits = tiny(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1]
    # The writer never emits ids that the tokenizer lacks.
    expected = (w.vocabulary.restrict(logits) / 1.3).softmax(-1) * 4000
    counts = torch.bincount(
        torch.tensor([s.tokens[0] for s in samples]), minlength=w.vocabulary.size
    )
    usual = expected > 5
    chi = ((counts - expected)[usual] ** 2 / expected[usual]).sum()
    degrees = int(usual.sum())
    assert float(chi) < degrees + 4 * (2 * degrees) ** 0.5


def test_store_is_the_same_with_any_number_of_workers_and_after_a_stop(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    reference = resolve(str(target))
    folders = [tmp_path / name for name in ("one", "two", "stopped")]
    for folder in folders:
        folder.mkdir()
    recipe = recipe_for(target)
    write_traces(recipe, reference, folders[0])
    write_traces(recipe_for(target, trace={"workers": 2}), reference, folders[1])
    # An earlier run got as far as the second batch, and broke in the middle of the third.
    for number in (0, 1):
        name = shard_name(number)
        (folders[2] / name).write_bytes((folders[0] / name).read_bytes())
    (folders[2] / shard_name(2)).write_bytes(b"half a shard")
    (folders[2] / (shard_name(3) + ".partial")).write_bytes(b"")
    write_traces(recipe, reference, folders[2])
    contents = [{p.name: p.read_bytes() for p in f.iterdir()} for f in folders]
    assert contents[0] == contents[1] == contents[2]
    assert TraceStore(folders[0]).answer_tokens >= 200


def test_self_written_prompts_go_through_the_chat_template(
    save: Callable[..., Path], tiny: Any
) -> None:
    target = save(tiny)
    job = trace.Job.of(recipe_for(target), resolve(str(target)), target)
    tokenizer = make_tokenizer()
    prompts = trace.Prompts(job.data, 6, tokenizer, 0)
    rows = write_batch(writer(tiny), prompts, job, 0)
    for row in rows:
        text = tokenizer.decode(row.tokens[: row.prompt_length].tolist())
        assert text.startswith(("<s>user\nhow ", "<s>user\nwrite "))
        assert text.endswith("</s>\n<s>assistant\n")


def test_corpus_beginnings_are_continued(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "how many apples are left in the basket"}\n{"text": null}\n' * 30)
    data = {"source": "corpus", "path": [str(corpus)], "prompt_tokens": 5}
    folder = tmp_path / "traces"
    folder.mkdir()
    # All are equal: only what is drawn is worth more than one row.
    recipe = recipe_for(target, data=data, trace={"sampled_share": 1.0})
    write_traces(recipe, resolve(str(target)), folder)
    rows = TraceStore(folder).rows("train")
    assert {r.prompt_length for r in rows} == {5}
    assert {r.domain for r in rows} == {"corpus"}
    assert make_tokenizer().decode(rows[0].tokens[:5].tolist()).startswith("how many")


def test_prompts_that_run_out_leave_a_smaller_store(
    save: Callable[..., Path], tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save(tiny)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "how many?"}\n{"text": "she has"}\n')
    data = {"source": "prompts", "path": [str(prompts)]}
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe_for(target, data=data), resolve(str(target)), folder)
    store = TraceStore(folder)
    assert sum(s.rows for s in store.shards) == 2
    assert "the prompts ran out" in capsys.readouterr().err


def test_a_target_without_a_template_is_told_at_once(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny, make_tokenizer(template=None))
    with pytest.raises(RequestError, match=r"no chat template.*data\.source: corpus"):
        write_traces(recipe_for(target), resolve(str(target)), tmp_path)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_failing_worker_is_one_error(
    workers: int, save: Callable[..., Path], tmp_path: Path
) -> None:
    """The weights hold NaN: the worker's error reaches the caller."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    target = save(model)
    where = "a trace worker failed: " if workers > 1 else "^"
    with pytest.raises(DraftsmithError, match=where + r".*lm_head\.weight holds values"):
        write_traces(recipe_for(target, trace={"workers": workers}), resolve(str(target)), tmp_path)


def test_a_single_worker_leaves_the_process_as_it_was(
    save: Callable[..., Path], tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs no process of its own; what goes wrong in it is told as of one that has."""
    target, threads = save(tiny), torch.get_num_threads()

    def no_memory(*_: Any, **__: Any) -> None:
        assert torch.get_num_threads() == 1
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(trace.Writer, "write", no_memory)
    torch.set_num_threads(3)
    try:
        with pytest.raises(DraftsmithError, match="a trace worker failed: RuntimeError: can't all"):
            write_traces(recipe_for(target), resolve(str(target)), tmp_path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


def test_store_refuses_a_shard_that_was_changed(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe_for(target), resolve(str(target)), folder)
    shard = folder / shard_name(0)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(DraftsmithError, match="not the shard that the index describes"):
        TraceStore(folder).rows("train")
    shard.write_bytes(bytes(data[:-7]))
    with pytest.raises(DraftsmithError, match="damaged trace shard"):
        read_shard(shard)


def test_validation_rows_are_held_out(save: Callable[..., Path], tiny: Any, tmp_path: Path) -> None:
    """Every row is on one side, equal rows on the same, greedy and sampled ones on both."""
    target = save(tiny)
    recipe = recipe_for(target, trace={"validation_share": 0.3, "tokens": 600})
    write_traces(recipe, resolve(str(target)), tmp_path)
    store = TraceStore(tmp_path)
    train, validation = store.rows("train"), store.rows("validation")
    total = sum(s.rows for s in store.shards)
    assert len(train) + len(validation) == total
    assert 0.1 < len(validation) / total < 0.5
    assert {r.sampled for r in validation} == {True, False}
    sides = [{r.tokens.tobytes() for r in rows} for rows in (train, validation)]
    assert not sides[0] & sides[1]


def keys(**tokens: int) -> list[RowKey]:
    """Keys of rows by their names."""
    return [RowKey(count, name.encode()) for name, count in tokens.items()]


def test_empty_batches_are_no_gap() -> None:
    """A batch whose prompts came to nothing counts as written, or the stage would never end."""
    a, b, c = keys(a=100, b=100, c=100)
    assert needed({0: [a], 1: [], 2: [b], 3: [c]}, 250) == ([0, 1, 2, 3], 300, True)
    assert needed({0: [a], 2: [b]}, 250) == ([0], 100, False)


def needed(done: Any, tokens: int, source: str = "self") -> Any:
    """What `_needed` says for a recipe of so many tokens."""
    data = {"source": source, "path": [] if source == "self" else ["prompts.jsonl"]}
    recipe = validate({"target": "t", "data": data, "trace": {"tokens": tokens}})
    return trace._needed(done, trace.Job.of(recipe, ModelRef("t", Path()), Path()))


def test_a_target_that_only_repeats_itself_is_not_asked_for_ever() -> None:
    """Files of prompts end by themselves, however often they repeat one."""
    (a,) = keys(a=6)
    same = {key: [a] for key in range(500)}
    numbers, tokens, enough = needed(same, 1000)
    assert (len(numbers), tokens, enough) == (1 + trace._EMPTY_BATCHES, 6, True)
    assert needed(same, 1000, source="prompts") == (list(range(500)), 6, False)
    few = {key: [a] for key in range(trace._EMPTY_BATCHES)}
    assert needed(few, 1000)[2] is False


def test_a_worker_that_was_killed_is_told() -> None:
    from types import SimpleNamespace

    team = SimpleNamespace(processes=[SimpleNamespace(exitcode=c) for c in (None, -9)])
    with pytest.raises(DraftsmithError, match=r"exit code -9; out of memory"):
        trace._Team.check(team)  # type: ignore[arg-type]


def test_prompts_that_fill_the_context_are_left_out(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    model = make_model(max_position_embeddings=24)
    target = save(model)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "she has"}\n{"text": "%s"}\n' % ("how many apples " * 20))
    data = {"source": "prompts", "path": [str(prompts)]}
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe_for(target, data=data), resolve(str(target)), folder)
    (row,) = TraceStore(folder).rows("train") + TraceStore(folder).rows("validation")
    assert len(row.tokens) <= 24


# --- texts that were written before


def a_row(
    prompt: Sequence[int],
    answer: Sequence[int],
    *,
    sampled: bool = False,
    domain: str = "",
    n: int = 2,
    id_type: type = np.uint16,
) -> TraceRow:
    return TraceRow(
        tokens=np.array([*prompt, *answer], np.int32),
        prompt_length=len(prompt),
        sampled=sampled,
        logprobs=np.full(len(answer), -1.5, np.float32),
        top_ids=np.zeros((len(answer), n), id_type),
        top_logprobs=np.full((len(answer), n), -2.0, np.float16),
        domain=domain,
    )


# In the third batch all stood before; the first row of the second is a draw of its own.
BATCHES = [
    [a_row([5, 6], [7] * 10), a_row([8], [9] * 10, sampled=True), a_row([8], [9] * 10)],
    [a_row([8], [4] * 10, sampled=True), a_row([5, 6], [7] * 10), a_row([10], [3] * 10)],
    [a_row([8], [9] * 10, sampled=True), a_row([5, 6], [7] * 10), a_row([10], [3] * 10)],
    [a_row([11], [3] * 10, domain="d"), a_row([10], [3] * 10), a_row([12], [3] * 10)],
    [a_row([13], [3] * 10)],
]


def test_tokens_that_were_written_before_count_once() -> None:
    a, b, c, d = keys(a=100, b=50, c=100, d=1)
    done = {0: [a], 1: [a, b, b], 2: [a], 3: [c], 4: [d]}
    assert needed(done, 200) == ([0, 1, 2, 3], 250, True)
    assert needed(done, 150) == ([0, 1], 150, True)
    assert needed(done, 1000) == ([0, 1, 2, 3, 4], 251, False)


def test_a_greedy_row_is_known_by_its_prompt_and_a_drawn_one_by_all_of_it() -> None:
    greedy, tie = a_row([5, 6], [7, 8]), a_row([5, 6], [7, 9, 9])
    assert RowKey.of(greedy) == RowKey.of(tie)
    assert RowKey.of(tie).answer_tokens == 3
    assert RowKey.of(greedy) != RowKey.of(a_row([5, 7], [7, 8]))
    drawn = a_row([5, 6], [7, 8], sampled=True)
    assert RowKey.of(drawn) == RowKey.of(a_row([5, 6], [7, 8], sampled=True))
    assert RowKey.of(drawn) != RowKey.of(a_row([5, 6], [7, 9], sampled=True))
    # A prompt that is all of another row is not that row.
    assert RowKey.of(drawn) != RowKey.of(a_row([5, 6, 7, 8], [1]))


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The engine writes `BATCHES`; the numbers that it was asked for."""
    asked: list[int] = []

    def run(job: trace.Job, done: dict[int, list[RowKey]], progress: object) -> None:
        for number, rows in enumerate(BATCHES):
            if number in done:
                continue
            asked.append(number)
            write_shard(job.folder, number, rows)
            done[number] = [RowKey.of(row) for row in rows]
            if trace._enough(done, job):
                return

    engine = trace._Engine(check=lambda target: None, run=run)
    monkeypatch.setitem(trace._ENGINES, "transformers", engine)
    return asked


def all_rows(folder: Path) -> list[TraceRow]:
    store = TraceStore(folder)
    return [row for shard in store.shards for row in read_shard(folder / shard.file)]


def test_a_text_stands_in_the_store_once(
    save: Callable[..., Path],
    tiny: Any,
    tmp_path: Path,
    scripted: list[int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """70 different tokens are in the first four batches; 60 more would be with the equal ones."""
    target = save(tiny)
    folder = tmp_path / "traces"
    folder.mkdir()
    write_traces(recipe_for(target, trace={"tokens": 70}), resolve(str(target)), folder)
    assert scripted == [0, 1, 2, 3]
    found = [RowKey.of(row) for row in all_rows(folder)]
    expected = dict.fromkeys(RowKey.of(row) for rows in BATCHES[:4] for row in rows)
    assert found == list(expected)
    store = TraceStore(folder)
    assert store.answer_tokens == 70
    assert [s.file for s in store.shards] == [shard_name(n) for n in (0, 1, 3)]
    assert not (folder / shard_name(2)).exists()
    assert "5 texts had been written before" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["first", "second", "index"])
def test_leaving_out_may_be_interrupted(
    save: Callable[..., Path],
    tiny: Any,
    tmp_path: Path,
    scripted: list[int],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    target = save(tiny)
    recipe, reference = recipe_for(target, trace={"tokens": 70}), resolve(str(target))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    write_traces(recipe, reference, whole)
    with monkeypatch.context() as patch:
        interrupt(patch, place)
        with pytest.raises(KeyboardInterrupt):
            write_traces(recipe, reference, stopped)
    write_traces(recipe, reference, stopped)
    assert {p.name: p.read_bytes() for p in stopped.iterdir()} == {
        p.name: p.read_bytes() for p in whole.iterdir()
    }


def interrupt(patch: pytest.MonkeyPatch, place: str) -> None:
    """Stop before the first or second shard is written anew, or before the index is."""
    left = iter([True] if place == "first" else [False, True])

    def shard(*arguments: Any) -> None:
        if next(left):
            raise KeyboardInterrupt
        write_shard(*arguments)

    def index(*arguments: Any) -> None:
        raise KeyboardInterrupt

    if place == "index":
        patch.setattr(trace, "write_index", index)
    else:
        patch.setattr(trace, "write_shard", shard)


# --- bytes


@pytest.mark.parametrize("n", [16, 64, 256])
@pytest.mark.parametrize(("id_type", "entry"), [(np.uint16, 4), (np.int32, 6)])
def test_bytes_per_answer_token(tmp_path: Path, n: int, id_type: type, entry: int) -> None:
    """An id and a float16 for each of the n, the token and its float32, and the prompt's share."""
    rows = [a_row([i] * 48, [1] * 128, n=n, id_type=id_type) for i in range(32)]
    write_shard(tmp_path, 0, rows)
    write_index(tmp_path, [0], {"validation_share": 0.0, "top_n": n})
    found = TraceStore(tmp_path).bytes_per_token
    assert found == pytest.approx(entry * n + 4 + 4 + 4 * 48 / 128, rel=0.01)


# --- domains


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A finished store with rows of two domains and of none."""
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_shard(folder, 0, [a_row([5], [1] * 30, domain="code"), a_row([6], [1] * 10)])
    write_shard(folder, 1, [a_row([7], [1] * 40, domain="book"), a_row([8], [1], domain="code")])
    write_shard(folder, 2, [a_row([9], [1])])
    write_index(folder, [0, 1, 2], {"validation_share": 0.0, "top_n": 2})
    return folder


def test_rows_keep_their_domain(mixed: Path) -> None:
    store = TraceStore(mixed)
    assert [row.domain for row in store.rows("train")] == ["code", "", "book", "code", ""]
    assert store.domains == ("", "book", "code")


def test_a_store_without_domains_opens(mixed: Path) -> None:
    """As they were written before rows had one: no array in the shard, no names in the index."""
    from safetensors.numpy import load_file

    assert "domains" in load_file(mixed / shard_name(0))
    assert "domains" not in load_file(mixed / shard_name(2))
    write_index(mixed, [2], {"validation_share": 0.0, "top_n": 2})
    index = json.loads((mixed / "index.json").read_text())
    del index["domains"]
    (mixed / "index.json").write_text(json.dumps(index))
    store = TraceStore(mixed)
    assert [row.domain for row in store.rows("train")] == [""]
    assert store.domains == ("",)
    assert "Answer tokens" not in shown(mixed)


def test_inspect_shows_answer_tokens_by_domain(mixed: Path) -> None:
    found = inspect(str(mixed))
    assert found["answer_tokens_by_domain"] == {"": 11, "book": 40, "code": 31}
    assert json.loads(json.dumps(found)) == found
    lines = [line.split() for line in shown(mixed).splitlines()]
    assert lines[-3:] == [["book", "40", "49%"], ["code", "31", "38%"], ["(none)", "11", "13%"]]


def shown(folder: Path) -> str:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(inspect(str(folder))))
    return console.export_text()


def batches_of(model: Any, target: Path, folder: Path, **data: Any) -> Iterator[list[TraceRow]]:
    """The batches that a worker writes, read from its shards."""
    job = trace.Job.of(recipe_for(target, data=data), resolve(str(target)), folder)
    prompts = trace.Prompts(job.data, job.trace.batch, make_tokenizer(), job.seed)
    numbers = itertools.count()
    for number, keys in trace._batches(writer(model), prompts, job, numbers, {}, lambda n: None):
        if keys:
            yield read_shard(folder / shard_name(number))


def test_prompts_give_their_domain_or_their_files_name(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    target = save(tiny)
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    mine.write_text('{"text": "how many?", "domain": "sums"}\n{"text": "she has"}\n')
    other.write_text('{"text": "write a list"}\n')
    data = {"source": "prompts", "path": [str(mine), str(other)]}
    (rows,) = batches_of(tiny, target, tmp_path, **data)
    assert [row.domain for row in rows] == ["sums", "mine", "other"]


def test_corpus_texts_give_their_files_name(
    save: Callable[..., Path], tiny: Any, tmp_path: Path
) -> None:
    import gzip

    target = save(tiny)
    (tmp_path / "code").mkdir()
    plain, packed = tmp_path / "books.jsonl", tmp_path / "code" / "code.jsonl.gz"
    plain.write_text('{"text": "how many apples are left"}\n' * 6)
    packed.write_bytes(gzip.compress(b'{"text": "write a short list of words"}\n' * 6))
    data = {"source": "corpus", "path": [str(plain), str(packed)], "prompt_tokens": 5}
    rows = [row for batch in batches_of(tiny, target, tmp_path, **data) for row in batch]
    beginnings = {make_tokenizer().decode(r.tokens[:5].tolist())[:5]: r.domain for r in rows}
    assert beginnings == {"how m": "books", "write": "code"}
    assert len(rows) == 12
