"""Memory and traffic of other packages' kernels, from their own code without its launches.

A stand-in for fla allocates, keeps and launches a known amount, by stand-ins for Triton's and
TileLang's launchers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.models.meta import kernels_left_out
from megatrain.planner.cost.footprint import Footprint, call_peak_bytes
from megatrain.planner.cost.work import tally
from tests.helpers.kernel_packages import install

ROWS, TOKENS, HEADS, COLUMNS = 2, 128, 4, 16
ELEMENTS = ROWS * TOKENS * HEADS * COLUMNS
SCRATCH = 999
Launcher = Callable[..., None]


class KernelInterface:
    """Triton's: `kernel[grid](...)` launches."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def __getitem__(self, grid: Any) -> Launcher:
        return lambda *args: self.ran.append((grid, args))


class JITImpl:
    """TileLang's: `kernel(sizes)` compiles, and what comes back launches."""

    def __init__(self, out_idx: int | None = None) -> None:
        self.out_idx = out_idx

    def __call__(self, *sizes: int) -> Launcher:
        raise AssertionError("it would be compiled")


@pytest.fixture(autouse=True)
def launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = SimpleNamespace(KernelInterface=KernelInterface)
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", triton)
    monkeypatch.setitem(sys.modules, "tilelang.jit", SimpleNamespace(JITImpl=JITImpl))


def by_triton() -> Launcher:
    return KernelInterface()[1,]


def by_tilelang() -> Launcher:
    return JITImpl()(COLUMNS)


def with_results_of_its_own() -> Launcher:
    return JITImpl(out_idx=1)(COLUMNS)


def compiled_ahead() -> Launcher:
    raise NotImplementedError("no kernel for the meta backend")


def package(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Launcher]) -> Callable[..., Any]:
    """transformers' function with a kernel that keeps its inputs and bytes of its own."""

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out, own = torch.empty_like(v), v.new_empty(SCRATCH, dtype=torch.float32)
            make()(q, k, v, out, own, 3)
            ctx.save_for_backward(q, k, v, own)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
            *inputs, own = ctx.saved_tensors
            grads = tuple(map(torch.empty_like, inputs))
            make()(grad, *inputs, own)
            make()(*grads)
            return grads

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, None]:
        return Rule.apply(q, k, v), None

    kernels = {"chunk_gated_delta_rule": rule}
    install(monkeypatch, "qwen3_5", lambda name, plain: kernels.get(name))
    family = transformers.models.qwen3_5.modeling_qwen3_5
    return family.torch_chunk_gated_delta_rule  # type: ignore[no-any-return]


def call_of(function: Callable[..., Any]) -> tuple[Callable[[], Tensor], list[Tensor]]:
    shape = ROWS, TOKENS, HEADS, COLUMNS
    inputs = [torch.ones(shape, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    rates = torch.ones(ROWS, TOKENS, HEADS, device="meta")
    given = [tensor.requires_grad_() for tensor in inputs]
    return lambda: function(*given, g=rates, beta=rates)[0], given


def footprint(function: Callable[..., Any], runs_on: str) -> Footprint:
    return call_peak_bytes(*call_of(function), runs_on=runs_on)


@pytest.mark.parametrize("launcher", [by_triton, by_tilelang])
def test_on_a_gpu_a_package_keeps_what_its_own_code_allocates(launcher, monkeypatch):
    function = package(monkeypatch, launcher)
    found = footprint(function, "cuda")
    kept = 2 * ELEMENTS + 4 * SCRATCH
    assert found == Footprint(kept, kept + 3 * 2 * ELEMENTS)
    assert footprint(function, "cpu").saved_bytes > 2 * kept  # in torch, where no kernel runs


def test_a_package_that_cannot_run_so_is_counted_in_torch(monkeypatch):
    for launcher in (compiled_ahead, with_results_of_its_own):
        function = package(monkeypatch, launcher)
        assert footprint(function, "cuda") == footprint(function, "cpu")


def test_each_launch_moves_what_it_is_given(monkeypatch):
    forward, inputs = call_of(package(monkeypatch, by_triton))
    ahead, back = tally(forward, inputs, [], fused=True, runs_on="cuda")
    assert (ahead.bytes, ahead.kernels) == (4 * 2 * ELEMENTS + 4 * SCRATCH, 1)
    assert (back.bytes, back.kernels) == (7 * 2 * ELEMENTS + 4 * SCRATCH, 2)


def test_tensors_with_data_are_launched_as_ever():
    kernel, real, blank = KernelInterface(), torch.ones(3), torch.ones(3, device="meta")
    with kernels_left_out():
        kernel["inside"](real)
        kernel["inside"](blank)
    kernel["outside"](blank)
    assert [grid for grid, _ in kernel.ran] == ["inside", "outside"]
