"""`draftsmith inspect`: what lies at a path, whatever stage wrote it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, TypeAdapter

from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.formats import local_path, resolve
from draftsmith.checkpoints.inspection import inspect_checkpoint, inspect_pair
from draftsmith.checkpoints.pair import check_pair
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.files import PARTIAL
from draftsmith.data.traces import INDEX, TraceStore, notes_on
from draftsmith.errors import RequestError
from draftsmith.prune.compact import read_masks
from draftsmith.prune.plots import check_plot_file, plot_trajectory
from draftsmith.prune.trajectory import CLOSED, OPEN, Trajectory
from draftsmith.prune.trajectory import FILE as TRAJECTORY
from draftsmith.recipes.run import MASKS, SCORE, STAGES

Plain = dict[str, Any]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Decided:
    """Shares of an axis' masks that are open, and closed."""

    open: Share
    closed: Share


@dataclass(frozen=True)
class ExchangedParts:
    """What exchanging layers, or halves of layers, changed.

    Attributes:
        before: loss of the set that was proposed.
        after: loss of the set that is kept.
        proposed: the best of what masks and cheap choices proposed; None: not stated.
        parts: the set that is kept; None: not stated.
        by: what proposed it.
        runners_up: the best of the other sets that were tried.
    """

    before: FiniteFloat
    after: FiniteFloat
    proposed: tuple[int, ...] | None = None
    parts: tuple[int, ...] | None = None
    by: str = "masks"
    runners_up: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Raced:
    """A choice that was distilled for a few steps.

    Attributes:
        by: what proposed it.
        parts: what it keeps.
        emitted_per_round: on held-out traces, after those steps.
        top1: share of the target's tokens that it would have said.
    """

    by: str
    parts: tuple[int, ...]
    emitted_per_round: FiniteFloat
    top1: FiniteFloat


@dataclass(frozen=True)
class Learned:
    """What a masks file may say of how its choice came about.

    Attributes:
        expected: axis -> expected count when learning ended.
        decided: axis -> how sure its masks were.
        exchanged: what exchanging layers changed.
        raced: choices after a short distillation, best first.
    """

    expected: dict[str, FiniteFloat] = field(default_factory=dict)
    decided: dict[str, Decided] = field(default_factory=dict)
    exchanged: ExchangedParts | None = None
    raced: tuple[Raced, ...] = ()


def inspect(spec: str, target: str | None = None, allow_pickle: bool = False) -> Plain:
    """Say what a path holds: a checkpoint, a masks file, a trace store or a run; for JSON.

    Args:
        spec: a path, or a model as `resolve` takes it.
        target: check the checkpoint as this model's drafter.
        allow_pickle: as for `resolve`.

    Raises:
        RequestError: it is none of these, is damaged, or can't draft for the target.
    """
    path = local_path(spec)
    found = _not_a_checkpoint(path)
    if found is None:
        ref = resolve(spec, allow_pickle)
        found = inspect_checkpoint(ref)
        if target is not None:
            pair = check_pair(resolve(target, allow_pickle), ref)
            found["pair"] = inspect_pair(pair)
        if path.is_dir() and (path / MASKS).is_file():
            found["masks"] = _masks(path / MASKS)
        if path.is_dir():
            found["provenance"] = _provenance(path)
    elif target is not None:
        raise RequestError(f"--target {target}: {spec} is a {found['kind']}, not a drafter")
    return found


def _not_a_checkpoint(path: Path) -> Plain | None:
    if path.is_file() and path.suffix == ".json":
        return _masks(path)
    if (path / "config.json").is_file():
        return None
    if (path / INDEX).is_file():
        return _traces(path)
    stages = [f"{stage.folder}{end}" for stage in STAGES for end in ("", PARTIAL)]
    if any((path / name).is_dir() for name in stages):
        return _run(path)
    return None


