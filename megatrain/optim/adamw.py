"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101), its moments in fp32 or bfloat16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatrain.errors import ConfigError
from megatrain.optim.optimizer import StateArray, UpdateRange

MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KERNELS = {  # of kernels.py, by moments and by how weights are kept
    "float32": {"split": "adamw_split", "float32": "adamw_float32"},
    "bfloat16": {"split": "adamw_split_bf16", "float32": "adamw_float32_bf16"},
}
SMALLEST_EPS = float(np.finfo(np.float32).tiny)  # below it eps may round to zero in float32, and zero moments would give 0 / 0


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of AdamW; the same meanings and defaults as torch's, except that weight decay is off.

    `lr` is the base rate: what an update uses is passed to it, since a schedule may change it. `moments`: "float32" or "bfloat16", which
    rounds them stochastically (kernels.py). Raises ConfigError for a value out of range.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    moments: str = "float32"

    name: ClassVar[str] = "adamw"

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
        if self.moments not in MOMENTS:
            raise ConfigError(f"optimizer.moments: {self.moments!r} is none of {', '.join(MOMENTS)}")

    @property
    def state_arrays(self) -> tuple[StateArray, ...]:
        return tuple(StateArray(name, MOMENTS[self.moments]) for name in ("exp_avg", "exp_avg_sq"))

    def compile(self) -> None:
        """Load the kernels from Numba's cache or compile them (seconds), so that the first update does not."""
        from megatrain.optim import kernels  # here: planning reads this class and need not wait for numba

        for kernel in KERNELS[self.moments].values():
            getattr(kernels, kernel)()

    def update(self, views: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0) -> None:
        """One AdamW update of a flat range, in place; the contract is `Optimizer.update`'s.

        `views`: "weight" and "grad" bfloat16 with "remainder" int16, or both float32 without it; "exp_avg", "exp_avg_sq" of `moments`. A
        float32 "grad" beside bfloat16 weights is rounded to bfloat16 first.
        """
        if views["weight"].is_cuda:
            self._update_on_gpu(views, step, first, self.scalars(lr, weight_decay, step, grad_scale))
        else:
            update = self.updating(views, lr=lr, weight_decay=weight_decay, step=step, grad_scale=grad_scale, first=first)
            update(0, views["weight"].numel())

    def _update_on_gpu(self, views: dict[str, Tensor], step: int, first: int, scalars: list[np.float32]) -> None:
        from megatrain.optim import cuda_kernels, kernels

        arrays = [views[name] for name in ("weight", "remainder", "exp_avg", "exp_avg_sq", "grad") if name in views]
        of_sums = "remainder" in views and views["grad"].dtype == torch.float32
        name = KERNELS[self.moments]["split" if "remainder" in views else "float32"] + ("_of_sums" if of_sums else "")
        cuda_kernels.launch(name, arrays, first, int(kernels.key_of(step)), scalars)

    def updating(
        self, arrays: dict[str, Tensor], *, lr: float, weight_decay: float, step: int, grad_scale: float, first: int = 0
    ) -> UpdateRange:
        """AdamW updates of ranges of CPU `arrays`; the contract is `Optimizer.updating`'s."""
        from megatrain.optim import kernels

        scalars = self.scalars(lr, weight_decay, step, grad_scale)
        split = "remainder" in arrays
        dtypes = {"weight": torch.bfloat16, "remainder": torch.int16} if split else {"weight": torch.float32}
        dtypes |= dict.fromkeys(("exp_avg", "exp_avg_sq"), MOMENTS[self.moments])
        gradient = dtypes["weight"]
        ordered = [*(numpy_of(arrays[name], dtype) for name, dtype in dtypes.items()), numpy_of(arrays["grad"].to(gradient), gradient)]
        assert len({array.size for array in ordered}) == 1, "slices of unequal length"
        kernel = getattr(kernels, KERNELS[self.moments]["split" if split else "float32"])()
        drawn, key = self.moments == "bfloat16", kernels.key_of(step)

        def update(start: int, stop: int) -> None:  # numpy's slices: torch's would hand the GIL over at each
            kernel(*[array[start:stop] for array in ordered], *((first + start, key) if drawn else ()), *scalars)

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
