"""Milliseconds of a drafter's pass as a function of its shape, from a few measured shapes."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from torch import Tensor

from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.shape import Shape
from draftsmith.errors import RequestError

FILE = "latency.json"
SCHEMA = 1
# What a layer's time depends on; outside of layers it depends on hidden and vocab.
LAYER_AXES: tuple[Axis, ...] = ("kv_heads", "heads_per_group", "ffn", "hidden")
TABLE_AXES: tuple[Axis, ...] = ("layers", *LAYER_AXES, "vocab")
# Nothing is done in less; keeps times positive where noise is larger than they are.
_LEAST_MS = 1e-6

Grid = Mapping[str, Sequence[int]]
Counts = Mapping[str, int]


@dataclass(frozen=True)
class MeasuredShape:
    """A shape and its time.

    Attributes:
        ms: milliseconds of one pass, the median.
        spread_ms: the quartiles.
    """

    layers: int
    kv_heads: int
    heads_per_group: int
    ffn: int
    hidden: int
    vocab: int
    ms: float
    spread_ms: tuple[float, float]

    @property
    def counts(self) -> Counts:
        """The shape alone."""
        return {axis: getattr(self, axis) for axis in TABLE_AXES}


def shapes_to_measure(grid: Grid) -> Iterator[Counts]:
    """The shapes from which a `LatencyTable` is made, of the many that its grid has.

    A block's projections do their work one after another, and what each does is a product of the
    hidden width with one of the others. So for each hidden width every other axis is shortened
    alone; what several save together follows.

    Args:
        grid: axis -> counts, the source's last, except for layers.
    """
    most: Counts = {axis: max(grid[axis]) for axis in TABLE_AXES}
    for hidden in grid["hidden"]:
        whole = {**most, "hidden": hidden}
        for layers in grid["layers"]:
            yield {**whole, "layers": layers}
        for axis in ("kv_heads", "heads_per_group", "ffn"):
            yield from ({**whole, axis: n} for n in grid[axis] if n != most[axis])
        fewest = min(grid["layers"])
        for vocab in grid["vocab"]:
            if vocab != most["vocab"]:
                yield {**whole, "layers": fewest, "vocab": vocab}


@dataclass(frozen=True)
class LatencyTable:
    """A shape's time: t_outside + layers x t_layer, each by what it depends on.

    t_layer depends on kv_heads, heads_per_group, ffn and hidden, t_outside on hidden and vocab.
    Both are multilinear between the counts of the grid, and never fall where a count grows.

    Attributes:
        family: of the source whose shapes were measured.
        source: its shape.
        grid: axis -> measured counts, ascending. Layers count alike, so any number of them is
            within the table.
        layer_ms: of one layer, [kv_heads, heads_per_group, ffn, hidden].
        outside_ms: of the embedding, the head and what each pass needs, [hidden, vocab].
    """

    family: str
    source: Shape
    grid: Grid
    layer_ms: Tensor
    outside_ms: Tensor

    @classmethod
    def of(cls, family: str, source: Shape, rows: Sequence[MeasuredShape]) -> "LatencyTable":
        """From measured shapes.

        Args:
            family: name of the source's family.
            source: its shape.
            rows: at least those of `shapes_to_measure`.

        Raises:
            RequestError: a shape that is needed was not measured.
        """
        grid: Grid = {axis: sorted({getattr(row, axis) for row in rows}) for axis in TABLE_AXES}
        _check_grid(grid, source)
        ms = {_key(row.counts): row.ms for row in rows}
        if missing := [c for c in shapes_to_measure(grid) if _key(c) not in ms]:
            raise RequestError(f"no row for {_words(missing[0])}; measure again")
        columns = [_Column.of(grid, hidden, ms) for hidden in grid["hidden"]]
        layer = np.stack([column.layer_ms(grid) for column in columns], axis=-1)
        outside = np.stack([column.outside_ms for column in columns])
        return cls(family, source, grid, _rising(layer), _rising(outside))

    @classmethod
    def read(cls, path: Path) -> "LatencyTable":
        """Read what `draftsmith profile` wrote.

        Args:
            path: the file, or the folder that holds it.

        Raises:
            RequestError: it is not there, or no such table.
        """
        file = path / FILE if path.is_dir() else path
        try:
            plain = json.loads(file.read_text(encoding="utf-8"))
            if plain["schema"] != SCHEMA:
                raise ValueError(f"schema {plain['schema']!r}, not {SCHEMA}")
            source = TypeAdapter(Shape).validate_json(json.dumps(plain["source_shape"]))
            rows = TypeAdapter(list[MeasuredShape]).validate_json(json.dumps(plain["rows"]))
            return cls.of(str(plain["family"]), source, rows)
        except FileNotFoundError:
            raise RequestError(
                f"{file}: there is no such file; `draftsmith profile` writes one"
            ) from None
        except RequestError as error:
            raise RequestError(f"{file}: {error}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split()[:24])
            raise RequestError(
                f"{file}: no table of latencies ({reason}); give the {FILE} of `draftsmith profile`"
            ) from None

    def ms(self, counts: Mapping[str, Tensor]) -> Tensor:
        """Milliseconds, differentiable with respect to counts that need not be whole.

        Outside of the grid, widths are held at its ends: below, nothing more is saved.

        Args:
            counts: each of `TABLE_AXES` -> counts of the same dimensions.
        """
        places = {axis: _places(counts[axis], self.grid[axis]) for axis in (*LAYER_AXES, "vocab")}
        layer = torch.einsum(
            "kgfh,...h,...f,...g,...k->...",
            self.layer_ms.to(counts["hidden"]),
            *(places[axis] for axis in reversed(LAYER_AXES)),
        )
        outside = torch.einsum(
            "hv,...v,...h->...",
            self.outside_ms.to(counts["hidden"]),
            places["vocab"],
            places["hidden"],
        )
        return outside + counts["layers"] * layer

    def ms_of(self, shape: Shape) -> float:
        """Milliseconds of a shape.

        Raises:
            RequestError: a width lies outside of what was measured.
        """
        self.check(shape)
        counts: dict[str, Tensor] = {
            axis: torch.tensor(getattr(shape, axis), dtype=torch.float64) for axis in TABLE_AXES
        }
        return float(self.ms(counts))

    def check(self, shape: Shape) -> None:
        """Refuse a shape of which the table says nothing.

        Raises:
            RequestError: naming the width, and how to measure it.
        """
        for axis in (*LAYER_AXES, "vocab"):
            count, known = getattr(shape, axis), self.grid[axis]
            if not known[0] <= count <= known[-1]:
                option = f"--{axis.replace('_', '-')}"
                raise RequestError(
                    f"{axis} {count} lies outside of the measured {known[0]} … {known[-1]}; run "
                    f"`draftsmith profile` with {option} {count}"
                )


@dataclass(frozen=True)
class _Column:
    """Times at one hidden width.

    Attributes:
        whole: milliseconds of a layer that is cut nowhere else.
        saved: axis -> milliseconds that each of its counts saves of it, [counts].
        outside_ms: at each vocabulary, [vocab].
    """

    whole: float
    saved: Mapping[str, Any]
    outside_ms: Any

    @classmethod
    def of(cls, grid: Grid, hidden: int, ms: Mapping[tuple[int, ...], float]) -> "_Column":
        most = {axis: max(grid[axis]) for axis in TABLE_AXES} | {"hidden": hidden}

        def measured(**changes: int) -> float:
            return ms[_key({**most, **changes})]  # type: ignore[dict-item]

        layers = grid["layers"]
        times = [measured(layers=n) for n in layers]
        # Errors are in proportion to times.
        whole, outside = np.polyfit(layers, times, 1, w=1 / np.array(times))
        whole, outside = max(float(whole), _LEAST_MS), max(float(outside), _LEAST_MS)
        saved: dict[str, Any] = {}
        for axis in ("kv_heads", "heads_per_group", "ffn"):
            cut = [measured(**{axis: n}) for n in grid[axis][:-1]]
            saved[axis] = np.array([whole - (t - outside) / layers[-1] for t in cut] + [0.0])
        heads = [measured(layers=layers[0], vocab=n) for n in grid["vocab"][:-1]]
        return cls(whole, saved, np.array([*(t - layers[0] * whole for t in heads), outside]))

    def layer_ms(self, grid: Grid) -> Any:
        """Of a layer at all counts, [kv_heads, heads_per_group, ffn].

        Query heads are kv_heads x heads_per_group, so fewer of a group save less where there are
        fewer groups.
        """
        share = np.array(grid["kv_heads"]) / max(grid["kv_heads"])
        return (
            self.whole
            - self.saved["kv_heads"][:, None, None]
            - share[:, None, None] * self.saved["heads_per_group"][None, :, None]
            - self.saved["ffn"]
        )


def _places(counts: Tensor, grid: Sequence[int]) -> Tensor:
    """Weights of the grid's counts between which each count lies, [..., grid]."""
    if len(grid) == 1:
        return torch.ones_like(counts)[..., None]
    nodes = torch.tensor(grid, dtype=counts.dtype, device=counts.device)
    held = counts.clamp(grid[0], grid[-1])
    below = torch.searchsorted(nodes, held.detach().contiguous(), right=True) - 1
    below = below.clamp(0, len(grid) - 2)
    part = ((held - nodes[below]) / (nodes[below + 1] - nodes[below]))[..., None]
    number = torch.arange(len(grid), device=counts.device)
    return (1 - part) * (number == below[..., None]) + part * (number == below[..., None] + 1)


def _rising(times: Any) -> Tensor:
    """The nearest table that never falls along an axis: what noise alone can have made.

    One axis after another suffices, for the regression is a maximum of minima of means, which
    keeps the order along the others.
    """
    from scipy.optimize import isotonic_regression  # type: ignore[import-untyped]

    for axis in range(times.ndim):
        times = np.apply_along_axis(lambda line: isotonic_regression(line).x, axis, times)
    return torch.from_numpy(np.maximum(times, _LEAST_MS))


def _check_grid(grid: Grid, source: Shape) -> None:
    if len(grid["layers"]) < 2:
        raise RequestError("two numbers of layers are needed, to tell a layer from what is outside")
    for axis in (*LAYER_AXES, "vocab"):
        if not grid[axis] or max(grid[axis]) != getattr(source, axis):
            raise RequestError(f"no row with the source's {axis} {getattr(source, axis)}")


def _key(counts: Counts) -> tuple[int, ...]:
    return tuple(counts[axis] for axis in TABLE_AXES)


def _words(counts: Counts) -> str:
    return ", ".join(f"{axis} {counts[axis]}" for axis in TABLE_AXES)
