"""Why the planner chose what it chose, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.activations import UNCHANGED
from megatrain.hardware import GIB, Hardware
from megatrain.planner_bytes import far_inputs, nvme_traffic, working_sets
from megatrain.planner_job import Choices, Job

if TYPE_CHECKING:
    from megatrain.models.shape import ModelShape

# What a drive endures: makers of consumer drives promise about so much for each TB of capacity, those of data centres several times that.
WORN_OUT_BYTES = 600e12
NO_ROOM = "what host RAM has no room for"


def reasons(choices: Choices, job: Job, shape: ModelShape, hardware: Hardware) -> tuple[tuple[str, str], ...]:
    """(what, why it is so) of every choice, for the reader."""
    sets = working_sets(choices, job, shape, hardware)
    asked = {
        "micro-batch": job.micro_batch_tokens,
        "groups": job.groups,
        "resident": job.resident,
        "retained": job.retained,
        "boundaries": job.offload,
        "gradients": job.second_backward,
        "head chunk": job.head_chunk_tokens,
        "layer chunk": job.layer_chunk_tokens,
        "update threads": job.update_threads,
    }
    found = {
        "micro-batch": "with the other choices, the shortest step",
        "groups": _groups(choices),
        "resident": _resident(choices, shape, hardware),
        "retained": _retained(choices, shape),
        "gradient sums": _sums(choices, shape),
        "gradients": _gradients(choices, job),
        "boundaries": _boundaries(choices, job),
        "head chunk": "the largest that needs no more than the layers do, or pays for what it takes",
        "layer chunk": _layer_chunk(choices),
        "update threads": "all physical cores but an eighth, or but two of few",
        "NVMe": _nvme(choices, job, shape),
        "working set": f"decided by: {max(sets, key=lambda name: sets[name])}",
    }
    if not job.nvme_drives:
        del found["NVMe"]
    return tuple((name, found[name] if asked.get(name) is None else f"as asked: {found[name]}") for name in found)


def _groups(choices: Choices) -> str:
    if choices.groups == 1:
        return "every weight crosses once forward and once backward"
    return "smaller groups leave room, for which weights cross once a group"


def _layer_chunk(choices: Choices) -> str:
    if choices.layer_chunk_tokens:
        return "MLPs and norms take so many tokens at a time, so that nothing wider than the hidden states exists for a whole micro-batch"
    return "layers take a micro-batch at once"


def _resident(choices: Choices, shape: ModelShape, hardware: Hardware) -> str:
    blocks = len(shape.block_numel)
    where = "the GPU" if hardware.gpu else "place"
    if choices.resident >= blocks:
        return f"all {blocks} blocks are updated {'on' if hardware.gpu else 'in'} {where}: nothing is streamed"
    if choices.resident == 0:
        return f"none of {blocks} blocks: all are streamed"
    return f"the first {choices.resident} of {blocks} blocks, what {where} has room for; the others are streamed"


def _retained(choices: Choices, shape: ModelShape) -> str:
    layers = len(shape.block_numel) - 2
    if choices.retained + choices.retained_on_host == 0:
        return f"all {layers} layers are recomputed from their inputs"
    others = "recomputed"
    if choices.retained_on_host:
        others = f"{'recomputed, or ' if choices.retained + choices.retained_on_host < layers else ''}kept in host RAM"
    if choices.retained == 0:
        return f"all {layers} layers are {others}"
    what = "what products and attention need" if choices.cheap_retention else "the graphs"
    if choices.retained >= layers:
        return f"{what} of all {layers} layers are kept"
    return f"{what} of the last {choices.retained} of {layers} layers are kept; the others are {others}"


def _gradients(choices: Choices, job: Job) -> str:
    if choices.second_backward:
        return "are computed twice, so that none is kept: the first time for their norm, then block by block to be applied"
    return "all wait for their norm" if job.clipping else "are applied block by block: nothing is clipped"


def _boundaries(choices: Choices, job: Job) -> str:
    where = "wait in host RAM, which makes room on the GPU" if choices.offload else "stay where they were computed"
    kept = "" if job.activations == UNCHANGED else f", as {job.activations} where layers are recomputed, so gradients are near, not exact"
    return where + kept


def _sums(choices: Choices, shape: ModelShape) -> str:
    blocks = len(shape.block_numel)
    if choices.groups == 1:
        return "one block's at a time: all micro-batches pass a block together"
    if choices.sums_on_device >= blocks:
        return "of all blocks stay where they are computed, between groups"
    return f"of the first {choices.sums_on_device} of {blocks} blocks stay on the GPU between groups; the others' wait in host RAM"


def _nvme(choices: Choices, job: Job, shape: ModelShape) -> str:
    asked = {"blocks": job.nvme_blocks, "arrays": job.nvme_arrays if choices.nvme_blocks else None, "inputs": job.nvme_activations}
    names = [name for name, value in asked.items() if value is not None]
    named = " and ".join(names)
    whole = {"blocks", "inputs"} <= set(names)  # what is left open is which arrays of those blocks
    if not choices.nvme_blocks and not far_inputs(choices, shape):
        if whole:
            return "as asked, nothing"
        return f"{named} as asked; host RAM has room for the rest" if names else "host RAM has room for everything"
    wanted = "as asked" if whole else f"{named} as asked, besides {NO_ROOM}" if names else NO_ROOM
    read, written = nvme_traffic(choices, job, shape)
    steps, drives = int(WORN_OUT_BYTES * job.nvme_drives / max(1, written)), "a drive" if job.nvme_drives == 1 else "drives"
    return (
        f"{wanted}; a step reads {read / GIB:,.2f} GiB and writes {written / GIB:,.2f} GiB: {steps:,} steps wear out "
        f"{drives} of 600 TB endurance, as consumers buy with 1 TB"
    )
