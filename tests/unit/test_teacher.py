"""A live target as teacher: its logits, its layers, and the drafter's own rounds."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.shape import shape_of
from draftsmith.checkpoints.slicing import Selection, compact_model
from draftsmith.distill.batches import Batch, BatchStream, collate
from draftsmith.distill.engine import Ranks, TorchEngine
from draftsmith.distill.evaluation import Costs
from draftsmith.distill.lessons import Lessons
from draftsmith.distill.logs import LOGS, Logs
from draftsmith.distill.losses import TargetLogits, forward_kl
from draftsmith.distill.rounds import OwnRounds
from draftsmith.distill.states import states_at_answers
from draftsmith.distill.teacher import Lesson, Teacher
from draftsmith.distill.train import Student, distill, loss_head, mean_over_step
from draftsmith.errors import RequestError
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, _teacher, check, run_stages
from draftsmith.recipes.schema import DistillSettings
from tests.conftest import CAUSAL, make_model
from tests.unit.test_batches import trace_rows

LIVE = DistillSettings(
    teacher="live", steps=6, warmup=1, batch=2, lr=1e-2, evaluate_every=3, save_every=2
)


def logits_at_answers(model: Any, batch: Batch) -> torch.Tensor:
    with torch.inference_mode():
        logits = model(input_ids=batch.ids, attention_mask=batch.mask).logits
    return logits.flatten(0, 1)[batch.positions]


def student_of(model: Any, settings: DistillSettings, teacher: Teacher | None = None) -> Student:
    ids = None if teacher is None else teacher.vocabulary
    return Student(model, loss_head(model, [], settings, ids), torch.float32, 1.0)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_live_target_gives_the_divergence_of_whole_distributions(family: str) -> None:
    """Whatever a family does to its logits: bounds and biases of a head included."""
    options: dict[str, Any] = {"final_logit_softcapping": 2.0} if family == "gemma3_text" else {}
    target, drafter = make_model(family, **options), make_model(family, seed=1, **options)
    batch, teacher = collate(trace_rows(3), max_length=16), Teacher(target)
    found = student_of(drafter, LIVE, teacher)(batch, teacher(batch))
    pair = TargetLogits(logits_at_answers(target, batch)).against(logits_at_answers(drafter, batch))
    expected, _ = forward_kl(pair)
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize(("ours", "theirs"), [(96, 104), (104, 96)])
def test_A26_a_live_target_that_pads_its_vocabulary_otherwise(ours: int, theirs: int) -> None:
    """Only ids that both have count, whatever the others' logits say."""
    target, drafter = make_model(vocab_size=theirs), make_model(seed=1, vocab_size=ours)
    batch = collate([replace(row, tokens=row.tokens % 96) for row in trace_rows(4)], 16)
    teacher = Teacher(target)
    found = student_of(drafter, LIVE, teacher)(batch, teacher(batch))
    p, q = (logits_at_answers(m, batch)[:, :96] for m in (target, drafter))
    expected, _ = forward_kl(TargetLogits(p).against(q))
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


def cut(source: Any, layers: tuple[int, ...], hidden: int | None = None) -> tuple[Any, Selection]:
    """A drafter of some layers, and of the first dimensions of the residual stream."""
    family = families()["llama"]
    selection = Selection.of_layers(shape_of(source.config, family), layers)
    if hidden is not None:
        selection = replace(selection, hidden=tuple(range(1, hidden + 1)))
    return compact_model(source, family, selection), selection


@pytest.mark.parametrize("hidden", [None, 24])
def test_layers_should_read_what_they_read_in_the_target(hidden: int | None) -> None:
    """The drafter's second layer is the target's fourth, and should read what that one reads."""
    source = make_model()
    drafter, selection = cut(source, (0, 3), hidden)
    batch, teacher = collate(trace_rows(3), max_length=16), Teacher(source, kept=selection)
    lesson = teacher(batch)
    with torch.inference_mode():
        states = source(batch.ids, attention_mask=batch.mask, output_hidden_states=True)
    wanted = states.hidden_states[3].flatten(0, 1)[batch.positions][:, list(selection.hidden)]
    assert len(lesson.reads) == 1
    assert torch.equal(lesson.reads[0], wanted)
    _, (own,) = states_at_answers(drafter.base_model, batch, (1,))
    ratio = (own - wanted).square().sum(-1) / wanted.square().sum(-1)
    matched = student_of(drafter, LIVE)(batch, lesson)
    plain = student_of(drafter, LIVE)(batch, replace(lesson, reads=()))
    assert float(matched - plain) == pytest.approx(float(ratio.sum()), rel=1e-4)


