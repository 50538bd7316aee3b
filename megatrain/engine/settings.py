"""How an engine is set up: precision, the dials between memory and speed, and what every block keeps in host RAM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.activations import FORMS, UNCHANGED
from megatrain.errors import ConfigError
from megatrain.memory.host_store import ArraySpec
from megatrain.memory.layout import FlatLayout
from megatrain.memory.store import OnNvme, Store
from megatrain.nvme_tier import LEVELS, Level, blocks_on_nvme, holds
from megatrain.optim import Optimizer

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.bfloat16}  # what weights are stored and sent as


@dataclass(frozen=True)
class Settings:
    """How the engine divides a step and the memory; the planner's choices, or yours. Numbers beyond what the model has mean all of it.

    Attributes:
        groups: the micro-batches of a step are cut into so many groups; each streamed weight crosses to the device once per group and
            direction.
        group_size: with several groups, a group has at most so many micro-batches; a step that has more of them has more groups.
        resident: the first so many blocks (embed, the layers, head) live on the device with their optimizer state, and are updated there.
        sums_on_device: with several groups, the first so many blocks keep their fp32 gradient sums on the device between groups (4 bytes a
            parameter; resident blocks always do), the others' travel.
        retained: the last so many layers keep their graphs from forward to backward; the others are computed again in backward.
        retained_on_host: of those others so many, evenly spread, send their graphs to host RAM instead; their boundaries too.
        offload: boundary activations wait in host RAM between forward and backward.
        activations: "none", or the codec that keeps boundary activations of recomputed layers in fewer bits: their recomputation, and so
            gradients, are of what it gives back (memory/codecs.py).
        head_chunk: targets whose logits exist at a time.
        layer_chunk: parts of a layer that treat every token alike, its MLP above all, are computed so many tokens at a time; None: whole.
        update_threads: host threads that run the optimizer.
        compile: fuse the element-wise parts of every decoder layer with torch.compile. Pays where micro-batches have few different shapes.
        cheap_retention: with `compile`, retained layers keep only what matrix products and attention need; what lies between is computed
            again in backward.
        second_backward: clip the global norm without storing gradients: the first backward only measures them, the second computes them
            again and updates each block at once. 2 bytes a parameter less (4 in float32), for a head and a backward more.
        nvme_folders: on the drives that hold what host RAM does not.
        nvme_blocks: so many streamed blocks keep arrays there: the last layers first, then the head and the embedding.
        nvme_arrays: which: "state" (remainder and the optimizer's arrays), "gradients" (those too) or "all" (weights too).
        nvme_activations: of the recomputed layers' boundary activations an equal share goes on from host RAM to there, as much as those of
            so many layers are.
        lengths_vary: micro-batches have ever new shapes, so that kernels which are planned for a shape are left alone.
        largest_group: tokens of each micro-batch of the largest group that is to come, or where lengths vary, of one with as many of both:
            files and staging for it are made at once; without it, and for a larger one, these are made anew when it comes.

    Raises ConfigError for a number out of range, for an unknown codec, for cheap retention of layers that are not compiled, for graphs in
    host RAM or boundaries on NVMe without `offload`, and for a second backward of several groups or of graphs, which the first one spends.
    """

    groups: int = 1
    group_size: int | None = None
    resident: int = 0
    sums_on_device: int = 0
    retained: int = 0
    retained_on_host: int = 0
    offload: bool = False
    activations: str = UNCHANGED
    head_chunk: int = 2048
    update_threads: int = 2
    compile: bool = False
    cheap_retention: bool = False
    second_backward: bool = False
    layer_chunk: int | None = None
    nvme_folders: tuple[Path, ...] = ()
    nvme_blocks: int = 0
    nvme_arrays: Level = "state"
    nvme_activations: int = 0
    lengths_vary: bool = False
    largest_group: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        ones = ("groups", "head_chunk", "update_threads", *(() if self.layer_chunk is None else ("layer_chunk",)))
        zeros = ("resident", "sums_on_device", "retained", "retained_on_host", "nvme_blocks", "nvme_activations")
        for name, least in {**dict.fromkeys(ones, 1), **dict.fromkeys(zeros, 0)}.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"{name}: {value!r} is out of range; it must be a whole number of at least {least}")
        if self.activations not in (UNCHANGED, *FORMS):
            raise ConfigError(f"activations: {self.activations!r} is unknown; choose one of {', '.join((UNCHANGED, *FORMS))}")
        for name in ("nvme_blocks", "nvme_activations"):
            if getattr(self, name) and not self.nvme_folders:
                raise ConfigError(f"{name}: no folder was named for what lies on NVMe; set nvme_folders as well")
        if self.nvme_arrays not in LEVELS:
            raise ConfigError(f"nvme_arrays: {self.nvme_arrays!r} is unknown; choose one of {', '.join(LEVELS)}")
        if self.cheap_retention and not self.compile:
            raise ConfigError("cheap_retention: only compiled layers can keep less than their graphs; set compile: true as well")
        if self.retained_on_host and not self.offload:
            raise ConfigError(
                "retained_on_host: graphs wait in host RAM beside boundary activations; set offload_activations: true as well"
            )
        if self.nvme_activations and not self.offload:
            raise ConfigError("nvme_activations: what goes on to a drive leaves the device first; set offload_activations: true as well")
        if self.second_backward and (self.groups > 1 or self.retained or self.retained_on_host):
            raise ConfigError(
                "second_backward: it begins with the inputs of all layers of all micro-batches; set groups: 1, retained: 0 and "
                "retained_on_host: 0 as well"
            )


ALL = 1 << 30  # for `resident`, `sums_on_device` and `retained`: every block or layer there is


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
        summed = min(max(settings.sums_on_device, resident), blocks) if several else 0
        return cls(blocks, resident, summed, several, far, settings.nvme_arrays, settings.nvme_folders)

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
    """The arrays of every block, where the placement says (DESIGN: the bytes). gradients: they are stored until the norm is known."""
    dtype = PRECISIONS[precision]
    kept = [ArraySpec("weight", dtype, transferred=True)]
    if dtype == torch.bfloat16:
        kept.append(ArraySpec("remainder", torch.int16))
    kept += [ArraySpec(array.name, array.dtype, per=array.per) for array in optimizer.state_arrays]
    grad = [ArraySpec("grad", dtype, transferred=True)] if gradients else []
    sums = [ArraySpec("grad_sum", torch.float32, transferred=True)] if placement.sums_travel else []
    far = {spec.name: placement.on_nvme for spec in [*kept, *grad] if holds(placement.nvme_arrays, spec.name)}
    return Store(
        layouts,
        [*kept, *grad, *sums],
        first={"grad_sum": placement.summed} if sums else {},
        resident=placement.resident,
        resident_arrays=kept if placement.several else [*kept, *grad],  # between groups, sums hold the gradient
        on_nvme=OnNvme(far, placement.nvme_folders),
        device=device,
        threads=threads,
    )