def _masks(path: Path) -> Plain:
    masks, learned = read_masks(path), _learned(path)
    kept, trajectory = masks.selection, _trajectory(path)
    decided = {axis: asdict(shares) for axis, shares in learned.decided.items()}
    if not decided and trajectory is not None:
        decided = trajectory.decided()
    return {
        "kind": "masks",
        "path": str(path),
        "family": masks.family,
        "source_shape": asdict(masks.source),
        "shape": asdict(kept.shape(masks.source)),
        "layers": list(kept.layers),
        "ffn_layers": None if kept.ffn_layers is None else list(kept.ffn_layers),
        "kv_heads": [list(heads) for heads in kept.kv_heads],
        "query_heads": _query_heads(kept, masks.source.heads_per_group),
        "cross_heads": [list(heads) for heads in kept.cross_heads],
        "encoder_layers": list(kept.encoder_layers),
        "encoder_heads": [list(heads) for heads in kept.encoder_heads],
        "method": masks.method,
        "expected": learned.expected,
        "decided": decided,
        "exchanged": _lists(asdict(learned))["exchanged"],
        "raced": _lists(asdict(learned))["raced"],
        "trajectory": None if trajectory is None else _course(trajectory),
    }


def _learned(path: Path) -> Learned:
    """The part of a masks file that `compact` doesn't need.

    Raises:
        RequestError: it is damaged.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        names = {f.name for f in fields(Learned)}
        told = {name: plain[name] for name in names & plain.keys()}
        return TypeAdapter(Learned).validate_json(json.dumps(told), strict=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split()[:24])
        raise RequestError(f"{path}: not a masks file ({reason}); give a masks.json") from None


def _trajectory(masks: Path) -> Trajectory | None:
    """What was recorded beside a masks file; published ones have nothing."""
    path = masks.with_name(TRAJECTORY)
    return Trajectory.read(path) if path.is_file() else None


def _course(trajectory: Trajectory) -> Plain:
    """What a trajectory holds; a loss that is no number is null."""
    first, last = trajectory.loss[0].item(), trajectory.loss[-1].item()
    return {
        "steps": trajectory.steps,
        "samples": trajectory.samples,
        "first_loss": first if isfinite(first) else None,
        "last_loss": last if isfinite(last) else None,
    }


def _query_heads(kept: Selection, per_group: int) -> list[list[int]]:
    """For each kept layer, the kept query heads in the source's numbering."""
    return [
        [
            group * per_group + head
            for group, heads in zip(groups, inner, strict=True)
            for head in heads
        ]
        for groups, inner in zip(kept.kv_heads, kept.heads_per_group, strict=True)
    ]


def _lists(plain: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    return json.loads(json.dumps(plain))


def plot_masks(spec: str, file: Path) -> None:
    """Draw what masks learned.

    Args:
        spec: the folder of a prune stage, a file in it, or the folder of its run.
        file: the picture, `.png` or `.svg`.

    Raises:
        RequestError: there is no trajectory, it is damaged, or the picture can't be written there.
    """
    check_plot_file(file, "--plot")
    path = local_path(spec)
    places = (path, path.parent, path / "pruned")
    folder = next((p for p in places if (p / TRAJECTORY).is_file()), None)
    if folder is None:
        raise RequestError(
            f"--plot {file}: {spec} holds no {TRAJECTORY}: masks that were published alone and "
            "baselines have no history; give the folder of a prune stage that learned masks"
        )
    masks = folder / MASKS
    selection = read_masks(masks).selection if masks.is_file() else None
    plot_trajectory(Trajectory.read(folder / TRAJECTORY), file, selection)


def _traces(path: Path) -> Plain:
    store = TraceStore(path)
    train, validation = store.rows("train"), store.rows("validation")
    rows = [*train, *validation]
    return {
        "kind": "traces",
        "path": str(path),
        "rows": len(rows),
        "validation_rows": len(validation),
        "answer_tokens": store.answer_tokens,
        "sampled_rows": sum(row.sampled for row in rows),
        "searched_rows": sum(row.beams > 1 for row in rows),
        "bytes": sum((path / shard.file).stat().st_size for shard in store.shards),
        "bytes_per_token": store.bytes_per_token,
        "shards": len(store.shards),
        **store.about,
        "domains": list(store.domains),
        "answer_tokens_by_domain": {
            domain: sum(len(row.answer) for row in rows if row.domain == domain)
            for domain in store.domains
        },
        "provenance": _provenance(path),
    }


def _run(path: Path) -> Plain:
    return {
        "kind": "run",
        "path": str(path),
        "stages": {stage.name: _stage(path / stage.folder) for stage in STAGES},
    }


def _stage(folder: Path) -> Plain:
    state = "done" if provenance.read_key(folder) is not None else "not made"
    if state != "done" and folder.is_dir():
        state = "incomplete"
    elif state != "done" and folder.with_name(f"{folder.name}{PARTIAL}").is_dir():
        state = "unfinished"
    found: Plain = {"state": state, "folder": str(folder)}
    if state == "done":
        found["bytes"] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
        found["provenance"] = _provenance(folder)
        if (folder / SCORE).is_file():
            score = json.loads((folder / SCORE).read_text(encoding="utf-8"))
            found["verdict"] = score["verdict"]["text"]
    return found


def _provenance(folder: Path) -> Plain | None:
    path = folder / provenance.FILE
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        versions = {str(name): str(number) for name, number in record["versions"].items()}
        kept = {key: record[key] for key in ("seed", "inputs", "argv")}
        return kept | {"versions": versions}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path}: damaged ({error!r}); make the folder anew") from None


