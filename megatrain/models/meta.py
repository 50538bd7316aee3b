"""Running models on the meta device, where tensors have shapes and dtypes but no values.

transformers computes with packages of kernels (fla, mamba-ssm, causal-conv1d) where they are
installed. Kernels want addresses on a GPU, which such tensors lack. Two ways around that:
transformers' own code in torch, or the package's code with its launches left out, which allocates
and keeps what it will on the GPU.

Only this file uses torch's private dispatch modes and the identity of storages (`_cdata`).
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import (
    Callable,
    Collection,
    Iterator,
    MutableMapping,
    MutableSequence,
    Sequence,
)
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatrain.models.recorder import LayerCall, replaced, tensors_in

aten = torch.ops.aten
LARGE = 1 << 24  # elements: far more than a table that layers compute with has


class MetaKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Grouped matmuls of experts on the meta device in any dtype; torch's own knows bf16 alone."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._grouped_mm.default and args[0].is_meta:
            return _grouped_matmul(*args, **kwargs)
        return func(*args, **kwargs)


class AssumeYes(MetaKernels):  # type: ignore[no-untyped-call]
    """Answers yes to questions about meta tensors: models ask if nothing is padded or packed."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        asks = func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta
        if asks and args[0].dtype == torch.bool:
            return True
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextmanager
def on_meta() -> Iterator[list[None]]:
    """For a layer on the meta device, whose questions about values fail; as `torch_paths`."""
    with torch_paths() as replaced, MetaKernels():  # type: ignore[no-untyped-call]
        yield replaced


@contextmanager
def without_data(runs_on: str = "cpu") -> Iterator[None]:
    """As `on_meta`, but under `AssumeYes`, and the random state stays as it was. runs_on: "cuda"
    for the kernels of packages that it has, else transformers' path."""
    paths = kernels_left_out() if runs_on == "cuda" else torch_paths()
    with torch.random.fork_rng(devices=[]), paths, AssumeYes():  # type: ignore[no-untyped-call]
        yield


def _grouped_matmul(
    a: Tensor, b: Tensor, offs: Tensor, bias: None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """An empty a @ b, in which `offs` [groups] divides the rows: of [rows, k] x [groups, k, n], and
    of [m, rows] x [rows, n] -> [groups, m, n], which is the gradient of the matrices. Raises
    RuntimeError, as real kernels do, if rows do not begin at multiples of 16 bytes."""
    for matrix in (a, b):
        if any(step != 1 and step * matrix.itemsize % 16 for step in matrix.stride()[-2:]):
            raise RuntimeError("strides should be multiple of 16 bytes")
    if a.ndim == b.ndim == 2:
        return a.new_empty(len(offs), a.shape[0], b.shape[1], dtype=out_dtype)
    return a.new_empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype)


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class: runs every operation as it is and reports it to `saw`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.saw(func, tensors_in((args, kwargs)), tensors_in(out))
        return out

    def saw(self, func: Any, read: list[Tensor], written: list[Tensor]) -> None:
        """`func`, an overload of a torch operator, has made `written` from `read`."""
        raise NotImplementedError


def storage_of(tensor: Tensor) -> int:
    """A number that only tensors on the same living storage share."""
    return int(tensor.untyped_storage()._cdata)


def is_open_container(value: Any) -> bool:
    """True if a layer could store something here: an empty list or dict, or a dict subclass."""
    return isinstance(value, MutableMapping | MutableSequence) and (
        not isinstance(value, dict | list) or not len(value)
    )


