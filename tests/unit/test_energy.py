"""The energy meter, with stand-ins for the GPU and NVIDIA's library."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.accept.energy import measure_energy

GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    """As in pynvml."""


class StandIn:
    """pynvml on a machine of two GPUs whose counters stand at 1,000 and 5,000 mJ."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.counters = {"GPU-aaaa": 1_000, "GPU-bbbb": 5_000}
        self.log: list[str] = []
        self.broken: set[str] = set()

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name in self.broken:
            raise NVMLError(name)

    def nvmlInit(self) -> None:
        self._call("init")

    def nvmlShutdown(self) -> None:
        self._call("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self._call("handle")
        if uuid not in self.counters:
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self._call("read")
        return self.counters[handle]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """The library, and a torch that sees the second GPU only, as its first."""
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "pynvml", stand_in)

    def properties(device: torch.device) -> Any:
        assert device.index in (None, 0)
        return SimpleNamespace(uuid="bbbb")

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: stand_in.log.append("wait"))
    return stand_in


@pytest.mark.parametrize("device", [GPU, torch.device("cuda")])
def test_joules_of_the_gpu_in_use(nvml: StandIn, device: torch.device) -> None:
    with measure_energy(device) as energy:
        assert energy.joules is None
        nvml.counters["GPU-aaaa"] += 70_000
        nvml.counters["GPU-bbbb"] += 2_500
        nvml.log.append("work")
    assert energy.joules == 2.5
    read = ["wait", "handle", "read"]
    assert nvml.log == ["init", *read, "work", *read, "shutdown"]


def test_none_on_a_cpu(nvml: StandIn) -> None:
    with measure_energy(torch.device("cpu")) as energy:
        pass
    assert energy.joules is None
    assert nvml.log == []


@pytest.mark.parametrize("broken", ["init", "handle", "read"])
def test_none_where_the_machine_cannot_tell(nvml: StandIn, broken: str) -> None:
    nvml.broken = {broken}
    with measure_energy(GPU) as energy:
        nvml.counters["GPU-bbbb"] += 1
    assert energy.joules is None
    assert (nvml.log[-1] == "shutdown") == (broken != "init")


@pytest.mark.parametrize("broken_first", [True, False])
def test_none_if_one_reading_fails(nvml: StandIn, broken_first: bool) -> None:
    nvml.broken = {"read"} if broken_first else set()
    with measure_energy(GPU) as energy:
        nvml.counters["GPU-bbbb"] += 1
        nvml.broken = {"read"} - nvml.broken
    assert energy.joules is None


@pytest.mark.parametrize("moved", [0, -4_000])
def test_none_if_the_counter_stood_still_or_began_anew(nvml: StandIn, moved: int) -> None:
    with measure_energy(GPU) as energy:
        nvml.counters["GPU-bbbb"] += moved
    assert energy.joules is None


def test_none_for_a_slice_of_a_gpu(nvml: StandIn) -> None:
    del nvml.counters["GPU-bbbb"]  # torch knows the UUID of the slice, NVML that of the board
    with measure_energy(GPU) as energy:
        nvml.counters["GPU-aaaa"] += 1_000
    assert energy.joules is None


def test_none_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with measure_energy(GPU) as energy:
        pass
    assert energy.joules is None


def test_none_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = pytest.importorskip("pynvml")

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    with measure_energy(GPU) as energy:
        pass
    assert energy.joules is None


def test_the_library_has_the_functions_that_are_called() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert all(hasattr(pynvml, name) for name in dir(StandIn) if name.startswith(("nvml", "NVML")))


def fail_after_work(nvml: StandIn) -> None:
    with measure_energy(GPU):
        nvml.counters["GPU-bbbb"] += 1
        raise KeyError("work")


def test_the_library_is_closed_when_the_work_fails(nvml: StandIn) -> None:
    with pytest.raises(KeyError, match="work"):
        fail_after_work(nvml)
    assert nvml.log[-1] == "shutdown"