def render(found: Mapping[str, Any]) -> Any:
    """What `inspect` found, as tables of at most 100 columns."""
    from rich.console import Group

    parts = {"checkpoint": _show_checkpoint, "masks": _show_masks, "traces": _show_traces}
    return Group(*parts.get(found["kind"], _show_run)(found))


def _show_checkpoint(found: Mapping[str, Any]) -> Iterator[Any]:
    yield _facts(found, "checkpoint", _checkpoint_facts(found))
    yield _axes(found)
    if found.get("pair"):
        pair = found["pair"]
        yield _facts(
            pair,
            "pair",
            {
                "verdict": pair["verdict"],
                "rows": f"target {pair['target_rows']:,}, drafter {pair['drafter_rows']:,}",
                "context": f"target {_any(pair['target_context'])}, "
                f"drafter {_any(pair['drafter_context'])}",
                **{f"note {i + 1}": note for i, note in enumerate(pair["notes"])},
            },
        )
    if found.get("masks"):
        yield from _show_masks(found["masks"])


def _checkpoint_facts(found: Mapping[str, Any]) -> dict[str, str]:
    stored, tokenizer = found["stored"], found["tokenizer"]
    types = ", ".join(f"{name} {_human(count)}" for name, count in stored["values_by_type"].items())
    files = f"{len(stored['files'])} files" if len(stored["files"]) > 1 else stored["files"][0]
    apart = found["parameters_with_head"]
    head = f"; {apart:,} with the tied head counted apart" if found["tied_head"] else ""
    facts = {
        "family": found["family"],
        "parameters": f"{found['parameters']:,}{head}",
        "stored as": f"{stored['format']}, {files}, {stored['bytes'] / 2**20:,.1f} MiB: {types}",
        "context": f"{_any(found['context'])} positions",
        "KV cache": f"{found['cache_bytes'] / 2**20:,.1f} MiB for {found['cache_tokens']:,} tokens "
        "in half precision",
        "tokenizer": f"{tokenizer['tokens']:,} tokens, {tokenizer['padding_rows']} padding rows, "
        f"bos {tokenizer['bos']}, eos {tokenizer['eos']}, "
        f"chat template: {'yes' if tokenizer['chat_template'] else 'no'}",
        "checksums": "compared, all equal" if found["checksums"] else "none in the checkpoint",
    }
    if found["cut_from"] is not None:
        facts["vocabulary"] = f"cut from {found['cut_from']:,} tokens, with a map to them"
    if (block := found["block_drafting"]) is not None:
        facts["drafts"] = (
            f"blocks of {block['size']} tokens in one pass, masked by {block['mask_id']}"
        )
    facts |= {f"note {i + 1}": note for i, note in enumerate(found["notes"])}
    return facts | _origin(found)


