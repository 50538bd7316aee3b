"""Records of runs: one JSON file each, with the command, the machine, its clocks meanwhile, and the
raw figures or the reason why there are none."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cases import OURS, Run
from megatrain.machine.hardware import GIB, opened_nvml, read_hardware

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EVERY_S = 0.25
BUSY = 50  # percent of the time: readings of a GPU that hardly computes do not count
# Bits of nvmlDeviceGetCurrentClocksEventReasons.
REASONS = {"power cap": 0x04, "slowdown": 0x08, "heat": 0x20 | 0x40, "power brake": 0x80}


@dataclass(frozen=True)
class Record:
    """One run's outcome. `result` has at least step_s, tokens_per_s, tflops, gpu_peak_bytes,
    host_bytes, and what the machine gave meanwhile (`clocks`, `stolen`), unless there is an
    `error`."""

    case: str
    system: str
    variant: str
    date: str
    machine: str  # GPU, cores, RAM
    command: tuple[str, ...]
    wall_s: float  # of the whole process
    error: str | None
    result: dict[str, Any]

    @property
    def tflops(self) -> float:
        """0 where the run failed."""
        return float(self.result.get("tflops", 0.0))


def execute(run: Run, limit_s: float, folder: Path) -> Record:
    """Run it in a process of its own, write its record to `folder`, and return it. The log of one
    that fails stays beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, log = folder / f"{run.name}.figures", folder / f"{run.name}.log"
    started = time.perf_counter()
    with Clocks() as clocks:
        code = _wait(run, limit_s, figures, log)
    wall_s = time.perf_counter() - started
    error = None if code == 0 else _reason(code, limit_s, log)
    result = {}
    if error is None:
        given = {"clocks": clocks.figures(), "stolen": clocks.stolen}
        result = json.loads(figures.read_text()) | given
    figures.unlink(missing_ok=True)
    if error is None:
        log.unlink()
    words = ("python", *run.arguments)
    what = (run.case.name, run.system, run.variant, date.today().isoformat(), machine())
    record = Record(*what, words, wall_s, error, result)
    (folder / f"{run.name}.json").write_text(json.dumps(asdict(record), indent=1) + "\n")
    return record


def _wait(run: Run, limit_s: float, figures: Path, log: Path) -> int | None:
    """The exit code; None if it was stopped at the limit, with all processes that it had started.
    Figures are in `figures`."""
    command = [sys.executable, *run.arguments]
    if run.system != OURS:
        command += ["--json", str(figures.absolute())]
    with log.open("w") as said, figures.open("w") as printed:
        output = printed if run.system == OURS else said
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | dict(run.environ),
            stdout=output,
            stderr=said,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def _reason(code: int | None, limit_s: float, log: Path) -> str:
    """Why there are no figures, in one line."""
    if code is None:
        return f"not done after {limit_s:.0f} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}" + (
            ": out of host memory, most likely" if code == -signal.SIGKILL else ""
        )
    lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
    errors = [
        line
        for line in lines
        if re.match(r"(\[rank\d+\]: )?([\w.]*(Error|Exception|OutOfMemory)\b|error:)", line)
    ]
    return (errors or lines or [f"exit code {code}"])[-1][:300]


def machine() -> str:
    """This machine in words."""
    hardware = read_hardware(ROOT)
    where = hardware.gpu.name if hardware.gpu else "CPU"
    ram = f"{hardware.host_total_bytes / GIB:.0f} GiB of RAM"
    return f"{where}, {hardware.physical_cores} cores, {ram}"


def new_folder() -> Path:
    """Where this machine's results of today belong: benchmarks/results/<date>-<GPU>."""
    gpu = read_hardware(ROOT).gpu
    words = gpu.name.split() if gpu else ["cpu"]
    kind = next((word for word in words if any(map(str.isdigit, word))), words[-1])
    return RESULTS / f"{date.today().isoformat()}-{kind.lower()}"


def load(folder: Path = RESULTS) -> list[Record]:
    """All records under `folder`, oldest first. Other JSON files there, of scripts with figures of
    their own, are passed over."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob("*.json"))]
    ours = [
        data
        for data in found
        if isinstance(data, dict) and data.keys() == Record.__dataclass_fields__.keys()
    ]
    records = [Record(**{**data, "command": tuple(data["command"])}) for data in ours]
    return sorted(records, key=lambda record: record.date)


def latest(records: Iterable[Record], case: str, system: str) -> Record | None:
    """The fastest variant of the newest day on which the system succeeded at the case on one GPU;
    else its newest failure; None if never tried."""
    tried = [
        record
        for record in records
        if (record.case, record.system) == (case, system) and record.result.get("ranks", 1) == 1
    ]
    return max(
        tried, key=lambda record: (record.error is None, record.date, record.tflops), default=None
    )


# -- the machine meanwhile ----------------------------------------------------------------------


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
