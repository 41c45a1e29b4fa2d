"""What a training loop needs of its runtime: backward, step, save, load."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from draftsmith.data.files import sha256, write_file, write_json
from draftsmith.errors import DraftsmithError

_KEEP = 2


class Engine(Protocol):
    """One process or many; the loops see no difference."""

    steps_done: int

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch."""

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping."""

    def save(self, extra: dict[str, Any]) -> None:
        """Keep everything that the next step depends on."""

    def load(self) -> dict[str, Any]:
        """Go back to the newest whole save; returns its `extra`, empty for a fresh start."""


class TorchEngine:
    """Plain torch in one process, with saves that survive a kill at any moment.

    Args:
        parameters: name -> trainable tensor.
        optimizer: over these.
        folder: where saves go.
        scheduler: of the learning rate; none: constant.
        clip: largest gradient norm; none: no clipping.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        folder: Path,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
    ) -> None:
        """Set up; nothing is read yet."""
        self.parameters, self.optimizer = parameters, optimizer
        self.folder, self.clip = folder, clip
        self.scheduler = scheduler or LambdaLR(optimizer, lambda _: 1.0)
        self.steps_done = 0

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch."""
        loss.backward()

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping.

        Raises:
            DraftsmithError: the gradients are not numbers; nothing was updated or saved.
        """
        norm = nn.utils.clip_grad_norm_(
            self.parameters.values(), self.clip if self.clip is not None else float("inf")
        )
        if not torch.isfinite(norm):
            rate = self.optimizer.param_groups[0]["lr"]
            raise DraftsmithError(
                f"step {self.steps_done + 1}: the gradients are no longer numbers; lower the "
                f"learning rate (now {rate:.2g}) and start again: the last save is sound"
            )
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return float(norm)

    def save(self, extra: dict[str, Any]) -> None:
        """Write a save, then its mark with the checksum; older ones beyond two go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{self.steps_done:07d}.pt"
        state = {
            "parameters": {k: v.detach() for k, v in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps_done": self.steps_done,
            "extra": extra,
        }
        write_file(path, lambda partial: torch.save(state, partial))
        write_json(path.with_suffix(".json"), {"sha256": sha256(path)})
        for old in sorted(self.folder.glob("step-*.pt"))[:-_KEEP]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink()

    def load(self) -> dict[str, Any]:
        """Go back to the newest save that is whole, passing over damaged ones (case A22)."""
        for path in sorted(self.folder.glob("step-*.pt"), reverse=True):
            if not _whole(path):
                continue
            state = torch.load(path, map_location="cpu", weights_only=True)
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(state["parameters"][name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.steps_done = state["steps_done"]
            extra: dict[str, Any] = state["extra"]
            return extra
        return {}


def _whole(path: Path) -> bool:
    try:
        mark = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        return bool(mark["sha256"] == sha256(path))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def freeze_all_but(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Make the named parameters trainable and no others; returns them."""
    wanted = set(names)
    trainable = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
        if name in wanted:
            trainable[name] = parameter
    return trainable
