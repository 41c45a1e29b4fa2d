"""The energy that a GPU used while something ran."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Energy:
    """What was used, in joules; None until the measurement ends, and where none can be had."""

    joules: float | None = None


@contextmanager
def measure_energy(device: torch.device) -> Iterator[Energy]:
    """Measure the energy of one GPU over the body of a `with`.

    It is the whole board's: idle power and other processes are in it, the CPU is not. The counter
    moves every 20 to 100 ms, so a body should take seconds. joules stays None on a CPU, without
    an NVIDIA driver or nvidia-ml-py, on GPUs before Volta, on a slice of a GPU (MIG), if the
    counter did not move, and if the body raises.

    Args:
        device: where the model is; one without an index is torch's current device.
    """
    energy = Energy()
    nvml = _start(device)
    if nvml is None:
        yield energy
        return
    try:
        read = _counter(nvml, device)
        before = read()
        yield energy
        after = read()
        # A counter that stood still, or began anew with its driver, measured nothing.
        if before is not None and after is not None and after > before:
            energy.joules = (after - before) / 1e3
    finally:
        nvml.nvmlShutdown()


def _start(device: torch.device) -> Any:
    """NVIDIA's management library, ready for use; None where there is none."""
    if device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _counter(nvml: Any, device: torch.device) -> Callable[[], int | None]:
    """A function that waits for the device and gives the millijoules since its driver started.

    NVML counts all GPUs of the machine, torch those that CUDA_VISIBLE_DEVICES leaves and in its
    order; the UUID is the same for both. A slice of a GPU has one of its own that isn't found,
    and rightly so: the board's counter would charge it with its neighbours' work.
    """
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

    def read() -> int | None:
        # Work goes on after the call that started it has returned.
        torch.cuda.synchronize(device)
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
            return int(nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        except nvml.NVMLError:
            return None

    return read
