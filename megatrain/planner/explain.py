"""The plan on a terminal: the choices and why, a step's time, and the bytes of every tier."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.planner.memory import CONSTANTS
from megatrain.planner.plan import Plan
from megatrain.planner.suggest import TIER_WORDS
from megatrain.reporting.energy import described, human_hours
from megatrain.reporting.words import human_bytes, human_parameters, three_digits

# Headings of right-aligned columns.
NUMBERS = {"seconds", "share", "size", "B/parameter", "needs", "has", "used"}


def render(plan: Plan, console: Console) -> None:
    """Print the verdict, what to change, what the run costs, and then why, as tables."""
    style = "bold green" if plan.fits else "bold red"
    console.print(Text(verdict(plan), style=style), soft_wrap=True)
    for line in (*changes(plan), *(f"{name}: {words}" for name, words in economy(plan))):
        console.print(Text(line), soft_wrap=True)
    numbers = [_numbers(plan)] if plan.on_gpus else []
    for table in (*numbers, _choices(plan), _step(plan), _arrays(plan), _tiers(plan)):
        console.print(table)


def verdict(plan: Plan) -> str:
    """Whether the run fits: in which time and memory, or what it lacks."""
    if not plan.fits:
        return f"does not fit: {plan.lack}"
    speed = f"{plan.timing.seconds:.3g} s a step, {plan.timing.tokens_per_s:,.0f} tokens/s"
    used = [
        f"{human_bytes(need)} of {human_bytes(have)} of {_tier(plan, name)}"
        for name, need, have in plan.tiers
        if name != "disk"
    ]
    return f"fits{_on(plan)}: {speed}; {', '.join(used)}"


def _tier(plan: Plan, name: str) -> str:
    return TIER_WORDS[name] + (" of each" if plan.job.ranks > 1 and name == "gpu" else "")


def _ranks(plan: Plan, number: int = 2) -> str:
    """What ranks compute on, as a noun for so many."""
    one, several = ("GPU", "GPUs") if plan.budget.gpu is not None else ("process", "processes")
    return one if number == 1 else several


def _on(plan: Plan) -> str:
    """Where it runs, if not on one GPU of one host."""
    job = plan.job
    hosts = "" if job.hosts == 1 else f" of each of {job.hosts} hosts"
    return "" if job.size == 1 else f" on {job.ranks} {_ranks(plan, job.ranks)}{hosts}"


def changes(plan: Plan) -> Iterable[str]:
    """What to change, and what a user should know, as `what: why`."""
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
        every = plan.parameters + plan.frozen_parameters
        where = (
            "" if plan.layers_back is None else f", and backward visits {_back(plan.layers_back)}"
        )
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


def _back(layers: int) -> str:
    return (
        ("no layer", "the last layer alone")[layers] if layers < 2 else f"the last {layers} layers"
    )


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, justify="right" if heading in NUMBERS else "left")
    return table


def _choices(plan: Plan) -> Table:
    tokens = f"{plan.job.tokens_per_step:,} tokens per step"
    parameters = human_parameters(plan.parameters, plan.active_parameters)
    title = f"{parameters}, {plan.job.precision}, {tokens}"
    table = _table(title, "choice", "value", "why")
    for row in plan.reasons:
        table.add_row(*row)
    return table


def _step(plan: Plan) -> Table:
    timing = plan.timing
    each = " each" if plan.job.size > 1 else ""
    speed = f"{timing.tokens_per_s:,.0f} tokens/s, {timing.tflops:,.3g} TFLOP/s{each}"
    title = f"a step, predicted: {timing.seconds:.3g} s, {speed}"
    table = _table(title, "phase", "seconds", "share", "bound by")
    for phase, seconds in timing.phases.items():
        if seconds:
            share = f"{seconds / timing.seconds:.0%}"
            table.add_row(phase, f"{seconds:.3g}", share, timing.bound_by[phase])
    return table


def economy(plan: Plan) -> Iterable[tuple[str, str]]:
    """Time and cost of the whole run, if its number of steps is known, and of a million tokens."""
    if plan.economy is None:
        return
    if plan.steps is not None:
        time = human_hours(plan.economy.seconds)
        yield "run", f"{plan.steps:,} steps, {plan.economy.tokens:,} tokens, {time} of steps"
    yield from described(plan.economy, whole=plan.steps is not None)


def _arrays(plan: Plan) -> Table:
    where = "GPU" if plan.budget.gpu is not None else "host, computing"
    of_rank = " of a rank" if plan.job.size > 1 else ""
    table = _table(f"bytes by tier and array{of_rank}", "tier", "array", "size", "B/parameter")
    tiers = {where: plan.device, "host": plan.host, "NVMe": plan.nvme, "disk": plan.disk}
    for tier, arrays in tiers.items():
        for name, nbytes in arrays.items():
            if nbytes:
                table.add_row(tier, name, human_bytes(nbytes, 2), f"{nbytes / plan.parameters:.2f}")
        table.add_section()
    return table


def _tiers(plan: Plan) -> Table:
    ranks = plan.job.ranks
    title = "totals" if ranks == 1 else f"totals of a host, with {ranks} ranks"
    table = _table(title, "tier", "needs", "has", "used")
    for name, need, have in plan.tiers:
        style = "red" if name in plan.short else None
        used = f"{need / max(have, 1):.0%}"
        bytes_of = human_bytes(need, 2), human_bytes(have, 2)
        table.add_row(_tier(plan, name), *bytes_of, used, style=style)
    return table


def _numbers(plan: Plan) -> Table:
    """What numbers of GPUs would give."""
    priced = any(row.cost_per_million is not None for row in plan.on_gpus)
    hosts = f" of each of {plan.job.hosts} hosts" if plan.job.hosts > 1 else ""
    title = f"numbers of {_ranks(plan)}{hosts}" + (", priced in proportion" if priced else "")
    costs = [f"{plan.economy.prices.currency}/million tokens"] if priced and plan.economy else []
    table = Table(title=title)
    for heading in (_ranks(plan), "seconds", "tokens/s", "TFLOP/s each", *costs):
        table.add_column(heading, justify="right")
    for row in plan.on_gpus:
        figures = row.seconds, row.tokens_per_s, row.tflops, row.cost_per_million
        cells = [three_digits(value) for value in figures if value is not None]
        style = "bold" if row.gpus == plan.job.ranks else None
        table.add_row(str(row.gpus), *(cells or ["does not fit"]), style=style)
    return table
