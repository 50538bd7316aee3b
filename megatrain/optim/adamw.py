"""AdamW with decoupled weight decay and fp32 moments (Loshchilov and Hutter, 2019, arXiv:1711.05101)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.optim.optimizer import StateArray, UpdateRange

SMALLEST_EPS = float(np.finfo(np.float32).tiny)  # below it eps may round to zero in float32, and zero moments would give 0 / 0


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of AdamW; the same meanings and defaults as torch's, except that weight decay is off.

    `lr` is the base rate: what an update uses is passed to it, since a schedule may change it. Raises ConfigError for a value out of range.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    name: ClassVar[str] = "adamw"
    state_arrays: ClassVar[tuple[StateArray, ...]] = (StateArray("exp_avg", torch.float32), StateArray("exp_avg_sq", torch.float32))

    def __post_init__(self) -> None:
        betas: Any = self.betas  # a list where it comes from YAML
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ConfigError(f"optimizer.betas: expected two numbers such as (0.9, 0.999), not {betas!r}")
        object.__setattr__(self, "betas", tuple(betas))
        check_range("lr", self.lr, 0.0, math.inf)
        check_range("betas[0]", self.betas[0], 0.0, 1.0)
        check_range("betas[1]", self.betas[1], 0.0, 1.0)
        check_range("eps", self.eps, SMALLEST_EPS, math.inf)
        check_range("weight_decay", self.weight_decay, 0.0, math.inf)

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them (seconds), so that the first update does not."""
        from megatrain.optim import kernels  # here: planning reads this class and need not wait for numba

        kernels.adamw_split()
        kernels.adamw_float32()

    def update(self, views: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float) -> None:
        """One AdamW update of a flat range, in place; the contract is `Optimizer.update`'s.

        `views`: "weight" and "grad" bfloat16 with "remainder" int16, or both float32 without it; "exp_avg", "exp_avg_sq" float32. A
        float32 "grad" beside bfloat16 weights is rounded to bfloat16 first.
        """
        if views["weight"].is_cuda:
            self._update_on_gpu(views, self.scalars(lr, weight_decay, step, grad_scale))
        else:
            self.updating(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale)(0, views["weight"].numel())

    def _update_on_gpu(self, views: dict[str, Tensor], scalars: list[np.float32]) -> None:
        from megatrain.optim import cuda_kernels

        arrays = [views[name] for name in ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad") if name in views]
        if "remainder" not in views:
            name = "adamw_float32"
        else:
            name = "adamw_split" if views["grad"].dtype == torch.bfloat16 else "adamw_split_of_sums"
        cuda_kernels.launch(name, arrays, scalars)

    def updating(self, arrays: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float) -> UpdateRange:
        """AdamW updates of ranges of CPU `arrays`; the contract is `Optimizer.updating`'s."""
        from megatrain.optim import kernels

        scalars = self.scalars(lr, weight_decay, step, grad_scale)
        moments = [numpy_of(arrays[name], torch.float32) for name in ("exp_avg", "exp_avg_sq")]
        if "remainder" in arrays:
            kernel, dtype = kernels.adamw_split(), torch.bfloat16
            weights = [numpy_of(arrays["weight"], dtype), numpy_of(arrays["remainder"], torch.int16)]
        else:
            kernel, dtype = kernels.adamw_float32(), torch.float32
            weights = [numpy_of(arrays["weight"], dtype)]
        ordered = (*weights, *moments, numpy_of(arrays["grad"].to(dtype), dtype))
        assert len({array.size for array in ordered}) == 1, "slices of unequal length"

        def update(start: int, stop: int) -> None:
            kernel(*[array[start:stop] for array in ordered], *scalars)  # numpy's slices: torch's would hand the GIL over at each

        return update

    def scalars(self, lr: float, weight_decay: float, step: int, grad_scale: float) -> list[np.float32]:
        """The kernels' constants, computed in double: 1 - beta2 taken in float32 would be off by 1e-5."""
        assert step >= 1, step
        beta1, beta2 = self.betas
        values = (
            grad_scale,
            1 - lr * weight_decay,
            beta2,
            1 - beta1,
            1 - beta2,
            (1 - beta2**step) ** 0.5,
            self.eps,
            -(lr / (1 - beta1**step)),
        )
        return [np.float32(value) for value in values]


def check_range(key: str, value: Any, low: float, high: float) -> None:
    """Raise ConfigError unless `value` is a finite number with low <= value < high."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"optimizer.{key}: expected a number, not {value!r}")
    if not low <= value < high:  # false for NaN too
        upper = "" if high == math.inf else f" and below {high:g}"
        raise ConfigError(f"optimizer.{key}: {value!r} is out of range; it must be finite, at least {low:g}{upper}")


def numpy_of(tensor: Tensor, dtype: torch.dtype) -> np.ndarray[Any, Any]:
    """A 1-D CPU tensor as a numpy view; bfloat16, which numpy lacks, as int16."""
    assert tensor.dtype == dtype, (tensor.dtype, dtype)
    assert tensor.is_contiguous(), tensor.stride()
    return tensor.view(torch.int16).numpy() if dtype == torch.bfloat16 else tensor.numpy()
