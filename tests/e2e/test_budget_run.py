"""From `draftsmith profile` to a drafter within so many milliseconds."""

import json
from pathlib import Path

import pytest

from draftsmith.accept.latency_table import LatencyTable
from draftsmith.accept.profile import ProfileSettings, find_config, write_profile
from draftsmith.checkpoints.formats import resolve
from draftsmith.checkpoints.loading import describe, load_config
from draftsmith.checkpoints.shape import Shape
from draftsmith.errors import RequestError
from draftsmith.prune.trajectory import FILE, Trajectory
from draftsmith.recipes.loading import load
from draftsmith.recipes.run import Run, run_stages

BUDGET = ["prune.shape={hidden: 32}", "prune.steps=40", "prune.warmup=10", "prune.penalty=100"]


@pytest.fixture
def table(tiny_recipe: Path, tmp_path: Path) -> Path:
    """A real one, of the tiny target."""
    settings = ProfileSettings({}, context=8, repeats=3, dtype="float32", threads=1)
    folder = tmp_path / "mine" / "profile"
    folder.parent.mkdir()
    write_profile(find_config(load(str(tiny_recipe)).target), settings, folder)
    return folder / "latency.json"


def shape_in(folder: str) -> Shape:
    reference = resolve(folder)
    return describe(load_config(reference), reference)[1]


def go(recipe: Path, out: Path, overrides: list[str]) -> Run:
    run = Run(load(str(recipe), overrides), out)
    run_stages(run)
    return run


def test_masks_meet_a_measured_budget(tiny_recipe: Path, tmp_path: Path, table: Path) -> None:
    """What comes out takes at most the milliseconds by the table; its hidden width was fixed."""
    measured = LatencyTable.read(table)
    source = shape_in(load(str(tiny_recipe)).target)
    least = measured.ms_of(Shape(**{**vars(source), "layers": 1}))
    draft_ms = (least + measured.ms_of(source)) / 2
    asked = [*BUDGET, f"prune.draft_ms={draft_ms}", f"prune.latency={table}"]
    run = go(tiny_recipe, tmp_path / "out", asked)
    drafter = shape_in(str(run.folder("distilled")))
    assert measured.ms_of(drafter) <= draft_ms
    assert drafter != source
    assert drafter.hidden == 32
    told = Trajectory.read(run.folder("pruned") / FILE).state()
    assert float(told["wanted.draft_ms"][-1]) == pytest.approx(draft_ms)
    assert float(told["expected.draft_ms"][0]) > draft_ms
    assert (run.folder("pruned") / "masks.png").stat().st_size > 1000
    expected = json.loads((run.folder("pruned") / "masks.json").read_text())["expected"]
    assert "layers" in expected


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["prune.draft_ms=1e-9"], "the smallest shape that may be had"),
        (["prune.draft_ms=1e9"], "so nothing would be cut"),
        (["prune.draft_ms=1", "prune.latency=gone.json"], "gone.json: there is no such file"),
        (["prune.draft_ms=1", "prune.method=random"], "only learned masks"),
    ],
)
def test_budgets_that_can_not_be_met_are_refused_before_any_work(
    tiny_recipe: Path, tmp_path: Path, table: Path, more: list[str], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        go(tiny_recipe, tmp_path / "out", [f"prune.latency={table}", *more])
    assert not (tmp_path / "out").exists()
