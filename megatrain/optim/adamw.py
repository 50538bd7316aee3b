"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101), its moments in fp32, bfloat16 or 8 bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatrain.optim.elementwise import Elementwise, check_moments, check_range, checked_betas

SMALLEST_EPS = float(np.finfo(np.float32).tiny)  # below it eps may round to zero in float32, and zero moments would give 0 / 0


@dataclass(frozen=True)
class AdamW(Elementwise):
    """Hyper-parameters of AdamW; the same meanings and defaults as torch's, except that weight decay is off.

    `lr` is the base rate: what an update uses is passed to it, since a schedule may change it. `moments`: "float32"; or "bfloat16" or
    "int8", which round them stochastically (kernels.py, int8_kernels.py). Raises ConfigError for a value out of range.
    """

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    moments: str = "float32"

    name: ClassVar[str] = "adamw"
    plain_s: ClassVar[float] = 0.45e-9
    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    homes: ClassVar[dict[str, str]] = {"float32": "kernels", "bfloat16": "kernels", "int8": "int8_kernels"}

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", checked_betas(self.betas))
        check_range("lr", self.lr, 0.0, math.inf)
        check_range("eps", self.eps, SMALLEST_EPS, math.inf)
        check_range("weight_decay", self.weight_decay, 0.0, math.inf)
        check_moments(self.moments)

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
