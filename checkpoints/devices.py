"""Where and in which dtype work is done."""

from functools import cache
from pathlib import Path
from typing import Any


def default_device() -> str:
    """The accelerator if there is one, else the CPU."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def working_dtype(device: str) -> Any:
    """A dtype that the device computes well: half precision fails or crawls on a CPU (case A33)."""
    import torch

    if device == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def compute_dtype(name: str, device: Any) -> Any:
    """The dtype of work where exactness is not at stake: traces, masks, distillation.

    Args:
        name: `float32`, `bfloat16`, or `auto` for the one whose products are quickest.
        device: where the work is done.

    bfloat16 on a CPU pays only where its products are instructions of the machine, elsewhere they
    are emulated and slow; benchmarks/dtype.py measures it.
    """
    import torch

    if name != "auto":
        return getattr(torch, name)
    device = torch.device(device)
    if device.type != "cpu":
        return working_dtype(device.type)
    return torch.bfloat16 if _cpu_flags() & {"avx512_bf16", "amx_bf16"} else torch.float32


def autocast(model: Any, dtype: Any) -> Any:
    """Let the model's matrix products run in `dtype` while its weights keep their own."""
    import torch

    return torch.autocast(model.device.type, dtype=dtype, enabled=dtype != torch.float32)


@cache
def _cpu_flags() -> frozenset[str]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return frozenset(flags.split())
