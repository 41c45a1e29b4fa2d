"""The verdict: use the drafter and with which lookahead, or not, and what would have to change."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftsmith.accept.figures import Row


def verdict(
    decode: Sequence["Row"], replays: Sequence["Row"], on_cpu: bool, exact: bool = True
) -> dict[str, Any]:
    """Use it, and with which lookahead; or not, and what would have to change.

    Args:
        decode: lookaheads that were decoded for real.
        replays: lookaheads that were replayed; empty where replay does not hold.
        on_cpu: whether a GPU may decide otherwise.
        exact: false for a lossy verifier, which the text then says first.
    """
    rows = [row for row in replays or decode if row.speedup_predicted is not None]
    if not rows:
        return {
            "drafting_pays": None,
            "lookahead": None,
            "speedup_predicted": None,
            "reason": None,
            "text": "No verdict on speed: the target was not loaded, so nothing was timed. Score "
            "without --mode replay on the machine that will serve it.",
        }
    best = max(rows, key=_predicted)
    measured = max(
        (r for r in decode if r.speedup_measured),
        key=lambda r: r.speedup_measured or 0.0,
        default=None,
    )
    # Both must say so: a prediction alone may flatter, a short measurement alone may be luck.
    pays = _predicted(best) > 1.0 and (measured is None or (measured.speedup_measured or 0) > 1.0)
    text = _text(best, measured, rows, pays)
    shown = decode[0] if decode else best
    steps = (shown.t_verify_ms or 0.0) / (shown.t_ar_ms or 1.0)
    if on_cpu and steps > 1.2:
        text += (
            f" Here a verification of {shown.lookahead + 1} positions takes {steps:.1f} plain "
            "steps; on a GPU it takes little more than one, so score there before deciding for one."
        )
    if not exact:
        text = f"LOSSY: the output is not the target's own. {text}"
    return {
        "drafting_pays": pays,
        "lookahead": best.lookahead if pays else None,
        "speedup_predicted": best.speedup_predicted,
        "reason": None if pays else _reason(best, rows),
        "text": text,
    }


def runtime_verdict(rows: Sequence["Row"], runtime: str, prompts: int) -> dict[str, Any]:
    """Use it or not, by what another runtime measured.

    Args:
        rows: of the lookaheads that it decoded.
        runtime: its name.
        prompts: that it answered.
    """
    best = max(rows, key=lambda row: row.speedup_measured or 0.0)
    speedup, k = best.speedup_measured or 0.0, best.lookahead
    low, high = best.speedup_interval or (0.0, 0.0)
    # A few prompts may be luck.
    pays = low > 1.0 and best.proposed != 0
    where = f"in {runtime} on this machine"
    measured = f"{speedup:.2f} times its tokens per second without a drafter, on {prompts} prompts"
    spread = f" ({low:.2f} to {high:.2f} on others like these)" if high else ""
    if pays:
        reason, text = None, f"Draft with k = {k} {where}: {measured}{spread}."
    elif max(high, speedup) > 1.0:
        reason = "too few prompts to tell"
        text = (
            f"Drafting {where} may pay or not: {measured}{spread}, with k = {k}. Score with more "
            "prompts."
        )
    else:
        reason = "slower than the runtime alone"
        text = f"Do not draft {where}: at best {measured}{spread}, with k = {k}."
    return {
        "drafting_pays": pays,
        "lookahead": k if pays else None,
        "speedup_predicted": None,
        "reason": reason,
        "text": text,
    }


def _reason(best: "Row", rows: Sequence["Row"]) -> str:
    """What keeps drafting from paying, at the lookahead where it is nearest to it."""
    if (best.steps_per_round or 0.0) > (best.break_even_emitted_per_round or 0.0):
        return "answers too short"
    if not _hopeless(rows):
        return "acceptance too low"
    # What a draft that costs nothing would leave.
    verification = (best.t_verify_ms or 0.0) / (best.t_ar_ms or 1.0)
    return "verification too slow" if verification > best.lookahead + 1 else "draft too slow"


def _hopeless(rows: Sequence["Row"]) -> bool:
    """Whether not even full acceptance would pay."""
    return all((r.break_even_emitted_per_round or 0.0) > r.lookahead + 1 for r in rows)


def _predicted(row: "Row") -> float:
    return row.speedup_predicted or 0.0


def _text(best: "Row", measured: "Row | None", rows: Sequence["Row"], pays: bool) -> str:
    reached = best.steps_per_round or best.emitted_per_round or 0.0
    needed = best.break_even_emitted_per_round or 0.0
    if pays:
        return (
            f"Draft with k = {best.lookahead}: {_predicted(best):.2f} times the target's "
            "tokens per second is predicted on this machine"
            + (", though nothing was decoded for real." if measured is None else ".")
        )
    if measured is not None and _predicted(best) > 1.0:
        return (
            f"Do not draft on this machine yet: {_predicted(best):.2f} times is predicted at "
            f"k = {best.lookahead}, but {measured.speedup_measured or 0.0:.2f} was measured at "
            f"k = {measured.lookahead}. Decode for real with -k {best.lookahead} on more prompts."
        )
    if _hopeless(rows):
        return (
            "Do not draft on this machine: at every lookahead a round costs more plain steps than "
            "the tokens that it can emit at most. Drafting or verifying must get cheaper first"
            f"{_cheaper(best, best.lookahead + 1.0)}."
        )
    if reached > needed:
        return (
            f"Do not draft on this machine: at its best lookahead, k = {best.lookahead}, a round "
            f"gains {reached - needed:.2f} plain steps, which the drafter's pass over the prompt "
            "uses up. Longer answers may pay."
        )
    share = best.break_even_acceptance
    more = "" if share is None else f" to {share:.0%} of proposals"
    return (
        f"Do not draft on this machine: at its best lookahead, k = {best.lookahead}, a round "
        f"emits {reached:.2f} tokens and costs {needed:.2f} plain steps. Acceptance would "
        f"have to rise{more}, or drafting and verifying get cheaper{_cheaper(best, reached)}."
    )


def _cheaper(row: "Row", emitted: float) -> str:
    """How quick a round that emits so many tokens would have to be."""
    ar, verify, draft = row.t_ar_ms or 0.0, row.t_verify_ms or 0.0, row.t_draft_ms or 0.0
    rest = emitted * ar - verify
    round_ms = (row.break_even_emitted_per_round or 0.0) * ar
    if rest <= 0 or not draft or round_ms <= verify:
        return (
            f": a verification takes {verify:.1f} ms, {emitted:.2f} plain steps {emitted * ar:.1f}"
        )
    # Of whatever passes a round has, each would have to be so much quicker.
    most = draft * rest / (round_ms - verify)
    return f": a drafter step at most {most:.1f} ms, not {draft:.1f}"
