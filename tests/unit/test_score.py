"""The score: its figures, its form, its verdict."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Round
from draftsmith.accept.figures import Row
from draftsmith.accept.latency import Latency, Load, break_even_acceptance, measure_latency
from draftsmith.accept.replay import RoundCounts
from draftsmith.accept.score import score_drafter
from draftsmith.accept.table import render
from draftsmith.accept.verify import Verification
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.formats import resolve
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import ScoreSettings
from tests.conftest import make_model, make_tokenizer

KEYS = [
    "lookahead",
    "rounds",
    "proposed",
    "accepted",
    "emitted",
    "accepted_per_round",
    "emitted_per_round",
    "acceptance_rate",
    "per_position",
    "t_draft_ms",
    "t_verify_ms",
    "t_ar_ms",
    "speedup_predicted",
    "speedup_measured",
    "identical_tokens",
    "compared_tokens",
    "first_differences",
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"how many apples {i}", "domain": "ab"[i % 2]} for i in range(5)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def scored(target: Path, drafter: Path, prompts: Path, **changes: Any) -> Any:
    settings = asked(prompts, **({"decode_prompts": 3, "lookahead": (2, 4)} | changes))
    return score_drafter(resolve(str(target)), resolve(str(drafter)), settings, seed=3)


def asked(prompts: Path, **changes: Any) -> ScoreSettings:
    short: dict[str, Any] = {"max_new_tokens": 16, "lookahead": (3,), "replay_lookahead": 4}
    return ScoreSettings(prompts=str(prompts), **(short | changes))


def test_form_and_figures(save: Callable[..., Path], prompts: Path) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    score = scored(target, drafter, prompts, decode_prompts=None)
    plain = json.loads(json.dumps(score.to_plain(), allow_nan=False))
    for key in [
        "schema",
        "target",
        "drafter",
        "runtime",
        "verify",
        "lossless",
        "temperature",
        "dtype",
        "batch",
        "machine",
        "decode",
        "replay",
        "by_domain",
        "verdict",
        "waterfall",
        "quality",
        "energy",
    ]:
        assert key in plain, key
    assert plain["lossless"] is True
    assert [r["lookahead"] for r in plain["decode"]] == [2, 4]
    assert [r["lookahead"] for r in plain["replay"]] == [1, 2, 3, 4]
    for row in plain["decode"] + plain["replay"]:
        assert set(KEYS) <= set(row)
        assert len(row["per_position"]) == row["lookahead"]
    for row in plain["decode"]:
        assert row["identical_tokens"] == row["compared_tokens"] == row["emitted"]
        assert row["first_differences"] == []
        # All prompts were decoded, so replay must have counted the very same rounds.
        twin = plain["replay"][row["lookahead"] - 1]
        for key in ("rounds", "accepted", "emitted", "per_position"):
            assert row[key] == twin[key]
        assert twin["proposed"] is None
        assert twin["speedup_measured"] is None
    assert set(plain["by_domain"]) == {"a", "b"}
    parts = plain["waterfall"]
    assert parts["draft_seconds"] > 0
    assert parts["verify_seconds"] > 0
    assert parts["overhead_seconds"] >= 0


def test_the_target_as_its_own_drafter(save: Callable[..., Path], prompts: Path) -> None:
    folder = save(make_model())
    row = scored(folder, folder, prompts, lookahead=(3,)).decode[0]
    assert row.acceptance_rate == 1.0
    assert row.per_position[0] > 0.7


def test_A2_is_told_before_any_weight_is_loaded(
    save: Callable[..., Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_tokenizer()
    plain = json.loads(other.backend_tokenizer.to_str())
    vocab = plain["model"]["vocab"]
    a, b = (next(s for s, i in vocab.items() if i == n) for n in (7, 8))
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1), name="drafter")
    vocab[a], vocab[b] = 8, 7
    (drafter / "tokenizer.json").write_text(json.dumps(plain))
    monkeypatch.setattr(
        "draftsmith.accept.pairing.load_model", lambda *a: pytest.fail("weights were loaded")
    )
    with pytest.raises(RequestError) as error:
        scored(target, drafter, prompts)
    assert "id 7" in str(error.value)
    assert repr(a) in str(error.value)
    assert repr(b) in str(error.value)


def test_a_wrong_drafter_shows_in_the_certificate(
    save: Callable[..., Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verifier that keeps everything is found out."""
    from draftsmith.accept import verify

    monkeypatch.setattr(
        verify, "greedy", lambda proposals, logits: verify.Verdict(len(proposals), 5)
    )
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    score = scored(target, drafter, prompts)
    assert score.lossless is False
    assert score.decode[0].first_differences
    assert score.decode[0].first_differences[0]["logit_gap"] > 0