def _axes(found: Mapping[str, Any]) -> Any:
    from rich.table import Table

    table = Table("axis", box=None, pad_edge=False, title="What can be cut", title_justify="left")
    table.add_column("count", justify="right")
    table.add_column("parameters of one", justify="right")
    table.add_column("cut together with")
    for axis, parameters in found["parameters_per_entry"].items():
        others = [o for tie in found["cut_together"] if axis in tie for o in tie if o != axis]
        table.add_row(axis, f"{found['shape'][axis]:,}", f"{parameters:,}", ", ".join(others))
    return table


def _show_masks(found: Mapping[str, Any]) -> Iterator[Any]:
    facts = {
        "method": str(found["method"]),
        "learned": _learning(found["trajectory"]),
        "layers kept": _ranges(found["layers"]),
        "FFNs kept": _ranges(found["ffn_layers"] or ()),
        "encoder layers": _ranges(found["encoder_layers"]),
        "exchanged": _exchange(found["exchanged"], halves=found["ffn_layers"] is not None),
        "from": _counts(found["source_shape"]),
        "to": _counts(found["shape"]),
    }
    yield _facts(found, "masks", {k: v for k, v in facts.items() if v})
    yield _heads(found, "layers", ("kv_heads", "query_heads", "cross_heads"))
    if found["encoder_layers"]:
        yield _heads(found, "encoder_layers", ("encoder_heads",))
    if found["raced"]:
        yield _race(found["raced"], halves=found["ffn_layers"] is not None)
    if found["expected"]:
        yield _convergence(found)


def _learning(course: Mapping[str, Any] | None) -> str:
    if course is None:
        return ""
    first, last = (_figure(course[key]) for key in ("first_loss", "last_loss"))
    return f"in {course['steps']:,} steps, loss {first} → {last}"


def _exchange(exchanged: Mapping[str, Any] | None, *, halves: bool) -> str:
    """Which layers went for which others; of halves, even ones are attention, odd ones FFNs."""
    if exchanged is None:
        return ""
    loss, by = f"loss {_figure(exchanged['before'])}", exchanged["by"]
    losses = f"{loss} → {_figure(exchanged['after'])}"
    proposed = "" if by == "masks" else f" (proposed by {by})"
    if exchanged["proposed"] is None or exchanged["parts"] is None:
        return losses + proposed
    before, after = set(exchanged["proposed"]), set(exchanged["parts"])
    if before == after:
        return f"nothing: no exchange lowers the {loss}{proposed}"
    went, came = (_parts(sorted(parts), halves) for parts in (before - after, after - before))
    return f"{went} for {came}: {losses}{proposed}"


def _race(raced: Sequence[Mapping[str, Any]], *, halves: bool) -> Any:
    """What a short distillation made of each choice."""
    from rich.table import Table

    table = Table("proposed by", "keeps", box=None, pad_edge=False, title="Distilled for a race")
    table.title_justify = "left"
    for name in ("emitted/round", "agreement"):
        table.add_column(name, justify="right")
    for entrant in raced:
        keeps = _parts(entrant["parts"], halves)
        emitted, top1 = f"{entrant['emitted_per_round']:.3f}", f"{entrant['top1']:.1%}"
        table.add_row(entrant["by"], keeps, emitted, top1)
    return table


def _parts(parts: list[int], halves: bool) -> str:
    if not halves:
        return f"layers {_ranges(parts)}"
    return ", ".join(f"{('attention', 'FFN')[part % 2]} {part // 2}" for part in parts)


def _heads(found: Mapping[str, Any], layers: str, kinds: tuple[str, ...]) -> Any:
    """Kept heads; layers that keep the same are one row."""
    from rich.table import Table

    shape = found["source_shape"]
    counts = shape | {"query_heads": shape["kv_heads"] * shape["heads_per_group"]}
    kinds = tuple(kind for kind in kinds if counts[kind])
    rows: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for layer, *heads in zip(found[layers], *(found[kind] for kind in kinds), strict=True):
        row = (_of(kept, counts[kind]) for kind, kept in zip(kinds, heads, strict=True))
        rows[tuple(row)].append(layer)
    table = Table(_title(layers), box=None, pad_edge=False, title="Heads kept")
    table.title_justify = "left"
    for kind in kinds:
        table.add_column(_title(kind))
    for cells, numbers in rows.items():
        table.add_row(_ranges(numbers), *cells)
    return table


