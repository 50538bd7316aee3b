"""All measurements of a machine, one after another, as one profile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from megatrain.engine.components import take_workspaces
from megatrain.errors import OutOfMemory
from megatrain.machine import profile as profiles
from megatrain.machine.hardware import Hardware, bf16_is_fast, update_threads
from megatrain.measure import compute, disk
from megatrain.measure.compute import Device
from megatrain.measure.transfers import Clock

QUICK_S = 12.0  # no measurement is begun after this where a run waits for it

Figures = dict[str, Any]  # fields of MachineProfile
Note = Callable[[str], object]  # is told what is measured next


@dataclass(frozen=True)
class MeasuredSizes:
    """The sizes of what is computed: enough for steady rates, little enough for seconds in all."""

    tokens: tuple[int, ...]  # of matmuls
    lengths: tuple[int, ...]  # of sequences in attention
    attention_tokens: int
    memory_bytes: int
    rows: tuple[int, ...] = ()  # of an expert, in grouped matmuls


EXPERT_ROWS = (128, 512, 2048)
SIZES = {
    ("cuda", False): MeasuredSizes(
        (512, 1024, 2048, 4096, 8192, 16384), (256, 1024, 4096, 16384), 16384, 1 << 30, EXPERT_ROWS
    ),
    ("cuda", True): MeasuredSizes((2048, 8192), (256, 1024, 4096), 16384, 1 << 30, EXPERT_ROWS),
    ("cpu", False): MeasuredSizes((64, 256, 1024), (256, 512), 512, 1 << 28),
    ("cpu", True): MeasuredSizes((64,), (512,), 512, 1 << 28),
}


@dataclass(frozen=True)
class Subject:
    """The measurements to make. `quick`: only what the planner leans on most."""

    hardware: Hardware
    device: torch.device
    folder: Path
    quick: bool

    @property
    def sizes(self) -> MeasuredSizes:
        return SIZES[self.device.type, self.quick]

    def clock(self, device: torch.device) -> Clock:
        """A quick one takes no more samples than a median needs."""
        return Clock(device, budget_s=0.0) if self.quick else Clock(device)

    def computing(self) -> Device:
        return Device(self.clock(self.device))


def measure_machine(
    hardware: Hardware, device: torch.device, folder: Path, note: Note, *, quick: bool = False
) -> profiles.MachineProfile:
    """Measure the machine.

    Args:
        hardware: of `read_hardware`; without a GPU in it the CPU is the computing device.
        folder: where checkpoints would be written; its disk is measured.
        note: called with the name of each measurement before it.
        quick: only what the planner leans on most, and for QUICK_S; the rest is the typical guess.

    Raises:
        OutOfMemory: the GPU has no room for 2 GiB, or memory could not be pinned.
        StorageError: the folder cannot be written to.
    """
    subject = Subject(hardware, device, folder, quick)
    started = time.perf_counter()
    found: Figures = {}
    with _using(device):
        for name, step in (QUICK_STEPS if quick else STEPS).items():
            if not (quick and time.perf_counter() - started > QUICK_S):
                note(name)
                found |= step(subject)
    known: Figures = {
        "fingerprint": profiles.fingerprint(hardware),
        "measured_on": date.today().isoformat(),
        "grouped": (),  # as `matmul` was found, where it is not measured itself
    }
    return replace(profiles.typical(hardware), **known | found)


@contextmanager
def _using(device: torch.device) -> Iterator[None]:
    """Make a GPU the current one, and give its memory back. Raises OutOfMemory."""
    if device.type != "cuda":
        yield
        return
    try:
        with torch.cuda.device(device):
            # These stay: amid what is given back they would keep more than their own size.
            take_workspaces(device, torch.bfloat16)
            yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            "the GPU has no room for the 2 GiB that measuring takes; close other programs on it"
        ) from error
    finally:
        torch.cuda.empty_cache()


def _links_and_update(subject: Subject) -> Figures:
    """PCIe, the host's update, and the update while PCIe is busy."""
    cores, device = subject.hardware.physical_cores, subject.device
    counts = [update_threads(cores)] if subject.quick else profiles.thread_counts(cores)
    clocks = subject.clock(torch.device("cpu")), subject.clock(device)
    found = compute.links_and_update(device, cores, counts, *clocks)
    return found if device.type == "cuda" else {**found, "device_update": found["update"][-1][1]}


def _arithmetic(subject: Subject) -> Figures:
    """Compiling takes seconds the first time."""
    threads = update_threads(subject.hardware.physical_cores)
    return {"arithmetic": compute.arithmetic(threads, subject.clock(torch.device("cpu")))}


def _matmuls(subject: Subject) -> Figures:
    """In both precisions; on a CPU, where they take long, a quick one only in a run's default."""
    device, dtypes = subject.computing(), {"matmul": torch.bfloat16, "matmul_fp32": torch.float32}
    if subject.quick and subject.device.type == "cpu":
        del dtypes["matmul_fp32" if bf16_is_fast(subject.device.type) else "matmul"]
    return {field: device.matmul(subject.sizes.tokens, dtype) for field, dtype in dtypes.items()}


def _grouped(subject: Subject) -> Figures:
    """On a GPU: on a CPU experts' matmuls run one after another at the rate of lone ones."""
    rates = subject.computing().grouped(subject.sizes.rows)
    return {"grouped": rates} if rates else {}


def _attention(subject: Subject) -> Figures:
    """In the precision that runs choose by default."""
    dtype = torch.bfloat16 if bf16_is_fast(subject.device.type) else torch.float32
    lengths, tokens = subject.sizes.lengths, subject.sizes.attention_tokens
    return {"attention": subject.computing().attention(lengths, tokens, dtype)}


def _memory(subject: Subject) -> Figures:
    """The device's memory, a GPU's update in it, and what starting an operation costs."""
    device, nbytes = subject.computing(), subject.sizes.memory_bytes
    memory, launch = device.memory(nbytes), device.launch()
    if subject.device.type != "cuda":
        return {"memory": memory, "fresh": device.fresh(nbytes), "launch": launch}
    rate = None
    if not subject.quick:  # which compiles no kernel for a difference of 2%
        rate = compute.device_rate(subject.clock(subject.device), compute.PARAMETERS)
    rate = rate or memory / profiles.UPDATE_BYTES
    return {"memory": memory, "fresh": memory, "launch": launch, "device_update": rate}


def _disk(subject: Subject) -> Figures:
    if subject.hardware.disk_free_bytes < 2 * disk.FILE_BYTES:
        return {}
    write, read = disk.disk_rates(subject.folder)
    return {"disk_write": write, "disk_read": read}


Step = Callable[[Subject], Figures]

QUICK_STEPS: dict[str, Step] = {
    "links and the host's update": _links_and_update,
    "matrix products": _matmuls,
    "the device's memory": _memory,
    "attention": _attention,
    "experts' products": _grouped,
    "the update's arithmetic": _arithmetic,
}
STEPS: dict[str, Step] = QUICK_STEPS | {
    "fp8 products": lambda subject: {"fp8": subject.computing().fp8()},
    "the disk": _disk,
}
