"""Parallel heads: exact with any target, made of the right state, trained, saved, scored."""

import json
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.accept.cache import Source, cached
from draftsmith.accept.decode import (
    Generation,
    Limits,
    decode_batch,
    greedy_decode,
    speculative_decode,
)
from draftsmith.accept.heads import FILE, WEIGHTS, HeadsConfig, HeadsDrafter, ParallelHeads
from draftsmith.accept.replay import RoundCounts
from draftsmith.accept.replaying import Replayable, replay_all
from draftsmith.accept.score import score_drafter
from draftsmith.accept.verify import Greedy, Sampling
from draftsmith.accept.warping import Warping
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.heads import head_logits
from draftsmith.checkpoints.pair import SharedVocabulary
from draftsmith.checkpoints.shape import shape_of
from draftsmith.data.traces import TraceRow, TraceStore, write_index, write_shard
from draftsmith.distill.batches import collate
from draftsmith.distill.heads import HeadsStudent, ahead, train_heads
from draftsmith.errors import RequestError
from draftsmith.recipes.schema import DistillSettings, ScoreSettings
from tests.conftest import TINY_VOCAB, killed_after, make_model, make_tokenizer
from tests.unit.test_decode import prompts
from tests.unit.test_encoder_decoder import START, sources

ALL = SharedVocabulary(TINY_VOCAB)
TARGETS = ("bart", "llama", "marian", "t5", "whisper")
LENGTHS = (3, 9, 17, 1)
HEADS = 3
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/seq2seq/train_heads.py"


def new_heads(model: Any, count: int = HEADS, seed: int | None = 0) -> ParallelHeads:
    """Heads that say something of their own, or (seed None) what new ones say."""
    family = families()[model.config.model_type]
    torch.manual_seed(seed or 0)
    heads = ParallelHeads(HeadsConfig.of("target", shape_of(model.config, family), count))
    if seed is not None:
        with torch.no_grad():
            for parameter in heads.parameters():
                parameter.normal_(std=0.3)
    return heads


def drafter_of(target: Any, heads: ParallelHeads, limits: Limits) -> HeadsDrafter:
    return HeadsDrafter(target, heads, ALL, limits.stop_ids)


def inputs(
    family: str, lengths: Sequence[int], seed: int = 0
) -> tuple[list[list[int]], list[Source]]:
    """Prompts, and what encoders read where there is one."""
    if families()[family].has_encoder:
        return [START] * len(lengths), sources(family, lengths, seed)
    return prompts(lengths, seed), []


def together(
    model: Any,
    heads: ParallelHeads,
    texts: Sequence[Sequence[int]],
    read: Sequence[Source],
    k: int,
    limits: Limits,
) -> list[Generation]:
    target = cached(model)
    return decode_batch(
        target,
        drafter_of(target, heads, limits),
        texts,
        k,
        limits,
        ALL,
        verifiers=[Greedy()] * len(texts),
        seeds=[0] * len(texts),
        sources=read,
    )


def alone(
    model: Any, text: Sequence[int], source: Source | None, limits: Limits, **heads: Any
) -> Generation:
    """One text, by plain decoding or (with `heads` and `k`) in rounds."""
    target = cached(model)
    if not heads:
        return greedy_decode(target, text, limits, ALL, source)
    drafter = drafter_of(target, heads["heads"], limits)
    return speculative_decode(target, drafter, text, heads["k"], limits, ALL, source=source)


def rounds_of(generation: Generation) -> list[tuple[int, int, int, int]]:
    return [(r.proposed, r.accepted, r.emitted, r.passes) for r in generation.rounds]


def uncached_states(model: Any, text: Sequence[int], source: Source | None) -> torch.Tensor:
    """The target's last states, [T, H], by one plain pass; by hooks on nothing."""
    ids = torch.tensor([list(text)])
    if source is None:
        return model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
    heard = isinstance(source, torch.Tensor)
    given_ = source if heard else torch.tensor(list(source))
    encoder = model.get_encoder()
    encoded = encoder(**{"input_features" if heard else "input_ids": given_[None]})
    decoded = model.get_decoder()(
        input_ids=ids, encoder_hidden_states=encoded.last_hidden_state, use_cache=False
    )
    return decoded.last_hidden_state[0]


