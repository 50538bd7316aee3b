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
from megatrain.reporting.words import human_bytes, human_parameters

# Headings of right-aligned columns.
NUMBERS = {"seconds", "share", "size", "B/parameter", "needs", "has", "used"}


def render(plan: Plan, console: Console) -> None:
    """Print the verdict, what to change, what the run costs, and then why, as tables."""
    style = "bold green" if plan.fits else "bold red"
    console.print(Text(verdict(plan), style=style), soft_wrap=True)
    for line in (*changes(plan), *(f"{name}: {words}" for name, words in economy(plan))):
        console.print(Text(line), soft_wrap=True)
    for table in (_choices(plan), _step(plan), _arrays(plan), _tiers(plan)):
        console.print(table)


def verdict(plan: Plan) -> str:
    """Whether the run fits: in which time and memory, or what it lacks."""
    if not plan.fits:
        return f"does not fit: {plan.lack}"
    speed = f"{plan.timing.seconds:.3g} s a step, {plan.timing.tokens_per_s:,.0f} tokens/s"
    used = [
        f"{human_bytes(need)} of {human_bytes(have)} of {TIER_WORDS[name]}"
        for name, need, have in plan.tiers
        if name != "disk"
    ]
    return f"fits: {speed}; {', '.join(used)}"


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
    speed = f"{timing.tokens_per_s:,.0f} tokens/s, {timing.tflops:,.3g} TFLOP/s"
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
    table = _table("bytes by tier and array", "tier", "array", "size", "B/parameter")
    tiers = {where: plan.device, "host": plan.host, "NVMe": plan.nvme, "disk": plan.disk}
    for tier, arrays in tiers.items():
        for name, nbytes in arrays.items():
            if nbytes:
                table.add_row(tier, name, human_bytes(nbytes, 2), f"{nbytes / plan.parameters:.2f}")
        table.add_section()
    return table


def _tiers(plan: Plan) -> Table:
    table = _table("totals", "tier", "needs", "has", "used")
    for name, need, have in plan.tiers:
        style = "red" if name in plan.short else None
        used = f"{need / max(have, 1):.0%}"
        table.add_row(
            TIER_WORDS[name], human_bytes(need, 2), human_bytes(have, 2), used, style=style
        )
    return table
