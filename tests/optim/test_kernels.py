"""The kernels' speed and safety rest on packed instructions, no GIL, and a cache that may fail."""

from __future__ import annotations

import platform
import re
from itertools import product
from typing import Any

import numba
import numpy as np
import pytest

from megatrain.optim import kernels
from megatrain.optim.optimizer import MOMENTS

OF_MUON = {
    "muon's direction": kernels.muon_direction_kernel,
    "muon's update": kernels.muon_update_kernel,
}
SPLITS = {"split": True, "float32": False}
KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    f"{name}, {moments}, {kind}": (kernels.range_kernel, (name, split, moments))
    for name, moments in product(kernels.BODIES, MOMENTS)
    for kind, split in SPLITS.items()
} | {
    f"{name}, {kind}": (factory, (split,))
    for name, factory in OF_MUON.items()
    for kind, split in SPLITS.items()
}

# The loop over float32 weights is that over split ones without the two ends: one stands for all.
COMPILED = [name for name in KERNELS if name.endswith("split") or name == "adamw, float32, float32"]


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


def test_the_gil_is_released():
    for name, (factory, arguments) in KERNELS.items():
        assert factory(*arguments).targetoptions["nogil"], name


@pytest.mark.parametrize(
    "error", [RuntimeError("no locator"), OSError(28, "full"), EOFError("end")]
)
def test_a_run_goes_on_without_the_cache(monkeypatch, caplog, error):
    monkeypatch.setattr(kernels, "njit", njit_whose_cache_raises(error))
    kernel = kernels.range_kernel.__wrapped__("adamw", False, "float32")
    weight, exp_avg, exp_avg_sq, grad = (
        np.full(5, value, np.float32) for value in (1.0, 0.0, 0.0, 2.0)
    )
    scalars = tuple(map(np.float32, (1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1e-8, -0.25)))
    kernel(weight, None, exp_avg, exp_avg_sq, grad, 0, np.uint32(0), scalars)
    assert weight.tolist() == [0.75] * 5
    assert str(error) in caplog.text
