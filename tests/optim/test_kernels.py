"""What the kernels' speed and safety rest on: packed instructions, no GIL, and a cache that may be missing or broken."""

from __future__ import annotations

import platform
import re
from typing import Any

import numba
import numpy as np
import pytest

from megatrain.optim import int8_kernels, kernels, lion_kernels

KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        kernels.adamw_split,
        kernels.adamw_float32,
        kernels.adamw_split_bf16,
        kernels.adamw_float32_bf16,
        int8_kernels.adamw_split_int8,
        int8_kernels.adamw_float32_int8,
        int8_kernels.lion_split_int8,
        int8_kernels.lion_float32_int8,
        lion_kernels.lion_split,
        lion_kernels.lion_float32,
        lion_kernels.lion_split_bf16,
        lion_kernels.lion_float32_bf16,
    )
}


def njit_whose_cache_raises(error: Exception) -> Any:
    def njit(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return numba.njit(*arguments, **options)

    return njit


@pytest.mark.parametrize("name", KERNELS)
def test_the_loop_is_vectorised(name, monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("reads x86 assembly")
    monkeypatch.setattr(kernels, "njit", njit_whose_cache_raises(OSError()))  # code from the cache cannot be inspected
    kernel: Any = KERNELS[name].__wrapped__()
    (assembly,) = kernel.inspect_asm().values()
    for operation in ("mul", "div", "sqrt") if name.startswith("adamw") else ("mul",):
        assert re.search(rf"v{operation}ps\b.*%[yz]mm|\b{operation}ps\b.*%xmm", assembly), operation


@pytest.mark.parametrize("name", KERNELS)
def test_the_gil_is_released(name):
    kernel: Any = KERNELS[name]()
    assert kernel.targetoptions["nogil"]


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError(28, "No space left"), EOFError("Ran out of input")])
def test_a_run_goes_on_without_the_cache(monkeypatch, caplog, error):
    monkeypatch.setattr(kernels, "njit", njit_whose_cache_raises(error))
    kernel = kernels.adamw_float32.__wrapped__()
    weight, exp_avg, exp_avg_sq, grad = (np.full(5, value, np.float32) for value in (1.0, 0.0, 0.0, 2.0))
    kernel(weight, exp_avg, exp_avg_sq, grad, 0, np.uint32(0), *map(np.float32, (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1e-8, -0.25)))
    assert weight.tolist() == [0.75] * 5
    assert str(error) in caplog.text
