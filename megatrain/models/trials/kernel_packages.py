"""Kernels of packages beside transformers (fla, mamba-ssm, causal-conv1d), on the meta device.

transformers computes with such a package where it is installed. Kernels want addresses on a GPU,
which tensors without data lack. Two ways around that: transformers' own code in torch, or the
package's code with its launches left out, which allocates and keeps what it will on the GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from megatrain.models.recorder import tensors_in

_LIBRARY = torch.library.Library("megatrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("launch(Tensor(a!)[] tensors) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "launch", lambda tensors: None, "CompositeExplicitAutograd"
)


@contextmanager
def torch_paths() -> Iterator[list[None]]:
    """Have transformers compute in plain torch, though a package of kernels is installed.

    Yields a list that grows whenever it asks, which it does only in place of such a kernel.
    """
    asked: list[None] = []

    def in_torch() -> bool:
        asked.append(None)
        return True

    with _answering(in_torch):
        yield asked


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Have packages of kernels compute as they will on a GPU, but without their kernels: those of
    Triton and TileLang, whose results are allocated before them.

    Each launch on meta tensors becomes one call of the operator `megatrain::launch` on them. A
    function that cannot run so (its kernels are compiled ahead, or it refuses this GPU) is computed
    as under `torch_paths`.
    """

    def in_torch() -> bool:
        asks = sys._getframe(1).f_locals  # of transformers, which is about to call the kernel
        try:
            _try_out(*(asks.get(name) for name in ("implementation", "args", "kwargs")))
        except _CannotRun:
            return True
        return False

    with _answering(in_torch), _without_launches():
        yield


@contextmanager
def _answering(in_torch: Callable[[], bool]) -> Iterator[None]:
    """Inside, `in_torch` decides where transformers computes in torch rather than by a kernel.

    It does so while it takes a model to be exported. Only its choice of kernels is told that: its
    own torch code, which avoids some operators then, stays as it is.
    """
    from transformers.integrations import hub_kernels

    before = hub_kernels.is_torchdynamo_exporting
    hub_kernels.is_torchdynamo_exporting = in_torch
    try:
        yield
    finally:
        hub_kernels.is_torchdynamo_exporting = before


class _CannotRun(Exception):
    """A function of a package, or its gradient, does not run on tensors without data."""


def _try_out(kernel: Any, args: Any, kwargs: Any) -> None:
    """Run a function and its gradient on such tensors, unseen by dispatch modes.

    Raises _CannotRun.
    """

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, requires_grad=tensor.requires_grad)

    try:
        with _disable_current_modes():
            args, kwargs = pytree.tree_map_only(Tensor, blank, (args, kwargs))
            out = [tensor for tensor in tensors_in(kernel(*args, **kwargs)) if tensor.requires_grad]
            leaves = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            torch.autograd.grad(out, leaves, [torch.empty_like(t) for t in out], allow_unused=True)
    except Exception as error:  # whatever a package raises
        raise _CannotRun from error


@contextmanager
def _without_launches() -> Iterator[None]:
    """Inside, kernels of Triton and TileLang that are given meta tensors are not run.

    Packages that use one of the two have imported it.
    """
    triton, tilelang = sys.modules.get("triton.runtime.jit"), sys.modules.get("tilelang.jit")
    replaced: list[tuple[Any, str, Any]] = []
    if triton is not None:
        replaced.append((triton.KernelInterface, "__getitem__", _triton_launch))
    if tilelang is not None:
        replaced.append((tilelang.JITImpl, "__call__", _tilelang_launch))
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    for owner, name, launch in replaced:
        setattr(owner, name, launch(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, method in before:
            setattr(owner, name, method)


def _triton_launch(getitem: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `KernelInterface.__getitem__`, which makes a launcher of a kernel and a grid."""

    def launcher(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if not _noted(args, kwargs):
                getitem(kernel, grid)(*args, **kwargs)

        return launch

    return launcher


def _tilelang_launch(call: Callable[..., Any]) -> Callable[..., Any]:
    """In place of `JITImpl.__call__`, which compiles a kernel for given sizes."""

    def compiled(kernel: Any, *sizes: Any, **options: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if kernel.out_idx is not None:
                raise RuntimeError("the kernel allocates its results itself")
            if not _noted(args, kwargs):
                call(kernel, *sizes, **options)(*args, **kwargs)

        return launch

    return compiled


def _noted(args: Any, kwargs: Any) -> bool:
    """True if a kernel was given meta tensors, which dispatch modes see then."""
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
    if tensors:
        with torch.no_grad():
            torch.ops.megatrain.launch(tensors)
    return bool(tensors)