def rows_of(model: Any, family: str, lengths: Sequence[int], new: int, seed: int) -> list[TraceRow]:
    """Greedy traces of the target, with its four likeliest tokens."""
    rows = []
    texts, read = inputs(family, lengths, seed)
    for i, text in enumerate(texts):
        source = read[i] if read else None
        answer = alone(model, text, source, Limits(new)).tokens
        whole = [*text, *answer]
        target = cached(model)
        target.reset(sources=() if source is None else [source])
        with torch.inference_mode():
            logits = target.feed_list(whole[:-1], keep=len(answer))
        top = logits.log_softmax(-1).topk(4)
        rows.append(
            TraceRow(
                np.array(whole, np.int32),
                len(text),
                sampled=False,
                logprobs=top.values[:, 0].numpy(),
                top_ids=top.indices.numpy().astype(np.uint16),
                top_logprobs=top.values.numpy().astype(np.float16),
                source=None if source is None else np.array(source, np.int32),
            )
        )
    return rows


def learned(model: Any, rows: Sequence[TraceRow], state: Path, **changes: Any) -> Any:
    """Heads that were trained, and the loss of each step."""
    heads = new_heads(model, seed=None)
    asked: dict[str, Any] = {"steps": 60, "batch": 4, "lr": 1e-2, "warmup": 2, "loss": "sequence"}
    losses = train_heads(
        model, heads, rows, DistillSettings(**(asked | changes)), seed=0, state=state
    )
    return heads, losses


# --- the projection and the states


@pytest.mark.parametrize("options", [{}, {"final_logit_softcapping": 2.0}])
def test_heads_speak_through_the_targets_own_projection(
    family_name: str, options: dict[str, float]
) -> None:
    """Head 0, which adds nothing, gives the target's logits: bias, scale and bound included."""
    if options and not family_name.startswith("gemma"):
        options = {"tie_word_embeddings": True}
    model = make_model(family_name, **options)
    texts, read = inputs(family_name, [5])
    target = cached(model)
    target.reset(1, read)
    target.keep_states()
    with torch.inference_mode():
        logits_V = target.feed_list(texts[0], keep=1)[-1]
        (state,) = target.last_states()
        assert state is not None
        torch.testing.assert_close(head_logits(model, target.family, state), logits_V)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_states_follow_their_rows(family: str) -> None:
    """Through shortening, leaving and waiting; of what the last pass did not read there is none."""
    model = make_model(family)
    _, read = inputs(family, LENGTHS[:3])
    texts = prompts([4, 2, 6], seed=1)
    target = cached(model)
    target.reset(3, read)
    target.keep_states()
    assert target.last_states() == [None] * 3
    with torch.inference_mode():
        target.feed_rows(texts, keep=1)
        target.truncate([3, 2, 5])
        target.select([2, 0])
        for row, state, length in zip((2, 0), target.last_states(), (5, 3), strict=True):
            own = uncached_states(model, texts[row][:length], read[row] if read else None)[-1]
            torch.testing.assert_close(state, own)
        target.feed_rows([[], [7]], keep=1)
        waiting, fed = target.last_states()
        assert waiting is None
        own = uncached_states(model, [*texts[0][:3], 7], read[0] if read else None)[-1]
        torch.testing.assert_close(fed, own)
        target.truncate([5, 3])
    assert target.last_states() == [None, None]