def test_nothing_is_to_be_matched_where_every_layer_is_kept() -> None:
    source = make_model()
    drafter, selection = cut(source, (0, 1, 2, 3))
    batch, teacher = collate(trace_rows(3), max_length=16), Teacher(source, kept=selection)
    assert float(student_of(drafter, LIVE)(batch, teacher(batch))) == pytest.approx(0, abs=1e-3)


def test_hidden_matching_brings_layers_nearer(tmp_path: Path) -> None:
    def distance(weight: float) -> float:
        source = make_model()
        drafter, selection = cut(source, (0, 3))
        rows, teacher = trace_rows(8), Teacher(source, kept=selection)
        settings = replace(LIVE, hidden_matching=weight, steps=30, train="layers")
        folder = tmp_path / str(weight)
        distill(
            drafter, families()["llama"], rows, [], settings, seed=0, state=folder, teacher=teacher
        )
        batch = collate(rows, max_length=32)
        wanted, (own,) = teacher(batch).reads, states_at_answers(drafter.base_model, batch, (1,))[1]
        return float((own - wanted[0]).norm())

    assert distance(10.0) < 0.8 * distance(0.0)


FEATURES: list[dict[str, Any]] = [
    {},
    {"on_policy": 0.5, "on_policy_warmup": 3},
    {"on_policy": 1.0, "lookahead": 5, "position_decay": 0.8},
    {"position_decay": 0.7, "hidden_matching": 0.5, "domain_weights": {"": 2.0}},
]


@pytest.mark.parametrize("features", FEATURES)
def test_resumed_live_distillation_equals_one_that_was_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, features: dict[str, Any]
) -> None:
    """Bit for bit, and it learns."""

    def run(folder: Path) -> tuple[Any, Any]:
        source = make_model()
        drafter, selection = cut(source, (0, 3))
        rows, settings = trace_rows(12, source), replace(LIVE, steps=8, **features)
        teacher = Teacher(source, kept=selection if settings.hidden_matching else None)
        table = families()["llama"]
        curve = distill(
            drafter, table, rows[:8], rows[8:], settings, seed=3, state=folder, teacher=teacher
        )
        return drafter.state_dict(), curve

    weights, curve = run(tmp_path / "straight" / "state")
    step, calls = TorchEngine.step, iter(range(100))

    def deadly(self: TorchEngine) -> float:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "step", deadly)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "stopped" / "state")
    until_the_next_second()
    again, curve_again = run(tmp_path / "stopped" / "state")
    assert curve == curve_again
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())
    # The step that was saved last is shown as well.
    assert [e.step for e in shown_losses(tmp_path / "stopped" / LOGS)] == list(range(1, 9))


def until_the_next_second() -> None:
    """Event files are read in the order of their names, which begin with the second."""
    time.sleep(1.0 - time.time() % 1.0)


