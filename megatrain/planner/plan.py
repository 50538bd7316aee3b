"""The plan: what a run will hold on each tier, how long a step takes, and the options it chooses.

Model shape, hardware, the machine's rates and the job go in. Arithmetic only: nothing is allocated,
no weight is read and no device is asked. The engine allocates what the plan says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatrain.errors import PlanError
from megatrain.machine.hardware import GIB
from megatrain.planner.job import Budget, Choices, Job
from megatrain.planner.memory import CONSTANTS, NOT_ALLOCATED
from megatrain.planner.simulation import Timing
from megatrain.planner.suggest import TIER_WORDS, Suggestion
from megatrain.reporting.energy import Economy, described, human_hours
from megatrain.reporting.streams import as_printed
from megatrain.reporting.words import human_bytes, human_parameters, three_digits


class Reason(NamedTuple):
    """A row of the plan's table."""

    what: str
    value: str
    why: str


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

    def check(self) -> None:
        """Raise PlanError, naming need, budget and the cheapest fix, if a tier is too small."""
        if not self.fits:
            raise PlanError(f"the run does not fit: {self.lack}; {self.fix}")

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, what `megatrain plan --full` prints."""
        printer.text(as_printed(lambda console: render(self, console, full=True)))

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
            # that share the work, and bytes of one of them: `totals` are a host's
            "ranks": {
                "gpus": self.job.ranks,
                "hosts": self.job.hosts,
                "run_by": "train",
                "transport": self.job.transport,
                "tokens_of_the_fullest": self.job.rank_tokens,
                "gpu_bytes": self.gpu_bytes,
                "host_bytes": self.host_bytes,
                "nvme_bytes": sum(self.nvme.values()),
            },
            "fits": self.fits,
            "economy": None if self.economy is None else self.economy.to_dict(),
        }


# -- printed --------------------------------------------------------------------------------------

BAR = 24  # cells
NAMED = 3  # arrays that a bar names


def render(plan: Plan, console: Console, *, full: bool = False) -> None:
    """Print the verdict, where memory and time go, what to change and what the run costs. full: and
    then why, as tables."""
    style, piped = "bold green" if plan.fits else "bold red", not console.is_terminal
    console.print(Text(verdict(plan), style=style), soft_wrap=piped)
    for line in () if full else bars(plan):
        console.print(Text(line), soft_wrap=piped)
    for line in (*changes(plan), *(f"{name}: {words}" for name, words in economy(plan))):
        console.print(Text(line), soft_wrap=piped)
    if plan.on_gpus:
        console.print(_numbers(plan))
    if not full:
        console.print(Text("--full: every choice, phase and array, and why", style="dim"))
        return
    for table in _tables(plan):
        console.print(table)


def bars(plan: Plan) -> Iterable[str]:
    """A line for each tier in use, with its largest arrays, and one for the step."""
    on_gpu, every = plan.budget.gpu is not None, {"nvme": plan.nvme, "disk": plan.disk}
    every |= {"gpu": plan.device, "host": plan.host if on_gpu else plan.host | plan.device}
    for name, need, have in plan.tiers:
        filled = min(BAR, round(BAR * need / max(have, 1)))
        largest = sorted(every[name].items(), key=lambda item: -item[1])[:NAMED]
        parts = ", ".join(f"{array} {human_bytes(size)}" for array, size in largest if size)
        share = f"{need / max(have, 1):4.0%} of {human_bytes(have)}"
        yield f"{_tier(plan, name):<10} {'█' * filled}{'░' * (BAR - filled)} {share}: {parts}"
    timing = plan.timing
    phases = sorted(timing.phases.items(), key=lambda item: -item[1])
    shares = (f"{phase} {seconds / timing.seconds:.0%}" for phase, seconds in phases)
    named = [share for share in shares if not share.endswith(" 0%")]
    worst = max(timing.waits, key=lambda wait: timing.waits[wait])
    waited = timing.waits[worst] / timing.seconds
    waits = f"waits for the {worst} {waited:.0%}" if waited >= 0.01 else "waits for nothing"
    yield f"a step     {', '.join(named)}; {waits}"


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
