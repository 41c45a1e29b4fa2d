"""The engine over DeepSpeed's ZeRO 1, 2 and 3: many processes train as one would.

Nothing here is needed to train in one process: DeepSpeed is imported when processes were launched
(case A33). Tested with 0.19.8:

    deepspeed --no_local_rank --num_gpus N --module draftsmith.cli distill RECIPE
"""

import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from draftsmith.data.files import sha256, storage, write_json
from draftsmith.data.processes import launched_processes
from draftsmith.distill.engine import (
    KEEP,
    Engine,
    Ranks,
    TorchEngine,
    copy_state,
    diverged,
    random_state,
    read_marks,
    refuse_empty,
    refuse_other_ranks,
    restore_random_state,
    save_name,
)
from draftsmith.errors import DraftsmithError, RequestError

# Elements below which stage 3 leaves a parameter whole on every rank: gathering it costs more.
WHOLE_BELOW = 100_000


def start_processes() -> None:
    """Join the other processes that were launched, if any; do so before a model is loaded.

    Raises:
        RequestError: DeepSpeed is not installed.
    """
    if launched_processes() > 1:
        _deepspeed()


def make_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
    scheduler: LRScheduler | None = None,
    clip: float | None = None,
    *,
    zero: int = 2,
) -> Engine:
    """The engine for as many processes as were launched.

    Args:
        module: gives a loss; whole and on its device, with the same weights on every rank.
        optimizer: over the parameters that learn. For many processes it must treat elements alike
            and apart, as Adam does, since they are cut into flat parts.
        folder: where saves go, on storage that all nodes share.
        scheduler: of the learning rate; none: constant.
        clip: largest gradient norm; none: no clipping.
        zero: ZeRO stage for many processes. 1 cuts the optimizer's state into parts, 2 the
            gradients too, 3 the weights too.
    """
    if launched_processes() > 1:
        return DeepSpeedEngine(module, optimizer, folder, scheduler, clip, zero=zero)
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return TorchEngine(parameters, optimizer, folder, scheduler, clip, module)


def cut_for_inference(module: nn.Module) -> nn.Module:
    """A module that is only read, cut into the parts of the launched processes (ZeRO 3).

    Every process must call what comes back as often as the others. Alone nothing is cut.
    """
    if launched_processes() == 1:
        return module
    engine, *_ = _deepspeed().initialize(model=module, config=_config(3, None))
    cut: nn.Module = engine
    return cut


