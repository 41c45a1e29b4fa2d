"""Scores in other runtimes, from what their workers say; tests/runtimes has the real ones."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftsmith.accept import runtimes
from draftsmith.accept.score import score_drafter
from draftsmith.accept.table import render
from draftsmith.checkpoints.export import processes
from draftsmith.checkpoints.formats import ModelRef, resolve
from draftsmith.checkpoints.token_map import TokenMap
from draftsmith.data.traces import TraceStore
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings
from tests.conftest import make_model
from tests.unit.test_race import text_of

WORKERS = Path(processes.__file__).parent / "workers"
PROMPTS = ("how many?", "write a list", "she has nine")
# What the runtime is to say: every answer of each way, with its counts.
SCRIPT = """
import json, pathlib
VERSION = "toy 1.0"
class Pair:
    def __init__(self, **given):
        self.texts = json.loads(pathlib.Path(__file__).with_name("texts.json").read_text())
        pathlib.Path(__file__).with_name("given.json").write_text(json.dumps(given))
    def generate(self, prompt, lookahead):
        return self.texts[str(lookahead)][json.dumps(prompt)]
"""


@pytest.fixture
def pair(save: Callable[..., Path], tiny: Any, tiny_drafter: Any) -> tuple[ModelRef, ModelRef]:
    """A target and a drafter on disk."""
    return resolve(str(save(tiny, name="target"))), resolve(str(save(tiny_drafter, name="small")))


@pytest.fixture
def settings(tmp_path: Path) -> ScoreSettings:
    """Three prompts in a runtime that is scripted."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": text, "domain": text[:3]} for text in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ScoreSettings(
        prompts=str(path), runtime="transformers", lookahead=(2, 4), max_new_tokens=12
    )


@pytest.fixture
def script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pair: tuple[ModelRef, ModelRef],
    settings: ScoreSettings,
) -> Path:
    """A worker that says what draftsmith's own decoding says; its texts, to be changed."""
    folder = tmp_path / "workers"
    folder.mkdir()
    (folder / "__main__.py").write_text((WORKERS / "__main__.py").read_text())
    (folder / "transformers_worker.py").write_text(SCRIPT)
    monkeypatch.setattr(processes, "_WORKERS", folder)
    request = runtimes.Request.of(*pair)
    decoding = request.load(settings)
    texts: dict[str, dict[str, Any]] = {"0": {}, "2": {}, "4": {}}
    for prompt in request.prompts(settings):
        key, ids = json.dumps(list(prompt.ids)), list(prompt.ids)
        model = decoding.target.model
        tokens = own_text(model, ids, 12)
        texts["0"][key] = {"tokens": tokens, "seconds": 1.0}
        for k, seconds in (("2", 0.5), ("4", 2.0)):
            counts = {"drafted": 20, "accepted": 5, "passes": 7}
            texts[k][key] = {"tokens": tokens, "seconds": seconds} | counts
    path = folder / "texts.json"
    path.write_text(json.dumps(texts))
    return path


def own_text(model: Any, ids: list[int], count: int) -> list[int]:
    """Greedy, by transformers."""
    import torch

    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)
    return [int(i) for i in out[0, len(ids) :]]


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    texts = json.loads(path.read_text())
    change(texts)
    path.write_text(json.dumps(texts))