def test_a_prompt_that_fills_the_context_is_named(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    folder = save(make_model(max_position_embeddings=8))
    prompts = tmp_path / "long.jsonl"
    prompts.write_text('{"text": "how"}\n{"id": "long", "text": "how many apples are left"}\n')
    with pytest.raises(RequestError, match=r"prompt long: \d+ tokens leave no room .* of 8"):
        scored(folder, folder, prompts)


LATENCY = Latency(
    ar=10e-3,
    draft=2e-3,
    draft_after_full=2.5e-3,
    verify={3: 12e-3},
    prefill_target=20e-3,
    prefill_drafter=4e-3,
)


def test_cost_model_by_hand() -> None:
    """Two texts, 60 tokens in 30 rounds of k = 3, 4 of them accepted whole.

    The prefills give the first token, the first proposal and the first verification.
    """
    counts = RoundCounts(3, rounds=30, accepted=30, emitted=60, full=4)
    alone = 2 * 20 + 58 * 10
    together = 2 * (20 + 4 + 2 * 2) + 28 * (3 * 2 + 12) + 4 * 0.5
    load = Load(prefills=2, steps=counts.emitted, rounds=counts.rounds, full=counts.full)
    assert LATENCY.speedup(load, 3) == pytest.approx(alone / together)
    assert LATENCY.round_seconds(3) / LATENCY.ar == pytest.approx(1.8)


def test_break_even_acceptance() -> None:
    """2.5 tokens a round at k = 3 are 1.5 accepted of 3 proposed."""
    assert break_even_acceptance(2.5, 3) == pytest.approx(0.5)
    assert break_even_acceptance(4.0, 3) == 1.0
    assert break_even_acceptance(4.5, 3) is None
    assert break_even_acceptance(0.5, 3) == 0.0


def test_verdicts() -> None:
    from draftsmith.accept.verdict import verdict

    def row(emitted: float, needed: float, predicted: float, measured: float | None) -> Row:
        return Row(
            lookahead=3,
            rounds=10,
            proposed=30,
            accepted=5,
            emitted=15,
            accepted_per_round=0.5,
            emitted_per_round=emitted,
            acceptance_rate=0.2,
            per_position=[0.3, 0.1, 0.1],
            t_draft_ms=1,
            t_verify_ms=12,
            t_ar_ms=10,
            break_even_emitted_per_round=needed,
            break_even_acceptance=None,
            speedup_predicted=predicted,
            speedup_measured=measured,
        )

    pays = verdict([row(2.0, 1.5, 1.3, 1.2)], [row(2.0, 1.5, 1.3, None)], on_cpu=True)
    assert pays["drafting_pays"]
    assert pays["text"].startswith("Draft with k = 3: 1.30 times")
    weak = verdict([row(1.2, 1.5, 0.8, 0.8)], [row(1.2, 1.5, 0.8, None)], on_cpu=True)
    assert not weak["drafting_pays"]
    assert "emits 1.20 tokens and costs 1.50 plain steps" in weak["text"]
    slow = verdict([row(1.2, 5.0, 0.3, 0.3)], [row(1.2, 5.0, 0.3, None)], on_cpu=True)
    assert "at every lookahead a round costs more" in slow["text"]
    assert [pays["reason"], weak["reason"], slow["reason"]] == [
        None,
        "acceptance too low",
        "draft too slow",
    ]
    # A flattering prediction alone is not enough.
    assert not verdict([row(2, 1.5, 1.3, 0.9)], [row(2, 1.5, 1.3, None)], on_cpu=True)[
        "drafting_pays"
    ]


def test_table_fits_a_hundred_columns(save: Callable[..., Path], prompts: Path) -> None:
    from io import StringIO

    from rich.console import Console

    folder = save(make_model())
    out = StringIO()
    Console(width=100, file=out).print(render(scored(folder, folder, prompts).to_plain()))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text.replace(str(folder), "")
    assert "Identical to the target's own greedy output" in text
    assert "One plain step of the target takes" in text


def test_a_lookahead_named_twice_counts_once(save: Callable[..., Path], prompts: Path) -> None:
    folder = save(make_model())
    assert [r.lookahead for r in scored(folder, folder, prompts, lookahead=(2, 2)).decode] == [2]


def test_a_prediction_that_the_measurement_does_not_bear_out() -> None:
    from draftsmith.accept.verdict import verdict

    def row(predicted: float, measured: float | None) -> Row:
        figures = dict.fromkeys(("rounds", "accepted", "t_draft_ms", "t_verify_ms", "t_ar_ms"), 1.0)
        return Row(
            **figures,  # type: ignore[arg-type]
            lookahead=3,
            proposed=3,
            emitted=2,
            accepted_per_round=1.0,
            emitted_per_round=2.0,
            acceptance_rate=0.3,
            per_position=[1.0, 0.0, 0.0],
            break_even_emitted_per_round=1.9,
            break_even_acceptance=0.3,
            speedup_predicted=predicted,
            speedup_measured=measured,
        )

    text = verdict([row(1.05, 0.98)], [row(1.05, None)], on_cpu=False)["text"]
    assert "1.05 times is predicted at k = 3, but 0.98 was measured" in text
    assert "GPU" not in text


def shown(score: Any) -> str:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    Console(width=100, file=out).print(render(score.to_plain()))
    assert max(map(len, out.getvalue().splitlines())) <= 100
    return " ".join(out.getvalue().split())


def test_sampling_is_scored_by_real_decoding_and_by_replay(
    save: Callable[..., Path], prompts: Path
) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    sampling = {"verify": "sampling", "temperature": 0.8, "top_k": 20, "decode_prompts": None}
    score = scored(target, drafter, prompts, **sampling)
    plain = json.loads(json.dumps(score.to_plain(), allow_nan=False))
    assert (plain["verify"], plain["temperature"], plain["lossless"]) == ("sampling", 0.8, True)
    assert plain["settings"]["top_k"] == 20
    for row in plain["decode"]:
        assert row["compared_tokens"] is None
        assert row["identical_tokens"] is None
        low, high = row["emitted_per_round_interval"]
        assert 1.0 <= low <= row["emitted_per_round"] <= high
    assert [row["lookahead"] for row in plain["replay"]] == [1, 2, 3, 4]
    text = shown(score)
    assert "temperature 0.8" in text
    assert "Sampled texts can't be compared" in text
    again = scored(target, drafter, prompts, **sampling)
    assert [r.accepted for r in again.decode] == [r.accepted for r in score.decode]


def test_the_target_samples_with_itself_at_full_acceptance(
    save: Callable[..., Path], prompts: Path
) -> None:
    folder = save(make_model())
    score = scored(folder, folder, prompts, verify="sampling", temperature=1.0)
    assert score.decode[0].acceptance_rate == 1.0
    assert score.replay[1].accepted_per_round == pytest.approx(
        score.decode[0].accepted_per_round, abs=0.3
    )


def test_lossy_results_say_so_everywhere(save: Callable[..., Path], prompts: Path) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    score = scored(target, drafter, prompts, verify="top_beta", beta=30, tau=9.0)
    plain = json.loads(json.dumps(score.to_plain(), allow_nan=False))
    assert plain["lossless"] is False
    assert plain["replay"] == []
    assert plain["quality"]["token_identity"] < 1.0
    assert plain["quality"]["texts"] == 3
    assert plain["verdict"]["text"].startswith("LOSSY: the output is not the target's own.")
    text = shown(score)
    assert "(LOSSY: top_beta)" in text
    assert "LOSSY (beta 30, tau 9)" in text
    exact = scored(target, drafter, prompts)
    assert exact.quality is None
    assert "LOSSY" not in shown(exact)


@pytest.mark.parametrize("batch", [2, 8])
def test_texts_scored_together_are_those_alone(
    batch: int, save: Callable[..., Path], prompts: Path
) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    alone = scored(target, drafter, prompts)
    together = scored(target, drafter, prompts, batch=batch)
    assert together.batch == batch
    assert together.lossless
    for a, b in zip(alone.decode, together.decode, strict=True):
        assert (a.rounds, a.accepted, a.emitted) == (b.rounds, b.accepted, b.emitted)
    assert f"{batch} texts together" in shown(together)
    assert together.waterfall["overhead_seconds"] >= 0


def test_prompt_lookup_needs_no_drafter(save: Callable[..., Path], prompts: Path) -> None:
    target = resolve(str(save(make_model())))
    score = score_drafter(target, "prompt-lookup", asked(prompts))
    assert score.lossless
    assert score.drafter == "prompt-lookup"
    # Nothing is drawn, so its rounds are replayed from where they begin: the very same ones.
    replayed = score.replay[2]
    for key in ("rounds", "proposed", "accepted", "emitted", "per_position"):
        assert getattr(replayed, key) == getattr(score.decode[0], key)
    assert score.kv_bytes_per_token == {"target": 2 * 4 * 4 * 2 * 8, "drafter": None}
    assert set(score.by_domain) == {"a", "b"}
    shown(score)


def test_adaptive_drafts_are_replayed_from_where_their_rounds_begin(
    save: Callable[..., Path], prompts: Path
) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    score = scored(target, drafter, prompts, confidence=0.2, decode_prompts=None)
    assert score.lossless
    assert [row.lookahead for row in score.replay] == [1, 2, 3, 4]
    assert score.decode[1].proposed < 4 * score.decode[1].rounds
    for row in score.decode:
        twin = score.replay[row.lookahead - 1]
        for key in ("rounds", "proposed", "accepted", "emitted", "per_position"):
            assert getattr(row, key) == getattr(twin, key)
    # Drawn ones stop elsewhere each time.
    drawn = {"verify": "sampling", "temperature": 1.0, "confidence": 0.2}
    assert scored(target, drafter, prompts, **drawn).replay == []


def test_a_stop_string_ends_both_ways_of_decoding(save: Callable[..., Path], prompts: Path) -> None:
    target = save(make_model(initializer_range=0.3), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    score = scored(target, drafter, prompts, stop=("e",))
    assert score.lossless
    assert score.decode[0].emitted <= scored(target, drafter, prompts).decode[0].emitted


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "exact"}, "verify: 'exact' is not among greedy, sampling, top_beta"),
        ({"warping": Warping(0.7)}, "temperature 0.7: only verify sampling draws"),
        ({"name": "top_beta", "beta": 0}, "beta 0, tau 1.0"),
        ({"name": "top_beta", "tau": float("nan")}, "beta 3, tau nan"),
    ],
    ids=str,
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Verification(**settings)