class DeepSpeedEngine:
    """ZeRO over the launched processes, with the numbers of a single one.

    Weights stay in the dtype that they have, float32; products are in less where the module's
    forward says so. Arguments as `make_engine`.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        scheduler: LRScheduler | None = None,
        clip: float | None = None,
        *,
        zero: int = 2,
    ) -> None:
        """Cut the module and its optimizer into parts; no save is read yet."""
        self.deepspeed = _deepspeed()
        self.module, self.optimizer, self.folder, self.zero = module, optimizer, folder, zero
        self.scheduler = scheduler or LambdaLR(optimizer, lambda _: 1.0)
        # An existing model is handed over: one made under zero.Init would have other weights than
        # the checkpoint's, without a word.
        self._engine, *_ = self.deepspeed.initialize(
            model=module,
            optimizer=optimizer,
            lr_scheduler=self.scheduler,
            config=_config(zero, clip),
        )
        self.ranks = Ranks(self._engine.device)
        self.foreign_scale = float(self.ranks.world)
        self.steps_done = 0

    def __call__(self, *inputs: Any) -> Any:
        """Run the module on this rank's micro-batch."""
        return self._engine(*inputs)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch; those of all ranks add up."""
        # DeepSpeed takes the mean over ranks.
        self._engine.backward(loss * self.ranks.world, scale_wrt_gas=False)

    def step(self) -> float:
        """Update the weights; returns the gradient norm before clipping.

        Raises:
            DraftsmithError: the gradients are not numbers; nothing was updated or saved.
        """
        self._engine.step()
        if not self._engine.was_step_applied():
            raise diverged(self.steps_done + 1, self.optimizer)
        self.steps_done += 1
        return float(self._engine.get_global_grad_norm())

    def save(self, extra: dict[str, Any]) -> None:
        """Write every rank's part, then the mark with their checksums; older ones beyond two go."""
        name = save_name(self.steps_done)
        state = {
            "steps_done": self.steps_done,
            "random": self.ranks.gather(random_state(self.ranks.device)),
            "extra": extra,
        }
        with storage(self.folder):
            self._clear(name)
            self.ranks.barrier()
            self._engine.save_checkpoint(self.folder, name, client_state=state, save_latest=False)
            digests = self._digests(name)
            if self.ranks.is_main:
                mark = {"zero": self.zero, "world": self.ranks.world, "sha256": digests}
                write_json(self.folder / f"{name}.json", mark)
                self._forget_old()
        self.ranks.barrier()

    def load(self) -> dict[str, Any]:
        """Go back to the newest save that is whole, passing over damaged ones (case A22).

        DeepSpeed unpickles its files: the folder must be one that this project's runs wrote.

        Raises:
            DraftsmithError: another number of ranks, or another stage, made the save.
        """
        # What the main rank sees counts for all.
        for name, mark in self.ranks.gather(read_marks(self.folder))[0]:
            refuse_other_ranks(self.folder, mark, self.zero, self.ranks.world)
            if not self._is_whole(name, mark):
                continue
            _, state = self._engine.load_checkpoint(self.folder, name)
            self.steps_done = state["steps_done"]
            restore_random_state(state["random"], self.ranks)
            extra: dict[str, Any] = state["extra"]
            return extra
        return {}

    def full_state(self, module: nn.Module | None = None) -> dict[str, Tensor]:
        """Whole tensors on the CPU of the main rank, by name; empty on the others.

        Tied names share a tensor, as in the module.

        Raises:
            DraftsmithError: a tensor came out without elements (case A23).
        """
        return copy_state(module or self.module, self.ranks, self._whole)

    def finish(self) -> None:
        """Give the module back as an ordinary one, whole on every rank; nothing trains it on.

        Raises:
            DraftsmithError: a tensor came out without elements (case A23).
        """
        self._engine.destroy()
        self._engine.module_forward_pre_hook.remove()
        self._engine.module_forward_post_hook.remove()
        # Old parameters are kept until the end: their ids say which are tied.
        whole: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in self.module.modules():
            own = dict(part.named_parameters(recurse=False))
            for parameter in own.values():
                if id(parameter) not in whole:
                    whole[id(parameter)] = parameter, self._ordinary(parameter)
            # ZeRO 3 had put a dictionary in its place that gathers what is asked for.
            part._parameters = dict(part._parameters)
            part.__dict__.pop("_original_parameters", None)
            for name, parameter in own.items():
                setattr(part, name, whole[id(parameter)][1])
        refuse_empty(dict(self.module.named_parameters()))
        del self._engine

    def _whole(self, parameter: Tensor) -> Any:
        """Gather a parameter for a while; others, and those of stages 1 and 2, are whole."""
        return self.deepspeed.zero.GatheredParameters([parameter])

    def _ordinary(self, parameter: nn.Parameter) -> nn.Parameter:
        with self._whole(parameter):
            return nn.Parameter(parameter.detach().clone(), parameter.requires_grad)

    def _clear(self, name: str) -> None:
        """Remove what an interrupted or damaged save of this step left."""
        if self.ranks.is_main:
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def _forget_old(self) -> None:
        """Keep the newest finished saves; those that were never finished go too."""
        kept = {name for name, _ in read_marks(self.folder)[:KEEP]}
        for path in self.folder.glob("step-*.json"):
            if path.stem not in kept:
                path.unlink()
        for path in self.folder.glob("step-*/"):
            if path.name not in kept:
                shutil.rmtree(path)

    def _digests(self, name: str) -> dict[str, str]:
        """File of a save -> its checksum; each rank reads its share."""
        files = _files(self.folder / name)
        if any(files != others for others in self.ranks.gather(files)):
            raise DraftsmithError(
                f"{self.folder}: the nodes do not see the same files there; put --out on storage "
                "that all of them share"
            )
        mine = {f: sha256(self.folder / name / f) for f in self._share(files)}
        return {f: digest for part in self.ranks.gather(mine) for f, digest in part.items()}

    def _is_whole(self, name: str, mark: dict[str, Any]) -> bool:
        """Whether every file is as it was written; each rank reads its share."""
        folder, digests = self.folder / name, mark["sha256"]
        sound = all(
            (folder / f).is_file() and sha256(folder / f) == digests[f]
            for f in self._share(sorted(digests))
        )
        return all(self.ranks.gather(sound))

    def _share(self, files: list[str]) -> list[str]:
        return files[self.ranks.rank :: self.ranks.world]


def _files(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


def _config(zero: int, clip: float | None) -> dict[str, Any]:
    return {
        # Not used: the loop brings its batches and divides by the tokens of the whole step.
        "train_micro_batch_size_per_gpu": 1,
        # `step` ends a step, after as many micro-batches as there were.
        "managed_gradient_accumulation": False,
        "gradient_clipping": clip or 0.0,
        "zero_optimization": {"stage": zero, "stage3_param_persistence_threshold": WHOLE_BELOW},
        # torch's own optimizers; "untested" are all but DeepSpeed's.
        "zero_allow_untested_optimizer": True,
    }


def _deepspeed() -> Any:
    """DeepSpeed, with this process among its fellows.

    Raises:
        RequestError: it is not installed.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
        from deepspeed.utils import logger
    except ImportError as error:
        raise RequestError(
            f"training in {launched_processes()} processes needs DeepSpeed; install it with "
            "`pip install draftsmith[deepspeed]`"
        ) from error
    logger.setLevel(logging.WARNING)
    # Names of functions that DeepSpeed calls; once for every parameter.
    warnings.filterwarnings("ignore", r"`torch\.distributed\..*` is deprecated", FutureWarning)
    accelerator = deepspeed.accelerator.get_accelerator()
    if accelerator.device_name() == "cpu":
        # Its communication through shared memory is compiled for minutes, and a process that is
        # killed meanwhile leaves a lock; gloo needs no compiler. A table of our own also spares
        # asking the compiler about every other extension.
        deepspeed.ops.__compatible_ops__ = {}
    else:
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed(verbose=False)
    return deepspeed
