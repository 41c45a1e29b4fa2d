"""What masks learned as one picture: the loss, every layer's z, and counts against what was asked.

Colours are told apart by colour-blind readers (cividis; Okabe and Ito 2008).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.slicing import Selection
from draftsmith.data.files import write_file
from draftsmith.errors import RequestError
from draftsmith.prune.trajectory import LAYERS, Trajectory, deterministic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = "masks.png"
SUFFIXES = (".png", ".svg")
_BAND = "lowest to highest of all layers"
_BLUE, _ORANGE, _GREY = "#0072B2", "#D55E00", "#666666"
# Inches; all layers have a number of their own up to so many.
_WIDTH, _LINE, _MAP, _NUMBERED = 8.0, 1.1, 2.6, 40
_STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    # Text stays text, and names in the file are not drawn by chance.
    "svg.fonttype": "none",
    "svg.hashsalt": "draftsmith",
}


def check_plot_file(path: Path, place: str) -> None:
    """Refuse a picture that can't be written.

    Args:
        path: of the picture.
        place: what asked for it, for the message.

    Raises:
        RequestError: an unknown kind, or no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise RequestError(
            f"{place} {path}: {path.suffix or 'no suffix'} is not among {', '.join(SUFFIXES)}"
        )
    if not path.absolute().parent.is_dir():
        raise RequestError(f"{place} {path}: there is no folder {path.parent}; make it")


def plot_trajectory(trajectory: Trajectory, path: Path, selection: Selection | None = None) -> None:
    """Draw what masks went through.

    Two drawings of the same may differ in the last bit of a few pixels, so a picture is no part of
    what a run can be compared by.

    Args:
        trajectory: of at least one sample.
        path: of the picture; its suffix says which kind.
        selection: what was kept at last, to mark it.

    Raises:
        RequestError: an unknown kind, or no such folder.
    """
    check_plot_file(path, "plot")
    from matplotlib import rc_context

    kind = path.suffix.lower().removeprefix(".")
    # A date says nothing of what is drawn.
    metadata = {"Date": None} if kind == "svg" else None
    with rc_context(_STYLE):
        figure = draw(trajectory, selection)
        write_file(
            path,
            lambda partial: figure.savefig(partial, format=kind, dpi=130, metadata=metadata),
        )


def draw(trajectory: Trajectory, selection: Selection | None = None) -> "Figure":
    """The picture, not yet written; arguments as for `plot_trajectory`."""
    from matplotlib.figure import Figure

    maps = [axis for axis in LAYERS if axis in trajectory.axes]
    lines = trajectory.constraints
    heights = [_LINE, *[_MAP] * len(maps), *[_LINE] * len(lines)]
    # No pyplot: it keeps state, and may want a screen.
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(
        len(heights), sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
    )[:, 0].tolist()
    _draw_loss(panels[0], trajectory)
    for panel, axis in zip(panels[1:], maps, strict=False):
        _draw_layers(panel, trajectory, axis, getattr(selection, axis, None) or ())
    for panel, name in zip(panels[1 + len(maps) :], lines, strict=True):
        _draw_constraint(panel, trajectory, name)
    _draw_legend(panels[1 + len(maps) :])
    panels[-1].set_xlabel("step")
    figure.align_ylabels(panels)
    return figure


def _draw_loss(panel: "Axes", trajectory: Trajectory) -> None:
    panel.plot(trajectory.sampled.numpy(), trajectory.loss.numpy(), color=_GREY, linewidth=1.0)
    panel.set_ylabel("loss")


def _draw_layers(panel: "Axes", trajectory: Trajectory, axis: Axis, kept: Sequence[int]) -> None:
    """A heat map: a row for each layer, a column for each sample."""
    log_alpha_SL = trajectory.log_alpha(axis)
    assert log_alpha_SL is not None
    count = log_alpha_SL.shape[1]
    steps = trajectory.sampled.double()
    # A sample is shown until the next one.
    edges = torch.cat([steps - 0.5, steps[-1:] + 0.5])
    mesh = panel.pcolormesh(
        edges.numpy(),
        torch.arange(count + 1).double().sub(0.5).numpy(),
        deterministic(log_alpha_SL).T.numpy(),
        cmap="cividis",
        vmin=0.0,
        vmax=1.0,
        # As vectors it would be thousands of squares.
        rasterized=True,
    )
    panel.invert_yaxis()
    panel.set_ylabel(_words(axis).removesuffix("s"))
    panel.figure.colorbar(mesh, ax=panel, label="z without noise", pad=0.035, aspect=30)
    _mark_kept(panel, count, kept)


def _mark_kept(panel: "Axes", count: int, kept: Sequence[int]) -> None:
    """Number the layers, and point at those that stay."""
    if count <= _NUMBERED:
        panel.set_yticks(range(count), map(str, range(count)), fontsize=5.5 if count > 16 else 8)
    for layer, label in enumerate(panel.get_yticklabels() if count <= _NUMBERED else ()):
        if layer in kept:
            label.set(color=_ORANGE, fontweight="bold")
    if not kept:
        # The layout breaks on a line without points.
        return
    panel.plot(
        [1.014] * len(kept),
        list(kept),
        linestyle="none",
        marker="<",
        markersize=5,
        color=_ORANGE,
        clip_on=False,
        transform=panel.get_yaxis_transform(),
    )
    panel.set_title("◀ kept", loc="right", color=_ORANGE, fontsize=8, pad=2)


def _draw_constraint(panel: "Axes", trajectory: Trajectory, name: str) -> None:
    """What came out against what was asked, and how far layers are apart."""
    steps = trajectory.sampled.numpy()
    if name in trajectory.axes and (kept := trajectory.kept(name)).dim() > 1:
        ends = kept.amin(-1).numpy(), kept.amax(-1).numpy()
        panel.fill_between(steps, *ends, color=_BLUE, alpha=0.25, linewidth=0, label=_BAND)
    panel.plot(steps, trajectory.expected(name).numpy(), color=_BLUE, label="expected")
    if (wanted := trajectory.wanted(name)) is not None:
        panel.plot(steps, wanted.numpy(), color=_ORANGE, linestyle="--", label="wanted")
        _write_end(panel, float(wanted[-1]))
    panel.set_ylabel(_words(name))
    panel.set_ylim(bottom=0)


def _write_end(panel: "Axes", value: float) -> None:
    """What is wanted at last, beside the panel."""
    panel.text(
        1.014,
        value,
        f"{value:.4g}" if value % 1 else f"{value:.0f}",
        color=_ORANGE,
        fontsize=8,
        verticalalignment="center",
        transform=panel.get_yaxis_transform(),
    )


def _words(name: str) -> str:
    return name.replace("_", " ").replace("kv", "KV").replace("ffn", "FFN")


def _draw_legend(panels: Sequence["Axes"]) -> None:
    """One for all, in the first."""
    found = {
        label: handle
        for panel in panels
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    panels[0].legend(
        found.values(),
        found.keys(),
        # Above the panel: within it, lines may be anywhere.
        loc="lower right",
        bbox_to_anchor=(1.0, 0.95),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
