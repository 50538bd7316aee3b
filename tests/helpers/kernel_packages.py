"""Stand-ins for packages of kernels beside transformers (fla, mamba-ssm, causal-conv1d), which need
a GPU, given to transformers' own decorator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

# of a decorated function: (its name in the package, its implementation in torch)
StandIn = Callable[[str, Callable[..., Any]], Callable[..., Any] | None]


class Package(ModuleType):
    """Has every module, and every function of `functions`."""

    def __init__(self, name: str, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(name)
        self.functions = functions

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.functions.get(name) or Package(f"{self.__name__}.{name}", self.functions)


def install(monkeypatch: pytest.MonkeyPatch, family: str, stand_in: StandIn) -> None:
    """Decorate a family's functions anew, while the packages have what `stand_in` returns.

    None: that package is not there.
    """
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    functions = decorated_in(module)
    assert functions
    for name, cells in functions.items():
        wanted, package, plain = (cells[c] for c in ("func_name", "package", "torch_function"))
        kernel = stand_in(wanted, plain)
        with monkeypatch.context() as during:
            there = None if kernel is None else Package(package, {wanted: kernel})
            during.setitem(sys.modules, package, there)
            decorated = use_kernel_func_from_hub_with_fallback(wanted, package)(plain)
        monkeypatch.setattr(module, name, decorated)


def decorated_in(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The functions of a module that kernels may replace, and what transformers knows of each."""
    functions = {n: f for n, f in vars(module).items() if isinstance(f, FunctionType)}
    known = {name: cells_of(function) for name, function in functions.items()}
    return {name: cells for name, cells in known.items() if "is_new_implementation" in cells}


def kernels_there(model: nn.Module) -> list[str]:
    """The functions of a model's family that kernels do replace."""
    functions = decorated_in(sys.modules[type(model).__module__])
    return [name for name, cells in functions.items() if cells["is_new_implementation"]]


def cells_of(function: FunctionType) -> dict[str, Any]:
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


# -- what separates documents as the packages do, in torch -----------------------------------------


def delta_rule(plain: Callable[..., Any]) -> Callable[..., Any]:
    """fla's: documents of one row, [1, tokens, heads, dim], begin at `cu_seqlens`."""

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        option = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel}
        if cu_seqlens is None:
            return plain(q, k, v, g=g, beta=beta, **option)[0], None
        if len(q) != 1:
            raise ValueError("The batch size is expected to be 1")
        sizes = cu_seqlens.diff().tolist()
        pieces = zip(*(tensor.split(sizes, dim=1) for tensor in (q, k, v, g, beta)), strict=True)
        outs = [plain(*own, g=gate, beta=rate, **option)[0] for *own, gate, rate in pieces]
        return torch.cat(outs, dim=1), None

    return chunk_gated_delta_rule


def convolution(plain: Callable[..., Any]) -> Callable[..., Any]:
    """causal-conv1d's: [batch, channels, tokens], documents as `seq_idx` [batch, tokens] has it."""

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if seq_idx is None:
            return plain(x, weight, bias, activation)  # type: ignore[no-any-return]
        assert (seq_idx.shape, seq_idx.dtype) == ((len(x), x.shape[-1]), torch.int32)
        rows = []
        for row, numbers in zip(x, seq_idx, strict=True):
            sizes = numbers.unique_consecutive(return_counts=True)[1].tolist()
            pieces = row[None].split(sizes, dim=-1)
            rows.append(torch.cat([plain(p, weight, bias, activation) for p in pieces], dim=-1))
        return torch.cat(rows)

    return causal_conv1d_fn


def separating(name: str, plain: Callable[..., Any]) -> Callable[..., Any] | None:
    """Stand-ins that keep documents apart where they are told of them."""
    kernels = {"chunk_gated_delta_rule": delta_rule, "causal_conv1d_fn": convolution}
    return kernels[name](plain) if name in kernels else None


def deaf(name: str, plain: Callable[..., Any]) -> Callable[..., Any] | None:
    """`separating`, but for a convolution that is not told of documents."""
    if name == "causal_conv1d_fn":

        def causal_conv1d_fn(
            x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
        ) -> Any:
            return plain(x, weight, bias, activation)

        return causal_conv1d_fn
    return separating(name, plain)