def test_load_of_batches_by_hand() -> None:
    """Groups of two go on until their longer row ends."""
    counts = [RoundCounts(3, rounds=r, emitted=2 * r, full=r / 10) for r in (10, 20, 5)]
    load = Load.of(counts, batch=2)
    assert (load.prefills, load.steps, load.rounds, load.full) == (2, 50, 25, 2.5)
    assert Load.of(counts, batch=1) == Load(3, 70, 35, 3.5)


def test_some_layers_of_the_target_draft_for_it(save: Callable[..., Path], prompts: Path) -> None:
    target = resolve(str(save(make_model())))
    score = score_drafter(target, "skip-layers:0,1,3", asked(prompts))
    assert score.lossless
    assert score.decode[0].rounds == score.replay[2].rounds
    assert score.kv_bytes_per_token["drafter"] == 2 * 4 * 3 * 2 * 8
    whole = score_drafter(target, "skip-layers:0,1,2,3", asked(prompts))
    assert whole.decode[0].acceptance_rate == 1.0
    for wrong in ("skip-layers:", "skip-layers:3,1", "skip-layers:0,4", "skip-layers:a"):
        with pytest.raises(RequestError, match="ascending numbers from 0 to 3"):
            score_drafter(target, wrong, asked(prompts))


def test_A7_low_precision_is_stated_and_its_near_ties_are_told_from_faults() -> None:
    """Two equal head rows, and two that are one bfloat16 step apart."""
    from draftsmith.accept.decode import Limits
    from draftsmith.accept.score import score_pair
    from draftsmith.accept.trial import Pair, Proposing
    from draftsmith.checkpoints.pair import SharedVocabulary
    from draftsmith.data.chat import Prompt
    from tests.unit.test_decode import prompts as random_prompts

    target = make_model().bfloat16()
    with torch.no_grad():
        head = target.lm_head.weight
        head[50] = head[40]
        head[51] = head[41] * (1 + 2**-7)
    drafter = make_model(seed=1, num_hidden_layers=2).bfloat16()
    every = SharedVocabulary(target.config.vocab_size)
    proposing = Proposing(CachedModel(drafter), every, frozenset())
    pair = Pair(CachedModel(target), proposing, every, Limits(24), lambda ids: str(ids))
    score = score_pair(
        pair,
        [
            Prompt(ids=tuple(ids), name=str(i), domain="d")
            for i, ids in enumerate(random_prompts(range(3, 9)))
        ],
        ScoreSettings(lookahead=(1, 4), replay_lookahead=2),
        Verification(),
        names={"target": "t", "drafter": "d", "dtype": "bfloat16", "machine": {}, "prompts": "p"},
    )
    assert score.dtype == "bfloat16"
    gaps = [d["logit_gap"] for row in score.decode for d in row.first_differences or ()]
    # A text may part where the block's sums round otherwise, and only at a near-tie.
    assert all(gap < 4 * 2**-7 * 16 for gap in gaps)
    assert score.lossless
    for row in score.decode:
        assert row.identical_tokens is not None
        assert (row.identical_tokens == row.compared_tokens) == (not row.first_differences)


