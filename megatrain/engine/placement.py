"""What every block keeps, and where: precision, placement over the tiers, and the store that follows from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.memory.layout import ArraySpec, FlatLayout
from megatrain.memory.store import OnNvme, Store
from megatrain.optim import Optimizer
from megatrain.schedule import Level, blocks_on_nvme, holds, summed_blocks
from megatrain.settings import Settings

PRECISIONS = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "fp8": torch.bfloat16,
}  # what weights are stored and sent as


@dataclass(frozen=True)
class Placement:
    """Which blocks live where, of a model with `blocks` of them.

    Attributes:
        resident: the first so many live on the device, with their optimizer state.
        summed: the first so many keep fp32 gradient sums on the device from group to group; 0 if there is one group.
        several: there are several groups, so that the other blocks' sums travel.
        on_nvme: these keep the arrays of this level in these folders.
    """

    blocks: int
    resident: int
    summed: int
    several: bool
    on_nvme: tuple[int, ...] = ()
    nvme_arrays: Level = "state"
    nvme_folders: tuple[Path, ...] = ()

    @classmethod
    def of(cls, settings: Settings, blocks: int) -> Placement:
        resident, several = min(settings.resident, blocks), settings.groups > 1
        far = blocks_on_nvme(blocks, resident, settings.nvme_blocks)
        summed = summed_blocks(blocks, settings.groups, resident, settings.sums_on_device)
        return cls(
            blocks, resident, summed, several, far, settings.nvme_arrays, settings.nvme_folders
        )

    @property
    def sums_travel(self) -> bool:
        return self.several and self.summed < self.blocks


def open_store(
    layouts: Sequence[FlatLayout],
    optimizer: Optimizer,
    precision: str,
    placement: Placement,
    *,
    gradients: bool,
    device: torch.device,
    threads: int,
) -> Store:
    """The arrays of every block, each on the tier where `placement` puts it.

    gradients: they are stored until the global norm is known.
    """
    dtype = PRECISIONS[precision]
    kept = [ArraySpec("weight", dtype, transferred=True)]
    if dtype == torch.bfloat16:
        kept.append(ArraySpec("remainder", torch.int16))
    kept += [ArraySpec(array.name, array.dtype, per=array.per) for array in optimizer.state_arrays]
    grad = [ArraySpec("grad", dtype, transferred=True)] if gradients else []
    sums = [ArraySpec("grad_sum", torch.float32, transferred=True)] if placement.sums_travel else []
    far = {
        spec.name: placement.on_nvme
        for spec in [*kept, *grad]
        if holds(placement.nvme_arrays, spec.name)
    }
    return Store(
        layouts,
        [*kept, *grad, *sums],
        first={"grad_sum": placement.summed} if sums else {},
        resident=placement.resident,
        resident_arrays=kept
        if placement.several
        else [*kept, *grad],  # between groups, sums hold the gradient
        on_nvme=OnNvme(far, placement.nvme_folders),
        device=device,
        threads=threads,
    )
