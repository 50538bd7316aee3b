"""Optimizers, the exact split of the master weight in two halves, and learning-rate schedules.

To add an optimizer: one file with a frozen dataclass of its hyper-parameters, and one row here.
Store, planner, checkpoint and the parity test read the rest from it. Where an element's update
depends on that element alone, `optimizer.Elementwise` has all but hyper-parameters, scalars and
kernels. One that updates whole matrices does as Muon.
"""

from megatrain.optim.adamw import AdamW
from megatrain.optim.lion import Lion
from megatrain.optim.muon import Muon
from megatrain.optim.optimizer import Frozen, Optimizer

OPTIMIZERS: dict[str, type[AdamW] | type[Lion] | type[Muon]] = {
    "adamw": AdamW,
    "lion": Lion,
    "muon": Muon,
}

__all__ = ["OPTIMIZERS", "AdamW", "Frozen", "Lion", "Muon", "Optimizer"]