def to_meta(tree: Any) -> Any:
    """The nested structure, its tensors on the meta device. Open containers stay as they are."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.detach().to("meta")

    return pytree.tree_map_only(Tensor, moved, tree, is_leaf=is_open_container)


def blank_call(
    layer: nn.Module,
    hidden_shape: Sequence[int],
    dtype: torch.dtype,
    call: LayerCall,
    device: str = "meta",
    frozen: Collection[str] = (),
) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A decoder layer's forward on tensors of ones, and its leaves: hidden states, then weights.

    Args:
        layer: on any device; only the shapes of parameters are read.
        hidden_shape: [batch, tokens, hidden].
        call: what the layer receives besides the hidden states.
        frozen: names of weights that need no gradient.

    Constants keep their dtypes, and are no leaves.
    """

    def blank(tensor: Tensor, as_dtype: torch.dtype | None = None) -> Tensor:
        return torch.ones(tensor.shape, dtype=as_dtype or tensor.dtype, device=device)

    own = dict(layer.named_parameters())
    weights = {
        name: blank(p, dtype).requires_grad_(name not in frozen)
        for name, p in own.items()
        if p.requires_grad
    }
    constants = {name: blank(p) for name, p in own.items() if not p.requires_grad}
    tensors = weights | constants | {name: blank(buffer) for name, buffer in layer.named_buffers()}
    received = (call.args, call.kwargs)
    args, kwargs = pytree.tree_map_only(Tensor, blank, received, is_leaf=is_open_container)
    hidden = torch.empty(hidden_shape, dtype=dtype, device=device, requires_grad=True)

    def forward() -> Tensor:
        with call.around():
            out = torch.func.functional_call(layer, tensors, (hidden, *args), kwargs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return forward, [hidden, *weights.values()]


class _LargeOnMeta(TorchFunctionMode):
    """Large tensors without values are made on meta: all experts' matrices may exceed the RAM."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and not isinstance(args[0], int) else args)
            if math.prod(size) >= LARGE:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Modules built inside get meta parameters, but real buffers, such as rotary frequencies."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        # a tied parameter is on meta already and must stay the same object
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            # transformers would draw its values, in Python for meta tensors: most of the time
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        register(module, name, parameter)

    with replaced(nn.Module, "register_parameter", register_on_meta), _LargeOnMeta():
        yield


@contextmanager
def lent(places: Sequence[tuple[nn.Module, str]], parameters: Sequence[Any]) -> Iterator[None]:
    """Inside, modules compute with other parameters at these places, (module, attribute)."""
    before = [module._parameters[leaf] for module, leaf in places]
    try:
        for (module, leaf), parameter in zip(places, parameters, strict=True):
            module._parameters[leaf] = parameter
        yield
    finally:
        for (module, leaf), parameter in zip(places, before, strict=True):
            module._parameters[leaf] = parameter


class ZeroProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Products with weights in a mapping of zeros are zeros, and not computed."""

    def __init__(self, zeros: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._start, self._end = zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = [args, kwargs or {}]
        if func.overloadpacket in (aten.mm, aten.addmm, aten.bmm, aten.convolution) and any(
            self._start <= one.data_ptr() < self._end
            for one in tensors_in(given)
            if not one.is_meta
        ):
            on_meta = pytree.tree_map_only(Tensor, lambda one: one.to("meta"), given)
            out = func(*on_meta[0], **on_meta[1])
            return torch.zeros(out.shape, dtype=out.dtype)
        return func(*args, **given[1])


@contextmanager
def zeros_outside(
    model: nn.Module, layers: Sequence[nn.Module], but: Collection[str] = ()
) -> Iterator[None]:
    """Give the parameters outside the layers, `but` for these, all-zero CPU memory, which nobody
    may write to: a mapping that the operating system backs by its one page of zeros."""
    inside = {id(p) for layer in layers for p in layer.parameters()}
    inside |= {id(p) for name, p in model.named_parameters() if name in but}
    places = ((m, leaf, p) for m in model.modules() for leaf, p in m._parameters.items())
    outside = {(m, leaf): p for m, leaf, p in places if p is not None and id(p) not in inside}
    size = max((p.nbytes for p in outside.values()), default=1)
    mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(mapping, dtype=torch.uint8)
    stand_ins = {  # tied parameters share one
        id(p): nn.Parameter(zeros[: p.nbytes].view(p.dtype).view(p.shape), p.requires_grad)
        for p in outside.values()
    }
    with lent(list(outside), [stand_ins[id(p)] for p in outside.values()]), ZeroProducts(zeros):
        yield


# -- packages of kernels ---------------------------------------------------------------------------

_LIBRARY = torch.library.Library("megatrain", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("launch(Tensor(a!)[] tensors) -> ()")  # type: ignore[no-untyped-call]
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "launch", lambda tensors: None, "CompositeExplicitAutograd"
)


@contextmanager
def torch_paths() -> Iterator[list[None]]:
    """Have transformers compute in plain torch; the list grows where a kernel would have run."""
    asked: list[None] = []

    def in_torch() -> bool:
        asked.append(None)
        return True

    with _answering(in_torch):
        yield asked


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Have packages of kernels compute as they will on a GPU, but without their kernels: those of
    Triton and TileLang, whose results are allocated before them. Each launch on meta tensors
    becomes one call of the operator `megatrain::launch` on them. A function that cannot run so (its
    kernels are compiled ahead, or it refuses this GPU) is computed as under `torch_paths`."""

    def in_torch() -> bool:
        asks = sys._getframe(1).f_locals  # of transformers, which is about to call the kernel
        return not _runs(*(asks.get(name) for name in ("implementation", "args", "kwargs")))

    with _answering(in_torch), _without_launches():
        yield


def _answering(in_torch: Callable[[], bool]) -> AbstractContextManager[None]:
    """Inside, `in_torch` decides where transformers computes in torch rather than by a kernel."""
    from transformers.integrations import hub_kernels

    return replaced(hub_kernels, "is_torchdynamo_exporting", in_torch)


def _runs(kernel: Any, args: Any, kwargs: Any) -> bool:
    """True if a function and its gradient run on tensors without data, unseen by dispatch modes."""

    def blank(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, requires_grad=tensor.requires_grad)

    try:
        with _disable_current_modes():
            args, kwargs = pytree.tree_map_only(Tensor, blank, (args, kwargs))
            out = [tensor for tensor in tensors_in(kernel(*args, **kwargs)) if tensor.requires_grad]
            leaves = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
            torch.autograd.grad(out, leaves, [torch.empty_like(t) for t in out], allow_unused=True)
    except Exception:  # noqa: BLE001  whatever a package raises
        return False
    return True


@contextmanager
def _without_launches() -> Iterator[None]:
    """Inside, kernels of Triton and TileLang that are given meta tensors are not run."""
    triton, tilelang = sys.modules.get("triton.runtime.jit"), sys.modules.get("tilelang.jit")
    with ExitStack() as launchers:
        if triton is not None:  # `kernel[grid]` is a launcher
            launchers.enter_context(_not_on_meta(triton.KernelInterface, "__getitem__"))
        if tilelang is not None:  # `kernel(*sizes)` is one
            launchers.enter_context(_not_on_meta(tilelang.JITImpl, "__call__"))
        yield


def _not_on_meta(kernels: Any, name: str) -> AbstractContextManager[None]:
    """Inside, what makes launchers of a class of kernels is called for tensors with data only."""
    make = getattr(kernels, name)

    def launcher(kernel: Any, *sizes: Any, **options: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            if getattr(kernel, "out_idx", None) is not None:
                raise RuntimeError("the kernel allocates its results itself")
            blank = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_meta]
            if not blank:
                make(kernel, *sizes, **options)(*args, **kwargs)
                return
            with torch.no_grad():  # seen by dispatch modes
                torch.ops.megatrain.launch(blank)

        return launch

    return replaced(kernels, name, launcher)