def test_the_runtimes_own_counters_are_told(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    score = score_drafter(*pair, settings)
    first, second = score.decode
    assert (first.lookahead, first.proposed, first.accepted, first.rounds) == (2, 60, 15, 21)
    assert first.acceptance_rate == 0.25
    assert first.emitted_per_round == pytest.approx(first.emitted / 21)
    assert (first.speedup_measured, second.speedup_measured) == (2.0, 0.5)
    assert first.tokens_per_second == pytest.approx(first.emitted / 1.5)
    assert first.tokens_per_second_alone == pytest.approx(first.emitted / 3)
    assert first.identical_tokens == first.compared_tokens == first.emitted
    assert score.lossless is True
    assert score.verdict["lookahead"] == 2
    assert "Draft with k = 2 in transformers on this machine: 2.00 times" in score.verdict["text"]
    assert first.speedup_interval == [2.0, 2.0]
    assert (score.runtime, score.machine["runtime"]) == ("transformers", "toy 1.0")
    text = text_of(render(score.to_plain()))
    assert "Identical to the runtime's own greedy output" in text
    assert "Decoded by toy 1.0" in text
    given = json.loads(script.with_name("given.json").read_text())
    assert given["stop_ids"] == [2]
    assert (given["max_new_tokens"], given["lookaheads"]) == (12, [2, 4])
    assert (Path(given["target"]), Path(given["drafter"])) == (pair[0].folder, pair[1].folder)


def test_replay_beside_it_is_that_of_the_same_texts(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    """The scripted runtime writes the target's own texts, so torch expects what torch finds."""
    score = score_drafter(*pair, settings)
    torch_alone = ScoreSettings(prompts=settings.prompts, lookahead=(4,), max_new_tokens=12)
    ours = score_drafter(*pair, torch_alone)
    for there, here in zip(score.replay, ours.replay, strict=False):
        assert (there.lookahead, there.rounds, there.accepted) == (
            here.lookahead,
            here.rounds,
            here.accepted,
        )


def test_what_a_runtime_does_not_count_is_null(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    def forget(texts: dict[str, Any]) -> None:
        for text in texts["2"].values():
            text.update(drafted=None, passes=None)

    changed(script, forget)
    row = score_drafter(*pair, settings).decode[0]
    assert (row.proposed, row.rounds, row.acceptance_rate, row.emitted_per_round) == (None,) * 4
    assert row.accepted == 15
    assert row.speedup_measured == 2.0


def test_a_text_that_differs_is_no_tie_unless_the_logits_say_so(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    def other(texts: dict[str, Any]) -> None:
        text = max(texts["4"].values(), key=lambda text: len(text["tokens"]))
        text["tokens"][1] = (text["tokens"][1] + 1) % 90 + 3

    changed(script, other)
    score = score_drafter(*pair, settings)
    assert score.lossless is False
    (difference,) = score.decode[1].first_differences or ()
    assert difference["position"] == 1
    assert difference["logit_gap"] > 0.01
    row = score.decode[1]
    assert 0 < (row.compared_tokens or 0) - (row.identical_tokens or 0) <= 11
    assert "NOT numeric ties" in text_of(render(score.to_plain()))


def test_drafting_that_does_not_pay(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    def slow(texts: dict[str, Any]) -> None:
        for way in ("2", "4"):
            for text in texts[way].values():
                text["seconds"] = 4.0

    changed(script, slow)
    verdict = score_drafter(*pair, settings).verdict
    assert verdict["drafting_pays"] is False
    assert "Do not draft in transformers on this machine: at best 0.25 times" in verdict["text"]

    def luck(texts: dict[str, Any]) -> None:
        for way in ("2", "4"):
            for number, text in enumerate(texts[way].values()):
                text["seconds"] = 0.5 if number == 0 else 1.1

    changed(script, luck)
    verdict = score_drafter(*pair, settings).verdict
    assert verdict["drafting_pays"] is False
    assert verdict["reason"] == "too few prompts to tell"
    assert "may pay or not: 1.11 times" in verdict["text"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.7, "verify": "sampling"}, "verify sampling: other runtimes decode"),
        ({"batch": 2}, "batch 2: other runtimes"),
        ({"mode": "replay"}, "mode replay: other runtimes"),
        ({"stop": ("x",)}, "stop .* other runtimes"),
    ],
    ids=str,
)
def test_what_only_our_own_decoding_knows(changes: dict[str, Any], message: str) -> None:
    from draftsmith.recipes.loading import settings as settings_of

    with pytest.raises(RequestError, match=message):
        settings_of(ScoreSettings, {"runtime": "vllm", **changes})


def test_drafters_and_traces_that_a_runtime_does_not_take(
    pair: tuple[ModelRef, ModelRef], settings: ScoreSettings, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="prompt-lookup: transformers needs a drafter that is"):
        score_drafter(pair[0], "prompt-lookup", settings)
    store: Any = TraceStore.__new__(TraceStore)
    store.folder = tmp_path
    with pytest.raises(RequestError, match="decodes prompts, and replays no traces"):
        score_drafter(*pair, settings, traces=store)


def test_exports_are_kept_and_used_again(
    script: Path,
    pair: tuple[ModelRef, ModelRef],
    settings: ScoreSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GGUF is no HF folder: it is exported once, and only when its file changes once more."""
    from draftsmith.checkpoints.export import gguf
    from tests.conftest import job_of

    file = tmp_path / "target.gguf"
    gguf.write(job_of(make_model(), pair[0].folder), file, "F32")
    target, keep = resolve(str(file)), tmp_path / "kept"
    made: list[str] = []
    own = runtimes.export_drafter
    monkeypatch.setattr(runtimes, "export_drafter", lambda *a: (made.append(a[0].spec), own(*a))[1])
    for _ in range(2):
        score_drafter(target, pair[1], settings, exports=keep)
    assert made == [str(file)]
    (folder,) = keep.iterdir()
    given = json.loads(script.with_name("given.json").read_text())
    assert Path(given["target"]) == folder / "hf"
    assert (folder / "model.txt").read_text() == f"{file}\n"


def test_every_runtime_has_a_format_and_a_worker() -> None:
    from typing import get_args, get_type_hints

    hints = get_type_hints(ScoreSettings)
    names = set(get_args(hints["runtime"])) - {"torch"}
    assert set(runtimes.FORMATS) == names
    for name in names:
        assert (WORKERS / f"{name.replace('.', '_').replace('-', '_')}_worker.py").is_file()


def test_a_score_is_read_again_or_refused(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings, tmp_path: Path
) -> None:
    from draftsmith.accept.form import read_score
    from draftsmith.data.files import write_json

    path, plain = tmp_path / "score.json", score_drafter(*pair, settings).to_plain()
    write_json(path, plain)
    assert read_score(path)["decode"] == json.loads(path.read_text())["decode"]
    write_json(path, plain | {"decode": [{"lookahead": "three"}]})
    with pytest.raises(RequestError, match=r"not the form of a score\.json \(decode\.0"):
        read_score(path)
    path.write_text('{"target": ')
    with pytest.raises(RequestError, match=r"damaged .* score again"):
        read_score(path)
    with pytest.raises(RequestError, match=r"nowhere\.json: can't be read"):
        read_score(tmp_path / "nowhere.json")


def test_texts_end_where_the_targets_context_does(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    """Runtimes differ past it; replay would count what no round wrote."""
    short = replace(settings, max_new_tokens=1000)
    score_drafter(*pair, short)
    given = json.loads(script.with_name("given.json").read_text())
    assert given["max_new_tokens"] == 256 - max(map(len, _prompts(pair, settings)))


def _prompts(pair: tuple[ModelRef, ModelRef], settings: ScoreSettings) -> list[list[int]]:
    return [list(p.ids) for p in runtimes.Request.of(*pair).prompts(settings)]


def test_other_runtimes_draft_for_decoders_alone(
    save: Callable[..., Path], settings: ScoreSettings
) -> None:
    bart = resolve(str(save(make_model("bart"), name="bart")))
    with pytest.raises(
        RequestError, match=r"bart is an encoder–decoder, and transformers is asked"
    ):
        score_drafter(bart, bart, settings)


def test_a_cut_vocabulary_is_no_runtimes_business(
    script: Path, pair: tuple[ModelRef, ModelRef], settings: ScoreSettings
) -> None:
    whole = TokenMap(96, tuple(range(96)), 0)
    whole.save(pair[1].folder)
    with pytest.raises(RequestError, match=r"has a cut vocabulary, .* score that"):
        score_drafter(*pair, settings)


def test_a_recipe_asks_for_its_runtime_before_any_work(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.recipes.loading import load
    from draftsmith.recipes.run import Run, check

    monkeypatch.setenv("DRAFTSMITH_VLLM_PYTHON", str(tmp_path / "nowhere"))
    run = Run(load(str(tiny_recipe), ["score.runtime=vllm"]), tmp_path / "out")
    with pytest.raises(RequestError, match=r"vllm: DRAFTSMITH_VLLM_PYTHON=.* is no Python"):
        check(run)
