"""Replay of stored traces: without the target, the very rounds that decoding would have."""

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from draftsmith.accept import pairing
from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Limits, greedy_decode, plain_decode, speculative_decode
from draftsmith.accept.drafters import AutoregressiveDrafter, PromptLookup
from draftsmith.accept.replay import RoundCounts, replay_starts, text_logprobs
from draftsmith.accept.replaying import can_replay, of_traces, replay_all
from draftsmith.accept.score import score_drafter
from draftsmith.accept.table import render
from draftsmith.accept.verify import Sampling, Verification
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.data.traces import TraceRow, TraceStore, write_index, write_shard
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings
from tests.conftest import TINY_VOCAB, make_model, make_tokenizer
from tests.unit.test_decode import perturbed, prompts

ALL = SharedVocabulary(TINY_VOCAB)
TOKENS = len(make_tokenizer().get_vocab())
NEW = 14
STOPS = frozenset({2, 5, 40})
WARM = Warping(0.8)


def row_of(model: Any, prompt: list[int], sampled: bool) -> TraceRow:
    target, limits = CachedModel(model), Limits(NEW, STOPS)
    warping = WARM if sampled else Warping()
    text = plain_decode(target, prompt, limits, ALL, warping, seed=len(prompt)).tokens
    logprobs = text_logprobs(target, prompt, text, ALL, warping)
    return TraceRow(
        np.array([*prompt, *text], np.int32),
        len(prompt),
        sampled,
        logprobs.astype(np.float32),
        np.zeros((len(text), 1), np.uint16),
        np.zeros((len(text), 1), np.float16),
    )


def store_of(folder: Path, rows: list[TraceRow], **about: Any) -> TraceStore:
    folder.mkdir()
    write_shard(folder, 0, rows)
    known = {
        "target": "tiny",
        "vocabulary": TOKENS,
        "top_n": 1,
        "temperature": 0.8,
        "validation_share": 0.0,
        "max_new_tokens": NEW,
    }
    write_index(folder, [0], known | about)
    return TraceStore(folder)


@pytest.fixture
def texts() -> list[list[int]]:
    return prompts([3, 5, 8, 13, 4, 6])


def test_greedy_traces_give_the_rounds_of_real_decoding(
    tmp_path: Path, texts: list[list[int]]
) -> None:
    """Ends by EOS, by the limit and by an EOS in the last possible place included."""
    target = make_model()
    model = perturbed(target, 0.05)
    rows = [row_of(target, text, sampled=False) for text in texts]
    assert len({len(row.answer) for row in rows}) > 1
    store = store_of(tmp_path / "t", [*rows, row_of(target, texts[0], sampled=True)])
    found = of_traces(store, Verification(), STOPS, TOKENS)
    assert len(found) == len(texts)
    drafter = AutoregressiveDrafter(CachedModel(model), ALL, STOPS)
    counts = replay_all(drafter, found, Warping(), [1, 3, 6], 256)
    copied = replay_all(PromptLookup(STOPS), found, Warping(), [1, 3, 6], 256)
    for k in (1, 3, 6):
        for text, own, copy in zip(texts, counts[k], copied[k], strict=True):
            for draft, count in ((drafter, own), (PromptLookup(STOPS), copy)):
                limits = Limits(NEW, STOPS)
                real = speculative_decode(CachedModel(target), draft, text, k, limits, ALL)
                rounds = RoundCounts.of_rounds(real.rounds, k)
                assert (count.rounds, count.accepted, count.emitted, count.full) == (
                    rounds.rounds,
                    rounds.accepted,
                    rounds.emitted,
                    rounds.full,
                )
    assert [c.proposed for c in counts[3]] == [None] * len(texts)
    assert all(c.proposed is not None for c in copied[3])


@pytest.mark.parametrize(
    ("answer", "most", "limit"),
    [
        ([7, 8, 2], 14, 14),  # ended by its EOS, with room for more
        ([7, 8, 2], 3, 3),  # by its EOS in the last place, where none may be proposed
        ([7, 8, 9], 3, 3),  # by the limit
        ([7, 8, 9], 14, 3),  # by the context
        ([7, 8, 2], None, 4),  # in a store that does not say
    ],
)
def test_how_long_a_stored_text_could_have_been(
    tmp_path: Path, answer: list[int], most: int | None, limit: int
) -> None:
    nothing = np.zeros(len(answer))
    row = TraceRow(
        np.array([5, 6, *answer], np.int32), 2, False, nothing, nothing[:, None], nothing[:, None]
    )
    about = {} if most is None else {"max_new_tokens": most}
    store = store_of(tmp_path / "t", [row], **about)
    if most is None:
        del store.about["max_new_tokens"]
    (text,) = of_traces(store, Verification(), STOPS, TOKENS)
    assert text.limit == limit


