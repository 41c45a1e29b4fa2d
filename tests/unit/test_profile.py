"""The table of latencies: what is measured, what it predicts, and the command that writes it."""

import io
import json
import math
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from draftsmith.accept import profile as module
from draftsmith.accept.cache import CachedModel
from draftsmith.accept.latency_table import (
    FILE,
    LAYER_AXES,
    TABLE_AXES,
    LatencyTable,
    MeasuredShape,
    shapes_to_measure,
)
from draftsmith.accept.profile import (
    ProfileSettings,
    find_config,
    full_grid,
    profile,
    render,
    write_profile,
)
from draftsmith.checkpoints.families import families
from draftsmith.checkpoints.provenance import read_key
from draftsmith.checkpoints.shape import Shape, resolve_shape, shape_of
from draftsmith.errors import RequestError
from tests.conftest import CAUSAL, tiny_config

_LLAMA = families()["llama"]
SOURCE = Shape(
    layers=16, kv_heads=8, heads_per_group=4, head_dim=8, ffn=512, hidden=256, vocab=1000
)
GRID = full_grid(SOURCE, _LLAMA, {})
SMALL: dict[str, Any] = {"context": 8, "repeats": 2, "dtype": "float32"}


def true_ms(counts: Mapping[str, float]) -> float:
    """What a machine might take: products of widths, one call's cost for each layer, a head."""
    hidden, kv_heads = counts["hidden"], counts["kv_heads"]
    heads = kv_heads * counts["heads_per_group"]
    layer = 0.2 + 1e-5 * hidden * (2 * kv_heads + 2 * heads + 0.1 * counts["ffn"])
    return 0.5 + 1e-6 * hidden * counts["vocab"] + counts["layers"] * layer


def rows_of(ms: Callable[[Mapping[str, float]], float]) -> list[MeasuredShape]:
    return [
        MeasuredShape(**counts, ms=ms(counts), spread_ms=(0.0, 0.0))  # type: ignore[arg-type]
        for counts in shapes_to_measure(GRID)
    ]


TABLE = LatencyTable.of("llama", SOURCE, rows_of(true_ms))
# Any shape within the table.
inside = st.fixed_dictionaries(
    {axis: st.integers(GRID[axis][0], GRID[axis][-1]) for axis in TABLE_AXES}
    | {"layers": st.integers(1, 16)}
)


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    """A folder that holds the config of the tiny llama and nothing else."""
    folder = tmp_path / "only"
    tiny_config().save_pretrained(folder)
    return folder


# --- the model of time


@given(inside)
def test_products_of_widths_are_predicted_exactly(counts: dict[Any, int]) -> None:
    """A shape is cut along all axes at once, though each was measured alone."""
    shape = Shape(**{**vars(SOURCE), **counts})
    assert TABLE.ms_of(shape) == pytest.approx(true_ms(counts), rel=1e-9)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**16), inside, st.sampled_from(TABLE_AXES))
def test_more_never_takes_less_whatever_the_noise(
    seed: int, counts: dict[Any, int], axis: str
) -> None:
    generator = np.random.default_rng(seed)
    table = LatencyTable.of(
        "llama", SOURCE, rows_of(lambda c: true_ms(c) * math.exp(generator.normal(0, 0.5)))
    )
    values = torch.linspace(GRID[axis][0], GRID[axis][-1], 9, dtype=torch.float64)  # type: ignore[index]
    along = {a: torch.full_like(values, n) for a, n in counts.items()} | {axis: values}
    ms = table.ms(along)  # type: ignore[arg-type]
    assert bool((ms > 0).all())
    assert bool((ms.diff() >= -1e-9).all())


