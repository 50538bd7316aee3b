"""How an engine is set up: precision, the dials between memory and speed, and what every block keeps in host RAM."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatrain.errors import ConfigError
from megatrain.memory.host_store import ArraySpec
from megatrain.optim import Optimizer

PRECISIONS = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Settings:
    """How the engine divides a step and the memory; the planner's choices, or yours.

    Attributes:
        groups: the micro-batches of a step are cut into so many groups; each weight crosses to the device once per group and direction.
        sums_on_device: with several groups, fp32 gradient sums of all blocks stay on the device (4 bytes a parameter), else they travel.
        head_chunk: targets whose logits exist at a time.
        update_threads: host threads that run the optimizer.
        compile: fuse the element-wise parts of every decoder layer with torch.compile. Pays where micro-batches have few different shapes.

    Raises ConfigError for a number below 1.
    """

    groups: int = 1
    sums_on_device: bool = False
    head_chunk: int = 2048
    update_threads: int = 2
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("groups", "head_chunk", "update_threads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: {value!r} is out of range; it must be a whole number of at least 1")

    @property
    def sums(self) -> str:
        """Where fp32 gradient sums live between groups: nowhere, on the device, or streamed to and from the host."""
        if self.groups == 1:
            return "ring"
        return "device" if self.sums_on_device else "host"


def state_specs(optimizer: Optimizer, precision: str, *, clip: bool, sums: str) -> list[ArraySpec]:
    """The arrays of every block in host RAM (DESIGN: the bytes)."""
    dtype = PRECISIONS[precision]
    specs = [ArraySpec("weight", dtype, transferred=True)]
    if precision == "bfloat16":
        specs.append(ArraySpec("remainder", torch.int16))
    specs += [ArraySpec(array.name, array.dtype) for array in optimizer.state_arrays]
    if clip:
        specs.append(ArraySpec("grad", dtype, transferred=True))
    if sums == "host":
        specs.append(ArraySpec("grad_sum", torch.float32, transferred=True))
    return specs
