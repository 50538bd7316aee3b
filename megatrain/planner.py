"""The planner: what a run will hold on which tier, how long a step will take, and what it chooses where the user left the choice.

Model shape, hardware, the machine's rates and the job go in; a `Plan` comes out. Arithmetic only: nothing is allocated, no weight is read
and no device is asked. The engine allocates what the plan says.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from megatrain.economy import Economy
from megatrain.errors import PlanError
from megatrain.hardware import GIB, Hardware
from megatrain.machine import MachineProfile
from megatrain.planner_bytes import NOT_ALLOCATED, device_bytes, disk_bytes, host_bytes, nvme_bytes, working_sets
from megatrain.planner_help import TIER_WORDS, Suggestion, cheapest_fix, faster
from megatrain.planner_job import Choices, Job
from megatrain.planner_search import AUTO_MICRO_BATCH_TOKENS, Room, Search
from megatrain.planner_words import reasons
from megatrain.timing import Timing, predict

if TYPE_CHECKING:
    from rich.console import Console

    from megatrain.models.shape import ModelShape

__all__ = ["AUTO_MICRO_BATCH_TOKENS", "TIER_WORDS", "Budget", "Choices", "Job", "Plan", "lay_out", "make_plan"]


@dataclass(frozen=True)
class Budget:
    """Bytes that the run may use; `gpu` is None when it trains on the CPU."""

    gpu: int | None
    host: int
    disk: int
    nvme: int | None = None  # None: no folder is named


@dataclass(frozen=True)
class Plan:
    """What the run will hold, and what it may. Tables map arrays to bytes."""

    choices: Choices
    reasons: tuple[tuple[str, str], ...]  # (what, why it is so), for the reader
    device: dict[str, int]  # where it computes: the GPU, or host RAM when training on the CPU
    host: dict[str, int]
    nvme: dict[str, int]
    disk: dict[str, int]
    working_sets: dict[str, int]  # the parts of which device["working set"] is the largest
    budget: Budget
    job: Job
    parameters: int
    timing: Timing  # predicted; of a plan that does not fit, too
    fix: str | None  # what would make it fit, if it does not
    economy: Economy | None = None  # predicted: of all steps, if their number is known, else of one
    steps: int | None = None  # of the whole run, if known
    drives_assumed: tuple[str, ...] = ()  # folders on drives for NVMe whose rates nobody measured
    faster: tuple[Suggestion, ...] = ()  # what would make it faster, if it fits and that was asked for

    @property
    def boundary_bytes(self) -> int:
        """The boundary activations: the part of the device's memory that grows with depth."""
        return self.device["boundary activations"]

    @property
    def allocated_bytes(self) -> int:
        """Peak of what PyTorch itself allocates where it computes (on CUDA, torch.cuda.max_memory_allocated)."""
        return sum(size for name, size in self.device.items() if name not in NOT_ALLOCATED)

    @property
    def gpu_bytes(self) -> int:
        """Peak GPU memory as the driver sees it; 0 when training on the CPU."""
        return 0 if self.budget.gpu is None else sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Peak resident memory of the process; on the CPU the device's arrays live there too."""
        return sum(self.host.values()) + (sum(self.device.values()) if self.budget.gpu is None else 0)

    @property
    def disk_bytes(self) -> int:
        """Peak disk space of the run folder's checkpoints."""
        return sum(self.disk.values())

    @property
    def tiers(self) -> tuple[tuple[str, int, int], ...]:
        """(name, bytes needed, bytes to be had) of every tier in use."""
        gpu = () if self.budget.gpu is None else (("gpu", self.gpu_bytes, self.budget.gpu),)
        nvme = () if self.budget.nvme is None else (("nvme", sum(self.nvme.values()), self.budget.nvme),)
        return (*gpu, ("host", self.host_bytes, self.budget.host), *nvme, ("disk", self.disk_bytes, self.budget.disk))

    @property
    def short(self) -> tuple[str, ...]:
        """The tiers that are too small."""
        return tuple(name for name, need, have in self.tiers if need > have)

    @property
    def fits(self) -> bool:
        return not self.short

    def check(self) -> None:
        """Raise PlanError, naming need, budget and the cheapest fix, if a tier is too small."""
        if self.fits:
            return
        lacks = [
            f"{need / GIB:.2f} GiB of {TIER_WORDS[name]}, where {have / GIB:.2f} GiB can be had"
            for name, need, have in self.tiers
            if name in self.short
        ]
        raise PlanError(f"the run does not fit: it needs {' and '.join(lacks)}; {self.fix}")

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values, for plan.json and `plan --json`. Bytes throughout."""
        totals = {name: {"need": need, "have": have, "fits": need <= have} for name, need, have in self.tiers}
        economy = None if self.economy is None else self.economy.to_dict()
        return asdict(self) | {"reasons": dict(self.reasons), "totals": totals, "fits": self.fits, "economy": economy}

    def render(self, console: Console) -> None:
        """Print the plan as tables: bytes per tier and array, choices and what decided them."""
        from megatrain.planner_view import render

        render(self, console)


def make_plan(
    job: Job,
    shape: ModelShape,
    hardware: Hardware,
    machine: MachineProfile,
    *,
    gpu_limit: int | None = None,
    host_limit: int | None = None,
    nvme_limit: int | None = None,
    suggest: bool = False,
) -> Plan:
    """Choose what `job` leaves open and lay out the bytes and the step. Never raises for lack of memory: `Plan.check` does.

    gpu_limit, host_limit: the user's own budgets in bytes (memory.gpu, memory.host); None takes what the machine has. A host budget
    above what the machine shows is taken at its word: some virtual machines show more RAM only as it is used.
    nvme_limit: bytes that there is room for in the folders of memory.nvme; None if there are none.
    suggest: also find out what would make it faster.
    """
    budget = Budget(
        gpu=None if hardware.gpu is None else min(gpu_limit or hardware.gpu.free_bytes, hardware.gpu.free_bytes),
        host=host_limit or hardware.host_available_bytes,
        disk=hardware.disk_free_bytes,
        nvme=nvme_limit,
    )
    search = Search(job, shape, hardware, machine, Room(budget.gpu, budget.host, budget.nvme))
    plan = lay_out(search.fastest(), job, shape, hardware, machine, budget)
    if not plan.fits:
        return replace(plan, fix=cheapest_fix(plan, search))
    return replace(plan, faster=faster(plan, search)) if suggest else plan


def lay_out(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware, machine: MachineProfile, budget: Budget) -> Plan:
    """The bytes and the step that `choices` make, whether they fit or not."""
    return Plan(
        choices=choices,
        reasons=reasons(choices, job, shape, hardware),
        device=device_bytes(choices, job, shape, hardware),
        host=host_bytes(choices, job, shape, hardware),
        nvme=nvme_bytes(choices, job, shape),
        disk=disk_bytes(job, shape),
        working_sets=working_sets(choices, job, shape, hardware),
        budget=budget,
        job=job,
        parameters=shape.parameters,
        timing=predict(choices, job, shape, machine),
        fix=None,
    )