def judged(k: int, predicted: float, measured: float | None = None, **changes: Any) -> Row:
    figures: dict[str, Any] = dict.fromkeys(("rounds", "accepted", "t_draft_ms"), 1.0)
    figures |= {"t_ar_ms": 10.0, "t_verify_ms": 10.0, "break_even_emitted_per_round": 1.9}
    figures |= {"emitted_per_round": 2.0, "break_even_acceptance": 0.3}
    return Row(
        **(figures | changes),
        lookahead=k,
        proposed=3,
        emitted=2,
        accepted_per_round=1.0,
        acceptance_rate=0.3,
        per_position=[0.5] * k,
        speedup_predicted=predicted,
        speedup_measured=measured,
    )


def test_the_verdict_is_of_the_best_lookahead() -> None:
    """Replayed where it holds; the best measurement bears it out, whichever lookahead it had."""
    from draftsmith.accept.verdict import verdict

    decode = [judged(2, 1.1, 1.2), judged(4, 1.05, 0.9)]
    replays = [judged(1, 1.0), judged(2, 1.1), judged(3, 1.3), judged(4, 1.05)]
    found = verdict(decode, replays, on_cpu=False)
    assert (found["drafting_pays"], found["lookahead"], found["speedup_predicted"]) == (
        True,
        3,
        1.3,
    )
    assert verdict(decode, [], on_cpu=False)["lookahead"] == 2
    # A measurement alone may be luck.
    found = verdict(decode, [judged(2, 0.9)], on_cpu=False)
    assert (found["drafting_pays"], found["lookahead"]) == (False, None)