def shown_losses(folder: Path) -> Any:
    """What TensorBoard shows of the loss."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events.Scalars("loss")


def lessons(on_policy: float, warmup: int = 0, seed: int = 0, teacher: Any = None) -> Lessons:
    settings = replace(LIVE, on_policy=on_policy, on_policy_warmup=warmup)
    student = student_of(make_model(seed=1, num_hidden_layers=2), settings)
    stream = BatchStream(trace_rows(8), settings.batch, settings.max_length, seed)
    rounds = OwnRounds(student.propose, settings.lookahead)
    return Lessons(stream, rounds, settings, seed, torch.device("cpu"), teacher)


def test_the_share_of_on_policy_steps_rises_to_what_the_recipe_says() -> None:
    rising = lessons(0.5, warmup=2000)
    own = [rising.is_on_policy(step) for step in range(4000)]
    assert sum(own[:500]) / 500 == pytest.approx(0.0625, abs=0.03)
    assert sum(own[1500:2000]) / 500 == pytest.approx(0.4375, abs=0.06)
    assert sum(own[2000:]) / 2000 == pytest.approx(0.5, abs=0.04)
    assert not any(lessons(0.0).is_on_policy(step) for step in range(100))
    assert all(lessons(1.0).is_on_policy(step) for step in range(100))


def test_an_on_policy_step_is_judged_by_the_target_on_the_drafters_own_states() -> None:
    target = make_model()
    own = lessons(1.0, teacher=Teacher(target))
    (batch,) = own.of_step(0, Ranks())
    (plain,) = lessons(0.0, teacher=Teacher(target)).of_step(0, Ranks())
    assert batch.tokens > plain.tokens
    lesson = own.on(batch)
    assert isinstance(lesson, Lesson)
    with torch.inference_mode():
        hidden, _ = states_at_answers(target.base_model, batch)
    assert torch.equal(lesson.signal.hidden, hidden)  # type: ignore[attr-defined]
    assert len(hidden) == batch.tokens


def test_predicted_speedup_by_hand() -> None:
    """Two rounds of three proposals, one of them kept whole: 3 + 1 and 1 + 1 tokens."""
    from draftsmith.accept.replay import replay

    counts = replay([True, True, True, False, True, False], 3, limit=7)
    assert (counts.rounds, counts.emitted, counts.full) == (2, 6, 1)
    # 2 rounds of 3 passes and a verification each, and a pass after full acceptance.
    assert Costs(0.1, 1.5).speedup(counts) == pytest.approx(6 / (7 * 0.1 + 2 * 1.5))
    model, family = make_model(num_hidden_layers=2), families()["llama"]
    assert Costs.of(model, family, LIVE, target_layers=8) == Costs(0.25, 1.0)
    named = replace(LIVE, draft_cost=0.4, verify_cost=2.0)
    assert Costs.of(model, family, named, 8) == Costs(0.4, 2.0)
    # An encoder's layers are none of the drafter's passes.
    deep, bart = make_model("bart", encoder_layers=6, decoder_layers=2), families()["bart"]
    assert Costs.of(deep, bart, LIVE, target_layers=4) == Costs(0.5, 1.0)


def test_figures_are_logged_for_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    source = make_model()
    rows = trace_rows(12, source)
    for row in rows:
        object.__setattr__(row, "sampled", False)
    curve = distill(
        make_model(seed=1),
        families()["llama"],
        rows[:8],
        rows[8:],
        replace(LIVE, teacher="traces"),
        seed=0,
        state=tmp_path / "state",
        target_layers=4,
    )
    events = EventAccumulator(str(tmp_path / LOGS))
    events.Reload()
    names = {"loss", "gradient_norm", "lr", "emitted_per_round", "top1", "predicted_speedup"}
    assert names <= set(events.Tags()["scalars"])
    assert [e.step for e in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [e.step for e in events.Scalars("top1")] == [3, 6]
    assert events.Scalars("top1")[-1].value == pytest.approx(curve[-1]["top1"])
    assert 0 < curve[-1]["predicted_speedup"] < curve[-1]["emitted_per_round"] * 3
    assert 1 <= curve[-1]["best_lookahead"] <= 8


def test_weights_of_domains_say_which_domains_there_are() -> None:
    with pytest.raises(RequestError, match=r"no trace is of code; the traces have ''"):
        BatchStream(trace_rows(4), 2, 32, 0, {"code": 2.0})


def test_a_domain_that_counts_double_has_twice_the_share_of_the_gradient() -> None:
    model = make_model(seed=1)
    rows = trace_rows(2)
    code = replace(rows[1], domain="code")
    student = student_of(model, replace(LIVE, teacher="traces"))

    def slopes(*batches: Batch) -> torch.Tensor:
        model.zero_grad()
        weight = sum(batch.weight for batch in batches)
        for batch in batches:
            (student(batch, Lesson(batch.traces)) / weight).backward()
        return model.lm_head.weight.grad.clone() * weight

    both = collate([rows[0], code], 32, {"code": 2.0})
    assert both.weight == len(rows[0].answer) + 2 * len(code.answer)
    weighted = slopes(both)
    apart = [slopes(collate([row], 32)) for row in (rows[0], code)]
    assert torch.allclose(weighted, apart[0] + 2 * apart[1], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"on_policy": 0.5}, "on_policy 0.5: only the target itself .* set teacher: live"),
        ({"hidden_matching": 1.0}, "hidden_matching 1.0: only the target itself"),
        ({"shard_teacher": True}, "shard_teacher True: only the target itself"),
    ],
)
def test_what_needs_the_target_says_so(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistillSettings(**changes)


def test_rounds_within_windows_and_layers_of_another_model_are_refused(
    tiny_recipe: Path, save: Callable[..., Path]
) -> None:
    live = ["distill.teacher=live", "export.to=[hf]"]
    windowed = save(make_model("mistral", sliding_window=64), name="windowed")
    other = save(make_model(seed=4), name="other")
    within = "max_length: 256: with on_policy .* at most 61"
    cases = {
        (f"target={windowed}", "distill.on_policy=0.5"): within,
        (f"target={windowed}", f"source={other}", "distill.on_policy=0.5"): within,
        (f"source={other}", "distill.hidden_matching=1"): "hidden_matching: .* leave it out",
    }
    for overrides, message in cases.items():
        run = Run(load(str(tiny_recipe), [*live, *overrides]), Path("nowhere"))
        with pytest.raises(RequestError, match=message):
            check(run)
    fits = ["distill.max_length=61", f"target={windowed}", "distill.on_policy=0.5"]
    # Weights by position need no mask of their own, and windows act as ever.
    no_branches = [f"target={windowed}", "distill.position_decay=0.5"]
    for overrides in (fits, no_branches):
        check(Run(load(str(tiny_recipe), [*live, *overrides]), Path("nowhere")))


def test_a_weight_of_all_tokens_alike_changes_nothing() -> None:
    """Also a small one."""
    assert float(mean_over_step(torch.tensor(1.5), 0.5)) == 3.0


def test_requests_are_refused_before_any_work(tiny_recipe: Path, tmp_path: Path) -> None:
    def refused(*overrides: str) -> str:
        with pytest.raises(RequestError) as caught:
            check(Run(load(str(tiny_recipe), overrides), tmp_path / "out"))
        return str(caught.value)

    cut = ("prune.method=block-influence", "prune.shape.ffn=32")
    assert "block-influence: it ranks layers" in refused(*cut)
    run = Run(load(str(tiny_recipe)), tmp_path / "out")
    run_stages(run, ("trace",))
    assert "no trace is of code; the traces have ''" in refused("distill.domain_weights={code: 2}")


def test_a_live_target_is_in_memory_once(tiny_recipe: Path, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        recipe = load(str(tiny_recipe), ["distill.teacher=live", f"dtype={dtype}"])
        run = Run(recipe, tmp_path / dtype)
        held = run.source_model
        teacher = _teacher(run)
        assert teacher is not None
        assert (teacher.head.weight is held.lm_head.weight) == (dtype == "float32")
        assert ("source_model" in vars(run)) == (dtype == "float32")


def test_a_resumed_run_shows_every_figure_once(tmp_path: Path) -> None:
    first = Logs(tmp_path, 1)
    for step in range(1, 6):
        first.add(step, {"loss": step})
    first.close()
    until_the_next_second()
    # Saved after three steps, killed after five.
    second = Logs(tmp_path, 4)
    for step in range(4, 8):
        second.add(step, {"loss": 10 * step})
    second.close()
    shown = {e.step: e.value for e in shown_losses(tmp_path)}
    assert shown == {1: 1, 2: 2, 3: 3, 4: 40, 5: 50, 6: 60, 7: 70}
