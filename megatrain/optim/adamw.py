"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv:1711.05101)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatrain.optim.optimizer import Elementwise, check_range

# A smaller eps may round to zero in float32, and zero moments would give 0 / 0.
SMALLEST_EPS = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class AdamW(Elementwise):
    """Hyper-parameters of AdamW, with torch's meanings and defaults, but no weight decay. `lr` is
    the base rate; a schedule gives each update its own. `moments`: "float32", or "bfloat16" or
    "int8", rounded stochastically (kernels.py). Raises ConfigError for a value out of range."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    moments: str = "float32"

    name: ClassVar[str] = "adamw"
    plain_s: ClassVar[float] = 0.45e-9
    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("eps", self.eps, SMALLEST_EPS, math.inf)

    def scalars(
        self, lr: float, weight_decay: float, step: int, grad_scale: float
    ) -> tuple[np.float32, ...]:
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
        return tuple(np.float32(value) for value in values)