@pytest.mark.parametrize(("needed", "hopeless"), [(3.5, False), (4.0, False), (4.1, True)])
def test_a_round_emits_one_more_than_it_drafts(needed: float, hopeless: bool) -> None:
    from draftsmith.accept.verdict import verdict

    row = judged(3, 0.5, 0.5, break_even_emitted_per_round=needed)
    assert ("at every lookahead" in verdict([row], [], on_cpu=False)["text"]) == hopeless


@pytest.mark.parametrize(
    ("on_cpu", "verify_ms", "told"),
    [(True, 13.0, True), (True, 11.0, False), (False, 13.0, False)],
    ids=str,
)
def test_a_slow_verification_on_a_cpu_is_told(on_cpu: bool, verify_ms: float, told: bool) -> None:
    from draftsmith.accept.verdict import verdict

    text = verdict([judged(3, 0.5, 0.5, t_verify_ms=verify_ms)], [], on_cpu=on_cpu)["text"]
    assert ("Here a verification" in text) == told
    assert not told or "a verification of 4 positions takes 1.3 plain steps" in text


class Recorder(CachedModel):
    """Remembers how many tokens each row of a forward had, and how many each held before."""

    def __init__(self, model: Any) -> None:
        self.fed: list[tuple[int, int, int]] = []
        super().__init__(model)

    def feed_rows(self, texts: Any, *, keep: int = 0, block: int = 0) -> list[torch.Tensor]:
        self.fed.append((len(texts), self.length, len(texts[0])))
        return super().feed_rows(texts, keep=keep, block=block)