@settings(max_examples=20, deadline=None)
@given(inside, st.integers(0, 2**16))
def test_gradients_with_respect_to_counts(counts: dict[Any, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Between counts: at those of the grid the slope changes.
    part = torch.rand(len(TABLE_AXES), generator=generator, dtype=torch.float64) * 0.8 + 0.1
    lowest = torch.tensor([min(counts[a], max(GRID[a][-1] - 1, 1)) for a in TABLE_AXES])
    values = (lowest + part).requires_grad_()

    def ms(values: torch.Tensor) -> torch.Tensor:
        return TABLE.ms(dict(zip(TABLE_AXES, values.unbind(), strict=True)))

    assert torch.autograd.gradcheck(ms, (values,), eps=1e-4, atol=1e-6)
    (slopes,) = torch.autograd.grad(ms(values), values)
    assert bool((slopes > 0).all())


def test_widths_are_held_at_the_ends_of_the_grid() -> None:
    least = {axis: torch.tensor(float(GRID[axis][0])) for axis in TABLE_AXES}
    below = {axis: value / 4 for axis, value in least.items()} | {"layers": least["layers"]}
    assert TABLE.ms(below) == TABLE.ms(least)


@pytest.mark.parametrize("axis", [*LAYER_AXES, "vocab"])
def test_a_shape_beyond_the_grid_is_refused(axis: str) -> None:
    for count in (GRID[axis][0] - 1, GRID[axis][-1] + 1):  # type: ignore[index]
        shape = Shape(**{**vars(SOURCE), axis: count})
        option = f"--{axis.replace('_', '-')} {count}"
        with pytest.raises(RequestError, match=f"{axis} {count} lies outside of .*{option}"):
            TABLE.ms_of(shape)


def test_layers_count_alike_beyond_those_measured() -> None:
    assert TABLE.ms_of(SOURCE) == pytest.approx(true_ms(vars(SOURCE)))
    assert max(GRID["layers"]) < SOURCE.layers


# --- what is measured


def test_few_of_the_shapes_of_the_grid_are_measured() -> None:
    shapes = [tuple(c.values()) for c in shapes_to_measure(GRID)]
    assert len(shapes) == len(set(shapes)) == 36
    assert math.prod(map(len, GRID.values())) == 972


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576},
        {"num_attention_heads": 13, "num_key_value_heads": 13, "hidden_size": 52},
        {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 7},
        {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896},
        {"num_attention_heads": 15, "num_key_value_heads": 3, "hidden_size": 180},
    ],
    ids=str,
)
def test_the_usual_counts_are_legal(name: str, sizes: dict[str, int]) -> None:
    family = families()[name]
    source = shape_of(tiny_config(name, **sizes), family)
    grid = full_grid(source, family, {})
    for axis in (*LAYER_AXES, "vocab"):
        assert grid[axis][-1] == getattr(source, axis)
        assert list(grid[axis]) == sorted(set(grid[axis]))
    assert grid["layers"] == [1, 2, 4]
    for counts in shapes_to_measure(grid):
        resolve_shape(source, {a: n for a, n in counts.items() if a != "vocab"}, family)


def test_the_usual_widths_are_halves_and_quarters() -> None:
    assert GRID == {
        "layers": [1, 2, 4, 8],
        "kv_heads": [2, 4, 8],
        "heads_per_group": [1, 2, 4],
        "ffn": [128, 256, 512],
        "hidden": [64, 128, 256],
        "vocab": [250, 500, 1000],
    }


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("tied", [False, True])
def test_measured_models_have_the_shape_and_share_one_pool(name: str, tied: bool) -> None:
    config = tiny_config(name, tie_word_embeddings=tied)
    family = families()[name]
    grid = full_grid(
        shape_of(config, family), family, {"ffn": (32,), "hidden": (16,), "vocab": (2,)}
    )
    device, dtype = torch.device("cpu"), torch.float32
    with torch.inference_mode():
        subjects = module._subjects(config, family, grid, 5, device, dtype)
        assert [counts for counts, _ in subjects] != []
        storages = set()
        for counts, cached in subjects:
            shape = shape_of(cached.model.config, family)
            assert {axis: getattr(shape, axis) for axis in TABLE_AXES} == dict(counts)
            assert cached.length == 5
            module._step(cached)
            assert cached.length == 5
            assert bool(cached.feed_list([0], keep=1).isfinite().all())
            parameters = dict(cached.model.named_parameters())
            storages |= {p.untyped_storage().data_ptr() for p in parameters.values()}
            places = [p.data_ptr() for p in parameters.values()]
            assert len(set(places)) == len(places)
            head = cached.model.get_output_embeddings().weight
            assert (head is cached.model.get_input_embeddings().weight) == tied
    assert len(storages) == 1


def test_every_pass_is_one_token_on_a_full_cache(
    config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    feed = CachedModel.feed_list

    def watched(self: CachedModel, ids: Any, *, keep: int = 0) -> torch.Tensor:
        seen.append((self.length, len(ids)))
        return feed(self, ids, keep=keep)

    monkeypatch.setattr(CachedModel, "feed_list", watched)
    grid = {axis: (4,) if axis == "hidden" else (1,) for axis in LAYER_AXES}
    asked = ProfileSettings({**grid, "layers": (1, 2)}, **SMALL)  # type: ignore[dict-item]
    measured = profile(find_config(str(config_only)), asked)
    # Of each shape its cache, then twice (one counted) in three rounds (one to warm up).
    passes = len(measured.rows) * 3 * 2
    assert seen == [(0, 8)] * len(measured.rows) + [(8, 1)] * passes
    assert all(row.ms > 0 and row.spread_ms[0] <= row.spread_ms[1] for row in measured.rows)


# --- the file


@pytest.fixture
def written(config_only: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "profile"
    write_profile(find_config(str(config_only)), ProfileSettings({}, **SMALL), folder)
    return folder


def test_what_is_written_is_read_again(written: Path) -> None:
    table = LatencyTable.read(written)
    assert table.source == shape_of(tiny_config(), _LLAMA)
    assert LatencyTable.read(written / FILE).layer_ms.equal(table.layer_ms)
    plain = json.loads((written / FILE).read_text())
    assert {"schema", "target", "machine", "versions", "rows"} <= plain.keys()
    about = {name: plain[name] for name in ("runtime", "batch", "dtype", "context", "repeats")}
    assert about == {"runtime": "torch", "batch": 1, "dtype": "float32", "context": 8, "repeats": 2}
    assert plain["threads"] == 1
    assert read_key(written) is not None
    provenance = json.loads((written / "provenance.json").read_text())
    assert provenance["files"] == [FILE]
    assert provenance["settings"]["grid"]["layers"] == [1, 2, 4]


def test_the_table_fits_100_columns(config_only: Path) -> None:
    measured = profile(find_config(str(config_only)), ProfileSettings({}, **SMALL))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(measured))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("…" in line for line in lines) == len(measured.rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain.update(schema=7), "schema 7, not 1"),
        (lambda plain: plain.pop("rows"), "rows"),
        (lambda plain: plain["rows"][0].update(ms="slow"), "no table of latencies"),
        (lambda plain: plain["rows"].pop(), "no row for"),
        (lambda plain: plain.update(rows=[]), "two numbers of layers"),
        (lambda plain: plain["source_shape"].update(hidden=64), "no row with the source's hidden"),
    ],
)
def test_a_damaged_table_is_refused(
    written: Path, change: Callable[[Any], Any], message: str
) -> None:
    file = written / FILE
    plain = json.loads(file.read_text())
    change(plain)
    file.write_text(json.dumps(plain))
    with pytest.raises(RequestError, match=message) as refused:
        LatencyTable.read(file)
    assert str(refused.value).startswith(str(file))


