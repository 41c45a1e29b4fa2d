"""`draftsmith inspect`: what lies at a path, whatever stage wrote it."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftsmith.checkpoints import provenance
from draftsmith.checkpoints.formats import local_path, resolve
from draftsmith.checkpoints.inspection import inspect_checkpoint, inspect_pair
from draftsmith.checkpoints.pair import check_pair
from draftsmith.data.files import PARTIAL
from draftsmith.data.traces import INDEX, TraceStore
from draftsmith.errors import RequestError
from draftsmith.prune.compact import read_masks
from draftsmith.recipes.run import MASKS, SCORE, STAGES

Plain = dict[str, Any]


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
    masks = read_masks(path)
    return {
        "kind": "masks",
        "path": str(path),
        "family": masks.family,
        "source_shape": asdict(masks.source),
        "shape": asdict(masks.selection.shape(masks.source)),
        "layers": list(masks.selection.layers),
        "encoder_layers": list(masks.selection.encoder_layers),
        "method": masks.method,
    }


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
        "layers kept": ", ".join(map(str, found["layers"])),
        "encoder layers": ", ".join(map(str, found["encoder_layers"])),
        "from": _counts(found["source_shape"]),
        "to": _counts(found["shape"]),
    }
    yield _facts(found, "masks", {k: v for k, v in facts.items() if v})


def _show_traces(found: Mapping[str, Any]) -> Iterator[Any]:
    yield _facts(
        found,
        "traces",
        {
            "rows": f"{found['rows']:,}, {found['validation_rows']:,} of them for validation, "
            f"{found['sampled_rows']:,} sampled",
            "answer tokens": f"{found['answer_tokens']:,}",
            "teacher signal": f"top {found['top_n']} log-probabilities, "
            f"{found['bytes_per_token']:.0f} bytes a token",
            "stored as": f"{found['shards']} shards, {found['bytes'] / 2**20:,.1f} MiB",
        }
        | _origin(found),
    )
    if len(found["domains"]) > 1:
        yield _domains(found["answer_tokens_by_domain"], found["answer_tokens"])


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


def _counts(shape: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in shape.items() if count)


def _any(context: int | None) -> str:
    return "any number of" if context is None else f"{context:,}"


def _human(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)
