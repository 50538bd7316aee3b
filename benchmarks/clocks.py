"""What the machine gave while something ran: the GPUs' clocks, which want of power or heat hold
down, and processor time that other virtual machines took. Neither is a plan's fault."""

from __future__ import annotations

import statistics
import threading
from collections import defaultdict
from contextlib import ExitStack
from typing import Any

import psutil

from megatrain.machine.hardware import opened_nvml

EVERY_S = 0.25
BUSY = 50  # percent of the time: readings of a GPU that hardly computes do not count
# Bits of nvmlDeviceGetCurrentClocksEventReasons.
REASONS = {"power cap": 0x04, "slowdown": 0x08, "heat": 0x20 | 0x40, "power brake": 0x80}


class Clocks:
    """Reads all GPUs of the host between enter and exit, from a thread.

    Attributes:
        stolen: share of the processor time wanted in between that the hypervisor gave to others.
    """

    stolen = 0.0

    def __init__(self) -> None:
        self._read: dict[int, list[tuple[float, float, int]]] = defaultdict(list)
        self._over, self._stack = threading.Event(), ExitStack()
        self._thread = threading.Thread(target=self._reading, daemon=True)

    def __enter__(self) -> Clocks:
        self._nvml: Any = self._stack.enter_context(opened_nvml())
        self._before = psutil.cpu_times()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._stack.close()
        after = psutil.cpu_times()
        passed = {
            name: getattr(after, name) - getattr(self._before, name) for name in after._fields
        }
        busy = sum(passed.get(name, 0.0) for name in ("user", "nice", "system", "steal"))
        self.stolen = passed.get("steal", 0.0) / busy if busy else 0.0

    def _reading(self) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        while not self._over.wait(EVERY_S):
            for number, gpu in enumerate(gpus):
                try:
                    if nvml.nvmlDeviceGetUtilizationRates(gpu).gpu < BUSY:
                        continue
                    mhz = float(nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM))
                    watts = nvml.nvmlDeviceGetPowerUsage(gpu) / 1000
                    why = int(nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
                except nvml.NVMLError:  # not said to a virtual machine
                    continue
                self._read[number].append((mhz, watts, why))

    def figures(self) -> dict[str, dict[str, Any]]:
        """For each GPU that computed: median and least MHz, watts, and what held its clock down in
        which share of the readings."""
        return {str(number): _summary(read) for number, read in sorted(self._read.items())}


def _summary(read: list[tuple[float, float, int]]) -> dict[str, Any]:
    mhz, watts, reasons = zip(*read, strict=True)
    held = {
        name: sum(1 for why in reasons if why & bits) / len(read) for name, bits in REASONS.items()
    }
    return {
        "readings": len(read),
        "mhz": statistics.median(mhz),
        "least_mhz": min(mhz),
        "most_mhz": max(mhz),
        "watts": statistics.median(watts),
        "held_by": {name: share for name, share in held.items() if share},
    }
