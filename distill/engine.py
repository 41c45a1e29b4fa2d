"""What a training loop needs of its runtime: forward, backward, step, save, load.

A loop is written once, for one process and for many. Every rank makes the same calls in the same
order, with as many micro-batches in a step; losses add up over micro-batches and ranks, so a loop
divides by the tokens of the whole step: `engine.ranks.total(tokens)` (case A25).
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from draftsmith.checkpoints.families.base import Family, template_of
from draftsmith.data.files import sha256, write_file, write_json
from draftsmith.errors import DraftsmithError, RequestError
from draftsmith.recipes.schema import DistillSettings

T = TypeVar("T")
# Saves that are kept: the newest, and the one to fall back on.
KEEP = 2


class Ranks:
    """The processes that train together; a single one where none were launched.

    Attributes:
        rank: which of them this is, from 0.
        world: how many there are.
        device: where tensors stand that are exchanged.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Ask torch, which has been told by the launcher."""
        many = distributed.is_available() and distributed.is_initialized()
        self.rank = distributed.get_rank() if many else 0
        self.world = distributed.get_world_size() if many else 1
        self.device = torch.device(device)

    @property
    def is_main(self) -> bool:
        """Whether this rank is the one that writes and talks."""
        return self.rank == 0

    def share(self, micro_batches: Sequence[T]) -> Sequence[T]:
        """Take the rank's part of a step, as large as that of any other.

        Raises:
            RequestError: they can't be shared evenly, and some ranks would wait for ever.
        """
        if len(micro_batches) % self.world:
            raise RequestError(
                f"{len(micro_batches)} micro-batches in a step can't be shared evenly by "
                f"{self.world} processes; accumulate a multiple of {self.world}"
            )
        return micro_batches[self.rank :: self.world]

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor of `device` by its sum over ranks."""
        if self.world > 1:
            distributed.all_reduce(tensor)

    def total(self, value: float) -> float:
        """Sum of a number over ranks; exact for counts."""
        if self.world == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        self.add_up(tensor)
        return float(tensor)

    def gather(self, value: Any) -> list[Any]:
        """The small values of all ranks, in their order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every rank has come this far."""
        if self.world > 1:
            distributed.barrier()