@pytest.mark.parametrize("family", TARGETS)
def test_proposals_are_those_of_an_uncached_pass(family: str) -> None:
    """In ragged batches whose rows leave at different times, of the state before the last token."""
    model = make_model(family)
    heads, limits = new_heads(model), Limits(14, frozenset({5, 40, 41, 42, 60}))
    texts, read = inputs(family, LENGTHS)
    target = cached(model)
    drafter, seen = drafter_of(target, heads, limits), []
    propose = drafter.propose

    def watched(texts: Any, lookaheads: Any) -> Any:
        drafts = propose(texts, lookaheads)
        seen.extend(
            (list(text), k, draft) for text, k, draft in zip(texts, lookaheads, drafts, strict=True)
        )
        return drafts

    drafter.propose = watched  # type: ignore[method-assign]
    rows = decode_batch(
        target,
        drafter,
        texts,
        HEADS,
        limits,
        ALL,
        verifiers=[Greedy()] * len(texts),
        seeds=[0] * len(texts),
        sources=read,
    )
    by_row = {
        i: [*text, *row.tokens] for i, (text, row) in enumerate(zip(texts, rows, strict=True))
    }
    checked = 0
    for text, k, draft in seen[len(texts) :]:
        assert draft.q is None
        owners = [i for i, whole in by_row.items() if whole[: len(text)] == text]
        with torch.inference_mode():
            options = []
            for i in owners:
                state = uncached_states(model, text, read[i] if read else None)[-2]
                said = head_logits(model, target.family, heads(state)).argmax(-1).tolist()[:k]
                end = next((n for n, t in enumerate(said, 1) if t in limits.stop_ids), len(said))
                options.append(said[:end])
        assert draft.tokens in options
        checked += len(draft.tokens)
    assert checked > 20
    assert all(not draft.tokens for _, _, draft in seen[: len(texts)]), "no state as yet"


# --- exactness


@pytest.mark.parametrize("family", TARGETS)
def test_A10_ragged_batches_are_those_alone(family: str, tmp_path: Path) -> None:
    """Heads that know some of the texts, so that rows accept different amounts."""
    model, limits = make_model(family), Limits(24, frozenset({5, 40, 41, 42, 60}))
    texts, read = inputs(family, LENGTHS)
    heads = new_heads(model)
    if family != "whisper":
        heads, _ = learned(model, rows_of(model, family, LENGTHS[:3], 16, 0), tmp_path)
    accepted = set()
    for k in (1, 3, 5):
        for i, row in enumerate(together(model, heads, texts, read, k, limits)):
            source = read[i] if read else None
            assert row.tokens == alone(model, texts[i], source, limits).tokens
            single = alone(model, texts[i], source, limits, heads=heads, k=k)
            assert rounds_of(row) == rounds_of(single)
            assert row.rounds[0].proposed == 0
            accepted |= {r.accepted for r in row.rounds}
    assert len(accepted) > 2 or family == "whisper"
    assert max(accepted) <= HEADS


@settings(max_examples=12, deadline=None)
@given(
    family=st.sampled_from(TARGETS),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    k=st.integers(1, HEADS + 2),
    new=st.integers(1, 20),
    stops=st.sets(st.integers(3, TINY_VOCAB - 1), max_size=12),
    seed=st.integers(0, 9),
)
def test_random_heads_change_no_token_and_are_replayed(
    family: str, lengths: list[int], k: int, new: int, stops: set[int], seed: int
) -> None:
    model, limits = make_model(family, seed=seed % 3), Limits(new, frozenset(stops))
    heads = new_heads(model, seed=seed or None)
    texts, read = inputs(family, lengths, seed)
    for i, row in enumerate(together(model, heads, texts, read, k, limits)):
        source = read[i] if read else None
        assert row.tokens == alone(model, texts[i], source, limits).tokens
        target = cached(model)
        text = Replayable(texts[i], row.tokens, limits.room(texts[i], target.context))
        text = replace(text, source=source)  # type: ignore[arg-type]
        drafter = drafter_of(target, heads, limits)
        found = replay_all(drafter, [text], Warping(), [1, k], target.context)
        assert found[k] == [RoundCounts.of_rounds(row.rounds, k)]


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_texts_reach_the_end_of_the_context(family: str) -> None:
    model = make_model(family, max_position_embeddings=24)
    limits = Limits(100)
    texts, read = inputs(family, [3, 9])
    for i, row in enumerate(together(model, new_heads(model), texts, read, HEADS, limits)):
        assert row.tokens == alone(model, texts[i], read[i] if read else None, limits).tokens
        assert len(texts[i]) + len(row.tokens) == 24


