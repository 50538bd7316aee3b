"""CUDA kernels of our own, compiled on first use by NVRTC, which PyTorch carries."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

THREADS = 256


# why: decision 0028
@cache
def _driver() -> Any:
    """The driver's functions; PyTorch would load its library at every launch, which is slower."""
    from torch.cuda._utils import _get_gpu_runtime_library

    return _get_gpu_runtime_library()


@cache
def _compiled(source: str, name: str, device: int) -> Any:
    """The kernel, for the device that is current."""
    # private in PyTorch, and its one way to NVRTC
    return torch.cuda._compile_kernel(source, name)


def launch(
    source: str, name: str, threads: int, tensors: Sequence[Tensor], numbers: Sequence[int]
) -> None:
    """Enqueue kernel `name` of `source` on the current stream with at least `threads` threads. Its
    parameters are pointers to the contiguous CUDA `tensors`, then the 32-bit `numbers`."""
    device = tensors[0].device
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    values = [*pointers, *map(ctypes.c_int, numbers)]
    places = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    with torch.cuda.device(device):
        kernel = _compiled(source, name, device.index)
        stream = ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index))
        shape = (-(-threads // THREADS), 1, 1, THREADS, 1, 1)  # blocks, threads of each
        error = _driver().cuLaunchKernel(kernel.func, *shape, 0, stream, places, None)
    if error:
        raise RuntimeError(f"the GPU refused to launch {name}: CUDA error {error}")


def float_bits(value: Any) -> int:
    """The bits of `value` as float32, which any launcher passes on unchanged."""
    return int(struct.unpack("i", struct.pack("f", value))[0])


def signed(number: int) -> int:
    """The lowest 32 bits of `number`, as a signed integer has them."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def vectors(tensors: Sequence[Tensor], elements: int) -> int | None:
    """Number of vectors of `elements` that each of these tensors holds. None if they are not
    contiguous, of one length and aligned to whole vectors."""
    numel = tensors[0].numel()
    aligned = all(tensor.data_ptr() % (elements * tensor.element_size()) == 0 for tensor in tensors)
    fit = all(tensor.numel() == numel and tensor.is_contiguous() for tensor in tensors)
    return numel // elements if aligned and fit and numel % elements == 0 else None
