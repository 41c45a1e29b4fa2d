"""A plan as tables of at most 100 columns."""

from collections.abc import Iterator
from typing import Any

from draftsmith.recipes.planning import Fit, Plan, gb


def render(planned: Plan) -> Any:
    """The plan as tables of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text as Line

    warnings = [Line(f"warning: {text}", "yellow") for text in planned.warnings]
    return Group(
        *_facts(planned),
        _memory_table(planned),
        *_verdict(planned),
        *_time_lines(planned),
        *warnings,
    )


def _facts(planned: Plan) -> Iterator[Any]:
    from rich.table import Table

    counts, text, device = planned.counts, planned.text, planned.device
    table = Table(box=None, pad_edge=False, show_header=False, title=f"plan for {planned.recipe}")
    table.title_justify = "left"
    table.add_row("drafter", str(counts.shape))
    adapters = f" ({counts.adapters:,} of adapters)" if counts.adapters else ""
    table.add_row("parameters", f"{counts.parameters:,}; {counts.learning:,} learn{adapters}")
    settings = planned.settings
    table.add_row(
        "step",
        f"{settings.accumulate} x {settings.batch} rows of up to {text.longest} tokens, products "
        f"in {planned.dtype}",
    )
    source = "in the traces" if text.measured else "from the recipe, with the longest answers"
    table.add_row(
        "text",
        f"{text.answer_tokens:,} answer tokens {source}; {settings.steps:,} steps ask for "
        f"{text.asked_tokens:,}: {text.epochs:.1f} epochs",
    )
    table.add_row("device", f"{device.name}, {gb(device.available)} free of {gb(device.memory)}")
    yield table


_PARTS = ("weights", "gradients", "optimizer", "activations", "head", "teacher")


_SHORT = {
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activa-\ntions",
}


def _memory_table(planned: Plan) -> Any:
    from rich.table import Table

    host = planned.fits[0].on_host
    title = "memory of one process at its peak, in GB"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*_PARTS, "traces"):
        table.add_column(_SHORT.get(name, name), justify="right")
    table.add_column("total", justify="right")
    table.add_column("free", justify="right")
    table.add_column("fits")
    for fit in planned.fits:
        cells = [_short_gb(getattr(fit.memory, name)) for name in _PARTS]
        traces = _short_gb(fit.traces) if host else "(host)"
        ends = (_short_gb(fit.total), _short_gb(fit.available), _fits(fit))
        mark = "→ " if fit.chosen and len(planned.fits) > 1 else ""
        table.add_row(mark + fit.name, *cells, traces, *ends, style="bold" if fit.chosen else "")
    return table


def _verdict(planned: Plan) -> Iterator[Any]:
    from rich.text import Text as Line

    own = planned.chosen
    words = {"yes": "fits", "tight": "hardly fits", "no": "does not fit"}[_fits(own)]
    yield Line(
        f"{own.name}: {words}; {gb(own.total)} of {gb(max(0, own.available))}, the most "
        f"{_MOMENTS[own.memory.moment]}",
        "bold",
    )
    for change in planned.changes:
        yield Line(f"would fit with {change.name}: {gb(change.total)}")


def _fits(fit: Fit) -> str:
    return "tight" if fit.tight else "yes" if fit.fits else "no"


_MOMENTS = {
    "teacher": "while the target reads",
    "loss": "while the head loss is computed",
    "backward": "as the backward pass begins",
    "gradients": "when all gradients are there",
    "replay": "while held-out rows are replayed",
}


def _time_lines(planned: Plan) -> Iterator[Any]:
    from rich.text import Text as Line

    took = planned.time
    if took is None:
        return
    scaled = "" if took.rows == planned.settings.batch else f", {took.rows} rows counted up"
    yield Line(
        f"time: {_span(took.total_low)} to {_span(took.total_high)}, median "
        f"{_span(took.total_median)} (a step {took.step_low:.2f} to {took.step_high:.2f} s in "
        f"{took.steps} steps{scaled}; replays, saves and exchange between processes not counted)"
    )


def _span(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _short_gb(count: int) -> str:
    return f"{count / 1e9:,.2f}" if count else "-"
