"""The plan: what a run will hold on each tier, how long a step takes, and the options it chooses.

Model shape, hardware, the machine's rates and the job go in. Arithmetic only: nothing is allocated,
no weight is read and no device is asked. The engine allocates what the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatrain.errors import PlanError, number_of
from megatrain.machine.hardware import GIB, Hardware
from megatrain.machine.profile import MachineProfile
from megatrain.planner.job import Budget, Choices, Job, check_job_ranks
from megatrain.planner.memory import (
    CONSTANTS,
    NOT_ALLOCATED,
    Layout,
    disk_bytes,
    state_bytes_per_parameter,
)
from megatrain.planner.search import Search
from megatrain.planner.simulation import Timing
from megatrain.planner.suggest import (
    TIER_WORDS,
    Suggestion,
    bound_by_update,
    cheapest_fix,
    faster,
    held_by_others,
)
from megatrain.planner.timing import StepCosts
from megatrain.reporting.energy import Economy, described, human_hours
from megatrain.reporting.streams import as_printed
from megatrain.reporting.summary import human_bytes, human_parameters, three_digits
from megatrain.schedule import UNCHANGED
from megatrain.settings import OPTIONS

if TYPE_CHECKING:
    from megatrain.planner.cost.shape import ModelShape


@dataclass(frozen=True)
class OnGpus:
    """The prediction for a number of GPUs per host; of what does not fit, only that."""

    gpus: int
    fits: bool
    seconds: float | None = None  # of a step
    tokens_per_s: float | None = None  # of all GPUs
    tflops: float | None = None  # of each
    cost_per_million: float | None = None  # tokens; None: no price is given


@dataclass(frozen=True)
class Plan:
    """The memory that a run will hold and may use, in bytes by array, and its predicted time."""

    choices: Choices
    reasons: tuple[Reason, ...]  # of the choices, for the reader
    device: dict[str, int]  # where it computes: the GPU, or host RAM when training on the CPU
    host: dict[str, int]
    nvme: dict[str, int]
    disk: dict[str, int]
    working_sets: dict[str, int]  # the parts of which device["working set"] is the largest
    budget: Budget
    job: Job
    parameters: int
    active_parameters: int  # that act on a token: fewer in a mixture of experts
    timing: Timing  # predicted; of a plan that does not fit, too
    bound_by_update: bool  # a mixture that waits most for the host to update idle experts as well
    fix: str | None  # what would make it fit, if it does not
    frozen_parameters: int = 0  # besides `parameters`, which are trained
    frozen_saves: int = 0  # bytes of state and gradients that they would have
    layers_back: int | None = None  # that backward visits, if not all
    economy: Economy | None = None  # predicted: of all steps, if their number is known, else of one
    steps: int | None = None  # of the whole run, if known
    drives_assumed: tuple[str, ...] = ()  # folders on drives for NVMe whose rates nobody measured
    faster: tuple[Suggestion, ...] = ()  # what would speed it up, if it fits and that was asked for
    ranks_assumed: bool = False  # rates of several ranks that nobody measured together here
    on_gpus: tuple[OnGpus, ...] = ()  # what other numbers of GPUs would give, if that was asked for

    made_of: Any = field(default=None, compare=False, repr=False)  # `engine.resolved.Resolved`

    @property
    def allocated_bytes(self) -> int:
        """Peak of PyTorch's own allocations (on CUDA, torch.cuda.max_memory_allocated)."""
        return sum(size for name, size in self.device.items() if name not in NOT_ALLOCATED)

    @property
    def gpu_bytes(self) -> int:
        """Peak GPU memory as the driver sees it; 0 when training on the CPU."""
        return 0 if self.budget.gpu is None else sum(self.device.values())

    @property
    def host_bytes(self) -> int:
        """Peak resident memory of a process, one a rank; on the CPU with the device's arrays."""
        return sum(self.host.values()) + sum(self.device.values()) - self.gpu_bytes

    @property
    def tiers(self) -> tuple[tuple[str, int, int], ...]:
        """(name, bytes needed at the peak, bytes to be had) of every tier in use: of each GPU, and
        of a host for all its ranks."""
        budget, ranks = self.budget, self.job.ranks
        rows = (
            ("gpu", 1, self.gpu_bytes, budget.gpu),
            ("host", ranks, self.host_bytes, budget.host),
            ("nvme", ranks, sum(self.nvme.values()), budget.nvme),
            ("disk", 1, sum(self.disk.values()), budget.disk),
        )
        return tuple((t, n * need, n * has) for t, n, need, has in rows if has is not None)

    @property
    def short(self) -> tuple[str, ...]:
        """The tiers that are too small."""
        return tuple(name for name, need, have in self.tiers if need > have)

    @property
    def fits(self) -> bool:
        return not self.short

    @property
    def saves_beside(self) -> bool:
        """True if a checkpoint is written beside training: host RAM has room for a copy of it."""
        left = {name: have - need for name, need, have in self.tiers}["host"]
        return self.job.size == 1 and not self.nvme and left >= self.disk.get("checkpoint 1", 0)

    @property
    def lack(self) -> str:
        """The need of a plan that does not fit, beside what is available."""
        lacks = [
            f"{need / GIB:.2f} GiB of {TIER_WORDS[name]}, where {have / GIB:.2f} GiB can be had"
            for name, need, have in self.tiers
            if name in self.short
        ]
        return f"it needs {' and '.join(lacks)}"

    @property
    def _ranks(self) -> dict[str, Any]:
        """The ranks that share the work, and bytes of one of them: `totals` are a host's."""
        job = self.job
        return {
            "gpus": job.ranks,
            "hosts": job.hosts,
            "run_by": "train",
            "transport": job.transport,
            "tokens_of_the_fullest": job.rank_tokens,
            "gpu_bytes": self.gpu_bytes,
            "host_bytes": self.host_bytes,
            "nvme_bytes": sum(self.nvme.values()),
        }

    def check(self) -> None:
        """Raise PlanError, naming need, budget and the cheapest fix, if a tier is too small."""
        if not self.fits:
            raise PlanError(f"the run does not fit: {self.lack}; {self.fix}")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, what `megatrain plan` prints."""
        printer.text(as_printed(lambda console: render(self, console)))

    def to_dict(self) -> dict[str, Any]:
        """The plan as JSON-able values, for plan.json and `plan --json`. Bytes throughout."""
        totals = {
            name: {"need": need, "have": have, "fits": need <= have}
            for name, need, have in self.tiers
        }
        values = asdict(replace(self, made_of=None))
        del values["made_of"]  # a model and a machine, which is no JSON
        return values | {
            "reasons": {row.what: row.why for row in self.reasons},
            "values": {row.what: row.value for row in self.reasons},
            "saves_beside": self.saves_beside,
            "totals": totals,
            "ranks": self._ranks,
            "fits": self.fits,
            "economy": None if self.economy is None else self.economy.to_dict(),
        }


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
    """Choose what `job` leaves open and lay out the bytes and the step.

    Never raises for lack of memory: `Plan.check` does.

    Args:
        hardware, machine: of several ranks, what each of them has of its host
            (machine/profile.py), and its rates with all of them at work.
        gpu_limit, host_limit: the user's budgets in bytes (memory.gpu, memory.host), of each GPU
            and of a host; None takes what the machine has. A host budget above what the machine
            shows is taken at its word: some virtual machines show more RAM only as it is used.
        nvme_limit: bytes free in a host's folders of memory.nvme; None without such folders.
        suggest: also find out what would make it faster.

    Raises:
        PlanError: a step has fewer rows than there are ranks.
        ConfigError: the job has what several ranks cannot do.
    """
    check_job_ranks(job)
    if job.size == 1:
        job = replace(job, replicated=None)
    if host_limit is not None:
        host_limit //= job.ranks
    if nvme_limit is not None:
        nvme_limit //= job.ranks
    free = None if hardware.gpu is None else hardware.gpu.free_bytes
    budget = Budget(
        gpu=free if free is None else min(gpu_limit or free, free),
        host=hardware.host_available_bytes if host_limit is None else host_limit,
        disk=hardware.disk_free_bytes,
        nvme=nvme_limit,
    )
    search = Search(job, shape, hardware, machine, budget)
    plan = lay_out(search.fastest(), machine, budget)
    if not plan.fits:
        why = held_by_others(search, plan.host_bytes) if host_limit is None else ""
        return replace(plan, fix=cheapest_fix(plan.short, search) + why)
    found = faster(plan.choices, plan.timing, search) if suggest else ()
    return replace(plan, faster=found)


def lay_out(layout: Layout, machine: MachineProfile, budget: Budget) -> Plan:
    """The plan of a layout, whether it fits or not."""
    timing, shape, job = StepCosts(layout, machine).predict(), layout.shape, layout.job
    frozen: dict[str, Any] = {}
    if shape.frozen is not None:
        weight = layout.activations.weight
        each = state_bytes_per_parameter(job) - (0 if layout.stored else weight)
        frozen = {
            "frozen_parameters": shape.frozen.parameters,
            "frozen_saves": int(shape.frozen.parameters * each),
            "layers_back": shape.layers_back if shape.layers_back < shape.layers else None,
        }
    return Plan(
        choices=layout.choices,
        reasons=reasons(layout),
        device=layout.device,
        host=layout.host,
        nvme=layout.nvme,
        disk=disk_bytes(job, shape),
        working_sets=layout.activations.working_sets,
        budget=budget,
        job=job,
        parameters=shape.parameters,
        active_parameters=shape.active_parameters,
        timing=timing,
        bound_by_update=bound_by_update(timing, shape),
        fix=None,
        **frozen,
    )


# -- printed ---------------------------------------------------------------------------------------


def render(plan: Plan, console: Console) -> None:
    """Print the verdict, what to change, what the run costs, and then why, as tables."""
    style = "bold green" if plan.fits else "bold red"
    console.print(Text(verdict(plan), style=style), soft_wrap=True)
    for line in (*changes(plan), *(f"{name}: {words}" for name, words in economy(plan))):
        console.print(Text(line), soft_wrap=True)
    for table in _tables(plan):
        console.print(table)


def verdict(plan: Plan) -> str:
    """The verdict: time and memory of a run that fits, or what it lacks."""
    job = plan.job
    if not plan.fits:
        return f"does not fit: {plan.lack}"
    where = "" if job.size == 1 else f" on {job.ranks} {_ranks(plan, job.ranks)}{_hosts(plan)}"
    used = [
        f"{human_bytes(need)} of {human_bytes(have)} of {_tier(plan, name)}"
        for name, need, have in plan.tiers
        if name != "disk"
    ]
    speed = f"{plan.timing.seconds:.3g} s a step, {plan.timing.tokens_per_s:,.0f} tokens/s"
    return f"fits{where}: {speed}; {', '.join(used)}"


def _tier(plan: Plan, name: str) -> str:
    return TIER_WORDS[name] + (" of each" if plan.job.ranks > 1 and name == "gpu" else "")


def _ranks(plan: Plan, number: int = 2) -> str:
    """The noun for what ranks compute on, in the right number."""
    one, several = ("GPU", "GPUs") if plan.budget.gpu is not None else ("process", "processes")
    return one if number == 1 else several


def _hosts(plan: Plan) -> str:
    return "" if plan.job.hosts == 1 else f" of each of {plan.job.hosts} hosts"


def changes(plan: Plan) -> Iterable[str]:
    """Lines on what to change and what a user should know, as `what: why`."""
    if not plan.fits:
        yield f"to change: {plan.fix}"
    if plan.bound_by_update:
        share = plan.timing.waits["update"] / plan.timing.seconds
        yield (
            f"bound by the host's update: it updates all {plan.parameters:,} parameters, of which "
            f"{plan.active_parameters:,} act on a token; {share:.0%} of a step waits for it"
        )
    if constants := plan.device.get(CONSTANTS):
        yield (
            f"not trained: {human_bytes(constants)} of buffers, and of parameters without part in "
            "what layers return; they stay as they are, and are saved so"
        )
    if plan.frozen_parameters:
        every, back, where = plan.parameters + plan.frozen_parameters, plan.layers_back, ""
        if back is not None:
            few = ("no layer", "the last layer alone")
            where = f", and backward visits {few[back] if back < 2 else f'the last {back} layers'}"
        yield (
            f"frozen: {plan.frozen_parameters:,} of {every:,} parameters, which saves "
            f"{human_bytes(plan.frozen_saves)} of state and gradients{where}"
        )
    if seconds := plan.timing.reference_s:
        yield (
            "before the first step: log-probabilities of the rows that the run takes under the "
            "model as it begins, unless they are kept from before: "
            f"{seconds / plan.timing.seconds:.0%} of the time of training on each once"
        )
    for better in plan.faster:
        gain = f"{better.speedup:.2f}x tokens/s, {better.tokens_per_s:,.0f}"
        yield f"faster: {better.words} would give {gain} ({better.cost}; {better.why})"
    if plan.job.hosts > 1:
        yield (
            "several hosts: planned from bytes and the network's rate alone, as if sending took "
            "nothing from computing"
        )
    if plan.ranks_assumed:
        doctor = f"megatrain doctor --gpus {plan.job.ranks}"
        yield (
            f"{plan.job.ranks} {_ranks(plan)} at work together: their rates are assumed, not "
            f"measured; `{doctor}` measures them"
        )
    if plan.drives_assumed:
        doctor = " ".join(["megatrain doctor", *(f"--nvme {name}" for name in plan.drives_assumed)])
        yield f"NVMe: the drive's speed is assumed, not measured; `{doctor}` measures it"


def economy(plan: Plan) -> Iterable[tuple[str, str]]:
    """Time and cost of the whole run, if its number of steps is known, and of a million tokens."""
    if plan.economy is None:
        return
    if plan.steps is not None:
        time = human_hours(plan.economy.seconds)
        yield "run", f"{plan.steps:,} steps, {plan.economy.tokens:,} tokens, {time} of steps"
    yield from described(plan.economy, whole=plan.steps is not None)


def _tables(plan: Plan) -> Iterable[Table]:
    job, timing = plan.job, plan.timing
    if plan.on_gpus:
        yield _numbers(plan)
    parameters = human_parameters(plan.parameters, plan.active_parameters)
    title = f"{parameters}, {job.precision}, {job.tokens_per_step:,} tokens per step"
    table = Table("choice", "value", "why", title=title)
    for row in plan.reasons:
        table.add_row(*row)
    yield table
    each, of_rank = (" each", " of a rank") if job.size > 1 else ("", "")
    speed = f"{timing.tokens_per_s:,.0f} tokens/s, {timing.tflops:,.3g} TFLOP/s{each}"
    title = f"a step, predicted: {timing.seconds:.3g} s, {speed}"
    table = Table("phase", *_figures("seconds", "share"), "bound by", title=title)
    for phase, seconds in timing.phases.items():
        if seconds:
            share = f"{seconds / timing.seconds:.0%}"
            table.add_row(phase, f"{seconds:.3g}", share, timing.bound_by[phase])
    yield table
    title = f"bytes by tier and array{of_rank}"
    table = Table("tier", "array", *_figures("size", "B/parameter"), title=title)
    where = "GPU" if plan.budget.gpu is not None else "host, computing"
    tiers = {where: plan.device, "host": plan.host, "NVMe": plan.nvme, "disk": plan.disk}
    for tier, arrays in tiers.items():
        for name, nbytes in arrays.items():
            if nbytes:
                table.add_row(tier, name, human_bytes(nbytes, 2), f"{nbytes / plan.parameters:.2f}")
        table.add_section()
    yield table
    title = "totals" if job.ranks == 1 else f"totals of a host, with {job.ranks} ranks"
    table = Table("tier", *_figures("needs", "has", "used"), title=title)
    for name, need, have in plan.tiers:
        cells = human_bytes(need, 2), human_bytes(have, 2), f"{need / max(have, 1):.0%}"
        table.add_row(_tier(plan, name), *cells, style="red" if name in plan.short else None)
    yield table


def _figures(*headings: str) -> Iterable[Column]:
    return (Column(heading, justify="right") for heading in headings)


def _numbers(plan: Plan) -> Table:
    """Predictions for other numbers of GPUs."""
    priced = any(row.cost_per_million is not None for row in plan.on_gpus)
    title = f"numbers of {_ranks(plan)}{_hosts(plan)}{', priced in proportion' if priced else ''}"
    costs = [f"{plan.economy.prices.currency}/million tokens"] if priced and plan.economy else []
    headings = _ranks(plan), "seconds", "tokens/s", "TFLOP/s each", *costs
    table = Table(*_figures(*headings), title=title)
    for row in plan.on_gpus:
        figures = row.seconds, row.tokens_per_s, row.tflops, row.cost_per_million
        cells = [three_digits(value) for value in figures if value is not None]
        style = "bold" if row.gpus == plan.job.ranks else None
        table.add_row(str(row.gpus), *(cells or ["does not fit"]), style=style)
    return table


# -- choices in words -----------------------------------------------------------------------------

# Bytes written that wear out a drive, as makers state for 1 TB consumer drives; drives for data
# centres stand several times this.
WORN_OUT_BYTES = 600e12


class Reason(NamedTuple):
    """A row of the plan's table."""

    what: str
    value: str
    why: str