def test_sampling_with_heads_is_distributed_as_the_target(tmp_path: Path) -> None:
    """The third token of 3,000 texts with drafts against its exact distribution."""
    from scipy.stats import chisquare

    warm = Warping(0.3)
    model, limits = make_model("t5", vocab_size=6), Limits(3)
    (source,) = [[3, 4, 5]]
    vocabulary = SharedVocabulary(6)
    heads = new_heads(model)
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    target = cached(model)
    for _ in range(3):
        longer = {}
        for said, p in expected.items():
            target.reset(1, [source])
            with torch.inference_mode():
                q = warm.probabilities(target.feed_list([*START, *said], keep=1))[0]
            longer |= {(*said, t): p * float(q[t]) for t in range(6)}
        expected = longer
    drafter = HeadsDrafter(target, heads, vocabulary, frozenset())
    counts = dict.fromkeys(expected, 0)
    texts, accepted = 3000, 0
    for first in range(0, texts, 500):
        rows = decode_batch(
            target,
            drafter,
            [START] * 500,
            2,
            limits,
            vocabulary,
            verifiers=[
                Sampling(warm, torch.Generator().manual_seed(first + i)) for i in range(500)
            ],
            seeds=range(500),
            sources=[source] * 500,
        )
        for row in rows:
            counts[tuple(row.tokens)] += 1
            accepted += sum(r.accepted for r in row.rounds)
    assert accepted > 100
    likely = [said for said, p in expected.items() if p * texts >= 5]
    found = [counts[said] for said in likely]
    wanted = [expected[said] * texts for said in likely]
    rest = texts - sum(found), texts - sum(wanted)
    assert chisquare([*found, rest[0]], [*wanted, rest[1]]).pvalue > 1e-3


def test_plain_decoding_keeps_no_states() -> None:
    model = make_model("t5")
    target = cached(model)
    alone_tokens = greedy_decode(target, START, Limits(4), ALL, [3, 4]).tokens
    drafter = drafter_of(target, new_heads(model), Limits(4))
    speculative_decode(target, drafter, START, 2, Limits(4), ALL, source=[3, 4])
    assert greedy_decode(target, START, Limits(4), ALL, [3, 4]).tokens == alone_tokens
    assert target.last_states() == [None]
    assert not model.get_decoder()._forward_hooks


# --- training


@pytest.mark.parametrize("loss", ["sequence", "forward_kl"])
def test_each_head_learns_the_token_that_is_its_distance_ahead(loss: str) -> None:
    """By hand: the sum over heads and places of −log q of what the trace says there.

    Each token of the answers stands once; the target is sure of the token above the written one.
    """
    model, sure = make_model("marian"), 0 if loss == "sequence" else 1
    rows = [
        certain(answer, sure, source)
        for answer, source in (([10, 20, 30, 40, 50], 7), ([60, 70], 8))
    ]
    heads, batch = new_heads(model), collate(rows, 64)
    student = HeadsStudent(model, heads, DistillSettings(loss=loss), torch.float32)  # type: ignore[arg-type]
    total, pairs = 0.0, 0
    for row in rows:
        assert row.source is not None
        states = uncached_states(model, row.tokens.tolist(), row.source.tolist())
        for place in range(len(row.answer)):
            logits = head_logits(model, families()["marian"], heads(states[place]))
            for head, logprobs in enumerate(logits.log_softmax(-1), start=1):
                if place + head < len(row.answer):
                    total -= float(logprobs[row.answer[place + head] + sure].detach())
                    pairs += 1
    assert student.pairs(batch) == pairs == 4 + 3 + 2 + 1
    assert float(student(batch).detach()) == pytest.approx(total, rel=1e-4)
    assert ahead(batch, 2).tolist() == [0, 1, 2]


def certain(answer: list[int], above: int, source: int) -> TraceRow:
    """A trace whose target knows one token alone at each place."""
    top_ids = np.array(answer, np.uint16)[:, None] + np.uint16(above)
    none = np.zeros(len(answer), np.float32)
    return TraceRow(
        np.array([*START, *answer], np.int32),
        len(START),
        sampled=False,
        logprobs=none,
        top_ids=top_ids,
        top_logprobs=none[:, None].astype(np.float16),
        source=np.array([source, 5, source], np.int32),
    )


