"""Masks that learn from a mixture, or from a target in memory."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import load_model
from draftsmith.checkpoints.shape import shape_of
from draftsmith.distill.batches import collate
from draftsmith.distill.engine import Ranks
from draftsmith.distill.teacher import Teacher
from draftsmith.errors import RequestError
from draftsmith.prune import train
from draftsmith.prune.objective import Objective
from draftsmith.prune.text import MixtureText
from draftsmith.prune.trajectory import FILE, Trajectory
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages
from draftsmith.recipes.schema import PruneSettings
from tests.conftest import make_model, make_tokenizer
from tests.unit.test_batches import trace_rows

CE = ["prune.objective=ce", "prune.weights_lr=1e-3"]
ACCEPTANCE = ["prune.objective=acceptance", "prune.teacher=live"]


@pytest.fixture
def mixture(tmp_path: Path) -> list[str]:
    """Overrides for two small domains."""
    domains = {}
    for name, words in (("stories", "once she had a cat and he"), ("lists", "one two three four")):
        rows = [{"text": f"{words} {i} {words[::-1]} {i * 7}"} for i in range(40)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        domains[name] = f"{name}: {{path: [{path}]}}"
    inner = f"domains: {{{', '.join(domains.values())}}}, sequence: 24, held_out: 2"
    return [f"prune.mixture={{{inner}, update_every: 3}}", "prune.save_every=5"]


def pruned(recipe: Path, out: Path, overrides: list[str]) -> Run:
    run = Run(load(str(recipe), overrides), out)
    run_stages(run, ("trace", "prune"))
    return run


def told(run: Run) -> dict[str, torch.Tensor]:
    return Trajectory.read(run.folder("pruned") / FILE).state()


@pytest.mark.filterwarnings("ignore:recipe.prune.mixture")
@pytest.mark.parametrize(
    "more",
    [
        [*CE, "prune.mixture.update=loss", "prune.mixture.reference={stories: 2.0, lists: 4.9}"],
        [*ACCEPTANCE, "prune.mixture.update=acceptance"],
        [*ACCEPTANCE, "prune.mixture.separate_documents=false", "prune.accumulate=2"],
    ],
)
def test_a_mixture_goes_on_where_it_stopped(
    tiny_recipe: Path,
    tmp_path: Path,
    mixture: list[str],
    more: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Masks, weights and shares, bit for bit."""
    straight = pruned(tiny_recipe, tmp_path / "straight", mixture + more)
    step, calls = train.MaskOptimizer.step, iter(range(100))

    def deadly(self: train.MaskOptimizer, *arguments: Any) -> None:
        if next(calls) == 8:
            raise KeyboardInterrupt
        step(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(train.MaskOptimizer, "step", deadly)
        with pytest.raises(KeyboardInterrupt):
            pruned(tiny_recipe, tmp_path / "stopped", mixture + more)
    stopped = pruned(tiny_recipe, tmp_path / "stopped", mixture + more)
    for name, values in told(straight).items():
        assert torch.equal(values, told(stopped)[name]), name
    models = [load_model(resolve(str(r.folder("pruned")))) for r in (straight, stopped)]
    for name, tensor in models[0].state_dict().items():
        assert torch.equal(tensor, models[1].state_dict()[name]), name
    shares = [
        json.loads((r.folder("pruned") / "shares.json").read_text()) for r in (straight, stopped)
    ]
    assert shares[0] == shares[1]
    if any("update=" in word for word in more):
        assert [entry["step"] for entry in shares[0]] == [0, 3, 6, 9, 12]
        assert shares[0][0]["shares"] != shares[0][-1]["shares"]


@pytest.mark.filterwarnings("ignore:recipe.prune.mixture")
def test_shares_rise_where_the_loss_is_above_its_reference(
    tiny_recipe: Path, tmp_path: Path, mixture: list[str]
) -> None:
    """A reference that is never reached keeps its domain from falling behind."""
    more = [*CE, "prune.mixture.update=loss", "prune.mixture.reference={stories: 0.1, lists: 9.0}"]
    run = pruned(tiny_recipe, tmp_path / "out", mixture + more)
    shares = json.loads((run.folder("pruned") / "shares.json").read_text())
    stories = [entry["shares"]["stories"] for entry in shares]
    assert stories == sorted(stories)
    assert stories[-1] > 0.9 > stories[0] == 0.5


@pytest.mark.filterwarnings("ignore:recipe.prune.mixture")
def test_what_is_drawn_follows_the_shares(tiny_recipe: Path, mixture: list[str]) -> None:
    more = [*CE, "prune.mixture.update=loss", "prune.mixture.reference={stories: 1.0, lists: 1.0}"]
    settings = load(str(tiny_recipe), mixture + more).prune
    assert settings.mixture is not None
    text = MixtureText(settings.mixture, make_tokenizer(), settings, seed=0)
    losses = iter((9.0, 1.0))
    measured = SimpleNamespace(device=torch.device("cpu"), under=lambda *_: next(losses))
    masks = SimpleNamespace(gates=dict)
    text.after(2, masks, measured, Ranks())  # type: ignore[arg-type]
    assert text.history()[-1]["measured"] == {"stories": 9.0, "lists": 1.0}
    before = dict(text._stream.mixture.drawn)
    for step in range(3, 13):
        text.of_step(step, Ranks())
    drawn = {name: count - before[name] for name, count in text._stream.mixture.drawn.items()}
    assert drawn == {"stories": 10 * settings.batch, "lists": 0}


def test_choices_are_compared_with_an_unmasked_target() -> None:
    """The target is the source itself, closed while it is measured."""
    model = make_model()
    family = families()["llama"]
    source = shape_of(model.config, family)
    settings = PruneSettings(objective="acceptance", teacher="live")
    objective = Objective.of(model, family, source, [], settings, teacher=Teacher(model))
    batch = collate(trace_rows(4), 32)
    assert objective.under({}, [batch]) == pytest.approx(0.0, abs=1e-5)
    assert objective.under({"layers": torch.zeros(source.layers)}, [batch]) > 0.3


def test_a_live_target_that_is_the_source_is_asked_unmasked(
    tiny_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every mask open there is nothing to learn: the loss is 0."""
    steps = ["prune.steps=2", "prune.warmup=2", "prune.init_log_alpha=4.6", "prune.mask_lr=1e-9"]
    run = pruned(tiny_recipe, tmp_path / "out", [*ACCEPTANCE, *steps, "prune.lambda_lr=1e-9"])
    assert float(told(run)["loss"][0]) < 0.2
    closed = ["prune.init_log_alpha=-4.6", "prune.steps=1", "prune.warmup=0"]
    run = pruned(tiny_recipe, tmp_path / "closed", [*ACCEPTANCE, *closed])
    assert float(told(run)["loss"][0]) > 0.3


@pytest.mark.parametrize("objective", ["kd", "acceptance"])
def test_live_and_traces_agree_where_traces_hold_everything(
    tiny_recipe: Path, tmp_path: Path, objective: str
) -> None:
    """All of the vocabulary's log-probabilities are as good as the target itself."""
    more = [f"prune.objective={objective}", "trace.top_n=96", "prune.steps=4", "prune.warmup=2"]
    traces = told(pruned(tiny_recipe, tmp_path / "traces", more))
    live = told(pruned(tiny_recipe, tmp_path / "live", [*more, "prune.teacher=live"]))
    assert torch.allclose(traces["loss"], live["loss"], atol=2e-3)
    assert torch.allclose(traces["log_alpha.layers"], live["log_alpha.layers"], atol=2e-2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["prune.objective=kd"], "no trace tells what the target says of a mixture"),
        ([*CE, "prune.mixture.update=acceptance"], "domains are measured by the objective"),
        ([*CE, "prune.mixture.update=loss"], "give a loss for each of lists, stories"),
        ([*CE, "prune.teacher=live"], "objective ce learns the tokens of the text alone"),
    ],
)
def test_what_can_not_be_learned_is_refused(
    tiny_recipe: Path, mixture: list[str], more: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        load(str(tiny_recipe), mixture + more)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("prune.mixture.sequence=100000", "sequence: 100000: .* positions apart"),
        ("prune.mixture.held_out=9999", "domains.stories"),
        ("prune.mixture.text_key=body", "domains.stories"),
        ("prune.mixture.domains.stories.path=[gone.jsonl]", "gone.jsonl"),
    ],
)
def test_a_mixture_that_lacks_text_is_refused_before_any_work(
    tiny_recipe: Path, tmp_path: Path, mixture: list[str], change: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        pruned(tiny_recipe, tmp_path / "out", [*mixture, *CE, change])
    assert not (tmp_path / "out").exists()


def test_A16_axes_that_forbid_the_shape_are_refused(
    tiny_recipe: Path, tmp_path: Path, save: Callable[..., Path]
) -> None:
    """Hidden is to be cut, but only heads may be."""
    asked = ["prune.shape={hidden: 24}", "prune.axes=[kv_heads]"]
    with pytest.raises(RequestError, match="asks to cut hidden from 32"):
        pruned(tiny_recipe, tmp_path / "out", asked)
    with pytest.raises(RequestError, match="warmup 20 is longer than the run of 12 steps"):
        load(str(tiny_recipe), ["prune.warmup=20"])