def reasons(layout: Layout) -> tuple[Reason, ...]:
    """A row for each option that has a heading, and one for the working set."""
    choices, job = layout.choices, layout.job
    blocks, on_gpu = len(layout.shape.block_numel), layout.hardware.gpu is not None
    chunk, codec = choices.layer_chunk_tokens, job.activations
    kept = "offloaded" if choices.offload_activations else "kept"
    kept += f", {choices.keep_attention} with attention" * (choices.keep_attention > 0)
    sums = 1 if choices.groups == 1 else choices.sums_on_device
    words = {
        "micro_batch_tokens": (
            f"{choices.micro_batch_tokens:,} tokens",
            "with the other choices, the shortest step",
        ),
        "groups": (
            str(choices.groups),
            "the routers' balancing loss is over a whole step"
            if job.balances_routers
            else "the loss is over a whole step"
            if job.whole_step
            else "every weight is streamed once forward and once backward"
            if choices.groups == 1
            else "smaller groups need less memory; weights are streamed once per group",
        ),
        "head_chunk_tokens": (
            f"{choices.head_chunk_tokens:,} tokens",
            "the largest whose logits need no more memory than the layers, or are worth it",
        ),
        "layer_chunk_tokens": (
            f"{chunk:,} tokens" if chunk else "none",
            "MLPs and norms take this many tokens at a time, so that wide intermediates stay small"
            if chunk
            else "a layer computes a whole micro-batch at once",
        ),
        "resident": (number_of(choices.resident, "block"), _resident(choices, job, blocks, on_gpu)),
        "replicated": (number_of(choices.replicated, "block"), _replicated(choices, blocks)),
        "retained": _retained(choices, layout.shape.layers_back, blocks - 2),
        "offload_activations": (
            kept if codec == UNCHANGED else f"{kept}, {codec}",
            _checkpoints(choices.offload_activations, codec),
        ),
        "second_backward": _gradients(choices, job, layout.shape.layers_back),
        "sums_on_device": (number_of(sums, "block"), _sums(choices, job, blocks)),
        "nvme_blocks": _nvme(choices, job, sum(layout.nvme.values())),
        "update_threads": (
            str(choices.update_threads),
            "physical cores minus 1/8 (at least two are left free)",
        ),
    }
    rows = [_of_ranks(job)] if job.size > 1 else []
    absent = {"nvme_blocks": not job.nvme_drives, "replicated": job.size == 1}
    for option in OPTIONS:
        if option.heading and not absent.get(option.field):
            value, why = words[option.field]
            asked = option.key and getattr(job, option.field) is not None
            if option.field == "sums_on_device":  # one group has none, and residents' always stay
                asked = choices.groups > 1 and choices.sums_on_device == job.sums_on_device
            rows.append(Reason(option.heading, value, f"as asked: {why}" if asked else why))
    sets = layout.activations.working_sets
    largest = max(sets, key=lambda name: sets[name])
    return *rows, Reason("working set", human_bytes(sets[largest], 2), f"the largest: {largest}")


