"""What one pass of a drafter costs on this machine, over shapes cut from a target's config.

Weights are random: time depends on shapes alone. All models share one pool of weights as large as
the largest of them, so that many fit in memory and can be measured in turn.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.accept.cache import CachedModel
from draftsmith.accept.decode import Stopwatch
from draftsmith.accept.latency_table import (
    FILE,
    LAYER_AXES,
    SCHEMA,
    TABLE_AXES,
    Counts,
    Grid,
    LatencyTable,
    MeasuredShape,
    shapes_to_measure,
)
from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.devices import default_device, working_dtype
from draftsmith.checkpoints.families.base import Axis, Family
from draftsmith.checkpoints.formats import UNFINISHED, ModelRef, local_path, resolve
from draftsmith.checkpoints.layout import Layout, layout_of, with_counts
from draftsmith.checkpoints.loading import describe, load_config, require_decoder
from draftsmith.checkpoints.pair import context_of
from draftsmith.checkpoints.shape import Shape, resolve_shape
from draftsmith.checkpoints.slicing import layers_of
from draftsmith.data.files import PARTIAL, fingerprint, new_folder, write_json
from draftsmith.data.progress import Progress
from draftsmith.errors import RequestError

# Options without a value: layers as drafters have them, widths at these shares of the source's.
_LAYERS = (1, 2, 4, 8)
_SHARES = (1.0, 0.5, 0.25)
# Widths that are multiples of this suit every kernel, where the source's width is one.
_FRIENDLY = 16
_RUNTIMES = ("torch",)
_CONFIG = "config.json"
# Tensors begin at multiples of this many values, as allocators let them.
_ALIGNED = 64
# Values that are drawn; the pool repeats them.
_DRAWN = 1 << 20


@dataclass(frozen=True)
class ProfileSettings:
    """What to measure.

    Attributes:
        grid: axis -> counts that were asked for; axes left out take the usual ones.
        context: tokens in the cache.
        repeats: counted passes of each shape.
        runtime: what runs the drafter.
        batch: rows of a pass.
        dtype: `auto` (in which models are scored on this device), `float32` or `bfloat16`.
        threads: 0: as many as torch takes.
    """

    grid: Mapping[str, tuple[int, ...]]
    context: int = 256
    repeats: int = 15
    runtime: str = "torch"
    batch: int = 1
    dtype: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        """Refuse what can't be measured so far."""
        if self.runtime not in _RUNTIMES:
            raise RequestError(
                f"--runtime {self.runtime}: only {', '.join(_RUNTIMES)} is measured so far; leave "
                "it out"
            )
        if self.batch != 1:
            raise RequestError(
                f"--batch {self.batch}: only a batch of 1 is measured so far; leave it out"
            )
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise RequestError(f"--dtype {self.dtype}: not among auto, float32, bfloat16")


@dataclass(frozen=True)
class Profile:
    """Measured times and all that they hold for.

    Attributes:
        target: the model, as the user named it.
        table: the model of time that they give.
        rows: as measured.
        settings: what was asked for; grid and dtype are the resolved ones.
    """

    target: str
    table: LatencyTable
    rows: tuple[MeasuredShape, ...]
    settings: ProfileSettings

    def to_plain(self) -> dict[str, Any]:
        """For JSON; `LatencyTable.read` reads it."""
        about = {k: v for k, v in asdict(self.settings).items() if k != "grid"}
        return {
            "schema": SCHEMA,
            "target": self.target,
            "family": self.table.family,
            "source_shape": asdict(self.table.source),
            **about,
            "threads": torch.get_num_threads(),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "rows": [asdict(row) for row in self.rows],
        }


def find_config(spec: str) -> ModelRef:
    """Find a model of which only the config is needed; of the hub nothing else is fetched.

    Raises:
        RequestError: it is not there, or its files are damaged.
    """
    if spec.startswith("package:"):
        return resolve(spec)
    path = local_path(spec)
    whole = not path.name.endswith(PARTIAL) and not (path / UNFINISHED).exists()
    if (path / _CONFIG).is_file() and whole:
        return ModelRef(spec, path)
    if path.exists() or path.suffix == ".gguf" or spec.count("/") != 1:
        return resolve(spec)
    return ModelRef(spec, _config_from_hub(spec))


