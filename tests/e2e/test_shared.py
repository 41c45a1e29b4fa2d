"""On the shared data: a RedPajama-like corpus and real prompts."""

from collections import Counter
from pathlib import Path

import pytest

from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_tokenizer
from draftsmith.data.chat import read_prompts
from draftsmith.data.corpus import corpus_files, read_texts
from draftsmith.data.traces import TraceStore
from tests.e2e.test_real import SMOLLM2
from tests.e2e.test_run import command

pytestmark = [pytest.mark.shared, pytest.mark.real]


def test_every_row_of_the_corpus_is_read(shared: Path) -> None:
    counts: Counter[str] = Counter()
    files = corpus_files([str(shared / "data" / "redpajama-mini")])
    assert len(files) == 7
    characters = sum(map(len, read_texts(files, counts)))
    assert set(counts) == {"rows"}
    assert counts["rows"] > 10_000
    assert characters > 40_000_000


@pytest.mark.parametrize("name", ["gsm8k", "humaneval"])
def test_real_prompts_go_through_the_template_once(shared: Path, name: str) -> None:
    tokenizer = load_tokenizer(resolve(SMOLLM2))
    prompts = read_prompts(str(shared / "data" / "prompts" / f"{name}.jsonl"), tokenizer)
    assert len(prompts) >= 100
    for prompt in prompts:
        text = tokenizer.decode(list(prompt.ids))
        assert text.count("<|im_start|>assistant") == 1
        assert text.count("<|im_start|>user") == 1


def test_the_corpus_recipe_runs(shared: Path, tmp_path: Path) -> None:
    """`smollm2-redpajama` with a path: beginnings of its texts, continued by the target."""
    done = command(
        *("trace", "smollm2-redpajama", "-s", f"data.path=[{shared / 'data' / 'redpajama-mini'}]"),
        *("-s", "trace.tokens=200", "-s", "trace.batch=8", "-s", "trace.max_new_tokens=16"),
        *("-s", "trace.workers=1"),
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    rows = TraceStore(tmp_path / "runs" / "smollm2-redpajama" / "traces").rows("train")
    assert sum(len(r.answer) for r in rows) >= 150