def _of_ranks(job: Job) -> Reason:
    value = f"{job.size}" if job.hosts == 1 else f"{job.hosts} x {job.ranks}"
    why = (
        f"each owns 1/{job.size} of every block, and computes {job.rank_tokens:,} tokens of a step"
    )
    if job.reads:
        why += "; weights in host RAM are one copy, which each uploads whole"
    if job.pieces > 1:
        why += f", a piece of every sequence that {job.pieces} share"
    return Reason("ranks", value, why)


def _part(where: str, number: int, total: int, noun: str) -> str:
    """A part of `total` things: "the first 3 of 30 blocks", "the last layer of 28", or all."""
    if number >= total:
        return f"all {total} {noun}s"
    which = f"{number} of {total} {noun}s" if number > 1 else f"{noun} of {total}"
    return f"the {where} {which}"


def _resident(choices: Choices, job: Job, blocks: int, on_gpu: bool) -> str:
    if choices.resident == 0:
        return f"all {blocks} blocks are streamed"
    which = _part("first", choices.resident, blocks, "block")
    if choices.resident >= blocks and job.size > 1:
        return f"the shares of {which} are updated where they are; weights are gathered from there"
    if choices.resident >= blocks:
        return f"{which} are updated {'on the GPU' if on_gpu else 'in place'}: nothing is streamed"
    return f"{which}; {'more do not fit' if job.resident is None else 'the others are streamed'}"


