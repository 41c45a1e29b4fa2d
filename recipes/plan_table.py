"""A plan as tables of at most 100 columns."""

from collections.abc import Iterator, Sequence
from typing import Any

from draftsmith.recipes.fits import Fit, Text, gb
from draftsmith.recipes.planning import Plan
from draftsmith.recipes.prune_plan import DomainText, PrunePlan


def render(planned: Plan) -> Any:
    """The plan as tables of at most 100 columns."""
    from rich.console import Group
    from rich.text import Text as Line

    prune = planned.prune
    return Group(
        *_facts(planned),
        *(_prune_lines(prune) if prune else ()),
        *_stage_facts("distill", _distill_facts(planned)),
        _memory_table("distill", planned.fits),
        *_verdict("distill", planned.chosen, planned.changes),
        *_time_lines(planned),
        *(Line(f"warning: {text}", "yellow") for text in planned.all_warnings),
    )


def _facts(planned: Plan) -> Iterator[Any]:
    counts, device = planned.counts, planned.device
    adapters = f" ({counts.adapters:,} of adapters)" if counts.adapters else ""
    once = ", the encoder once" if planned.shared else ""
    yield from _stage_facts(
        f"plan for {planned.recipe}",
        {
            "drafter": str(counts.shape),
            "parameters": f"{counts.parameters:,}; {counts.learning:,} learn{adapters}",
            "with target": f"{planned.together:,}{once}",
            "device": f"{device.name}, {gb(device.available)} free of {gb(device.memory)}",
            "products": f"in {planned.dtype}",
        },
    )


def _stage_facts(title: str, facts: dict[str, str]) -> Iterator[Any]:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, title=title)
    table.title_justify = "left"
    for name, fact in facts.items():
        table.add_row(name, fact)
    yield table


def _distill_facts(planned: Plan) -> dict[str, str]:
    settings, text = planned.settings, planned.text
    step = f"{settings.accumulate} x {settings.batch} {_rows_fact(text)}"
    if settings.block is not None:
        step += f", in blocks of {settings.block.size} after {settings.block.prefixes} beginnings"
    return {
        "step": step,
        "text": _text_fact(text, settings.steps),
    }


def _rows_fact(text: Text, length: int | None = None) -> str:
    source = f" for sources of up to {text.longest_source}" if text.longest_source else ""
    return f"rows of up to {length or text.longest} tokens{source}"


def _text_fact(text: Text, steps: int) -> str:
    source = "in the traces" if text.measured else "from the recipe, with the longest answers"
    return (
        f"{text.answer_tokens:,} answer tokens {source}; {steps:,} steps ask for "
        f"{text.asked_tokens:,}: {text.epochs:.1f} epochs"
    )


def _prune_lines(prune: PrunePlan) -> Iterator[Any]:
    settings, counts = prune.settings, prune.counts
    weights = "its weights learn too" if settings.weights_lr else "its weights stay as they are"
    facts = {
        "source": f"{counts.shape}",
        "masks": f"{counts.adapters:,} on {', '.join(prune.axes)}; {weights}",
        "step": f"{settings.accumulate} x {settings.batch} {_prune_rows(prune)}",
    }
    if prune.text is not None:
        facts["text"] = _text_fact(prune.text, settings.steps)
    else:
        facts["text"] = f"{settings.steps:,} steps ask for {prune.asked_tokens:,} tokens"
    yield from _stage_facts("prune", facts)
    if prune.domains:
        yield _domain_table(prune.domains)
    yield _memory_table("prune", prune.fits)
    yield from _verdict("prune", prune.chosen, prune.changes)


def _prune_rows(prune: PrunePlan) -> str:
    if prune.text is not None:
        return _rows_fact(prune.text, prune.length)
    return f"rows of up to {prune.length} tokens"


def _domain_table(domains: Sequence[DomainText]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("domain")
    table.add_column("tokens asked", justify="right")
    table.add_column("there", justify="right")
    table.add_column("", overflow="fold")
    for domain in domains:
        there = "?" if domain.tokens is None else f"{domain.tokens:,}"
        if domain.tokens is not None and domain.tokens >= domain.asked:
            there = "enough"
        note = domain.note if domain.here else "not here (see below)"
        table.add_row(domain.name, f"{domain.asked:,}", there, note)
    return table


_PARTS = ("weights", "gradients", "optimizer", "activations", "head", "teacher")


_SHORT = {
    "gradients": "gradi-\nents",
    "optimizer": "opti-\nmizer",
    "activations": "activa-\ntions",
}


def _memory_table(stage: str, fits: Sequence[Fit]) -> Any:
    from rich.table import Table

    host = fits[0].on_host
    title = f"{stage}: memory of one process at its peak, in GB"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*_PARTS, "traces"):
        table.add_column(_SHORT.get(name, name), justify="right")
    table.add_column("total", justify="right")
    table.add_column("free", justify="right")
    table.add_column("fits")
    for fit in fits:
        cells = [_short_gb(getattr(fit.memory, name)) for name in _PARTS]
        traces = _short_gb(fit.traces) if host else "(host)"
        ends = (_short_gb(fit.total), _short_gb(fit.available), _fits(fit))
        mark = "→ " if fit.chosen and len(fits) > 1 else ""
        table.add_row(mark + fit.name, *cells, traces, *ends, style="bold" if fit.chosen else "")
    return table


def _verdict(stage: str, own: Fit, changes: Sequence[Fit]) -> Iterator[Any]:
    from rich.text import Text as Line

    words = {"yes": "fits", "tight": "hardly fits", "no": "does not fit"}[_fits(own)]
    yield Line(
        f"{stage}, {own.name}: {words}; {gb(own.total)} of {gb(max(0, own.available))}, the most "
        f"{_MOMENTS[own.memory.moment]}",
        "bold",
    )
    for change in changes:
        yield Line(f"would fit with {change.name}: {gb(change.total)}")


def _fits(fit: Fit) -> str:
    return "tight" if fit.tight else "yes" if fit.fits else "no"


_MOMENTS = {
    "teacher": "while the target reads",
    "loss": "while the head loss is computed",
    "backward": "as the backward pass begins",
    "encoder": "as the encoder's backward pass begins",
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
