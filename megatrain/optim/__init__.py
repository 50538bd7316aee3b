"""Optimizers that update flat ranges of host arrays, the exact split of the master weight, and learning-rate schedules.

To add an optimizer: one file with a frozen dataclass that keeps the contract of `optimizer.Optimizer` (its hyper-parameters, `name`,
`state_arrays`, `compile`, `update`, `updating`), and one row here. Store, planner, checkpoint and the parity test read the rest from it.
Where an element's update depends on that element alone, `elementwise.Elementwise` has all but hyper-parameters, scalars and kernels.
"""

from megatrain.optim.adamw import AdamW
from megatrain.optim.frozen import Frozen
from megatrain.optim.lion import Lion
from megatrain.optim.optimizer import Optimizer, StateArray

OPTIMIZERS = {"adamw": AdamW, "lion": Lion}

__all__ = ["OPTIMIZERS", "AdamW", "Frozen", "Lion", "Optimizer", "StateArray"]