@pytest.mark.parametrize("answer", [[7], [7, 8, 9, 10]], ids=len)
def test_forwards_are_timed_in_the_middle_of_an_answer(answer: list[int]) -> None:
    """Prompt, written half, one step; the drafter's steps of one and of two; k + 1 to verify."""
    target, drafter = Recorder(make_model()), Recorder(make_model(seed=1))
    latency = measure_latency(target, drafter, [4, 5, 6], answer, (2, 4), batch=2)
    assert set(latency.verify) == {2, 4}
    half = max(1, len(answer) // 2)
    full = 3 + half
    prompt = [(2, 0, 3), (2, 3, half)]
    assert target.fed[-5:] == [*prompt, (2, full, 1), (2, full, 3), (2, full, 5)]
    assert drafter.fed[-4:] == [*prompt, (2, full, 1), (2, full, 2)]


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_encoder_decoders_are_scored(family: str, save: Callable[..., Path], prompts: Path) -> None:
    """Rows are what the encoder reads; the pair shares no weight, or all of its encoder."""
    target_model = make_model(family)
    target, tokenizer = save(target_model, make_tokenizer(template=None), "target"), make_tokenizer
    drafter = save(make_model(family, seed=1), tokenizer(template=None), "drafter")
    score = scored(target, drafter, prompts, decode_prompts=None)
    assert score.lossless
    assert set(score.by_domain) == {"a", "b"}
    for row in score.decode:
        twin = score.replay[row.lookahead - 1]
        assert (row.rounds, row.accepted) == (twin.rounds, twin.accepted)
        assert row.identical_tokens == row.compared_tokens == row.emitted
    for spec in ("prompt-lookup", "skip-layers:0,2"):
        other = score_drafter(resolve(str(target)), spec, asked(prompts))
        assert other.lossless
        assert other.decode[0].rounds == other.replay[2].rounds
    assert (
        score_drafter(resolve(str(target)), "skip-layers:0,1,2,3", asked(prompts))
        .decode[0]
        .acceptance_rate
        == 1.0
    )


def test_a_source_longer_than_the_encoder_is_named(
    save: Callable[..., Path], tmp_path: Path
) -> None:
    plain = make_tokenizer(template=None)
    folder = save(make_model("bart", max_position_embeddings=8), plain)
    prompts = tmp_path / "long.jsonl"
    prompts.write_text('{"text": "how"}\n{"id": "long", "text": "how many apples are left"}\n')
    with pytest.raises(RequestError, match=r"prompt long: \d+ tokens .* context of 8"):
        scored(folder, folder, prompts)
    prompts.write_text('{"id": "none", "text": " "}\n')
    with pytest.raises(RequestError, match="is empty; fill it in"):
        scored(folder, folder, prompts)


def test_a_target_that_hears_takes_no_text(save: Callable[..., Path], prompts: Path) -> None:
    folder = save(make_model("whisper"), make_tokenizer(template=None))
    with pytest.raises(RequestError, match=r":1: a text, and the target hears sound; give `audio`"):
        scored(folder, folder, prompts)


def test_a_drafter_says_in_its_config_that_it_drafts_blocks(
    save: Callable[..., Path], prompts: Path
) -> None:
    target = save(make_model(), name="target")
    model = make_model(seed=1, num_hidden_layers=2)
    model.config.block_drafting = {"size": 4, "mask_id": 90}
    score = scored(target, save(model, name="drafter"), prompts, decode_prompts=None)
    assert score.lossless
    for row in score.decode:
        twin = score.replay[row.lookahead - 1]
        assert (row.rounds, row.proposed) == (twin.rounds, twin.proposed)
    model.config.block_drafting = {"size": 0, "mask_id": 90}
    with pytest.raises(RequestError, match=r"block_drafting is .* it holds size"):
        scored(target, save(model, name="wrong"), prompts)


def test_drafts_cost_the_passes_that_they_took() -> None:
    """A block takes one however long it is, and an unsure draft as many as it dared."""
    assert LATENCY.round_seconds(3, passes=1.5) == pytest.approx(3e-3 + 12e-3)
    block = Load(prefills=1, steps=11, rounds=4, full=0, passes=4)
    # Prompt of both, whose drafter's pass holds the first block, and three more rounds.
    assert LATENCY.speedup(block, 3) == pytest.approx((20 + 100) / (20 + 4 + 3 * 14))
    unsure = Load(prefills=1, steps=11, rounds=4, full=0, passes=7)
    assert LATENCY.speedup(unsure, 3) == pytest.approx((20 + 100) / (20 + 4 + 6 * 2 + 3 * 12))
    fixed = Load(prefills=1, steps=11, rounds=4, full=0)
    assert LATENCY.speedup(fixed, 3) == LATENCY.speedup(
        Load(prefills=1, steps=11, rounds=4, full=0, passes=12), 3
    )


def test_passes_are_counted_round_by_round() -> None:
    rounds = [Round(n, 0, 1, 0.0, 0.0, passes=p) for n, p in ((0, 1), (0, 1), (4, 4), (4, 4))]
    counts = RoundCounts.of_rounds(rounds, 4)
    assert (counts.passes, counts.passes_per_round, counts.proposed_per_round) == (10, 2.5, 2.0)
    # In a batch a round lasts as long as its longest draft.
    load = Load.of([counts, RoundCounts.of_rounds([rounds[2]] * 4, 4)], batch=2)
    assert (load.passes, load.passes_per_round) == (16, 4.0)
    assert Load.of([counts, RoundCounts(4, rounds=2, emitted=4)], batch=1).passes is None


def test_the_needed_acceptance_is_of_what_was_proposed(
    save: Callable[..., Path], prompts: Path
) -> None:
    """0.4 proposals a round, and 1.3 plain steps to pay: three quarters of them."""
    assert break_even_acceptance(1.3, 0.4) == pytest.approx(0.75)
    assert break_even_acceptance(1.3, 0.2) is None
    assert break_even_acceptance(1.0, 0.0) is None
    target = resolve(str(save(make_model())))
    for row in score_drafter(target, "prompt-lookup", asked(prompts)).decode:
        assert row.proposed is not None
        needed = row.break_even_emitted_per_round - 1.0
        rate = needed * row.rounds / row.proposed if row.proposed else None
        expected = None if rate is None or rate > 1 else max(0.0, rate)
        assert row.break_even_acceptance == pytest.approx(expected)


def test_speed_is_in_tokens_and_not_in_seconds() -> None:
    """Drawn texts differ in length: 64 tokens in 0.64 s alone, 8 in 0.12 s with drafts."""
    from draftsmith.accept.decode import Generation
    from draftsmith.accept.figures import decode_row
    from draftsmith.accept.trial import Texts
    from draftsmith.data.chat import Prompt

    drafted = Generation(tokens=[5] * 8, rounds=[Round(3, 3, 4, 0.0, 0.0)] * 2, seconds=0.12)
    texts = Texts([Generation()], {3: [[drafted]]}, alone_seconds=[0.64], alone_tokens=[64])
    sampling = Verification("sampling", Warping(1.0))
    row = decode_row(3, texts, [Prompt("a", (1,))], LATENCY, sampling, 1)
    assert row.speedup_measured == pytest.approx((8 / 0.12) / (64 / 0.64))


@pytest.mark.parametrize(
    ("steps", "reason"), [(1.33, "answers too short"), (1.2, "acceptance too low")]
)
def test_the_verdict_compares_what_a_round_replaces(steps: float, reason: str) -> None:
    """In a batch that is what its longest row does, not what each row emits."""
    from draftsmith.accept.verdict import verdict

    changes = {"steps_per_round": steps, "break_even_emitted_per_round": 1.3}
    found = verdict([judged(3, 0.8, 0.8, **changes)], [], on_cpu=False)
    assert found["reason"] == reason
    assert ("uses up" in found["text"]) == (reason == "answers too short")


def test_generation_settings_hold_for_target_and_drafter(
    save: Callable[..., Path], prompts: Path
) -> None:
    """Tokens that are never said, or never first, by whoever says them."""
    model = make_model()
    free = scored(save(model, name="free"), save(model, name="d"), prompts)
    said = [t["token"] for t in free.rejected]
    assert said == []
    from draftsmith.accept.pairing import Request

    target = save(model, name="target")
    path = target / "generation_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(
            config
            | {"suppress_tokens": [30], "bad_words_ids": [[31], [32, 33], [-1]]}
            | {"begin_suppress_tokens": [34, 500]}
        )
    )
    pair = Request.of(resolve(str(target)), resolve(str(target))).load(asked(prompts))
    assert {30, 31} <= set(pair.allowed.holes)
    assert {30, 31} <= set(pair.proposing.vocabulary.holes)
    assert {32, -1}.isdisjoint(pair.allowed.holes)
    assert pair.limits.never_first == {34, 500}
    opened = pair.limits.open(torch.zeros(3, 96), emitted=0)
    assert torch.isneginf(opened).nonzero().tolist() == [[0, 34]]
    assert not torch.isneginf(pair.limits.open(torch.zeros(3, 96), emitted=1)).any()


