"""Which layers keep their graphs from forward to backward, and where, and how much of what goes to host RAM is on its way."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

# Of the largest that one micro-batch leaves behind in a layer, so much is on its way to the host and back, in rings of device memory: one
# arrives while the other is read, and a graph takes longer to leave than the next micro-batch to compute.
LEAVING, COMING = 3, 2


Where = Literal["device", "host", "nowhere"]  # of a layer's graph; with none it is computed again in backward


def rings(micro_batches: float, graphs: int) -> tuple[int, int]:
    """(leaving, coming): how much of what one micro-batch leaves behind the rings hold, of a group of so many, and of so many graphs.

    The boundary of a group's only micro-batch leaves while a whole layer computes, and the next one comes no sooner.
    """
    return (1 if micro_batches <= 1 and not graphs else LEAVING), COMING


@lru_cache(maxsize=256)
def graphs_of_layers(layers: int, retained: int, on_host: int) -> tuple[Where, ...]:
    """Of each layer: the last `retained` keep their graphs on the device, of the others `on_host` send them to host RAM.

    Those are spread evenly: a graph takes longer to leave than its layer to compute, and layers between them send less.
    """
    others = layers - min(retained, layers)
    sent = min(on_host, others)
    spread: list[Where] = ["host" if (i + 1) * sent // others > i * sent // others else "nowhere" for i in range(others)]
    staying: list[Where] = ["device"] * (layers - others)
    return (*spread, *staying)
