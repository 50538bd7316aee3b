"""A plan as blocks of a page: bytes of every tier, what was decided and why, the step as it is
simulated, and what would fit or be faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.machine.profile import MachineProfile
from megatrain.planner.explain import changes, economy, verdict
from megatrain.planner.memory import Layout
from megatrain.planner.plan import Plan
from megatrain.planner.played import WAIT, played, played_serially
from megatrain.planner.simulation import SIMULATED_GROUPS
from megatrain.planner.suggest import TIER_WORDS
from megatrain.planner.tasks import PHASES
from megatrain.planner.timing import StepCosts
from megatrain.reporting.page import Block, bars, cards, page, table, write_page

Described = Mapping[str, Any]  # what Plan.to_dict gives, or plan.json has


def tiers(plan: Described, measured: Mapping[str, int | None] | None = None) -> Block:
    """Bars of all tiers with their arrays. measured: peaks by tier."""
    on_gpu = plan["budget"]["gpu"] is not None
    arrays = {tier: [*plan[tier].items()] for tier in ("host", "nvme", "disk")}
    device = [*plan["device"].items()]
    arrays["gpu" if on_gpu else "host"] = device + (arrays["host"] if not on_gpu else [])
    rows = []
    for tier, words in TIER_WORDS.items():
        if tier in plan["totals"]:
            parts = sorted(arrays[tier], key=lambda part: -part[1])
            shown = [(name, size) for name, size in parts if size]
            rows.append((words, plan["totals"][tier]["have"], shown, (measured or {}).get(tier)))
    return bars("memory, as planned", rows)


def decisions(plans: Sequence[Described], runs: Sequence[str]) -> Block:
    """What each plan chose, and, of the first, why."""
    names = {name: why for plan in reversed(plans) for name, why in plan["reasons"].items()}
    rows = [
        [name, *(plan.get("values", {}).get(name, "") for plan in plans), why]
        for name, why in names.items()
    ]
    chosen = [*runs] if len(plans) > 1 else ["chosen"]
    return table("what the planner decided", ["", *chosen, "why"], rows)


def step_block(layout: Layout, machine: MachineProfile) -> Block:
    """The timeline of a steady step."""
    costs = StepCosts(layout, machine)
    play = played if costs.on_gpu else played_serially
    seconds, lanes = play(costs.blocks, costs.options)
    used = {one.kind for done in lanes.values() for one in done}
    others = [lane for lane in lanes if lane in used]
    note = "A steady step, as the planner simulates it."
    left_out = layout.choices.groups - SIMULATED_GROUPS
    if costs.on_gpu and left_out > 0:
        note += f" Group {SIMULATED_GROUPS - 1} stands for {left_out + 1} groups like it."
    if not costs.on_gpu:
        note += " On a CPU, computation, copies and update share the same cores."
    return {
        "kind": "timeline",
        "title": "a step, as planned",
        "seconds": seconds,
        "kinds": [*(phase for phase in PHASES if phase in used), *others],
        "lanes": [{"name": name, "tasks": done} for name, done in lanes.items()],
        "note": note + f" {WAIT.capitalize()}s of the computation are red.",
    }


def phases(plan: Described) -> Block:
    timing = plan["timing"]
    rows = [
        [phase, f"{seconds:.3g} s", f"{seconds / timing['seconds']:.0%}", timing["bound_by"][phase]]
        for phase, seconds in timing["phases"].items()
        if seconds
    ]
    return table("phases of a step", ["phase", "time", "share", "bound by"], rows)


def write_plan(path: Path, plan: Plan, title: str) -> None:
    """The page of `megatrain plan --html`. Raises StorageError."""
    made_of, found = plan.made_of, plan.to_dict()
    machine = made_of.machine
    layout = Layout.of(plan.choices, plan.job, made_of.shape, machine.hardware)
    speed = f"{plan.timing.tokens_per_s:,.0f} tokens/s, {plan.timing.tflops:,.3g} TFLOP/s"
    shown = [
        ("verdict", [verdict(plan)]),
        ("a step", [f"{plan.timing.seconds:.3g} s, {speed}"]),
        *((name, [words]) for name, words in economy(plan)),
    ]
    advice = [line.split(": ", 1) for line in changes(plan)]
    blocks = [
        cards(shown),
        *([table("what would change it", ["", ""], advice)] if advice else []),
        tiers(found),
        step_block(layout, machine.profile),
        phases(found),
        decisions([found], [title]),
    ]
    write_page(path, page(f"plan of {title}", [title], blocks))