def test_sampled_traces_hold_the_probability_of_what_was_emitted(
    tmp_path: Path, texts: list[list[int]]
) -> None:
    """The target is its own drafter, so all is accepted; of another drafter less is."""
    target = make_model()
    store = store_of(tmp_path / "t", [row_of(target, text, sampled=True) for text in texts])
    sampling = Verification("sampling", WARM)
    found = of_traces(store, sampling, STOPS, TOKENS)
    own = AutoregressiveDrafter(CachedModel(target), ALL, STOPS, WARM)
    (counts,) = replay_all(own, found, WARM, [4], 256).values()
    total = RoundCounts.total(counts, 4)
    longest = sum(-(-len(t.answer) // 5) for t in found)
    assert total.rounds == pytest.approx(longest, rel=1e-2)
    other = AutoregressiveDrafter(CachedModel(perturbed(target, 0.3)), ALL, STOPS, WARM)
    (counts,) = replay_all(other, found, WARM, [4], 256).values()
    assert RoundCounts.total(counts, 4).rounds > 1.2 * total.rounds


@pytest.mark.parametrize(
    ("verification", "about", "sampled", "message"),
    [
        (Verification(), {"vocabulary": 7}, False, "whose tokenizer has 7 tokens"),
        (Verification(), {}, True, "holds no greedy text; trace with another trace.sampled_share"),
        (Verification("sampling", WARM), {}, False, "holds no sampled text"),
        (Verification("sampling", Warping(0.7)), {}, True, "drawn at temperature 0.8 without"),
        (Verification("sampling", Warping(0.8, top_k=3)), {}, True, "replay holds for that alone"),
    ],
    ids=["vocabulary", "no-greedy", "no-sampled", "temperature", "top-k"],
)
def test_traces_that_were_written_otherwise_are_refused(
    tmp_path: Path,
    verification: Verification,
    about: dict[str, Any],
    sampled: bool,
    message: str,
) -> None:
    store = store_of(tmp_path / "t", [row_of(make_model(), [5, 6, 7], sampled)], **about)
    with pytest.raises(RequestError, match=message):
        of_traces(store, verification, STOPS, TOKENS)


def test_what_can_be_replayed() -> None:
    model = CachedModel(make_model())
    fixed = AutoregressiveDrafter(model, ALL, STOPS, WARM)
    unsure = AutoregressiveDrafter(model, ALL, STOPS, WARM, confidence=0.3)
    greedy = AutoregressiveDrafter(model, ALL, STOPS, confidence=0.3)
    sampling, lossy = Verification("sampling", WARM), Verification("top_beta")
    assert can_replay(fixed, sampling)
    assert can_replay(greedy, Verification())
    assert can_replay(PromptLookup(STOPS), sampling)
    assert not can_replay(unsure, sampling)
    assert not can_replay(fixed, lossy)


def test_a_prompt_lookup_is_replayed_on_sampled_texts(texts: list[list[int]]) -> None:
    """Given the text, a proposal was accepted where it equals the text, also where it was drawn."""
    target, warm, k = make_model(initializer_range=0.5), Warping(0.5), 3
    expected, real = [], []
    for seed in range(150):
        prompt = texts[seed % len(texts)] * 3
        answer = plain_decode(
            CachedModel(target), prompt, Limits(12), ALL, warm, 5000 + seed
        ).tokens

        expected.append(
            float(replay_starts(PromptLookup(STOPS), prompt, answer, [k], 12)[k].rounds)
        )
        verifier = Sampling(warm, torch.Generator().manual_seed(seed))
        out = speculative_decode(
            CachedModel(target), PromptLookup(STOPS), prompt, k, Limits(12), ALL, verifier
        )
        real.append(float(len(out.rounds)))
    difference = torch.tensor(real) - torch.tensor(expected)
    assert min(real) < 12, "nothing was copied"
    assert abs(float(difference.mean())) < 3 * float(difference.std()) / len(real) ** 0.5 + 1e-6


# --- the whole way


def test_a_score_of_traces_alone_loads_no_target(
    save: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target_model = make_model()
    target = save(target_model, name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    stops = frozenset({2})
    rows = []
    for text in prompts([4, 7]):
        answer = greedy_decode(CachedModel(target_model), text, Limits(NEW, stops), ALL).tokens
        tokens = np.array([*text, *answer], np.int32)
        nothing = np.zeros(len(answer))
        rows.append(TraceRow(tokens, len(text), False, nothing, nothing[:, None], nothing[:, None]))
    store = store_of(tmp_path / "t", rows)

    loaded: list[str] = []
    real_load = pairing.load_model
    monkeypatch.setattr(
        pairing, "load_model", lambda ref, *a: loaded.append(ref.spec) or real_load(ref, *a)
    )
    settings = ScoreSettings(mode="replay", replay_lookahead=4)
    score = score_drafter(resolve(str(target)), resolve(str(drafter)), settings, traces=store)
    assert loaded == [str(drafter)]
    assert score.decode == []
    assert [row.lookahead for row in score.replay] == [1, 2, 3, 4]
    assert all(row.t_verify_ms is row.speedup_predicted is None for row in score.replay)
    assert score.verdict["drafting_pays"] is None
    assert score.lossless is None
    Console(width=100, file=StringIO()).print(render(score.to_plain()))
    assert "2 texts" in score.prompts
    # With the target in memory the same texts give speeds too, and the prompts are decoded.
    prompt_file = tmp_path / "p.jsonl"
    prompt_file.write_text('{"text": "how many apples"}\n')
    both = ScoreSettings(prompts=str(prompt_file), max_new_tokens=8, replay_lookahead=4)
    full = score_drafter(resolve(str(target)), resolve(str(drafter)), both, traces=store)
    assert [row.rounds for row in full.replay] == [row.rounds for row in score.replay]
    assert full.replay[0].speedup_predicted is not None
    assert full.lossless is True
    assert full.decode[0].lookahead == 3


@pytest.mark.parametrize("mode", ["decode", "replay"])
def test_one_way_of_scoring_alone(mode: str, save: Callable[..., Path], tmp_path: Path) -> None:
    target = resolve(str(save(make_model(), name="target")))
    drafter = resolve(str(save(make_model(seed=1, num_hidden_layers=2), name="drafter")))
    prompt_file = tmp_path / "p.jsonl"
    prompt_file.write_text('{"text": "how many apples"}\n{"text": "write a list"}\n')
    short = {"prompts": str(prompt_file), "max_new_tokens": 8, "replay_lookahead": 3}
    score = score_drafter(target, drafter, ScoreSettings(mode=mode, **short))
    assert bool(score.decode) == (mode == "decode")
    assert bool(score.replay) == (mode == "replay")
    assert score.verdict["speedup_predicted"] > 0

    out = StringIO()
    Console(width=100, file=out).print(render(score.to_plain()))
    assert ("Nothing was decoded for real" in out.getvalue()) == (mode == "replay")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "decode"}, "mode decode replays nothing"),
        ({"verify": "top_beta"}, "what top_beta keeps of this drafter can't be computed"),
        ({"verify": "sampling", "temperature": 0.8, "confidence": 0.5}, "what sampling keeps"),
        (
            {"verify": "sampling", "temperature": 0.8, "samples": 9, "mode": "replay"},
            "samples 9: the target is not loaded",
        ),
    ],
    ids=["decode", "lossy", "unsure", "samples"],
)
def test_traces_that_would_be_of_no_use_are_refused(
    settings: dict[str, Any], message: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    folder = resolve(str(save(make_model())))
    rows = [row_of(make_model(), [5, 6, 7], sampled) for sampled in (True, False)]
    store = store_of(tmp_path / "t", rows)
    with pytest.raises(RequestError, match=message):
        score_drafter(folder, folder, ScoreSettings(**settings), traces=store)


def test_traces_of_a_decoder_are_not_for_targets_with_an_encoder(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    folder = resolve(str(save(make_model("t5"), make_tokenizer(template=None))))
    store = store_of(tmp_path / "t", [row_of(make_model(), [5, 6, 7], False)])
    with pytest.raises(RequestError, match=r"no encoder, .* has an encoder of text; give"):
        score_drafter(folder, folder, ScoreSettings(), traces=store)


def test_a_kind_of_text_that_only_training_saw_is_found(tmp_path: Path) -> None:
    """All rows that were held out are greedy; the sampled ones are elsewhere."""
    rows = [row_of(make_model(), text, sampled=False) for text in prompts([3, 4, 5, 6])]
    drawn = [row_of(make_model(), text, sampled=True) for text in prompts([7])]
    folder = tmp_path / "t"
    store = store_of(folder, [*rows, *drawn])
    shares = {split: [row.sampled for row in store.rows(split)] for split in ("train",)}
    assert shares["train"].count(True) == 1
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        store.about["validation_share"] = share
        found = of_traces(store, Verification("sampling", WARM), STOPS, TOKENS)
        assert len(found) == 1
