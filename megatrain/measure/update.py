"""The optimizer's update, by the host and by the device, over arrays much larger than caches."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch

from megatrain.measure.clock import Clock
from megatrain.memory.slab import Slab
from megatrain.optim import AdamW

PARAMETERS = 1 << 26  # 0.9 GiB of state: more than twice the largest caches of processors
PIECES_PER_THREAD = 4  # so that no thread is idle for long at the end
ARRAYS = {
    "weight": torch.bfloat16,
    "remainder": torch.int16,
    "exp_avg": torch.float32,
    "exp_avg_sq": torch.float32,
    "grad": torch.bfloat16,
}


UNMOVING: dict[str, Any] = {"lr": 1e-8, "weight_decay": 0.0, "step": 1, "grad_scale": 1.0}  # moves nothing far, however often repeated


def device_rate(device: torch.device, parameters: int) -> float | None:
    """Parameters/s of AdamW in bfloat16 precision on a GPU; None where its kernel cannot be made."""
    optimizer = AdamW()
    arrays = {name: torch.ones(parameters, dtype=dtype, device=device) for name, dtype in ARRAYS.items()}
    seconds = Clock(device).seconds_if_possible(lambda: optimizer.update(arrays, **UNMOVING))
    return None if seconds is None else parameters / seconds


class HostUpdate:
    """AdamW in bfloat16 precision over `parameters` parameters in host RAM. Use as a context manager."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        self._optimizer = AdamW()
        self._optimizer.compile()
        self._slabs = {name: Slab(name, parameters * dtype.itemsize, pinned=False, threads=1) for name, dtype in ARRAYS.items()}
        self._arrays = {name: slab.bytes.view(ARRAYS[name])[:parameters].fill_(1) for name, slab in self._slabs.items()}

    def rate(self, threads: int) -> float:
        """Parameters/s on so many threads."""
        size = -(-self.parameters // (threads * PIECES_PER_THREAD))
        starts = range(0, self.parameters, size)

        update = self._optimizer.updating(self._arrays, **UNMOVING)
        with ThreadPoolExecutor(threads) as pool:
            clock = Clock(torch.device("cpu"))
            return self.parameters / clock.seconds(lambda: list(pool.map(lambda start: update(start, start + size), starts)))

    def __enter__(self) -> HostUpdate:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._arrays.clear()
        for slab in self._slabs.values():
            slab.close()
