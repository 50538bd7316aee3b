"""The context in which layers compute on a device: attention kernels, threads, workspaces of
libraries, and the error when memory does not suffice.
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
    """While attention kernels are tried in the order of their speed: cuDNN's first on Hopper and
    newer, flash elsewhere.

    lengths_vary: rows seldom have the same length. cuDNN would plan its kernels for each, which
        takes 0.2 s and 5 MB of host RAM for good.
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    suits = not (lengths_vary or torch.are_deterministic_algorithms_enabled())
    if suits and torch.cuda.get_device_capability(device) >= (9, 0):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)


@contextmanager
def naming_the_gpu(what: str) -> Iterator[None]:
    """Raise the allocator's failure as OutOfMemory, which says what did not fit and what to change.

    The activations of what failed are let go at once, so that the caller can try less while it
    still handles the error.
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
    """While layers run: with this device's attention kernels, and with errors that name `what`.

    Gradients are computed in the calling thread. A thread of autograd's own would only wait for it,
    and the two would pass Python's lock back and forth: 5 to 6% of a step bound by launches.
    """
    with naming_the_gpu(what), naming_the_compiler():
        attention = fastest_attention(device, lengths_vary=lengths_vary)
        with attention, torch.autograd.set_multithreading_enabled(False):
            yield


def take_workspaces(device: torch.device, dtype: torch.dtype) -> None:
    """Let cuBLAS and cuBLASLt take their workspaces now, at the front of what PyTorch reserves.

    Taken in the first step they would lie amid its activations, and split the room these leave.
    """
    if device.type == "cuda":
        ones = torch.ones(64, 64, dtype=dtype, device=device)
        functional.linear(ones, ones, ones[0])  # with a bias: cuBLASLt's
        torch.mm(ones, ones)  # cuBLAS's


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """While only kernels run that repeat bit for bit, if wanted."""
    before = torch.are_deterministic_algorithms_enabled()
    if wanted:
        # cuBLAS reads it when its first handle is made
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
