"""Optimizers that update flat ranges of host arrays or whole tensors, the exact split of the master weight, and learning-rate schedules.

To add an optimizer: one file with a frozen dataclass that keeps the contract of `optimizer.Optimizer` (its hyper-parameters, `name`,
`state_arrays`, `compile`) and of `optimizer.RangeOptimizer` (`update`, `updating`) or `whole_tensors.WholeTensors` (`stages`, `scratch`),
and one row here. Store, planner, checkpoint and the parity test read the rest from it. Where an element's update depends on that element
alone, `elementwise.Elementwise` has all but hyper-parameters, scalars and kernels.
"""

from megatrain.optim.adamw import AdamW
from megatrain.optim.frozen import Frozen
from megatrain.optim.lion import Lion
from megatrain.optim.muon import Muon
from megatrain.optim.optimizer import Optimizer, StateArray
from megatrain.optim.whole_tensors import WholeTensors

OPTIMIZERS: dict[str, type[AdamW] | type[Lion] | type[Muon]] = {
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
}

__all__ = [
    "OPTIMIZERS",
    "AdamW",
    "Frozen",
    "Lion",
    "Muon",
    "Optimizer",
    "StateArray",
    "WholeTensors",
]
