"""Which of PyTorch's attention kernels to try first."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def fastest_attention(device: torch.device) -> AbstractContextManager[None]:
    """A context in which kernels are tried in the order of their speed: cuDNN's first on Hopper and newer, flash elsewhere."""
    if device.type != "cuda":
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if torch.cuda.get_device_capability(device) >= (9, 0) and not torch.are_deterministic_algorithms_enabled():
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return sdpa_kernel(order, set_priority=True)