@pytest.mark.parametrize(
    ("emitted", "draft_ms", "verify_ms", "reason", "told"),
    [
        (2.0, 4.0, 12.0, "acceptance too low", "a drafter step at most 2.7 ms, not 4.0"),
        (2.0, 12.0, 12.0, "draft too slow", "a drafter step at most 9.3 ms, not 12.0"),
        (2.0, 1.0, 45.0, "verification too slow", "a verification takes 45.0 ms"),
        (1.1, 4.0, 12.0, "acceptance too low", "a verification takes 12.0 ms, 1.10 plain steps"),
    ],
)
def test_the_verdict_says_what_would_have_to_change(
    emitted: float, draft_ms: float, verify_ms: float, reason: str, told: str
) -> None:
    """K = 3 and a plain step of 10 ms: the draft may take what the emitted tokens leave."""
    from draftsmith.accept.verdict import verdict

    needed = (3 * draft_ms + verify_ms) / 10.0
    row = judged(
        3,
        0.9,
        0.9,
        emitted_per_round=emitted,
        t_draft_ms=draft_ms,
        t_verify_ms=verify_ms,
        break_even_emitted_per_round=needed,
        break_even_acceptance=break_even_acceptance(needed, 3),
    )
    found = verdict([row], [], on_cpu=False)
    assert (found["drafting_pays"], found["reason"]) == (False, reason)
    assert told in found["text"]
    if reason == "acceptance too low":
        assert "to 47% of proposals" in found["text"]


