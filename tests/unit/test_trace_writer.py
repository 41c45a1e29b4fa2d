"""The target writes text: reproducible, resumable, with its own probabilities."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.accept.decode import Limits, greedy_decode
from draftsmith.checkpoints.formats import resolve
from draftsmith.data.traces import TraceStore, read_shard, shard_name
from draftsmith.distill import trace
from draftsmith.distill.trace import Sample, Writer, write_batch, write_traces
from draftsmith.errors import DraftsmithError, RequestError
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
    write_traces(recipe_for(target, data=data), resolve(str(target)), folder)
    rows = TraceStore(folder).rows("train")
    assert {r.prompt_length for r in rows} == {5}
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


def test_a_failing_worker_is_one_error(save: Callable[..., Path], tmp_path: Path) -> None:
    """The weights hold NaN: the worker's error reaches the caller."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    target = save(model)
    with pytest.raises(DraftsmithError, match="a trace worker failed"):
        write_traces(recipe_for(target), resolve(str(target)), tmp_path)


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


def test_empty_batches_are_no_gap() -> None:
    """A batch whose prompts came to nothing counts as written, or the stage would never end."""
    assert trace._needed({0: 100, 1: 0, 2: 100, 3: 100}, 250) == [0, 1, 2, 3]
    assert trace._needed({0: 100, 2: 100}, 250) == [0]


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
