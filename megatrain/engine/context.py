"""How layers are computed on a device: with which kernels, in which thread, where its libraries keep what they need, and what becomes of
the allocator's failure.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.nn import functional

from megatrain.errors import OutOfMemory
from megatrain.models.transforms.compiled import naming_the_compiler


def fastest_attention(
    device: torch.device, *, lengths_vary: bool = False
) -> AbstractContextManager[None]:
    """A context in which kernels are tried in the order of their speed: cuDNN's first on Hopper and newer, flash elsewhere.

    lengths_vary: rows have ever new lengths. cuDNN would plan its kernels for each, which takes 0.2 s and 5 MB of host RAM for good.
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not (
        lengths_vary or torch.are_deterministic_algorithms_enabled()
    ):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@contextmanager
def naming_the_gpu(what: str) -> Iterator[None]:
    """Turn the allocator's failure into our error, which says what did not fit and what to change.

    The activations of what failed are let go at once, so that the caller can try less while still handling the error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise OutOfMemory(
            f"the GPU has no room for {what}; use smaller micro-batches (in a config: "
            "train.micro_batch_tokens), or keep fewer blocks and activations there (memory.gpu: "
            f"what is free) ({str(error).splitlines()[0]})"
        ) from error


@contextmanager
def computing(device: torch.device, what: str, *, lengths_vary: bool) -> Iterator[None]:
    """While layers run: with this device's attention kernels, and with errors that say what is to be done about `what`.

    Gradients are computed in the calling thread. A thread of autograd's own would only wait for it, and the two would pass Python's lock
    back and forth: of steps that are bound by launches, that took 5 to 6%.
    """
    attention = fastest_attention(device, lengths_vary=lengths_vary)
    with (
        naming_the_gpu(what),
        naming_the_compiler(),
        attention,
        torch.autograd.set_multithreading_enabled(False),
    ):
        yield


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces now, at the front of what PyTorch reserves.

    Taken in the first step they lie amid its activations, and the room that these leave is never whole again.
    """
    if device.type == "cuda":
        ones = torch.ones(64, 64, dtype=dtype, device=device)
        functional.linear(ones, ones, ones[0])
        torch.mm(ones, ones)


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only kernels that repeat bit for bit, if wanted, until the block ends."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # cuBLAS reads it when its first handle is made
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
