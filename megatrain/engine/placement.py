"""Where the arrays of each block are: their placement, and the store that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.machine.hardware import reach_each_other
from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.store import Store
from megatrain.optim import Optimizer
from megatrain.schedule import IN_MEMORY, blocks_on_nvme, summed_blocks
from megatrain.settings import Settings
from megatrain.world import ALONE, World

# the dtype in which weights are stored and transferred
PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.bfloat16}


def sums_on_device(settings: Settings, blocks: int) -> int:
    """Number of blocks, the first ones, whose fp32 accumulators stay there between groups."""
    resident = min(settings.resident, blocks)
    return summed_blocks(blocks, settings.groups, resident, settings.sums_on_device)


def peers(world: World, device: torch.device) -> bool:
    """Whether the GPUs of one host's ranks reach each other's memory. All ranks call it."""
    if world.is_alone or device.type != "cuda":
        return True
    uuids = world.every(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    return all(world.every(reach_each_other(uuids)))


def shares_weights(settings: Settings, world: World, device: torch.device) -> bool:
    """Whether the ranks of a host have one copy of its weights in common. All ranks call it."""
    if world.is_alone or world.hosts > 1 or settings.transport == "gather":
        return False
    return settings.transport == "read" or not peers(world, device)


def open_store(
    layouts: Sequence[FlatLayout],
    optimizer: Optimizer,
    precision: str,
    settings: Settings,
    *,
    gradients: bool,
    device: torch.device,
    world: World = ALONE,
) -> Store:
    """The arrays of every block, each on the tier where `settings` put it.

    gradients: they are stored until the global norm is known.
    """
    dtype, blocks, several = PRECISIONS[precision], len(layouts), settings.groups > 1
    resident, summed = min(settings.resident, blocks), sums_on_device(settings, blocks)
    kept = [ArraySpec("weight", dtype, transferred=True, whole=True)]
    if dtype == torch.bfloat16:
        kept.append(ArraySpec("remainder", torch.int16))  # the master's other half (optim/split.py)
    kept += [ArraySpec(array.name, array.dtype, per=array.per) for array in optimizer.state_arrays]
    grad = [ArraySpec("grad", dtype, transferred=True)] if gradients else []
    # between groups the other blocks' accumulators wait in host RAM
    travel = several and summed < blocks
    sums = [ArraySpec("grad_sum", torch.float32, transferred=True)] if travel else []
    far = blocks_on_nvme(blocks, resident, settings.nvme_blocks)
    names = [spec.name for spec in kept if spec.name not in IN_MEMORY]
    return Store(
        layouts,
        [*kept, *grad, *sums],
        first={"grad_sum": summed} if sums else {},
        resident=resident,
        # with several groups a resident block's gradient stays in its accumulator, if that is whole
        resident_arrays=kept if several and world.is_alone else [*kept, *grad],
        on_nvme=dict.fromkeys(names, far),
        nvme_folders=settings.nvme_folders,
        device=device,
        threads=settings.update_threads,
        world=world,
        shares_weights=shares_weights(settings, world, device),
    )