def test_a_missing_table(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such file; `draftsmith profile`"):
        LatencyTable.read(tmp_path / FILE)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(RequestError, match="no table of latencies"):
        LatencyTable.read(tmp_path)


# --- requests


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runtime": "openvino"}, "--runtime openvino: only torch"),
        ({"batch": 4}, "--batch 4: only a batch of 1"),
        ({"dtype": "int8"}, "--dtype int8: not among"),
        ({"context": 256}, "--context 256: .* give at most 255"),
        ({"grid": {"layers": (2, 2)}}, "--drafter-layers 2: two different numbers"),
        ({"grid": {"layers": (1, 5)}}, "--drafter-layers 5: not among 1 … 4"),
        ({"grid": {"ffn": (65,)}}, "--ffn 65: not among 1 … 64"),
        ({"grid": {"heads_per_group": (0,)}}, "--heads-per-group 0: not among"),
        ({"grid": {"hidden": (30,)}}, "--hidden 30: 30 is no multiple of 4 query heads"),
    ],
)
def test_what_cant_be_measured(
    config_only: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    def asked() -> None:
        settings = ProfileSettings(**{"grid": {}, **SMALL, **changes})
        write_profile(find_config(str(config_only)), settings, tmp_path / "run" / "profile")

    with pytest.raises(RequestError, match=message):
        asked()
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit(config_only: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_free_bytes", lambda device: 1000)
    with pytest.raises(RequestError, match=r"largest shape has 0\.0 GB .* fewer layers"):
        profile(find_config(str(config_only)), ProfileSettings({}, **SMALL))


def test_an_encoder_decoder(tmp_path: Path) -> None:
    name = next(name for name, family in families().items() if family.has_encoder)
    tiny_config(name).save_pretrained(tmp_path / "both")
    with pytest.raises(RequestError, match="is an encoder–decoder"):
        profile(find_config(str(tmp_path / "both")), ProfileSettings({}, **SMALL))


def test_only_a_config_is_needed_and_never_a_weight(config_only: Path) -> None:
    assert [file.name for file in config_only.iterdir()] == ["config.json"]
    assert find_config(str(config_only)).folder == config_only


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for spec in (str(tmp_path), str(tmp_path / "none.gguf"), "package:nowhere/a.gguf", "a b"):
        with pytest.raises(RequestError, match=re.escape(spec)):
            find_config(spec)


# --- the command


@pytest.fixture
def command(config_only: Path, tmp_path: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "draftsmith.cli", "profile", str(config_only)),
        *("--context", "8", "--out", str(tmp_path / "run"), "--threads", "1"),
    ]


def test_the_command_writes_and_shows_the_table(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [*command, "--repeats", "2", "--drafter-layers", "1,4", "--ffn", "32", "--quiet"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "quartiles" in done.stdout
    assert done.stdout.splitlines()[-1] == str(tmp_path / "run" / "profile")
    table = LatencyTable.read(tmp_path / "run" / "profile")
    assert table.grid["ffn"] == [32, 64]
    assert table.grid["layers"] == [1, 4]


def test_counts_that_are_no_numbers(command: list[str], tmp_path: Path) -> None:
    done = subprocess.run([*command, "--ffn", "32;16"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "draftsmith: --ffn 32;16: give whole numbers with commas between, as 1,2,4\n"
    )
    assert not (tmp_path / "run").exists()


def test_an_interrupted_command_leaves_the_older_table(
    command: list[str], tmp_path: Path, written: Path
) -> None:
    before = (written / FILE).read_text()
    process = subprocess.Popen(
        [*command, "--repeats", "100000"],
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background ignores interrupts, and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    try:
        # The first line tells that all is built.
        assert "build" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "interrupted" in told
    assert process.returncode == 130
    assert (written / FILE).read_text() == before
    assert [path.name for path in written.parent.iterdir()] == ["profile"]