@pytest.mark.parametrize("loss", ["sequence", "forward_kl"])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_trained_heads_lose_less_and_are_accepted(family: str, loss: str, tmp_path: Path) -> None:
    model, limits = make_model(family), Limits(16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    rows = rows_of(model, family, LENGTHS, 16, 0)
    heads, losses = learned(model, rows, tmp_path, loss=loss)
    assert len(losses) == 60
    assert losses[-1] < 0.3 * losses[0]
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    texts, read = inputs(family, LENGTHS)
    made = together(model, heads, texts, read, HEADS, limits)
    untrained = together(model, new_heads(model, seed=None), texts, read, HEADS, limits)

    def kept(texts: Sequence[Generation]) -> int:
        return sum(r.accepted for text in texts for r in text.rounds)

    assert kept(made) > kept(untrained) + 10


def test_a_killed_training_goes_on_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("t5")
    rows = rows_of(model, "t5", LENGTHS, 8, 0)
    asked: dict[str, Any] = {"steps": 9, "save_every": 3, "batch": 2, "accumulate": 2}
    whole, losses = learned(model, rows, tmp_path / "whole", **asked)
    with killed_after(5, monkeypatch):
        learned(model, rows, tmp_path / "killed", **asked)
    again, resumed = learned(model, rows, tmp_path / "killed", **asked)
    assert resumed == losses
    for name, tensor in whole.state_dict().items():
        assert tensor.equal(again.state_dict()[name]), name


def test_answers_of_one_token_teach_heads_nothing(tmp_path: Path) -> None:
    model = make_model("t5")
    rows = rows_of(model, "t5", [3], 1, 0)
    with pytest.warns(UserWarning, match="no answer token"):
        heads, losses = learned(model, rows, tmp_path, steps=2, batch=1)
    assert losses == [0.0, 0.0]
    assert not any(head[-1].weight.any() for head in heads.heads)


# --- folders


def saved(folder: Path, model: Any, **changes: Any) -> Path:
    heads = new_heads(model)
    heads.config = replace(heads.config, **changes)
    folder.mkdir(exist_ok=True)
    heads.save(folder)
    return folder


def test_heads_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make_model("t5")
    folder = saved(tmp_path, model, target="org/target")
    heads, read = new_heads(model), ParallelHeads.load(folder)
    assert read.config == HeadsConfig("org/target", HEADS, 32, 48, TINY_VOCAB)
    states = torch.randn(2, 32)
    assert heads(states).equal(read(states))
    assert heads(states).shape == (2, HEADS, 32)
    about = json.loads((folder / FILE).read_text())
    assert about == {
        "format": "draftsmith-heads",
        "version": 1,
        "target": "org/target",
        "heads": 3,
        "hidden": 32,
        "ffn": 48,
        "vocabulary": TINY_VOCAB,
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": "draftsmith-heads", "version": 2}', "version 2; this draftsmith reads"),
        ('{"format": "draftsmith-heads", "version": 1}', "damaged"),
        (
            '{"format": "draftsmith-heads", "version": 1, "target": "a", "heads": 0, "hidden": 1, '
            '"ffn": 1, "vocabulary": 1}',
            "heads is 0",
        ),
    ],
)
def test_damaged_folders_are_told(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / FILE).write_text(content)
    with pytest.raises(RequestError, match=message):
        ParallelHeads.load(tmp_path)


def test_weights_that_are_not_of_the_config_are_told(tmp_path: Path) -> None:
    folder = saved(tmp_path, make_model("t5"), ffn=16)
    with pytest.raises(RequestError, match=r"heads\.safetensors: damaged, or not of heads\.json"):
        ParallelHeads.load(folder)
    (folder / WEIGHTS).write_bytes(b"xx")
    with pytest.raises(RequestError, match=r"heads\.safetensors: damaged"):
        ParallelHeads.load(folder)


# --- the score


