"""What an encoder–decoder writes for its drafters: by beams too, counted, held out greedily."""

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftsmith.accept.replaying import of_traces
from draftsmith.accept.verify import Verification
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.generation import decoder_start
from draftsmith.checkpoints.loading import load_model
from draftsmith.data.traces import (
    RowKey,
    TraceRow,
    TraceStore,
    is_held_out,
    pack_rows,
    shard_name,
    unpack_rows,
    write_index,
    write_shard,
)
from draftsmith.distill import trace
from draftsmith.distill.trace import Sample, Writer, write_traces
from draftsmith.errors import RequestError
from draftsmith.recipes.inspection import inspect, render
from draftsmith.recipes.loading import validate
from draftsmith.recipes.run import Run, check
from draftsmith.recipes.schema import Recipe, ScoreSettings
from tests.conftest import TINY_VOCAB, make_model, make_tokenizer
from tests.unit.test_decode import prompts
from tests.unit.test_encoder_decoder import START, TEXT

SENTENCE = "how many apples are left she has nine write a short list of words"
WORDS = SENTENCE.split()


def write(model: Any, read: Sequence[Sequence[int]], *beams: int, new: int = 10) -> list[Sample]:
    samples = [
        Sample(list(START), sampled=not count, source=tuple(source), beams=count or 1)
        for source, count in zip(read, beams or [3] * len(read), strict=True)
    ]
    writer = Writer(model, make_tokenizer())
    writer.write(
        samples,
        new,
        temperature=1.0,
        generator=torch.Generator().manual_seed(0),
        end=writer.stop_ids,
        top_n=8,
    )
    return samples


def allowed(model: Any) -> list[int]:
    vocabulary = Writer(model, make_tokenizer()).vocabulary
    return [i for i in range(TINY_VOCAB) if vocabulary.has(i)]


def by_transformers(model: Any, source: Sequence[int], beams: int, **settings: Any) -> list[int]:
    banned = sorted(set(range(TINY_VOCAB)).difference(allowed(model)))
    # T5's own cache counts the layers of the encoder; without one, nothing is counted.
    found = model.generate(
        torch.tensor([list(source)]),
        num_beams=beams,
        do_sample=False,
        max_new_tokens=10,
        suppress_tokens=banned,
        renormalize_logits=True,
        use_cache=False,
        **settings,
    )[0].tolist()
    return found[found.index(START[0]) + 1 :]


@pytest.mark.parametrize(("family", "seed"), [("bart", 2), ("marian", 1), ("t5", 1)])
def test_beams_are_transformers_own_in_ragged_batches(family: str, seed: int) -> None:
    """And what is kept of each token is what a plain pass over the finished text says."""
    model = make_model(family, seed, eos_token_id=[2, *range(4, TINY_VOCAB, 3)])
    assert decoder_start(model) == START
    read = prompts([3, 17, 9, 1])
    found = write(model, read)
    for source, sample in zip(read, found, strict=True):
        assert sample.tokens == by_transformers(model, source, 3)
        ids = torch.tensor([[*START, *sample.tokens]])
        with torch.inference_mode():
            said = model(input_ids=torch.tensor([list(source)]), decoder_input_ids=ids[:, :-1])
        logits = torch.full((len(sample.tokens), TINY_VOCAB), -torch.inf)
        logits[:, allowed(model)] = said.logits[0][:, allowed(model)]
        logprobs = logits.log_softmax(-1)
        row = sample.row(np.uint16)
        assert row.beams == 3
        chosen = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        assert np.allclose(row.logprobs, chosen.numpy(), atol=1e-4)
        top = logprobs.topk(8)
        assert np.allclose(row.top_logprobs, top.values.numpy(), atol=5e-3)
    assert len({len(s.tokens) for s in found}) > 1, "the test needs rows of different lengths"
    greedy = write(model, read, 1, 1, 1, 1)
    assert [s.tokens for s in greedy] != [s.tokens for s in found]


@pytest.mark.parametrize("family", TEXT)
def test_beams_heed_the_same_bans_as_greedy_rows(family: str) -> None:
    """Ids that are never said, or never first; another's habits of search are no bans."""
    model = make_model(family)
    (source,) = prompts([6])
    free = write(model, [source])[0].tokens
    config = model.generation_config
    config.begin_suppress_tokens, config.bad_words_ids = [free[0]], [[free[1]]]
    config.no_repeat_ngram_size, config.min_length, config.forced_eos_token_id = 1, 9, 2
    (searched,) = write(model, [source])
    assert searched.tokens[0] != free[0]
    assert free[1] not in searched.tokens
    assert len(searched.tokens) == 10
    assert searched.tokens[-1] != 2, "an end was forced at the limit"
    config.no_repeat_ngram_size = config.min_length = config.forced_eos_token_id = None
    assert searched.tokens == by_transformers(model, source, 3)
    assert np.isneginf(searched.top_logprobs[0]).sum() == 0
    assert free[0] not in searched.top_ids[0]


