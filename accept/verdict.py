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
    rows = replays or decode
    best = max(rows, key=lambda r: r.speedup_predicted)
    measured = max((r for r in decode if r.speedup_measured), key=lambda r: r.speedup_measured or 0)
    # Both must say so: a prediction alone may flatter, a short measurement alone may be luck.
    pays = best.speedup_predicted > 1.0 and (measured.speedup_measured or 0.0) > 1.0
    text = _text(best, measured, rows, pays)
    if on_cpu and decode[0].t_verify_ms > 1.2 * decode[0].t_ar_ms:
        text += (
            f" Here a verification of {decode[0].lookahead + 1} positions takes "
            f"{decode[0].t_verify_ms / decode[0].t_ar_ms:.1f} plain steps; on a GPU it takes "
            "little more than one, so score there before deciding for one."
        )
    if not exact:
        text = f"LOSSY: the output is not the target's own. {text}"
    return {
        "drafting_pays": pays,
        "lookahead": best.lookahead if pays else None,
        "speedup_predicted": best.speedup_predicted,
        "text": text,
    }


def _text(best: "Row", measured: "Row", rows: Sequence["Row"], pays: bool) -> str:
    reached, needed = best.emitted_per_round or 0.0, best.break_even_emitted_per_round
    if pays:
        return (
            f"Draft with k = {best.lookahead}: {best.speedup_predicted:.2f} times the target's "
            "tokens per second is predicted on this machine."
        )
    if best.speedup_predicted > 1.0:
        return (
            f"Do not draft on this machine yet: {best.speedup_predicted:.2f} times is predicted at "
            f"k = {best.lookahead}, but {measured.speedup_measured or 0.0:.2f} was measured at "
            f"k = {measured.lookahead}. Decode for real with -k {best.lookahead} on more prompts."
        )
    if all(r.break_even_emitted_per_round > r.lookahead + 1 for r in rows):
        return (
            "Do not draft on this machine: at every lookahead a round costs more plain steps than "
            "the tokens that it can emit at most. Drafting or verifying must get cheaper first."
        )
    return (
        f"Do not draft on this machine: at its best lookahead, k = {best.lookahead}, a round "
        f"emits {reached:.2f} tokens and costs {needed:.2f} plain steps. Acceptance would "
        "have to rise, or drafting and verifying get cheaper."
    )
