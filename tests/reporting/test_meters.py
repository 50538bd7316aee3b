"""Memory as the machine sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.reporting.meters import GpuMeter, peak_host_bytes

MIB = 2**20


def test_the_peak_of_the_host_remembers_what_was_freed(monkeypatch):
    # without children that an earlier test may have left
    monkeypatch.setattr("psutil.Process.children", lambda *_, **__: [])
    before = peak_host_bytes()
    block = bytearray(os.urandom(1) * (64 * MIB))
    during = peak_host_bytes()
    del block
    # The test process may have had a higher peak before this test: then nothing grows, and nothing
    # may shrink either, but for what the kernel has not added up yet.
    assert before - MIB <= during <= peak_host_bytes() + MIB


def test_a_sandbox_that_tells_no_peak_tells_what_is_there_now(monkeypatch):
    def unreadable(*_: object) -> Any:
        raise PermissionError(13, "Permission denied")

    for read_text in (unreadable, lambda *_: "Name:\tpython\nVmRSS:\t 9 kB\n"):
        monkeypatch.setattr(Path, "read_text", read_text)
        assert peak_host_bytes() > 20 * MIB


def test_children_are_counted():
    block = f"block = bytearray(b'x' * {200 * MIB})"
    hold = f"import sys; {block}; print('held', flush=True); sys.stdin.read()"
    before, pipe = peak_host_bytes(), subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with_child = peak_host_bytes()
        child.communicate()
    assert with_child - before >= 200 * MIB
    assert peak_host_bytes() - before < 100 * MIB


def printed(code: str) -> list[int]:
    """Figures that a new process prints; `block` and `peak` are there."""
    head = (
        "import mmap, os, signal\nfrom megatrain.reporting.meters import peak_host_bytes as peak\n"
    )
    command = [sys.executable, "-c", head + code]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [int(word) for word in out.split()]


def test_pages_that_children_share_are_not_counted_for_each():
    (more,) = printed(f"""
block = bytearray(b"x" * {200 * MIB})
alone, pids = peak(), []
for _ in range(4):
    if not (pid := os.fork()):
        signal.pause()
    pids.append(pid)
print(peak() - alone)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
""")
    assert more < 250 * MIB


def test_memory_that_ranks_have_in_common_is_divided_among_them():
    alone, one_of_four = printed(f"""
shared = mmap.mmap(-1, {200 * MIB})
shared.write(b"x" * {200 * MIB})
print(peak(), peak(4))
""")
    assert alone >= 200 * MIB
    assert alone - one_of_four == pytest.approx(150 * MIB, abs=MIB)


class FakeDriver(types.ModuleType):
    """As much of NVML as the meter asks for."""

    class NVMLError(Exception):
        pass

    def __init__(self, pid: int, *readings: int, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.pid, self.readings, self.broken, self.asked_for = pid, [*readings], broken, ""

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("driver not loaded")

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked_for = uuid
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return [
            types.SimpleNamespace(pid=1, usedGpuMemory=999),
            types.SimpleNamespace(pid=self.pid, usedGpuMemory=self.readings.pop(0)),
        ]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 7500

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(used=5000)


@pytest.fixture
def meter_on(monkeypatch):
    def build(driver: FakeDriver) -> GpuMeter:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        properties = types.SimpleNamespace(uuid="aa-bb")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return GpuMeter(torch.device("cuda", 1))

    return build


def test_the_largest_reading_of_our_own_process_counts_or_in_a_container_the_device(meter_on):
    driver = FakeDriver(os.getpid(), 10, 30, 20)
    with meter_on(driver) as meter:
        assert [meter.peak_bytes() for _ in range(3)] == [10, 30, 30]
        assert meter.energy_j() == 7.5
    assert driver.asked_for == "GPU-aa-bb"
    with meter_on(FakeDriver(-1, 10)) as meter:
        assert meter.peak_bytes() == 5000


def test_a_silent_driver_or_a_cpu_is_no_reading(meter_on):
    with meter_on(FakeDriver(-1, broken=True)) as silent, GpuMeter(torch.device("cpu")) as none:
        assert silent.peak_bytes() is none.peak_bytes() is None
        assert silent.energy_j() is none.energy_j() is None
