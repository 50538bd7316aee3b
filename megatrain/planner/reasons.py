"""The plan's choices in words: the value of each, and why it is so."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.machine.hardware import GIB
from megatrain.planner.job import Choices, Job, number_of
from megatrain.planner.memory import Layout
from megatrain.reporting.summary import human_bytes
from megatrain.schedule import UNCHANGED
from megatrain.settings import OPTIONS

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
        "second_backward": _gradients(choices, job),
        "sums_on_device": (number_of(sums, "block"), _sums(choices, job, blocks)),
        "nvme_blocks": _nvme(choices, job, layout.nvme_traffic),
        "update_threads": (
            str(choices.update_threads),
            "physical cores minus 1/8 (at least two are left free)",
        ),
    }
    rows = [_ranks(job)] if job.size > 1 else []
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


def _ranks(job: Job) -> Reason:
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
    return (
        f"the {where} {number} of {total} {noun}s"
        if number > 1
        else f"the {where} {noun} of {total}"
    )


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
        first = (
            "the first layer needs" if every - layers == 1 else f"the first {every - layers} need"
        )
        why = f"{why}; {first} no backward" if layers else "no layer needs a backward"
    return value + (", selectively" if choices.cheap_retention else ""), why


def _checkpoints(offloaded: bool, codec: str) -> str:
    where = "are in host RAM, which leaves room on the GPU" if offloaded else "stay in place"
    rounded = "" if codec == UNCHANGED else f", rounded to {codec}: gradients are near, not exact"
    return f"activation checkpoints {where}{rounded}"


def _gradients(choices: Choices, job: Job) -> tuple[str, str]:
    if choices.second_backward:
        return "computed twice", "once for the global norm, once to be applied: none is kept"
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


def _nvme(choices: Choices, job: Job, traffic: tuple[int, int]) -> tuple[str, str]:
    asked = job.nvme_blocks is not None
    if not choices.nvme_blocks:
        return "nothing", "nothing" if asked else "host RAM has room for everything"
    value = f"state of {number_of(choices.nvme_blocks, 'block')}"
    why = "" if asked else "what host RAM has no room for; "
    read, written = traffic
    steps = int(WORN_OUT_BYTES * job.nvme_drives / max(1, written))
    drives = "a drive" if job.nvme_drives == 1 else "drives"
    return value, (
        f"{why}a step reads {read / GIB:,.2f} GiB and writes {written / GIB:,.2f} GiB: {steps:,} "
        f"steps wear out {drives} of 600 TB endurance, typical of 1 TB consumer drives"
    )