def _replicated(choices: Choices, blocks: int) -> str:
    if choices.replicated == 0:
        return "weights come from all ranks at each visit: forward, backward, and in each group"
    which = _part("first", choices.replicated, blocks, "block")
    return f"weights of {which} come from all ranks once a step, and stay on each"


def _retained(choices: Choices, layers: int, every: int) -> tuple[str, str]:
    """layers: those that backward visits."""
    retained, on_host = choices.retained, choices.retained_on_host
    value = number_of(retained, "layer") + (f", {on_host} more in host RAM" if on_host else "")
    kinds = ["recomputed"] if retained + on_host < layers else []
    others = " or ".join(kinds + (["offloaded to host RAM"] if on_host else []))
    why = f"all {layers} layers are {others}"
    if retained:
        which = _part("last", retained, layers, "layer")
        saved = "what matmuls and attention need" if choices.cheap_retention else "activations"
        why = f"{saved} of {which} are saved" + (f"; the others are {others}" if others else "")
    if layers < every:
        first = "layer needs" if every - layers == 1 else f"{every - layers} need"
        why = f"{why}; the first {first} no backward" if layers else "no layer needs a backward"
    return value + (", selectively" if choices.cheap_retention else ""), why


def _checkpoints(offloaded: bool, codec: str) -> str:
    where = "are in host RAM, which leaves room on the GPU" if offloaded else "stay in place"
    rounded = "" if codec == UNCHANGED else f", rounded to {codec}: gradients are near, not exact"
    return f"activation checkpoints {where}{rounded}"


