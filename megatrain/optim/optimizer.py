"""The contract of optimizers: what they declare, and updates of flat ranges."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypedDict, Unpack, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from megatrain import cuda
from megatrain.errors import ConfigError
from megatrain.memory.layout import GROUP, ArraySpec

UPDATES = Path(__file__).with_name("elementwise.cu").read_text()
VECTOR = 4  # elements a thread; every range is a multiple of it (memory/layout.py aligns to 64)


UpdateRange = Callable[[int, int], None]  # (start, stop) of the arrays it was made for


class StepOptions(TypedDict):
    """Options of an update that hold for all blocks. step: its number, from 1. grad_scale:
    multiplies the gradient first (the clip factor)."""

    lr: float
    step: int
    grad_scale: float


class UpdateOptions(StepOptions):
    """Options of an update that hold for all elements of a range."""

    weight_decay: float


@runtime_checkable
class Optimizer(Protocol):
    """The declarations that all share. whole_tensors: it updates whole tensors in stages (Muon),
    not any range of elements (Elementwise)."""

    name: ClassVar[str]
    whole_tensors: ClassVar[bool]

    @property
    def state_arrays(self) -> tuple[ArraySpec, ...]:
        """Zero before the first update."""

    @property
    def lr(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def arithmetic(self) -> float | None:
        """Compute-bound rate of one host thread, parameters/s; None: memory is always slower."""

    def compile(self) -> None:
        """Compile kernels, which would otherwise delay the first update by seconds."""


@dataclass(frozen=True)
class Frozen:
    """No optimizer: an engine that only evaluates or generates keeps no optimizer state."""

    lr: float = 0.0
    weight_decay: float = 0.0

    name: ClassVar[str] = "frozen"
    state_arrays: ClassVar[tuple[ArraySpec, ...]] = ()
    whole_tensors: ClassVar[bool] = False
    arithmetic: ClassVar[None] = None

    def compile(self) -> None:
        pass


@dataclass(frozen=True)
class Format:
    """A storage format of moments. `codec_s`: seconds in which one thread of the host widens and
    narrows a number, with data in its caches, on an EPYC with AVX-512; None: memory always takes
    longer."""

    dtype: torch.dtype
    suffix: str = ""  # of the names of GPU kernels
    scaled: bool = False  # each GROUP has a scale
    codec_s: float | None = None


MOMENTS = {  # from the widest to the narrowest
    "float32": Format(torch.float32),
    "bfloat16": Format(torch.bfloat16, "_bf16", codec_s=0.13e-9),
    "int8": Format(torch.uint8, "_int8", scaled=True, codec_s=0.4e-9),
}


class Elementwise(ABC):
    """An optimizer that updates every element by itself, or with int8 moments every GROUP.

    Its kernels are compiled by Numba for the host and by NVRTC for GPUs. Both take "weight",
    "remainder" (of bfloat16 weights), the state's arrays, "grad", the number of the first element,
    the step's seed and the scalars. The name of a GPU kernel is made of `name`, "split" (bfloat16
    weights with a remainder) or "float32", and the format's suffix.
    """

    name: ClassVar[str]
    whole_tensors: ClassVar[bool] = False
    plain_s: ClassVar[float]  # seconds of one thread a parameter, with fp32 moments; as `codec_s`
    moment_names: ClassVar[tuple[str, ...]]
    lr: float
    betas: tuple[float, float]
    moments: str
    weight_decay: float

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of range; `betas` become a tuple, as a list of YAML."""
        betas: Any = self.betas
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(
                f"optimizer.betas: expected two numbers such as (0.9, 0.999), not {betas!r}"
            )
        for index, beta in enumerate(betas):
            check_range(f"betas[{index}]", beta, 0.0, 1.0)
        object.__setattr__(self, "betas", tuple(betas))
        check_range("lr", self.lr, 0.0, math.inf)
        check_range("weight_decay", self.weight_decay, 0.0, math.inf)
        if self.moments not in MOMENTS:
            names = ", ".join(MOMENTS)
            raise ConfigError(f"optimizer.moments: {self.moments!r} is none of {names}")

    @property
    def arithmetic(self) -> float | None:
        """As `Optimizer.arithmetic`."""
        codec_s = self._format.codec_s
        return None if codec_s is None else 1 / (self.plain_s + len(self.moment_names) * codec_s)

    @property
    def state_arrays(self) -> tuple[ArraySpec, ...]:
        """Every moment, with its scales behind it."""
        arrays = []
        for name in self.moment_names:
            arrays.append(ArraySpec(name, self._format.dtype))
            if self._format.scaled:
                arrays.append(ArraySpec(f"{name}_scale", torch.uint8, per="group"))
        return tuple(arrays)

    @property
    def _format(self) -> Format:
        return MOMENTS[self.moments]

    @abstractmethod
    def scalars(
        self, lr: float, weight_decay: float, step: int, grad_scale: float
    ) -> tuple[np.float32, ...]:
        """The kernels' constants, computed in double: float32's 1 - beta2 would be off by 1e-5."""

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them, which takes seconds."""
        from megatrain.optim import kernels  # late: planning need not wait for Numba

        for split in (True, False):
            kernels.range_kernel(self.name, split, self.moments)

    def update(
        self, views: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> None:
        """Update one flat range in place.

        An element's result depends on that element and its number alone, so any cut into ranges
        gives the same bits; a range of zeros stays zero.

        Args:
            views: equally long, contiguous 1-D slices: "weight" and "grad" bfloat16 with
                "remainder" int16, or both float32 without it; every array of `state_arrays`. A
                float32 "grad" beside bfloat16 weights is rounded to bfloat16 first.
            first: number of the range's first element in the whole model.
        """
        if not views["weight"].is_cuda:
            self.updating(views, first=first, **options)(0, views["weight"].numel())
            return
        from megatrain.optim import kernels

        split = "remainder" in views
        of_sums = "_of_sums" if split and views["grad"].dtype == torch.float32 else ""
        name = f"{self.name}_{'split' if split else 'float32'}{self._format.suffix}{of_sums}"
        arrays = [views[array.name] for array in self._arguments(split)]
        seed = int(kernels.seed_of(options["step"]))
        launch_update(name, arrays, first, seed, self.scalars(**options))

    def _arguments(self, split: bool) -> list[ArraySpec]:
        """The arrays that kernels take, in their order."""
        weight = torch.bfloat16 if split else torch.float32
        remainder = (ArraySpec("remainder", torch.int16),) if split else ()
        weights = (ArraySpec("weight", weight), *remainder)
        return [*weights, *self.state_arrays, ArraySpec("grad", weight)]

    def updating(
        self, arrays: dict[str, Tensor], *, first: int = 0, **options: Unpack[UpdateOptions]
    ) -> UpdateRange:
        """`update` of any range of CPU `arrays`, to be called from many threads at once. What
        ranges have in common is prepared here. A call takes microseconds of Python, in which it
        keeps the GIL from the thread that drives the device, and then releases it."""
        from megatrain.optim import kernels

        split, scaled = "remainder" in arrays, self._format.scaled
        given, wanted = dict(arrays), self._arguments(split)
        given["grad"] = arrays["grad"].to(arrays["weight"].dtype)
        dtypes = [given[array.name].dtype for array in wanted]
        assert dtypes == [array.dtype for array in wanted], dtypes
        weight, *others = (
            numpy_of(given[array.name], rows=scaled and array.per == "element") for array in wanted
        )
        assert {len(array) for array in others} == {len(weight)}, "slices of unequal length"
        ordered = [weight, *others] if split else [weight, None, *others]  # None: no remainder
        kernel = kernels.range_kernel(self.name, split, self.moments)
        unit = GROUP if scaled else 1
        seed, scalars = kernels.seed_of(options["step"]), self.scalars(**options)

        def update(start: int, stop: int) -> None:
            assert start % unit == stop % unit == 0, (start, stop)
            part = slice(start // unit, stop // unit)
            # numpy's slices: torch's would hand the GIL over at each
            parts = [None if array is None else array[part] for array in ordered]
            kernel(*parts, first + start, seed, scalars)

        return update


def launch_update(
    name: str, arrays: Sequence[Tensor], first: int, seed: int, scalars: Sequence[Any]
) -> None:
    """Enqueue kernel `name` of elementwise.cu over CUDA `arrays`, those of the host's kernels, on
    the current stream. With "_of_sums" behind the name the gradient is fp32 and rounded to bfloat16
    first. first: number of the first element in the model."""
    numel = arrays[0].numel()
    if not numel:  # a rank's share of a small block
        return
    of_elements = [array for array in arrays if array.numel() * GROUP != numel]
    count = cuda.vectors(of_elements, VECTOR)
    assert count is not None, [(tuple(array.shape), array.dtype) for array in arrays]
    # threads of an incomplete group would lack partners
    assert len(of_elements) == len(arrays) or numel % GROUP == 0, numel
    numbers = [count, *map(cuda.signed, (first, seed)), *map(cuda.float_bits, scalars)]
    cuda.launch(UPDATES, name, count, arrays, numbers)


def check_range(key: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a finite number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"optimizer.{key}: expected a number, not {value!r}")
    if not low <= value < high:  # false for NaN too
        upper = "" if high == math.inf else f" and below {high:g}"
        raise ConfigError(
            f"optimizer.{key}: {value!r} is out of range; "
            f"it must be finite, at least {low:g}{upper}"
        )


def numpy_of(tensor: Tensor, *, rows: bool = False) -> np.ndarray[Any, Any]:
    """A 1-D CPU tensor as a numpy view, bfloat16, which numpy lacks, as int16. rows: of GROUP."""
    assert tensor.is_contiguous(), tensor.stride()
    array = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
    return array.numpy().reshape(-1, GROUP) if rows else array.numpy()
