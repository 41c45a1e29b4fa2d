"""What masks went through while they learned, as small arrays: for plots and for a second look.

A file `trajectory.safetensors` holds S samples, with one entry each along dimension 0:

    step                int32   [S]     which steps, from 0; the last of the run is among them
    loss                float32 [S]     of the step, per token
    kept.AXIS           float32 [S] or [S, L]   expected kept count; L: for each layer
    decided.AXIS        float32 [S, 2]  share of masks whose z is above 0.9, and below 0.1
    log_alpha.AXIS      float32 or float16 [S, …]   every mask of layers (float32) and heads
    multipliers.NAME    float32 [S, 2]  λ₁ and λ₂ of a constraint
    wanted.NAME         float32 [S]     what it asks for: a count, or its own unit
    expected.NAME       float32 [S]     what came out, of a constraint that is no axis

Masks and multipliers are those after the step, what was wanted is that of the step.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch
from pydantic import TypeAdapter
from torch import Tensor

from draftsmith.checkpoints.families.base import Axis
from draftsmith.checkpoints.shape import Shape
from draftsmith.data.files import write_file
from draftsmith.errors import RequestError
from draftsmith.prune.masks import LearnableMasks, deterministic, mask_shape

FILE = "trajectory.safetensors"
FORMAT = "draftsmith-trajectory"
VERSION = 1
# Most samples of a run: more than a plot has columns.
SAMPLES = 512
# A mask is decided if its z is above the first or below the second.
OPEN, CLOSED = 0.9, 0.1
LAYERS: tuple[Axis, ...] = ("layers", "ffn_layers", "encoder_layers")
# Axes with few masks, whose log alpha is kept as it is.
_DETAILED: tuple[Axis, ...] = (
    *LAYERS,
    "kv_heads",
    "heads_per_group",
    "cross_heads",
    "encoder_heads",
)


@dataclass(frozen=True)
class _About:
    """What the file says beside its arrays."""

    format: str
    version: int
    steps: int
    source_shape: Shape


class Constraint(Protocol):
    """What is recorded of a Lagrangian."""

    @property
    def multipliers(self) -> Mapping[Any, Tensor]:
        """Name of an axis, or of a budget -> [λ₁, λ₂]."""

    def target(self, axis: Axis, step: int) -> float:
        """The wanted share of an axis."""


class Trajectory:
    """Samples of a run, at even distances and at its end.

    Attributes:
        source: the shape that is cut.
        steps: of the whole run.
    """

    def __init__(self, source: Shape, steps: int) -> None:
        """Nothing is recorded yet."""
        self.source = source
        self.steps = steps
        self._arrays: dict[str, Tensor] = {}
        self._pending: defaultdict[str, list[Tensor]] = defaultdict(list)

    def __eq__(self, other: object) -> bool:
        """Whether another one holds the same, bit for bit."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        ours, theirs = self.state(), other.state()
        alike = (self.source, self.steps, set(ours)) == (other.source, other.steps, set(theirs))
        return alike and all(torch.equal(ours[name], theirs[name]) for name in ours)

    def is_due(self, step: int) -> bool:
        """Whether a step is a sample; it depends on the step alone, so a resumed run agrees."""
        every = -(-self.steps // (SAMPLES - 1))
        return step % every == 0 or step == self.steps - 1

    @torch.no_grad()
    def record(
        self,
        step: int,
        masks: LearnableMasks,
        lagrangian: Constraint,
        loss: Tensor | float,
        told: Mapping[str, tuple[Tensor | float, Tensor | float]] | None = None,
    ) -> None:
        """Take a sample if one is due. Nothing leaves its device, so nothing waits.

        Args:
            step: the one that has been made, from 0.
            masks: after it.
            lagrangian: after it.
            loss: of it, per token; [] if a tensor.
            told: constraint -> what is expected and what is wanted; what is no axis is recorded.
        """
        if not self.is_due(step):
            return
        self._add("step", step, torch.int32)
        self._add("loss", loss)
        for axis in masks.axes:
            self._add_axis(axis, masks)
        for name, multipliers in lagrangian.multipliers.items():
            self._add(f"multipliers.{name}", multipliers)
            if name in masks.axes:
                wanted = lagrangian.target(name, step) * getattr(self.source, name)
                self._add(f"wanted.{name}", wanted)
        for name, (expected, wanted) in (told or {}).items():
            if name not in masks.axes:
                self._add(f"expected.{name}", expected)
                self._add(f"wanted.{name}", wanted)

    def state(self) -> dict[str, Tensor]:
        """All samples, on the CPU, for a save of the run."""
        for name, samples in self._pending.items():
            new = torch.stack(samples).cpu()
            old = self._arrays.get(name)
            self._arrays[name] = new if old is None else torch.cat([old, new])
        self._pending.clear()
        return dict(self._arrays)

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        self._pending.clear()
        self._arrays = dict(state)

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.state().get("step", ()))

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that have masks."""
        return tuple(axis for axis in get_args(Axis) if f"kept.{axis}" in self.state())

    @property
    def constraints(self) -> tuple[str, ...]:
        """The axes, then what else was recorded with `also`."""
        names = (name.partition(".") for name in self.state())
        return (*self.axes, *(rest for kind, _, rest in names if kind == "expected"))

    @property
    def sampled(self) -> Tensor:
        """The steps, [S]."""
        return self.state()["step"]

    @property
    def loss(self) -> Tensor:
        """The loss, [S]."""
        return self.state()["loss"]

    def kept(self, axis: str) -> Tensor:
        """Expected kept count: [S], or [S, L] where each layer has its own."""
        return self.state()[f"kept.{axis}"]

    def expected(self, name: str) -> Tensor:
        """What came out under a constraint, [S]: a kept count (mean over layers), or its unit."""
        if (other := self.state().get(f"expected.{name}")) is not None:
            return other
        kept = self.state()[f"kept.{name}"]
        return kept.mean(-1) if kept.dim() > 1 else kept

    def wanted(self, name: str) -> Tensor | None:
        """What a constraint asked for, [S]; None: nothing was asked of this axis alone."""
        return self.state().get(f"wanted.{name}")

    def multipliers(self, name: str) -> Tensor | None:
        """λ₁ and λ₂, [S, 2]; None: there is no such constraint."""
        return self.state().get(f"multipliers.{name}")

    def log_alpha(self, axis: Axis) -> Tensor | None:
        """Every log alpha, [S, *mask_shape]; None for widths, of which counts alone are kept."""
        return self.state().get(f"log_alpha.{axis}")

    def decided(self) -> dict[str, dict[str, float]]:
        """Axis -> share of masks that are `open` and `closed` at the last sample."""
        last = {axis: self.state()[f"decided.{axis}"][-1].tolist() for axis in self.axes}
        return {axis: {"open": opened, "closed": shut} for axis, (opened, shut) in last.items()}

    def write(self, path: Path) -> None:
        """Write the samples; equal ones are equal bytes."""
        from safetensors.torch import save_file

        about = _About(FORMAT, VERSION, self.steps, self.source)
        metadata = {"trajectory": json.dumps(asdict(about))}
        write_file(path, lambda partial: save_file(self.state(), partial, metadata))

    @classmethod
    def read(cls, path: Path) -> "Trajectory":
        """Read what `write` wrote.

        Raises:
            RequestError: it is not there, of another version, or damaged.
        """
        from safetensors import SafetensorError, safe_open

        if not path.is_file():
            raise RequestError(f"{path}: there is no such file; the prune stage writes it")
        try:
            with safe_open(path, framework="pt") as file:
                text = (file.metadata() or {})["trajectory"]
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            about = TypeAdapter(_About).validate_json(text, strict=True)
            if (about.format, about.version) != (FORMAT, VERSION):
                raise ValueError(f"format {about.format!r} version {about.version}")
            found = cls(about.source_shape, about.steps)
            found.restore(arrays)
            found._check()
        except (SafetensorError, OSError, LookupError, ValueError, TypeError) as error:
            reason = " ".join(str(error).split()[:24])
            raise RequestError(
                f"{path}: damaged, or not a trajectory that this draftsmith reads ({reason}); get "
                "the folder again, or delete the file: masks.json alone says what was kept"
            ) from None
        return found

    def _add(self, name: str, value: Tensor | float, dtype: torch.dtype = torch.float32) -> None:
        """Copy a value where it is: parameters change in place."""
        self._pending[name].append(torch.as_tensor(value).detach().to(dtype, copy=True))

    def _add_axis(self, axis: Axis, masks: LearnableMasks) -> None:
        log_alpha, share = masks.log_alpha[axis], masks.expected_share(axis)
        if share.dim() > 1:
            share = share.flatten(1).mean(-1)
        self._add(f"kept.{axis}", share * getattr(self.source, axis))
        z = deterministic(log_alpha)
        shares = [(z > OPEN).float().mean(), (z < CLOSED).float().mean()]
        self._add(f"decided.{axis}", torch.stack(shares))
        if axis in _DETAILED:
            # Of heads there may be thousands, and nobody needs the order of those that are close.
            kind = torch.float32 if axis in LAYERS else torch.float16
            self._add(f"log_alpha.{axis}", log_alpha, kind)

    def _check(self) -> None:
        """Refuse arrays that don't go together.

        Raises:
            ValueError, KeyError: saying which.
        """
        steps = self.sampled
        if steps.dim() != 1 or not len(steps) or bool((steps.diff() <= 0).any()):
            raise ValueError("step: not ascending numbers")
        samples = len(steps)
        wanted: dict[str, tuple[int, ...]] = {"step": (), "loss": ()}
        for axis in self.axes:
            dimensions = mask_shape(axis, self.source)
            wanted[f"kept.{axis}"] = dimensions[:1] if len(dimensions) > 1 else ()
            wanted[f"decided.{axis}"] = (2,)
            if axis in _DETAILED:
                wanted[f"log_alpha.{axis}"] = dimensions
        for name in self.state():
            kind, _, _ = name.partition(".")
            wanted.setdefault(name, (2,) if kind == "multipliers" else ())
        for name, shape in wanted.items():
            found = self.state()[name]
            if tuple(found.shape) != (samples, *shape):
                raise ValueError(f"{name}: shape {list(found.shape)}")
            if name.startswith("decided") and not bool(((found >= 0) & (found <= 1)).all()):
                raise ValueError(f"{name}: no shares")
