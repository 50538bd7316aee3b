"""From a job to its plan: the search, bytes and seconds of what it finds, and the reasons."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.errors import number_of
from megatrain.machine.hardware import GIB, Hardware
from megatrain.machine.profile import MachineProfile
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Budget, Choices, Job, check_job_ranks
from megatrain.planner.memory import Layout, disk_bytes, state_bytes_per_parameter
from megatrain.planner.plan import Plan, Reason
from megatrain.planner.search import Search
from megatrain.planner.suggest import bound_by_update, cheapest_fix, faster, held_by_others
from megatrain.planner.timing import StepCosts
from megatrain.reporting.words import human_bytes
from megatrain.schedule import UNCHANGED
from megatrain.settings import OPTIONS


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
    host_limit, nvme_limit = (limit and limit // job.ranks for limit in (host_limit, nvme_limit))
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


# -- choices in words -----------------------------------------------------------------------------

# Bytes written that wear out a drive, as makers state for 1 TB consumer drives; drives for data
# centres stand several times this.
WORN_OUT_BYTES = 600e12


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
    largest = max(sets, key=sets.__getitem__)
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
    if choices.resident < blocks:
        others = "more do not fit" if job.resident is None else "the others are streamed"
        return f"{which}; {others}"
    if job.size > 1:
        return f"the shares of {which} are updated where they are; weights are gathered from there"
    return f"{which} are updated {'on the GPU' if on_gpu else 'in place'}: nothing is streamed"


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