class Engine(Protocol):
    """One process or many; the loops see no difference."""

    steps_done: int
    ranks: Ranks
    optimizer: torch.optim.Optimizer
    # Factor of the gradients that `backward` leaves on parameters that aren't the engine's.
    foreign_scale: float

    def __call__(self, *inputs: Any) -> Any:
        """Run the module on this rank's micro-batch.

        Never call the module itself: ZeRO prepares each backward pass here, and without that tied
        weights get wrong gradients. Autocast belongs inside the module's forward.
        """

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch; those of all ranks add up."""

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping."""

    def save(self, extra: dict[str, Any]) -> None:
        """Keep everything that the next step depends on."""

    def load(self) -> dict[str, Any]:
        """Go back to the newest whole save; returns its `extra`, empty for a fresh start."""

    def full_state(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Whole tensors on the CPU of the main rank, by name; empty on the others.

        Args:
            module: a part of the engine's module; none: all of it.
        """

    def finish(self) -> None:
        """Give the module back as an ordinary one, whole on every rank; nothing trains it on."""


class TorchEngine:
    """Plain torch, with saves that survive a kill at any moment.

    On many ranks each has all parameters, and gradients are added up: right for the few that
    masks have. Saves fit any number of ranks.

    Args:
        parameters: name -> trainable tensor.
        optimizer: over these.
        folder: where saves go; the same for all ranks.
        scheduler: of the learning rate; none: constant.
        clip: largest gradient norm; none: no clipping.
        module: what is called; none: the loop has a forward pass of its own.
    """

    zero = 0
    foreign_scale = 1.0

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: torch.optim.Optimizer,
        folder: Path,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        module: nn.Module | None = None,
    ) -> None:
        """Set up; nothing is read yet."""
        self.parameters, self.optimizer = parameters, optimizer
        self.folder, self.clip = folder, clip
        self.module = nn.Module() if module is None else module
        self.scheduler = scheduler or LambdaLR(optimizer, lambda _: 1.0)
        self.ranks = Ranks(next(iter((*parameters.values(), *self.module.parameters()))).device)
        self.steps_done = 0

    def __call__(self, *inputs: Any) -> Any:
        """Run the module."""
        return self.module(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch; those of all ranks add up."""
        loss.backward()

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping.

        Raises:
            DraftsmithError: the gradients are not numbers; nothing was updated or saved.
        """
        self._add_up_gradients()
        norm = nn.utils.clip_grad_norm_(
            self.parameters.values(), self.clip if self.clip is not None else float("inf")
        )
        if not torch.isfinite(norm):
            raise diverged(self.steps_done + 1, self.optimizer)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return float(norm)

    def save(self, extra: dict[str, Any]) -> None:
        """Write a save, then its mark with the checksum; older ones beyond two go."""
        random = self.ranks.gather(random_state(self.ranks.device))
        if self.ranks.is_main:
            self._write(extra, random)
        self.ranks.barrier()

    def load(self) -> dict[str, Any]:
        """Go back to the newest save that is whole, passing over damaged ones (case A22).

        Raises:
            DraftsmithError: DeepSpeed made it.
        """
        for name, mark in read_marks(self.folder):
            refuse_other_ranks(self.folder, mark, self.zero, self.ranks.world)
            path = self.folder / f"{name}.pt"
            if not _whole(path, mark):
                continue
            state = torch.load(path, map_location="cpu", weights_only=True)
            with torch.no_grad():
                for key, parameter in self.parameters.items():
                    parameter.copy_(state["parameters"][key])
            self.optimizer.load_state_dict(state["optimizer"])
            self.scheduler.load_state_dict(state["scheduler"])
            self.steps_done = state["steps_done"]
            restore_random_state(state.get("random", []), self.ranks)
            extra: dict[str, Any] = state["extra"]
            return extra
        return {}

    def full_state(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Whole tensors on the CPU of the main rank, by name; empty on the others."""
        return copy_state(module or self.module, self.ranks)

    def finish(self) -> None:
        """The module has been an ordinary one all the time."""

    def _add_up_gradients(self) -> None:
        if self.ranks.world == 1:
            return
        for parameter in self.parameters.values():
            # A rank that did not use it takes part all the same.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.ranks.add_up(parameter.grad)

    def _write(self, extra: dict[str, Any], random: list[dict[str, Tensor]]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{save_name(self.steps_done)}.pt"
        state = {
            "parameters": {k: v.detach() for k, v in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "steps_done": self.steps_done,
            "random": random,
            "extra": extra,
        }
        write_file(path, lambda partial: torch.save(state, partial))
        write_json(path.with_suffix(".json"), {"sha256": sha256(path)})
        for old in sorted(self.folder.glob("step-*.pt"))[:-KEEP]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink()


def copy_state(
    module: nn.Module,
    ranks: Ranks,
    whole: Callable[[Tensor], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Tensor]:
    """Copies of a module's tensors on the CPU of the main rank; tied names share one.

    Args:
        module: whose parameters and buffers.
        ranks: all of them must call.
        whole: gathers a tensor for a while.

    Raises:
        DraftsmithError: a tensor came out without elements (case A23).
    """
    copies: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        with whole(value):
            if ranks.is_main and id(value) not in copies:
                copies[id(value)] = value.detach().clone().cpu()
        if ranks.is_main:
            state[name] = copies[id(value)]
    refuse_empty(state)
    return state


def refuse_empty(state: Mapping[str, Tensor]) -> None:
    """Refuse tensors that were never gathered; named in the error, before anything is written."""
    empty = [name for name, tensor in state.items() if not tensor.numel()]
    if empty:
        raise DraftsmithError(
            f"{', '.join(empty)}: 0 elements after gathering; nothing was written. A parameter was "
            "replaced after the engine was made: make the engine last"
        )


def save_name(steps_done: int) -> str:
    """Names in the order of the steps."""
    return f"step-{steps_done:07d}"


def read_marks(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Name and mark of each finished save, newest first; a mark that can't be read is none."""
    marks = []
    for path in sorted(folder.glob("step-*.json"), reverse=True):
        try:
            mark = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(mark, dict):
            marks.append((path.stem, mark))
    return marks


def refuse_other_ranks(folder: Path, mark: dict[str, Any], zero: int, world: int) -> None:
    """A save that is cut into the parts of so many ranks fits no other number of them.

    Args:
        folder: of the saves.
        mark: of the save.
        zero: ZeRO stage of this run; 0: every rank has everything.
        world: its number of ranks.

    Raises:
        DraftsmithError: the save was made by another number of ranks, or at another stage.
    """
    made = mark.get("zero", 0), mark.get("world", 1)
    if made == (zero, world) or made[0] == zero == 0:
        return

    def arrangement(zero: int, world: int) -> str:
        return f"{world} processes at ZeRO stage {zero}" if zero else "one process"

    raise DraftsmithError(
        f"{folder}: saved by {arrangement(*made)}, but this run is "
        f"{arrangement(zero, world)}; go on with {arrangement(*made)}, or delete that folder to "
        "begin the stage again from its input"
    )


def diverged(step: int, optimizer: torch.optim.Optimizer) -> DraftsmithError:
    """What to raise where gradients are no longer numbers."""
    return DraftsmithError(
        f"step {step}: the gradients are no longer numbers; lower the learning rate (now "
        f"{optimizer.param_groups[0]['lr']:.2g}) and start again: the last save is sound"
    )


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of torch's random numbers, those of dropout, on the CPU and on `device`."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(states: list[dict[str, Tensor]], ranks: Ranks) -> None:
    """Go on with the random numbers of this rank; nothing where another number of ranks saved."""
    if len(states) != ranks.world:
        return
    torch.set_rng_state(states[ranks.rank]["cpu"])
    if ranks.device.type == "cuda" and "cuda" in states[ranks.rank]:
        torch.cuda.set_rng_state(states[ranks.rank]["cuda"], ranks.device)


def _whole(path: Path, mark: dict[str, Any]) -> bool:
    try:
        return bool(mark["sha256"] == sha256(path))
    except (OSError, KeyError):
        return False


def learns(name: str, family: Family, settings: DistillSettings) -> bool:
    """Whether a parameter is among those that a recipe trains, where it has no adapters."""
    template = template_of(name)[0]
    if template in family.rebuilt:
        # What a checkpoint need not hold would be lost with it.
        return False
    if settings.train == "decoder":
        decoder = next(stack for stack in family.stacks if stack.layers == "layers")
        own = (decoder.block, *decoder.norms)
        return any(template.startswith(f"{module}.") for module in own)
    return settings.train == "all" or "vocab" not in family.tensors[template]


def freeze_all_but(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Make the named parameters trainable and no others; returns them."""
    wanted = set(names)
    trainable = {}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in wanted)
        if name in wanted:
            trainable[name] = parameter
    return trainable
