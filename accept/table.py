"""A score as a table that a person reads at a glance."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

# A score as it lies in score.json, so that old ones can be shown without loading a model.
Plain = Mapping[str, Any]

_COLUMNS = (
    "accepted\n/round",
    "emitted\n/round",
    "needed\nto pay",
    "accept-\nance",
    "needed\nto pay",
    "verify\nms",
    "predicted\nspeedup",
    "measured\nspeedup",
)


_RUNTIME_COLUMNS = (
    "pro-\nposed",
    "accept-\ned",
    "accepted\n/round",
    "emitted\n/round",
    "accept-\nance",
    "tokens\n/s",
    "alone",
    "measured\nspeedup",
)


def render(score: Plain) -> Group:
    """The figures by lookahead, what was compared, and the verdict."""
    return Group(
        _figures(score),
        _times(score),
        *_spread(score),
        *_domains(score),
        *_rejected(score),
        _certificate(score),
        Text(score["verdict"]["text"], "bold"),
    )


def _figures(score: Plain) -> Table:
    ours = score["runtime"] == "torch"
    title = f"{score['drafter']} drafting for {score['target']}"
    table = Table(title=title + _how(score), title_justify="left")
    table.add_column("k", justify="right")
    table.add_column("how")
    for name in _COLUMNS if ours else _RUNTIME_COLUMNS:
        table.add_column(name, justify="right")
    cells = _cells if ours else _runtime_cells
    for row in score["decode"]:
        table.add_row(*cells(row, "real" if ours else score["runtime"]))
    table.add_section()
    for row in score["replay"]:
        table.add_row(*cells(row, "replay"))
    return table


def _runtime_cells(row: Plain, how: str) -> list[str]:
    """What a runtime counts by itself; times of single passes are its own affair."""
    return [
        str(row["lookahead"]),
        how,
        _count(row["proposed"]),
        _count(row["accepted"]),
        _number(row["accepted_per_round"]),
        _number(row["emitted_per_round"]),
        _percent(row["acceptance_rate"]),
        _number(row["tokens_per_second"]),
        _number(row["tokens_per_second_alone"]),
        _number(row["speedup_measured"]),
    ]


def _needed(row: Plain) -> str:
    if row["break_even_emitted_per_round"] is None:
        return _percent(None)
    rate = row["break_even_acceptance"]
    return ">100%" if rate is None else _percent(rate)


def _times(score: Plain) -> Text:
    row, runtime = (score["decode"] or score["replay"])[0], score["runtime"]
    if runtime != "torch":
        return Text(
            f"Decoded by {score['machine']['runtime']}, prompts included in the times; replay is "
            "what draftsmith expects on the same texts."
        )
    if row["t_ar_ms"] is None:
        return Text("Nothing was timed, since the target was not loaded.")
    machine = score["machine"]
    device = machine["gpu"] if machine["gpu"] != "none" else machine["cpu"]
    return Text(
        f"One plain step of the target takes {row['t_ar_ms']:.1f} ms and one of the drafter "
        f"{row['t_draft_ms']:.1f} ms ({device}, {machine['threads']} threads)."
    )


def _cells(row: Plain, how: str) -> list[str]:
    return [
        str(row["lookahead"]),
        how,
        _number(row["accepted_per_round"]),
        _number(row["emitted_per_round"]),
        _number(row["break_even_emitted_per_round"]),
        _percent(row["acceptance_rate"]),
        _needed(row),
        "–" if row["t_verify_ms"] is None else f"{row['t_verify_ms']:.1f}",
        _number(row["speedup_predicted"]),
        _number(row["speedup_measured"]),
    ]


def _domains(score: Plain) -> list[Text]:
    domains = score["by_domain"]
    if len(domains) < 2:
        return []
    parts = [f"{name} {_number(row['emitted_per_round'])}" for name, row in domains.items()]
    lookahead = next(iter(domains.values()))["lookahead"]
    return [Text(f"Emitted per round at k = {lookahead} by domain: {', '.join(parts)}.")]


def _how(score: Plain) -> str:
    """What is not as usual."""
    parts = [f"LOSSY: {score['verify']}"] if score["verify"] == "top_beta" else []
    if score["temperature"]:
        parts.append(f"temperature {score['temperature']:g}")
    if score["batch"] > 1:
        parts.append(f"{score['batch']} texts together")
    return f" ({', '.join(parts)})" if parts else ""


def _spread(score: Plain) -> list[Text]:
    row = (score["decode"] or score["replay"])[-1]
    interval = row.get("emitted_per_round_interval")
    if interval is None:
        return []
    text = (
        f"Over other prompts like these, emitted per round at k = {row['lookahead']} would be "
        f"{interval[0]:.2f} to {interval[1]:.2f} (95 %)."
    )
    sizes = [
        f"{size:,} bytes of the {name}"
        for name, size in score["kv_bytes_per_token"].items()
        if size is not None
    ]
    if sizes:
        text += f" A token's keys and values take {' and '.join(sizes)}."
    return [Text(text)]


def _rejected(score: Plain) -> list[Text]:
    worst = [
        f"{found['text']!r} for {found['instead_text']!r} ({found['count']})"
        for found in score["rejected"][:4]
    ]
    return [Text(f"Most often rejected: {', '.join(worst)}.")] if worst else []


def _certificate(score: Plain) -> Text:
    if score["quality"] is not None:
        return _quality(score["quality"], score["settings"])
    if not score["decode"]:
        return Text("Nothing was decoded for real, so no output was compared.")
    if score["decode"][0]["compared_tokens"] is None:
        return _sampled(score)
    rows = score["decode"]
    identical = sum(row["identical_tokens"] for row in rows)
    compared = sum(row["compared_tokens"] for row in rows)
    differences = sum(len(row["first_differences"]) for row in rows)
    alone = "the target's own" if score["runtime"] == "torch" else "the runtime's own"
    text = f"Identical to {alone} greedy output: {identical} of {compared} tokens"
    if differences:
        kind = "all numeric ties" if score["lossless"] else "NOT numeric ties: a fault"
        text += f"; {differences} texts part ({kind})"
    return Text(f"{text} ({_precision(score)}).", style="" if score["lossless"] else "bold red")


def _sampled(score: Plain) -> Text:
    """What is known of the distribution of drawn texts."""
    found = score["samples"]
    if found is None:
        return Text(
            "Sampled texts can't be compared token by token; the verifier preserves the target's "
            f"distribution ({_precision(score)}). --samples 32 compares samples."
        )
    told = "no difference shows" if score["lossless"] else "they DIFFER: a fault"
    return Text(
        f"{found['samples']} short texts of each of {found['prompts']} prompts with and without "
        f"drafts: {told} (permutation test, p = {found['p_value']:.3g}; {_precision(score)}).",
        style="" if score["lossless"] else "bold red",
    )


def _precision(score: Plain) -> str:
    """In what it was computed, and what that means for the comparison."""
    if score["dtype"] == "float32":
        return "float32"
    return (
        f"{score['dtype']}, in which passes over one and over several positions round apart: "
        "equal up to numeric ties at best"
    )


def _quality(quality: Plain, settings: Plain) -> Text:
    """How far a lossy output is from the target's own."""
    return Text(
        f"LOSSY (beta {settings['beta']}, tau {settings['tau']:g}): "
        f"{_percent(quality['token_identity'])} of tokens equal the target's own greedy output at "
        f"k = {quality['lookahead']}, {quality['identical_texts']} of {quality['texts']} texts are "
        f"identical; BLEU {_number(quality['bleu'])}, ROUGE-L {_number(quality['rouge_l'])} "
        "against it.",
        style="bold red",
    )


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