def _gradients(choices: Choices, job: Job, layers: int) -> tuple[str, str]:
    """layers: those that backward visits."""
    twice, why = choices.second_backward, "once for the global norm, once to be applied"
    if twice >= max(1, layers):
        return "computed twice", f"{why}: none is kept"
    if twice:
        which = _part("first", twice, layers, "layer")
        kept = f"{why}: those of {which}; others are kept"
        return f"{number_of(twice, 'layer')} computed twice", kept
    kept = "kept until the global norm is known"
    return "computed once", kept if job.clipping else "applied at once, since nothing is clipped"


def _sums(choices: Choices, job: Job, blocks: int) -> str:
    if choices.groups == 1:
        return "one block's at a time: it ends all micro-batches before the next block begins"
    exchanged = ", and exchanged at the end of each" if job.size > 1 else ""
    if choices.sums_on_device == 0:
        return f"in host RAM between groups{exchanged}"
    here = f"those of {_part('first', choices.sums_on_device, blocks, 'block')} stay on the device"
    others = f"; the others' are in host RAM{exchanged}"
    return f"{here} between groups{others if choices.sums_on_device < blocks else ''}"


def _nvme(choices: Choices, job: Job, once: int) -> tuple[str, str]:
    """once: bytes of its arrays, of which a step reads and writes each."""
    asked = job.nvme_blocks is not None
    if not choices.nvme_blocks:
        return "nothing", "nothing" if asked else "host RAM has room for everything"
    value = f"state of {number_of(choices.nvme_blocks, 'block')}"
    why = "" if asked else "what host RAM has no room for; "
    steps = int(WORN_OUT_BYTES * job.nvme_drives / max(1, once))
    drives = "a drive" if job.nvme_drives == 1 else "drives"
    return value, (
        f"{why}a step reads {once / GIB:,.2f} GiB and writes {once / GIB:,.2f} GiB: {steps:,} "
        f"steps wear out {drives} of 600 TB endurance, typical of 1 TB consumer drives"
    )
