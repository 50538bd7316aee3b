"""The plan on a terminal: bytes of every tier and array, what was chosen, and what decided it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatrain.hardware import GIB, MIB
from megatrain.planner import TIER_WORDS, Plan


def render(plan: Plan, console: Console) -> None:
    """Print `plan` as three tables and a verdict."""
    console.print(_choices(plan))
    console.print(_arrays(plan))
    console.print(_tiers(plan))
    if plan.fits:
        console.print(Text("fits", style="bold green"))
    else:
        console.print(Text(f"does not fit: {plan.fix}", style="bold red"))


def human(nbytes: int) -> str:
    """Bytes in the unit a reader expects: GiB from one GiB on, else MiB."""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def _choices(plan: Plan) -> Table:
    chosen = {
        "micro-batch": f"{plan.choices.micro_batch_tokens:,} tokens",
        "groups": str(plan.choices.groups),
        "gradient sums": plan.choices.gradient_sums,
        "head chunk": f"{plan.choices.head_chunk_tokens:,} tokens",
        "update threads": str(plan.choices.update_threads),
        "working set": human(plan.device["working set"]),
    }
    table = Table(title=f"{plan.parameters:,} parameters, {plan.job.precision}, {plan.job.tokens_per_step:,} tokens per step")
    for heading in ("choice", "value", "why"):
        table.add_column(heading)
    for name, why in plan.reasons:
        table.add_row(name, chosen[name], why)
    return table


def _arrays(plan: Plan) -> Table:
    where = "GPU" if plan.budget.gpu is not None else "host, computing"
    table = Table(title="bytes by tier and array")
    table.add_column("tier")
    table.add_column("array")
    table.add_column("size", justify="right")
    table.add_column("B/parameter", justify="right")
    for tier, arrays in ((where, plan.device), ("host", plan.host), ("disk", plan.disk)):
        for name, nbytes in arrays.items():
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
