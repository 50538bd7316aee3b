"""The kernels' speed and safety rest on packed instructions, no GIL, and a cache that may fail."""

from __future__ import annotations

import platform
import re
from typing import Any

import numba
import numpy as np
import pytest

from megatrain.optim import int8_kernels, kernels

WITH_BF16_MOMENTS = {"adamw": kernels.adamw_kernel, "lion": kernels.lion_kernel}
OTHERS = {
    "adamw, int8": int8_kernels.int8_adamw_kernel,
    "lion, int8": int8_kernels.int8_lion_kernel,
    "muon's direction": kernels.muon_direction_kernel,
    "muon's update": kernels.muon_update_kernel,
}
KERNELS: dict[str, tuple[Any, tuple[bool, ...]]] = {
    f"{name}{', bf16' if bf16 else ''}, {'split' if split else 'float32'}": (factory, (split, bf16))
    for name, factory in WITH_BF16_MOMENTS.items()
    for bf16 in (False, True)
    for split in (True, False)
} | {
    f"{name}, {'split' if split else 'float32'}": (factory, (split,))
    for name, factory in OTHERS.items()
    for split in (True, False)
}

# The loop over float32 weights is that over split ones without the two ends: one stands for all.
COMPILED = [name for name in KERNELS if name.endswith("split") or name == "adamw, float32"]


def njit_whose_cache_raises(error: Exception) -> Any:
    def njit(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise error
        return numba.njit(*arguments, **options)

    return njit


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_the_loop_is_vectorised(name, monkeypatch):
    if platform.machine() != "x86_64":
        pytest.skip("reads x86 assembly")
    # code from the cache cannot be inspected
    monkeypatch.setattr(kernels, "njit", njit_whose_cache_raises(OSError()))
    factory, arguments = KERNELS[name]
    (assembly,) = factory.__wrapped__(*arguments).inspect_asm().values()
    for operation in ("mul", "div", "sqrt") if name.startswith("adamw") else ("mul",):
        packed = rf"v{operation}ps\b.*%[yz]mm|\b{operation}ps\b.*%xmm"
        assert re.search(packed, assembly), operation


@pytest.mark.parametrize("name", KERNELS)
def test_the_gil_is_released(name):
    factory, arguments = KERNELS[name]
    assert factory(*arguments).targetoptions["nogil"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("no locator available"),
        OSError(28, "No space left"),
        EOFError("Ran out of input"),
    ],
)
def test_a_run_goes_on_without_the_cache(monkeypatch, caplog, error):
    monkeypatch.setattr(kernels, "njit", njit_whose_cache_raises(error))
    kernel = kernels.adamw_kernel.__wrapped__(split=False, bf16_moments=False)
    weight, exp_avg, exp_avg_sq, grad = (
        np.full(5, value, np.float32) for value in (1.0, 0.0, 0.0, 2.0)
    )
    scalars = tuple(map(np.float32, (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1e-8, -0.25)))
    kernel(weight, None, exp_avg, exp_avg_sq, grad, 0, np.uint32(0), scalars)
    assert weight.tolist() == [0.75] * 5
    assert str(error) in caplog.text