def profile(target: ModelRef, settings: ProfileSettings) -> Profile:
    """Measure one new token's pass for shapes cut from a model's config.

    Args:
        target: the model that would be cut; its weights are not read.
        settings: what to measure.

    Raises:
        RequestError: a shape is illegal or too large for the memory, or the model is none of
            decoders alone.
    """
    config = load_config(target)
    family, source = describe(config, target)
    require_decoder(family, target.spec)
    grid = full_grid(source, family, settings.grid)
    _check_context(settings.context, context_of(config, family))
    device = torch.device(default_device())
    dtype = _dtype(settings.dtype, device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    rows = _measure(config, family, grid, settings, device, dtype)
    name = str(dtype).removeprefix("torch.")
    resolved = replace(settings, grid={a: tuple(n) for a, n in grid.items()}, dtype=name)
    return Profile(target.spec, LatencyTable.of(family.name, source, rows), rows, resolved)


def write_profile(target: ModelRef, settings: ProfileSettings, folder: Path) -> Profile:
    """Measure, and leave the table with its provenance in `folder`, whole or not at all.

    Arguments and errors as for `profile`.
    """
    with new_folder(folder) as partial:
        measured = profile(target, settings)
        plain = measured.to_plain()
        write_json(partial / FILE, plain)
        read = target.path if target.gguf else target.folder / _CONFIG
        inputs = {target.spec: fingerprint(read)}
        asked = asdict(measured.settings)
        key = provenance.key_of([asked, inputs, plain["machine"], plain["versions"]])
        provenance.write(partial, key=key, settings=asked, inputs=inputs, seed=None)
    return measured


def full_grid(source: Shape, family: Family, asked: Mapping[str, Sequence[int]]) -> Grid:
    """The counts to measure along every axis, ascending, the source's own width among them.

    Args:
        source: the shape that is cut.
        family: its table, which says what is legal.
        asked: axis -> counts; an axis left out takes the usual ones.

    Raises:
        RequestError: a count is illegal.
    """
    for axis, counts in asked.items():
        most = getattr(source, axis)
        if wrong := [n for n in counts if not 1 <= n <= most]:
            raise RequestError(
                f"{_option(axis)} {wrong[0]}: not among 1 … {most}, which the source has"
            )
    grid: dict[str, list[int]] = {
        "layers": [*asked.get("layers", (n for n in _LAYERS if n <= source.layers))]
    }
    # Heads before hidden, whose usual widths depend on them.
    for axis in (*LAYER_AXES, "vocab"):
        most = getattr(source, axis)
        legal = _usual_counts(axis, {**grid, **asked}, source, family)
        usual = (_nearest(legal, share * most) for share in _SHARES)
        grid[axis] = [*asked.get(axis, usual), most]
    ordered: Grid = {axis: sorted(set(grid[axis])) for axis in TABLE_AXES}
    if len(ordered["layers"]) < 2:
        listed = ",".join(map(str, ordered["layers"]))
        raise RequestError(
            f"--drafter-layers {listed}: two different numbers are needed, to tell a layer's time "
            f"from what is outside; the source has {source.layers}"
        )
    for shape in shapes_to_measure(ordered):
        _check_legal(shape, source, family)
    return ordered


def friendly_step(axis: Axis, source: Shape) -> int:
    """What good counts along an axis are multiples of; 1 for what is no width."""
    return math.gcd(getattr(source, axis), _FRIENDLY) if axis in ("ffn", "hidden") else 1


@torch.inference_mode()
def _measure(
    config: Any,
    family: Family,
    grid: Grid,
    settings: ProfileSettings,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[MeasuredShape, ...]:
    """Every shape in turn, again and again, so that a busy moment meets all alike."""
    subjects = _subjects(config, family, grid, settings.context, device, dtype)
    times: list[list[float]] = [[] for _ in subjects]
    watch = Stopwatch(device)
    total = len(subjects) * (settings.repeats + 1)
    with Progress("profile", total, "passes") as progress:
        for repeat in range(settings.repeats + 1):
            for (_, model), own in zip(subjects, times, strict=True):
                # Uncounted, the first finds the caches as another model left them.
                _step(model)
                watch.lap()
                _step(model)
                own.append(watch.lap())
                progress.update(1)
            if repeat == 0:
                times = [[] for _ in subjects]
    return tuple(
        MeasuredShape(**counts, ms=1e3 * statistics.median(own), spread_ms=_quartiles(own))
        for (counts, _), own in zip(subjects, times, strict=True)
    )


def _subjects(
    config: Any,
    family: Family,
    grid: Grid,
    context: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[tuple[Counts, CachedModel]]:
    """Every shape with its model, whose cache is filled.

    Models of the same widths share their layers.
    """
    groups: dict[tuple[int, ...], list[Counts]] = {}
    for counts in shapes_to_measure(grid):
        widths = tuple(counts[axis] for axis in (*LAYER_AXES, "vocab"))
        groups.setdefault(widths, []).append(counts)
    deepest = [max(group, key=lambda counts: counts["layers"]) for group in groups.values()]
    configs = [_config_of(config, family, counts) for counts in deepest]
    layouts = [layout_of(small, family) for small in configs]
    pool = _pool(max(map(_pool_size, layouts)), device, dtype)
    subjects: list[tuple[Counts, CachedModel]] = []
    total = sum(map(len, groups.values()))
    with Progress("build", total, "shapes") as progress:
        for group, small, layout in zip(groups.values(), configs, layouts, strict=True):
            whole = _pooled_model(small, family, layout, pool)
            for counts in group:
                model = CachedModel(layers_of(whole, family, range(counts["layers"])))
                model.feed_list(_tokens(context, counts["vocab"]), keep=1)
                subjects.append((counts, model))
                progress.update(1)
    return subjects


def _step(model: CachedModel) -> None:
    """One new token; the cache stays as long as it was."""
    length = model.length
    model.feed_list([0], keep=1)
    model.crop(length)


def _config_of(config: Any, family: Family, counts: Counts) -> Any:
    """The config of a shape; no token has a meaning here, so a small vocabulary may lack any."""
    widths: dict[str, int | None] = {a: n for a, n in counts.items() if a != "vocab"}
    small = with_counts(config, family, widths)
    setattr(small, family.config.vocab, counts["vocab"])
    small.pad_token_id = None
    return small


def _pooled_model(config: Any, family: Family, layout: Layout, pool: Tensor) -> Any:
    """A model whose parameters are views of the pool, each of its own place."""
    import transformers
    from accelerate import init_empty_weights  # type: ignore[import-untyped]

    # Buffers, as rotary frequencies, are computed for real.
    with init_empty_weights(include_buffers=False):
        model = getattr(transformers, family.auto).from_config(config, dtype=pool.dtype)
    parameters: dict[str, nn.Parameter] = {}
    start = 0
    for name, shape in layout.shapes.items():
        if name not in layout.trained:
            continue
        if name in layout.aliases:
            parameters[name] = parameters[layout.aliases[name]]
        else:
            size = math.prod(shape)
            view = pool[start : start + size].view(shape)
            parameters[name] = nn.Parameter(view, requires_grad=False)
            start += _aligned(size)
        module, _, kind = name.rpartition(".")
        setattr(model.get_submodule(module), kind, parameters[name])
    return model.to(pool.device).eval()


def _pool_size(layout: Layout) -> int:
    own = layout.trained - set(layout.aliases)
    return sum(_aligned(math.prod(layout.shapes[name])) for name in own)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNED) * _ALIGNED


def _pool(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Small random values, as trained weights are; zeros and denormals would cost other times.

    Raises:
        RequestError: they don't fit in memory.
    """
    needed, free = size * dtype.itemsize, _free_bytes(device)
    if needed > free:
        raise RequestError(
            f"--drafter-layers: the largest shape has {needed / 1e9:.1f} GB of weights, and "
            f"{free / 1e9:.1f} GB of memory are free; measure fewer layers, or give --dtype "
            "bfloat16"
        )
    drawn = torch.randn(min(size, _DRAWN), generator=torch.Generator().manual_seed(0)) * 0.02
    return drawn.to(device, dtype).repeat(math.ceil(size / len(drawn)))[:size]


def _free_bytes(device: torch.device) -> int:
    import psutil  # type: ignore[import-untyped]

    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _tokens(count: int, vocab: int) -> list[int]:
    return [place % vocab for place in range(count)]


def _quartiles(seconds: Sequence[float]) -> tuple[float, float]:
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return 1e3 * low, 1e3 * high


def _usual_counts(
    axis: Axis, grid: Mapping[str, Sequence[int]], source: Shape, family: Family
) -> list[int]:
    """Counts along an axis that go with those of the others, of which the usual ones are chosen."""
    most, step = getattr(source, axis), friendly_step(axis, source)
    if axis == "hidden":
        heads = [n * source.heads_per_group for n in grid["kv_heads"]]
        heads += [source.kv_heads * n for n in grid["heads_per_group"]]
        step = math.lcm(step, family.hidden_multiple, *(heads if family.hidden_of_heads else ()))
    if axis in ("ffn", "vocab", "hidden"):
        return [*range(step, most, step), most]
    widths = (source.hidden, *grid.get("hidden", ()))
    return [n for n in range(1, most + 1) if all(_goes(axis, n, h, source, family) for h in widths)]


def _nearest(counts: Sequence[int], wanted: float) -> int:
    """Of two that are equally near, the larger."""
    return min(counts, key=lambda count: (abs(count - wanted), -count))


def _goes(axis: Axis, count: int, hidden: int, source: Shape, family: Family) -> bool:
    """Whether so many heads are legal with a hidden width."""
    try:
        resolve_shape(source, {axis: count, "hidden": hidden}, family)
    except RequestError:
        return False
    return True


def _check_legal(counts: Counts, source: Shape, family: Family) -> None:
    wanted: dict[str, int | None] = {a: n for a, n in counts.items() if a != "vocab"}
    try:
        resolve_shape(source, wanted, family)
    except RequestError as error:
        axis = next(a for a in TABLE_AXES if f".{a}:" in str(error))
        reason = str(error).partition(": ")[2]
        raise RequestError(f"{_option(axis)} {counts[axis]}: {reason}") from None


def _check_context(context: int, most: int | None) -> None:
    if most is not None and context >= most:
        raise RequestError(
            f"--context {context}: with one token more it passes the {most} positions of the "
            f"model; give at most {most - 1}"
        )


def _option(axis: str) -> str:
    return "--drafter-layers" if axis == "layers" else f"--{axis.replace('_', '-')}"


def _dtype(name: str, device: torch.device) -> torch.dtype:
    dtype: torch.dtype = working_dtype(device.type) if name == "auto" else getattr(torch, name)
    return dtype


def _config_from_hub(spec: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(spec, _CONFIG)).parent
    except Exception as error:  # network, authentication and absence each have their own class
        reason = next(iter(str(error).strip().splitlines()), repr(error))
        raise RequestError(
            f"{spec}: no such folder, and the hub did not give its config ({reason}); check the "
            "name, the network and `hf auth login`, or give a local folder"
        ) from None


def render(measured: Profile) -> Any:
    """What was measured beside what the table makes of it, as a table of at most 100 columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text as Line

    settings = measured.settings
    title = (
        f"one pass of a drafter cut from {measured.target}: {settings.runtime}, {settings.dtype}, "
        f"batch {settings.batch}, {torch.get_num_threads()} threads, {settings.context} tokens in "
        f"the cache, {settings.repeats} repeats"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("layers", "KV\nheads", "heads/\ngroup", "FFN", "hidden", "vocab"):
        table.add_column(name, justify="right")
    for name in ("ms", "quartiles", "table's\nms"):
        table.add_column(name, justify="right")
    for row in measured.rows:
        shape = replace(measured.table.source, **row.counts)
        table.add_row(
            *(f"{n}" for n in row.counts.values()),
            f"{row.ms:.3f}",
            f"{row.spread_ms[0]:.3f} … {row.spread_ms[1]:.3f}",
            f"{measured.table.ms_of(shape):.3f}",
        )
    return Group(Line(title, "bold"), table)
