"""Which of PyTorch's attention kernels to try first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def fastest_attention(device: torch.device, *, lengths_vary: bool = False) -> AbstractContextManager[None]:
    """A context in which kernels are tried in the order of their speed: cuDNN's first on Hopper and newer, flash elsewhere.

    lengths_vary: rows have ever new lengths. cuDNN would plan its kernels for each, which takes 0.2 s and 5 MB of host RAM for good.
    """
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not (lengths_vary or torch.are_deterministic_algorithms_enabled()):
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)