def test_a_forced_first_word_is_read_and_no_answer() -> None:
    model = make_model("bart")
    (source,) = prompts([6])
    model.generation_config.forced_bos_token_id = 7
    writer = Writer(model, make_tokenizer())
    sample = Sample(decoder_start(model), sampled=False, source=source, beams=3)
    arguments = {"temperature": 1.0, "generator": torch.Generator(), "end": writer.stop_ids}
    writer.write([sample], 8, top_n=4, **arguments)
    expected = by_transformers(model, source, 3)[1:]
    assert sample.prompt == [*START, 7]
    assert sample.tokens[:8] == expected[:8]


def test_each_row_is_written_its_own_way() -> None:
    """Searched, drawn and greedy rows of one batch are those of batches of their own kind."""
    model, read = make_model("marian"), prompts([4, 9, 2, 6])
    mixed = write(model, read, 3, 0, 1, 3)
    assert mixed[0].tokens == write(model, read[:1])[0].tokens
    assert mixed[1].tokens == write(model, read[1:2], 0)[0].tokens
    assert mixed[2].tokens == write(model, read[2:3], 1)[0].tokens
    assert mixed[3].tokens == write(model, read[3:])[0].tokens


# --- the stage


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """48 sources, two of which are blank and one of which is too long for 24 positions."""
    path = tmp_path / "corpus.jsonl"
    texts = [" ".join(WORDS[i % 9 : i % 9 + 2 + i % 3] + WORDS[: i % 4]) for i in range(45)]
    texts[7:7] = ["", "   ", " ".join(WORDS * 3)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def recipe_for(target: Path, corpus: Path, **changes: Any) -> Recipe:
    settings = {"tokens": 150, "batch": 6, "top_n": 8, "max_new_tokens": 8, "workers": 1}
    settings |= {"beams": 3, "sampled_share": 0.25, "validation_share": 0.3}
    return validate(
        {
            "target": str(target),
            "dtype": "float32",
            "data": {"source": "corpus", "path": [str(corpus)]},
            "trace": settings | changes,
            "prune": {"shape": {"layers": 2}},
        }
    )


def traced(target: Path, corpus: Path, folder: Path, **settings: Any) -> TraceStore:
    folder.mkdir(exist_ok=True)
    write_traces(recipe_for(target, corpus, **settings), resolve(str(target)), folder)
    return TraceStore(folder)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage writes in this process, which needs no other to start."""

    def run(job: trace.Job, done: dict[int, list[RowKey]], progress: Any) -> None:
        tokenizer = make_tokenizer()
        writer, prompts = Writer(load_model(job.target), tokenizer), job.prompts(tokenizer)
        numbers = itertools.count()
        for number, keys in trace._batches(writer, prompts, job, numbers, done, progress.update):
            done[number] = keys
            if trace._enough(done, job):
                return

    engine = trace._Engine(check=lambda target: None, run=run)
    monkeypatch.setitem(trace._ENGINES, "transformers", engine)


@pytest.mark.usefixtures("alone")
def test_what_is_held_out_is_never_searched(
    save: Callable[..., Path], corpus: Path, tmp_path: Path
) -> None:
    store = traced(save(make_model("marian")), corpus, tmp_path / "traces", tokens=10_000)
    validation, train = store.rows("validation"), store.rows("train")
    assert {row.beams for row in validation} == {1}
    assert {row.greedy for row in validation} == {True, False}
    assert {(row.sampled, row.beams) for row in train} == {(True, 1), (False, 3)}
    assert store.about["beams"] == 3


def test_searched_stores_are_the_same_with_any_workers_and_after_a_stop(
    save: Callable[..., Path],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    target = save(make_model("bart", max_position_embeddings=24))
    one, two, stopped = (tmp_path / name for name in ("one", "two", "stopped"))
    traced(target, corpus, two, workers=2, tokens=10_000)
    told = [capsys.readouterr().err]
    request.getfixturevalue("alone")
    traced(target, corpus, one, tokens=10_000)
    told.append(capsys.readouterr().err)
    stopped.mkdir()
    for number in (0, 2):
        (stopped / shard_name(number)).write_bytes((one / shard_name(number)).read_bytes())
    (stopped / shard_name(1)).write_bytes(b"half a shard")
    traced(target, corpus, stopped, tokens=10_000)
    told.append(capsys.readouterr().err)
    contents = [{p.name: p.read_bytes() for p in f.iterdir()} for f in (one, two, stopped)]
    assert contents[0] == contents[1] == contents[2]
    assert TraceStore(one).about["left_out"] == {"too_long": 1, "empty": 2}
    for once in (
        "1 sources are longer than the encoder can hold, and left out",
        "2 sources are empty, and left out",
    ):
        assert [text.count(once) for text in told] == [1, 1, 1]


@pytest.mark.usefixtures("alone")
def test_sources_are_counted_as_far_as_they_were_read(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    """Enough is written before the second blank text; all are counted where they run out."""
    target = save(make_model("t5"))
    corpus = tmp_path / "corpus.jsonl"
    texts = ["she has", "", "how many", *WORDS, " "]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    few = traced(target, corpus, tmp_path / "few", tokens=1, batch=2)
    every = traced(target, corpus, tmp_path / "all", tokens=10_000, batch=len(WORDS) + 2)
    assert few.about["left_out"]["empty"] <= 1
    assert every.about["left_out"] == {"too_long": 0, "empty": 2}


def an_answer(source: int, answer: Sequence[int], *, beams: int = 1) -> TraceRow:
    n = len(answer)
    return TraceRow(
        np.array([1, *answer], np.int32),
        1,
        False,
        np.full(n, -1.5, np.float32),
        np.zeros((n, 2), np.uint16),
        np.full((n, 2), -2.0, np.float16),
        source=np.array([source, 5], np.int32),
        beams=beams,
    )


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """A store of five answers: two that ended at once, one without an end, one of them searched."""
    folder = tmp_path / "counted"
    folder.mkdir()
    rows = [an_answer(8, [2]), an_answer(9, [40]), an_answer(10, [7, 8, 2])]
    write_shard(folder, 0, rows)
    write_shard(folder, 1, [an_answer(11, [7, 8, 9, 10]), an_answer(12, [7, 8, 2], beams=5)])
    about = {"validation_share": 0.0, "top_n": 2, "max_new_tokens": 4, "beams": 5}
    about |= {"stop_ids": [2, 40], "left_out": {"too_long": 3, "empty": 1}, "temperature": 1.0}
    write_index(folder, [0, 1], about | {"target": "t", "vocabulary": 96})
    return folder


def test_empty_answers_are_no_lesson_and_cut_ones_are(counted: Path) -> None:
    store = TraceStore(counted)
    assert (store.about["empty_answers"], store.about["cut_answers"]) == (2, 1)
    assert [row.answer.tolist() for row in store.rows("train")] == [
        [7, 8, 2],
        [7, 8, 9, 10],
        [7, 8, 2],
    ]


def test_inspect_shows_what_was_counted(counted: Path) -> None:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(inspect(str(counted))))
    shown = " ".join(console.export_text().split())
    for text in (
        "3 sources are longer than the encoder can hold, and left out",
        "1 sources are empty, and left out",
        "2 answers are empty, and left out of training",
        "1 answers are cut at the limit of 4 tokens",
        "1 by 5 beams",
    ):
        assert text in shown
    assert inspect(str(counted))["searched_rows"] == 1


def test_replay_passes_over_searched_texts(counted: Path) -> None:
    verification = Verification.of(ScoreSettings(), 0)
    texts = of_traces(TraceStore(counted), verification, frozenset({2, 40}), 96)
    assert [list(text.answer) for text in texts] == [[7, 8, 2], [7, 8, 9, 10]]
    write_shard(counted, 0, [an_answer(12, [7, 8, 2], beams=5)])
    about = {k: v for k, v in TraceStore(counted).about.items() if k not in ("domains",)}
    write_index(counted, [0], about)
    with pytest.raises(RequestError, match=r"no greedy text; .* trace\.beams: 1"):
        of_traces(TraceStore(counted), verification, frozenset({2, 40}), 96)


def test_learning_is_not_judged_by_searched_texts() -> None:
    from draftsmith.checkpoints.families import families
    from draftsmith.distill.evaluation import Costs, evaluate
    from draftsmith.prune.race import Track
    from draftsmith.recipes.schema import DistillSettings, PruneSettings

    model = make_model("t5")
    settings = DistillSettings()
    costs = Costs.of(model, families()["t5"], settings, 4)
    assert evaluate(model, [an_answer(8, [7, 8, 2], beams=5)], settings, costs) == {}
    assert evaluate(model, [an_answer(8, [7, 8, 2])], settings, costs)
    rows = [an_answer(8, [7, 8, 2], beams=5), an_answer(8, [7, 8, 2])]
    track = Track.of([], rows, PruneSettings(race=2), 0, torch.float32)
    assert track is not None
    assert track.validation == rows[1:]


def test_a_row_says_how_it_was_written() -> None:
    rows = [an_answer(8, [7, 2]), an_answer(8, [7, 2], beams=5), an_answer(8, [7, 9, 2], beams=5)]
    assert [row.beams for row in unpack_rows(pack_rows(rows))] == [1, 5, 5]
    assert "beams" not in pack_rows(rows[:1])
    assert RowKey.of(rows[0]) != RowKey.of(rows[1])
    # A tie may fall otherwise, but it is the answer to the same source.
    assert RowKey.of(rows[1]) == RowKey.of(rows[2])
    assert all(is_held_out(row.content, 0.99) for row in rows)


def test_beams_are_refused_where_none_are_searched(tiny_recipe: Path, tmp_path: Path) -> None:
    from draftsmith.recipes.loading import load

    with pytest.raises(RequestError, match=r"beams: 5: .* is no encoder–decoder"):
        check(Run(load(str(tiny_recipe), ["trace.beams=5"]), tmp_path / "out"))
    overrides = ["trace.beams=5", "trace.engine=vllm"]
    with pytest.raises(RequestError, match=r"beams 5: engine vllm .* set engine: transformers"):
        load(str(tiny_recipe), overrides)
