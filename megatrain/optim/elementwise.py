"""What AdamW and Lion share: moments of three types, and updates in which an element depends on no other (with int8, on its group)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.memory.layout import GROUP
from megatrain.optim.optimizer import StateArray, UpdateRange


@dataclass(frozen=True)
class Format:
    """How moments are kept. `codec_s`: seconds of one thread of the host for a number to and fro, with data in its caches, on an EPYC with
    AVX-512 (docs/log.md); None: memory always takes longer."""

    dtype: torch.dtype
    suffix: str = ""  # of the kernels that take them
    scaled: bool = False  # each GROUP has a scale
    codec_s: float | None = None


MOMENTS = {  # from the widest to the narrowest
    "float32": Format(torch.float32),
    "bfloat16": Format(torch.bfloat16, "_bf16", codec_s=0.13e-9),
    "int8": Format(torch.uint8, "_int8", scaled=True, codec_s=0.4e-9),
}


class Elementwise(ABC):
    """An optimizer whose kernels are compiled by Numba for the host and by NVRTC for GPUs, for moments of every type of MOMENTS.

    Kernels are named by `name`, "split" (bfloat16 weights with a remainder) or "float32", and the format's suffix. They take "weight", if
    split "remainder", the state's arrays, "grad", the number of the first element, the step's key and the scalars.
    """

    name: ClassVar[str]
    plain_s: ClassVar[float]  # seconds of one thread for a parameter with moments in fp32, measured as the formats' `codec_s`
    moment_names: ClassVar[tuple[str, ...]]
    homes: ClassVar[dict[str, str]]  # module of the host's kernels, by moments
    moments: str

    @property
    def arithmetic(self) -> float | None:
        codec_s = self._format.codec_s
        return None if codec_s is None else 1 / (self.plain_s + len(self.moment_names) * codec_s)

    @property
    def state_arrays(self) -> tuple[StateArray, ...]:
        """Every moment, with its scales behind it."""
        kept = self._format
        scales = (("_scale", torch.uint8, "group"),) if kept.scaled else ()
        return tuple(
            StateArray(name + suffix, dtype, per)
            for name in self.moment_names
            for suffix, dtype, per in (("", kept.dtype, "element"), *scales)
        )

    @property
    def _format(self) -> Format:
        return MOMENTS[self.moments]

    @abstractmethod
    def scalars(self, lr: float, weight_decay: float, step: int, grad_scale: float) -> list[np.float32]:
        """The kernels' constants, computed in double: 1 - beta2 taken in float32 would be off by 1e-5."""

    def _kernel(self, weights: str) -> Any:
        module = import_module(f"megatrain.optim.{self.homes[self.moments]}")  # here: planning reads this class and need not wait for numba
        return getattr(module, f"{self.name}_{weights}{self._format.suffix}")()

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them (seconds), so that the first update does not."""
        for weights in ("split", "float32"):
            self._kernel(weights)

    def update(self, views: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0) -> None:
        """One update of a flat range, in place; the contract is `Optimizer.update`'s.

        `views`: "weight" and "grad" bfloat16 with "remainder" int16, or both float32 without it; the state's arrays. A float32 "grad"
        beside bfloat16 weights is rounded to bfloat16 first.
        """
        if views["weight"].is_cuda:
            self._update_on_gpu(views, step, first, self.scalars(lr, weight_decay, step, grad_scale))
        else:
            update = self.updating(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale, first=first)
            update(0, views["weight"].numel())

    def _update_on_gpu(self, views: dict[str, Tensor], step: int, first: int, scalars: list[np.float32]) -> None:
        from megatrain.optim import cuda_kernels, kernels

        split, of_sums = "remainder" in views, "remainder" in views and views["grad"].dtype == torch.float32
        name = f"{self.name}_{'split' if split else 'float32'}{self._format.suffix}{'_of_sums' if of_sums else ''}"
        arrays = [views[name] for name in self._argument_names(split)]
        cuda_kernels.launch(name, arrays, first, int(kernels.key_of(step)), scalars)

    def _argument_names(self, split: bool) -> tuple[str, ...]:
        return ("weight", *(("remainder",) if split else ()), *(state.name for state in self.state_arrays), "grad")

    def updating(
        self, arrays: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0
    ) -> UpdateRange:
        """Updates of ranges of CPU `arrays`; the contract is `Optimizer.updating`'s."""
        from megatrain.optim import kernels

        split, grouped = "remainder" in arrays, self._format.scaled
        scalars, key = self.scalars(lr, weight_decay, step, grad_scale), kernels.key_of(step)
        weight = torch.bfloat16 if split else torch.float32
        dtypes = {"weight": weight, "remainder": torch.int16, "grad": weight} | {state.name: state.dtype for state in self.state_arrays}
        given = arrays | {"grad": arrays["grad"].to(weight)}
        scales = {state.name for state in self.state_arrays if state.per == "group"}
        ordered = [numpy_of(given[name], dtypes[name], rows=grouped and name not in scales) for name in self._argument_names(split)]
        assert len({len(array) for array in ordered}) == 1, "slices of unequal length"
        kernel, unit = self._kernel("split" if split else "float32"), GROUP if grouped else 1

        def update(start: int, stop: int) -> None:  # numpy's slices: torch's would hand the GIL over at each
            assert start % unit == stop % unit == 0, (start, stop)
            part = slice(start // unit, stop // unit)
            kernel(*[array[part] for array in ordered], first + start, key, *scalars)

        return update


def checked_betas(betas: Any) -> tuple[float, float]:
    """`betas` as a tuple, also where it comes as a list from YAML. Raises ConfigError."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"optimizer.betas: expected two numbers such as (0.9, 0.999), not {betas!r}")
    for index, beta in enumerate(betas):
        check_range(f"betas[{index}]", beta, 0.0, 1.0)
    return betas[0], betas[1]


def check_range(key: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a finite number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"optimizer.{key}: expected a number, not {value!r}")
    if not low <= value < high:  # false for NaN too
        upper = "" if high == math.inf else f" and below {high:g}"
        raise ConfigError(f"optimizer.{key}: {value!r} is out of range; it must be finite, at least {low:g}{upper}")


def check_moments(moments: str) -> None:
    """Raise ConfigError for moments of a type that there is not."""
    if moments not in MOMENTS:
        raise ConfigError(f"optimizer.moments: {moments!r} is none of {', '.join(MOMENTS)}")


def numpy_of(tensor: Tensor, dtype: torch.dtype, *, rows: bool = False) -> np.ndarray[Any, Any]:
    """A 1-D CPU tensor as a numpy view; bfloat16, which numpy lacks, as int16. `rows`: as [groups, GROUP]."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous(), tensor.stride()
    array = tensor.view(torch.int16).numpy() if dtype == torch.bfloat16 else tensor.numpy()
    return array.reshape(-1, GROUP) if rows else array