@pytest.fixture
def asked(tmp_path: Path) -> ScoreSettings:
    file = tmp_path / "prompts.jsonl"
    texts = ("how many apples", "she has nine", "write a list")
    file.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return ScoreSettings(
        prompts=str(file), max_new_tokens=12, lookahead=(1, 3), replay_lookahead=4, batch=2
    )


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_a_folder_of_heads_is_scored(
    family: str, save: Callable[..., Path], asked: ScoreSettings, tmp_path: Path
) -> None:
    model = make_model(family)
    target = save(model, name="target")
    folder = saved(tmp_path / "heads", model, target=str(target))
    score = score_drafter(resolve(str(target)), str(folder), asked)
    assert score.lossless is True
    assert score.drafter == str(folder)
    assert [row.lookahead for row in score.replay] == [1, 2, 3]
    for row in score.decode:
        assert row.t_draft_ms is not None
        assert row.t_draft_ms > 0
        twin = score.replay[row.lookahead - 1]
        assert (row.rounds, row.accepted, row.proposed) == (
            twin.rounds,
            twin.accepted,
            twin.proposed,
        )
    with pytest.raises(RequestError, match=r"lookahead 4: .* proposes 3 tokens a round at most"):
        score_drafter(resolve(str(target)), str(folder), replace(asked, lookahead=(4,)))
    drawn = replace(asked, verify="sampling", temperature=1.0, batch=1)
    assert score_drafter(resolve(str(target)), str(folder), drawn).replay


def test_the_command_line_takes_a_folder_of_heads(
    save: Callable[..., Path], asked: ScoreSettings, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from draftsmith.cli import app

    model = make_model("t5")
    target = save(model, name="target")
    folder = saved(tmp_path / "heads", model)
    out = tmp_path / "score.json"
    command = ["score", str(folder), "--target", str(target), "--prompts", asked.prompts]
    command += ["--max-new-tokens", "6", "-k", "2", "--json", str(out)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_text())["lossless"] is True
    assert "the heads were trained on target, not on" in result.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 48}, "heads for a target of width 32, but .* has 48"),
        ({"vocab_size": 128}, "heads for a target of vocabulary 96, but .* has 128"),
    ],
)
def test_heads_of_another_target_are_refused(
    save: Callable[..., Path],
    asked: ScoreSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, int],
    message: str,
) -> None:
    folder = saved(tmp_path / "heads", make_model("t5"))
    target = save(make_model("t5", **changes), name="target")
    monkeypatch.setattr(
        "draftsmith.accept.pairing.load_model", lambda *a: pytest.fail("weights were loaded")
    )
    with pytest.raises(RequestError, match=message):
        score_drafter(resolve(str(target)), str(folder), asked)


def test_the_script_trains_heads_on_a_runs_traces(
    save: Callable[..., Path],
    asked: ScoreSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What comes out is scored beside the target; traces alone do not do, for heads need it."""
    model, traces = make_model("llama"), tmp_path / "run/traces"
    target = save(model, name="target")
    traces.mkdir(parents=True)
    write_shard(traces, 0, rows_of(model, "llama", LENGTHS, 8, 0))
    about = {"target": str(target), "validation_share": 0.0, "top_n": 4, "temperature": 1.0}
    vocabulary = len(make_tokenizer().get_vocab())
    write_index(traces, [0], {**about, "vocabulary": vocabulary, "max_new_tokens": 8})
    out = tmp_path / "heads"
    command = [str(SCRIPT), str(traces.parent), "--heads", "2", "--steps", "8", "--warmup", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--batch", "4", "--out", str(out)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (figures["heads"], figures["steps"], figures["target"]) == (2, 8, str(target))
    assert figures["minutes"] > 0
    assert sorted(p.name for p in out.iterdir()) == [FILE, WEIGHTS]
    assert not list(tmp_path.glob("heads-*"))
    assert ParallelHeads.load(out).heads[1][-1].weight.any()
    store = TraceStore(traces)
    asked = replace(asked, lookahead=(2,))
    both = score_drafter(resolve(str(target)), str(out), asked, traces=store)
    assert both.replay
    with pytest.raises(RequestError, match="drafts with the target, which a replay of traces"):
        score_drafter(resolve(str(target)), str(out), replace(asked, mode="replay"), traces=store)
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "exists; give another --out" in capsys.readouterr().err