def test_samples_are_compared_and_stand_in_the_certificate(
    save: Callable[..., Path], prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save(make_model(), name="target")
    drafter = save(make_model(seed=1, num_hidden_layers=2), name="drafter")
    drawn = {"verify": "sampling", "temperature": 1.0, "samples": 8, "mode": "decode"}
    score = scored(target, drafter, prompts, **drawn)
    assert score.samples is not None
    assert (score.samples["prompts"], score.samples["samples"]) == (3, 8)
    assert score.lossless
    assert "no difference shows (permutation test" in shown(score)
    # A target that takes whatever is proposed is found out.
    from draftsmith.accept import verify

    monkeypatch.setattr(
        verify,
        "sampling",
        lambda draft, p, generator: verify.Verdict(len(draft.tokens), int(p[-1].argmax())),
    )
    faulty = scored(target, drafter, prompts, **(drawn | {"samples": 16}))
    assert not faulty.lossless
    assert "they DIFFER: a fault" in shown(faulty)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"temperature": 1e-6, "samples": 9}, "nothing is drawn"), ({"samples": 2}, "take 4 or more")],
)
def test_a_comparison_that_could_tell_nothing_is_refused_before_anything_is_loaded(
    settings: dict[str, Any],
    message: str,
    save: Callable[..., Path],
    prompts: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save(make_model())
    monkeypatch.setattr(
        "draftsmith.accept.pairing.load_model", lambda *a: pytest.fail("weights were loaded")
    )
    drawn: dict[str, Any] = {"verify": "sampling", "temperature": 1.0} | settings
    with pytest.raises(RequestError, match=message):
        scored(folder, folder, prompts, **drawn)


@pytest.mark.parametrize("family", ["bart", "marian", "t5"])
def test_A11_an_encoder_decoder_of_a_short_context_drafts_up_to_it(
    family: str, save: Callable[..., Path], tmp_path: Path
) -> None:
    """Its decoder's places end in the middle of a text, or its encoder can't hold the source."""
    plain = make_tokenizer(template=None)
    short = {} if family == "t5" else {"max_position_embeddings": 16}
    target = save(make_model(family), plain, "target")
    drafter = save(make_model(family, seed=1, **short), plain, "drafter")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"text": "how"}\n{"text": "a list"}\n{"text": "she has"}\n')
    long = {"max_new_tokens": 40, "decode_prompts": None}
    for batch in (1, 3):
        score = scored(target, drafter, prompts, **long, batch=batch)
        assert score.lossless
        assert score.decode[1].rounds == score.replay[3].rounds
    prompts.write_text(json.dumps({"id": "long", "text": "how many apples " * 9}) + "\n")
    if short:
        with pytest.raises(RequestError, match=r"prompt long: .* no room in the drafter's"):
            scored(target, drafter, prompts)


def test_lookaheads_past_the_context_are_timed_within_it(
    save: Callable[..., Path], prompts: Path
) -> None:
    folder = save(make_model(max_position_embeddings=48))
    score = scored(folder, folder, prompts, lookahead=(60,), mode="decode")
    assert score.lossless
    assert score.decode[0].t_verify_ms > 0


def test_a_target_that_writes_in_a_vocabulary_of_its_own(
    save: Callable[..., Path], prompts: Path
) -> None:
    """Marian with 96 tokens to read and 120, or 40, to write: its output is transformers' own."""
    plain = make_tokenizer(template=None)
    for size in (120, 40):
        own = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": size}
        model = make_model("marian", **own)
        target = save(model, plain, f"target{size}")
        from draftsmith.accept.pairing import Request

        settings = asked(prompts, decode_prompts=1)
        request = Request.of(resolve(str(target)), "prompt-lookup")
        pair, (prompt, *_) = request.load(settings), request.prompts(settings)
        assert pair.allowed.size == size
        from draftsmith.accept.decode import greedy_decode

        ours = greedy_decode(pair.target, prompt.ids, pair.limits, pair.allowed, prompt.source)
        theirs = model.generate(
            torch.tensor([prompt.source]), max_new_tokens=16, do_sample=False, num_beams=1
        )
        assert theirs[0, 1:].tolist()[: len(ours.tokens)] == ours.tokens
        assert score_drafter(resolve(str(target)), "prompt-lookup", settings).lossless


def test_copies_end_before_what_must_not_be_said() -> None:
    from draftsmith.accept.drafters import PromptLookup
    from draftsmith.checkpoints.pair import SharedVocabulary

    lookup = PromptLookup(frozenset(), SharedVocabulary(50, holes=(7,)))
    assert lookup.propose([[1, 2, 9, 7, 8, 1, 2]], [4])[0].tokens == [9]
    assert lookup.propose([[1, 2, 9, 60, 8, 1, 2]], [4])[0].tokens == [9]


def test_sampled_replay_knows_what_no_text_begins_with() -> None:
    """Over the first token, kept proposals are as likely as their sum of min(p, q) says."""
    from draftsmith.accept.decode import Limits
    from draftsmith.accept.replay import sampling_acceptance, text_logprobs
    from draftsmith.checkpoints.pair import SharedVocabulary

    every, warm = SharedVocabulary(96), Warping(1.0)
    target, drafter = CachedModel(make_model()), CachedModel(make_model(seed=1))
    target.reset()
    logits = target.feed_list([5, 6, 7], keep=1)
    likely = frozenset(logits[0].topk(4).indices.tolist())
    limits = Limits(1, never_first=likely)
    p = warm.probabilities(limits.open(logits, 0))[0].double()
    drafter.reset()
    q = warm.probabilities(drafter.feed_list([5, 6, 7], keep=1))[0].double()
    kept = 0.0
    for token in range(96):
        if token in likely:
            continue
        logprobs = text_logprobs(target, [5, 6, 7], [token], every, warm, limits=limits)
        w = sampling_acceptance(drafter, [5, 6, 7], [token], logprobs, every, warm)
        kept += float(p[token] * w[0])
    assert kept == pytest.approx(float(torch.minimum(p, q).sum()), abs=1e-4)
