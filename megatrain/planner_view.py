"""The plan on a terminal: what was chosen and why, where a step's time goes, bytes of every tier and array."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.activations import UNCHANGED
from megatrain.economy import described, human_hours
from megatrain.hardware import GIB, MIB
from megatrain.planner import TIER_WORDS, Choices, Plan

NVME_WORDS = {"state": "the update's state", "gradients": "state and gradients", "all": "everything"}


def render(plan: Plan, console: Console) -> None:
    """Print `plan` as tables and a verdict."""
    console.print(_choices(plan))
    console.print(_step(plan))
    console.print(_arrays(plan))
    console.print(_tiers(plan))
    if plan.drives_assumed:
        doctor = " ".join(("megatrain doctor", *(f"--nvme {folder}" for folder in plan.drives_assumed)))
        console.print(Text(f"NVMe: the drive's speed is assumed, not measured; `{doctor}` measures it"))
    for line in _economy(plan):
        console.print(Text(line))
    if plan.fits:
        console.print(Text("fits", style="bold green"))
        for better in plan.faster:
            gain = f"{better.speedup:.2f}x tokens/s, {better.tokens_per_s:,.0f}"
            console.print(Text(f"faster: {better.words} would give {gain} ({better.cost}; {better.why})"))
    else:
        console.print(Text(f"does not fit: {plan.fix}", style="bold red"))


def human(nbytes: int) -> str:
    """Bytes in the unit a reader expects: GiB from one GiB on, else MiB."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def _choices(plan: Plan) -> Table:
    choices, in_full = plan.choices, plan.job.activations == UNCHANGED
    chosen = {
        "micro-batch": f"{choices.micro_batch_tokens:,} tokens",
        "groups": str(choices.groups),
        "resident": f"{choices.resident} blocks",
        "retained": _retained(choices),
        "gradient sums": "a block" if choices.groups == 1 else f"{choices.sums_on_device} blocks",
        "gradients": "twice" if choices.second_backward else "once",
        "boundaries": ("offloaded" if choices.offload else "kept") + ("" if in_full else f", {plan.job.activations}"),
        "head chunk": f"{choices.head_chunk_tokens:,} tokens",
        "layer chunk": f"{choices.layer_chunk_tokens:,} tokens" if choices.layer_chunk_tokens else "none",
        "update threads": str(choices.update_threads),
        "NVMe": on_nvme(choices) or "nothing",
        "working set": human(plan.device["working set"]),
    }
    table = Table(title=f"{plan.parameters:,} parameters, {plan.job.precision}, {plan.job.tokens_per_step:,} tokens per step")
    for heading in ("choice", "value", "why"):
        table.add_column(heading)
    for name, why in plan.reasons:
        table.add_row(name, chosen[name], why)
    return table


def on_nvme(choices: Choices) -> str:
    """What lies there; empty for nothing."""
    arrays = f"{NVME_WORDS[choices.nvme_arrays]} of {choices.nvme_blocks} blocks" if choices.nvme_blocks else ""
    inputs = f"{choices.nvme_activations} layers' worth of inputs" if choices.nvme_activations else ""
    return ", ".join(words for words in (arrays, inputs) if words)


def _retained(choices: Choices) -> str:
    on_host = f", {choices.retained_on_host} in host RAM" if choices.retained_on_host else ""
    return f"{choices.retained} layers{on_host}{', cheaply' if choices.cheap_retention else ''}"


def _step(plan: Plan) -> Table:
    timing = plan.timing
    table = Table(title=f"a step, predicted: {timing.seconds:.3g} s, {timing.tokens_per_s:,.0f} tokens/s, {timing.tflops:,.3g} TFLOP/s")
    table.add_column("phase")
    for heading in ("seconds", "share"):
        table.add_column(heading, justify="right")
    table.add_column("bound by")
    for phase, seconds in timing.phases.items():
        if seconds:
            table.add_row(phase, f"{seconds:.3g}", f"{seconds / timing.seconds:.0%}", timing.bound_by[phase])
    return table


def _economy(plan: Plan) -> list[str]:
    """Time and cost of the whole run, where its steps are known, and what a million tokens take."""
    if plan.economy is None:
        return []
    lines = [f"{name}: {words}" for name, words in described(plan.economy, whole=plan.steps is not None)]
    if plan.steps is not None:
        lines.insert(0, f"run: {plan.steps:,} steps, {plan.economy.tokens:,} tokens, {human_hours(plan.economy.seconds)} of steps")
    return lines


def _arrays(plan: Plan) -> Table:
    where = "GPU" if plan.budget.gpu is not None else "host, computing"
    table = Table(title="bytes by tier and array")
    table.add_column("tier")
    table.add_column("array")
    table.add_column("size", justify="right")
    table.add_column("B/parameter", justify="right")
    for tier, arrays in ((where, plan.device), ("host", plan.host), ("NVMe", plan.nvme), ("disk", plan.disk)):
        for name, nbytes in arrays.items():
            if nbytes:
                table.add_row(tier, name, human(nbytes), f"{nbytes / plan.parameters:.2f}")
        table.add_section()
    return table


def _tiers(plan: Plan) -> Table:
    table = Table(title="totals")
    table.add_column("tier")
    for heading in ("needs", "has", "used"):
        table.add_column(heading, justify="right")
    for name, need, have in plan.tiers:
        table.add_row(TIER_WORDS[name], human(need), human(have), f"{need / max(have, 1):.0%}", style="red" if name in plan.short else None)
    return table
