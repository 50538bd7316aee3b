"""What every peer is asked to do, and how all of them are measured: whole optimizer steps over
random tokens. Under torchrun each rank takes its part of a step's rows, and the first prints."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.reporting.meters import GpuMeter, peak_host_bytes

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
LEARNING_RATE, MAX_GRAD_NORM = 1e-5, 1.0
RANK, RANKS = (int(os.environ.get(*given)) for given in (("RANK", "0"), ("WORLD_SIZE", "1")))


@dataclass(frozen=True)
class Job:
    """One run of a peer."""

    shape: str
    layers: int | None  # None: as many as the shape has
    tokens: int  # per optimizer step, of all ranks
    seq_len: int
    micro_batch_rows: int
    steps: int  # measured
    warmup: int
    compiled: bool  # every layer by itself, and the softmax of the head
    checkpointing: bool  # layers are recomputed in backward
    device: str
    json: Path | None

    @property
    def micro_batches(self) -> int:
        """Of each rank."""
        return self.tokens // (self.seq_len * self.micro_batch_rows * RANKS)


@dataclass(frozen=True)
class Trainer:
    """A peer that is ready: `step` makes one whole optimizer step of micro-batches [rows, seq_len]
    and returns the mean loss."""

    step: Callable[[list[Tensor]], float]
    parameters: int
    vocabulary: int
    settings: dict[str, Any] = field(
        default_factory=dict
    )  # what it was set up with, for the record
    packages: tuple[str, ...] = ()  # besides PyTorch and transformers


def parser(description: str) -> argparse.ArgumentParser:
    """The arguments that all peers take; a peer may add its own."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument(
        "--shape", default="qwen2.5-7b", help="a shape of `megatrain bench`, or a model folder"
    )
    result.add_argument("--layers", type=int, help="override the number of layers")
    result.add_argument("--tokens", type=int, default=65536, help="per optimizer step")
    result.add_argument("--seq-len", type=int, default=1024)
    result.add_argument("--micro-batch-rows", type=int, default=16)
    result.add_argument("--steps", type=int, default=4, help="measured")
    result.add_argument("--warmup", type=int, default=2)
    result.add_argument(
        "--compiled",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="torch.compile for every layer",
    )
    result.add_argument(
        "--checkpointing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute layers in backward",
    )
    result.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    result.add_argument("--json", type=Path)
    return result


def job_of(args: argparse.Namespace) -> Job:
    """Raises SystemExit where the step cannot be cut into equal micro-batches: a mean of their
    means would not be the mean."""
    if args.tokens % (args.seq_len * args.micro_batch_rows * RANKS):
        raise SystemExit(
            f"--tokens {args.tokens} is no multiple of a micro-batch, "
            f"{args.micro_batch_rows} rows of {args.seq_len}, for each of {RANKS}"
        )
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return Job(**{name: getattr(args, name) for name in Job.__dataclass_fields__})


def run(system: str, job: Job, prepare: Callable[[Job], Trainer]) -> None:
    """Set the peer up, measure it, print every step, and write the JSON."""
    os.environ.setdefault(
        "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
    )  # as ours has it; less is lost to fragments
    ram_before, started = ram_in_use(), time.perf_counter()
    with sdpa_kernel(ATTENTION, set_priority=True):
        trainer = prepare(job)
        setup_s = time.perf_counter() - started
        described = describe(system, job, trainer.parameters, trainer.settings, trainer.packages)
        write(job, described | {"setup_s": setup_s} | measure(job, trainer, ram_before))


def write(job: Job, report: dict[str, Any]) -> None:
    """Print it as JSON, and leave it in the job's file if it has one."""
    if RANK:
        return
    text = json.dumps(report, indent=1)
    print(text)
    if job.json:
        job.json.parent.mkdir(parents=True, exist_ok=True)
        job.json.write_text(text + "\n")


def measure(job: Job, trainer: Trainer, ram_before: int) -> dict[str, Any]:
    """Time of every step, the median of the measured ones, and the peaks of GPU and host memory.
    Making random tokens is left out."""
    with StepMeter(job, ram_before) as meter:
        for number in range(job.warmup + job.steps):
            batches = random_rows(job, trainer.vocabulary, number)
            meter.begin()
            loss = trainer.step(batches)
            meter.end(loss)
            if not RANK:
                seconds = meter.steps[-1]["seconds"]
                print(f"step {number}: {seconds:.3f} s, loss {loss:.3f}", flush=True)
    return meter.figures(trainer.parameters)


class StepMeter:
    """Seconds of every step between `begin` and `end`, both synchronised, and after each the memory
    that it has taken."""

    def __init__(self, job: Job, ram_before: int) -> None:
        self.steps: list[dict[str, float]] = []
        self._job, self._ram_before = job, ram_before
        self._gpu = GpuMeter(torch.device(job.device))
        self._gpu_peak_bytes: int | None = None
        self._ram_bytes, self._started = 0, 0.0

    def __enter__(self) -> StepMeter:
        if self._job.device == "cuda":
            torch.cuda.empty_cache()  # what only the set-up needed is no part of training
        self._gpu.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._gpu.__exit__(*error)

    def begin(self) -> None:
        synchronize(self._job)
        self._started = time.perf_counter()

    def end(self, loss: float) -> None:
        synchronize(self._job)
        self.steps.append({"seconds": time.perf_counter() - self._started, "loss": loss})
        self._gpu_peak_bytes = self._gpu.peak_bytes()
        self._ram_bytes = max(self._ram_bytes, ram_in_use() - self._ram_before)

    def figures(self, parameters: int) -> dict[str, Any]:
        step_s = statistics.median(step["seconds"] for step in self.steps[self._job.warmup :])
        return {
            "steps": self.steps,
            "step_s": step_s,
            "tokens_per_s": self._job.tokens / step_s,
            "ranks": RANKS,
            "tflops": 6 * parameters * self._job.tokens / step_s / 1e12 / RANKS,  # of each
            "gpu_peak_bytes": self._gpu_peak_bytes,
            "host_bytes": max(peak_host_bytes(), self._ram_bytes),
            "resident_bytes": peak_host_bytes(),
            "ram_bytes": self._ram_bytes,
        }


def ram_in_use() -> int:
    """Of the whole machine. Memory that the driver has pinned for a process may count nowhere
    else."""
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


def random_rows(job: Job, vocabulary: int, step: int) -> list[Tensor]:
    """This rank's micro-batches of a step, the same for every system."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(
        0, vocabulary, (job.tokens // job.seq_len, job.seq_len), generator=generator
    )
    mine = ids[RANK::RANKS]
    return [part.to(job.device) for part in torch.split(mine, job.micro_batch_rows)]


def synchronize(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.synchronize()


def describe(
    system: str, job: Job, parameters: int, settings: dict[str, Any], packages: tuple[str, ...]
) -> dict[str, Any]:
    """What ran where. `packages` come besides PyTorch and transformers."""
    return {
        "system": system,
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if job.device == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "versions": {name: version(name) for name in ("torch", "transformers", *packages)},
        "arguments": {name: value for name, value in asdict(job).items() if name != "json"},
        "settings": settings,
        "parameters": parameters,
    }
