"""How layers are computed on a device: with which kernels, in which thread, and where its libraries keep what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

from megatrain.engine.attention import fastest_attention
from megatrain.engine.out_of_memory import naming_the_gpu
from megatrain.models.compiled import naming_the_compiler


@contextmanager
def computing(device: torch.device, what: str, *, lengths_vary: bool) -> Iterator[None]:
    """While layers run: with this device's attention kernels, and with errors that say what is to be done about `what`.

    Gradients are computed in the calling thread. A thread of autograd's own would only wait for it, and the two would pass Python's lock
    back and forth: of steps that are bound by launches, that took 5 to 6%.
    """
    attention = fastest_attention(device, lengths_vary=lengths_vary)
    with naming_the_gpu(what), naming_the_compiler(), attention, torch.autograd.set_multithreading_enabled(False):
        yield


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces now, at the front of what PyTorch reserves.

    Taken in the first step they lie amid its activations, and the room that these leave is never whole again.
    """
    if device.type == "cuda":
        ones = torch.ones(64, 64, dtype=dtype, device=device)
        functional.linear(ones, ones, ones[0])
        torch.mm(ones, ones)
