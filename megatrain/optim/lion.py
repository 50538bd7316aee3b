"""Lion (Chen et al., 2023, arXiv:2302.06675): updates by the sign of a mean of gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from megatrain.optim.optimizer import Elementwise


@dataclass(frozen=True)
class Lion(Elementwise):
    """Hyper-parameters of Lion, with the paper's defaults; weight decay is decoupled. `lr` is the
    base rate; a schedule gives each update its own. Every element moves by it, so rates are 3 to 10
    times smaller than AdamW's. `moments`: as AdamW's. Raises ConfigError for a value out of
    range."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0
    moments: str = "float32"

    name: ClassVar[str] = "lion"
    plain_s: ClassVar[float] = 0.35e-9
    moment_names: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def scalars(
        self, lr: float, weight_decay: float, step: int, grad_scale: float
    ) -> tuple[np.float32, ...]:
        beta1, beta2 = self.betas  # no bias correction: `step` changes nothing
        values = (grad_scale, 1 - lr * weight_decay, beta1, beta2, 1 - beta1, 1 - beta2, -lr)
        return tuple(np.float32(value) for value in values)