def _convergence(found: Mapping[str, Any]) -> Any:
    """Expected counts against those that came out, and how sure the masks were."""
    from rich.table import Table

    title = "Masks when learning ended"
    table = Table("axis", box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("from", "expected", "kept", f"z > {OPEN}", f"z < {CLOSED}"):
        table.add_column(name, justify="right")
    for axis, expected in found["expected"].items():
        shares = found["decided"].get(axis)
        sure = ["" if shares is None else f"{shares[key]:.0%}" for key in ("open", "closed")]
        counts = (found[shape].get(axis) for shape in ("source_shape", "shape"))
        old, new = ("" if count is None else f"{count:,}" for count in counts)
        table.add_row(axis, old, f"{expected:,.2f}", new, *sure)
    return table


def _show_traces(found: Mapping[str, Any]) -> Iterator[Any]:
    yield _facts(
        found,
        "traces",
        {
            "rows": f"{found['rows']:,}, {found['validation_rows']:,} of them for validation, "
            f"{found['sampled_rows']:,} sampled{_searched(found)}",
            "answer tokens": f"{found['answer_tokens']:,}",
            "teacher signal": f"top {found['top_n']} log-probabilities, "
            f"{found['bytes_per_token']:.0f} bytes a token",
            "stored as": f"{found['shards']} shards, {found['bytes'] / 2**20:,.1f} MiB",
        }
        | ({"counted": "; ".join(notes)} if (notes := notes_on(found)) else {})
        | _origin(found),
    )
    if len(found["domains"]) > 1:
        yield _domains(found["answer_tokens_by_domain"], found["answer_tokens"])


def _searched(found: Mapping[str, Any]) -> str:
    count = found["searched_rows"]
    return f", {count:,} by {found['beams']} beams" if count else ""


def _domains(tokens: Mapping[str, int], total: int) -> Any:
    from rich.table import Table

    table = Table("domain", box=None, pad_edge=False, title="Answer tokens", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("share", justify="right")
    for domain, count in sorted(tokens.items(), key=lambda item: -item[1]):
        table.add_row(domain or "(none)", f"{count:,}", f"{count / max(1, total):.0%}")
    return table


def _show_run(found: Mapping[str, Any]) -> Iterator[Any]:
    from rich.table import Table
    from rich.text import Text

    table = Table("stage", "state", box=None, pad_edge=False, title=f"run {found['path']}")
    table.title_justify = "left"
    table.add_column("MiB", justify="right")
    table.add_column("made by")
    for name, stage in found["stages"].items():
        size = f"{stage['bytes'] / 2**20:,.1f}" if "bytes" in stage else ""
        table.add_row(name, stage["state"], size, _origin(stage).get("made by", ""))
    yield table
    yield from (Text(s["verdict"], "bold") for s in found["stages"].values() if "verdict" in s)


def _facts(found: Mapping[str, Any], title: str, facts: Mapping[str, str]) -> Any:
    from rich.table import Table

    name = found.get("path") or f"{found['drafter']} for {found['target']}"
    table = Table(box=None, pad_edge=False, show_header=False, title=f"{title} {name}")
    table.title_justify = "left"
    for key, value in facts.items():
        table.add_row(key, value)
    return table


def _origin(found: Mapping[str, Any]) -> dict[str, str]:
    record = found.get("provenance")
    if not record:
        return {}
    versions = defaultdict(lambda: "?", record["versions"])
    seed = "" if record["seed"] is None else f", seed {record['seed']}"
    return {
        "made by": f"draftsmith {versions['draftsmith']}, torch {versions['torch']}, "
        f"transformers {versions['transformers']}{seed}"
    }


def _ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers, neighbours as ranges: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in runs)


def _of(kept: list[int], count: int) -> str:
    return f"all {count}" if len(kept) == count else _ranges(kept)


def _title(name: str) -> str:
    return name.replace("_", " ").replace("kv", "KV")


def _figure(value: float | None) -> str:
    return "not a number" if value is None else f"{value:.3f}"


def _counts(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in shape.items() if count)


def _any(context: int | None) -> str:
    return "any number of" if context is None else f"{context:,}"


def _human(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
