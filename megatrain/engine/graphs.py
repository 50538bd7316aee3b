"""A layer's graph between forward and backward: its two ends, and what it saved, which may wait in host RAM meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from megatrain.engine.boundaries import Offload, Parked
from megatrain.errors import ModelError
from megatrain.models.recorder import LayerCall


class Beginning(torch.autograd.Function):
    """Hidden states as the first node of a graph, which unlike a leaf does not hold on to them; with a version counter of their own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        alias = torch.empty(0, dtype=hidden.dtype, device=hidden.device)
        return alias.set_(hidden.untyped_storage(), hidden.storage_offset(), hidden.shape, hidden.stride())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients end here")


class Graph:
    """Made by running a layer. Of its output only the root stays: the values are needed by whoever comes next.

    Args:
        run: (index of a layer, hidden states, call) -> output; hidden states and output [batch, tokens, hidden].
        saved: catches what the graph saves; None leaves that in its place.
    """

    def __init__(
        self,
        run: Callable[[int, Tensor, LayerCall], Tensor],
        index: int,
        hidden: Tensor,
        call: LayerCall,
        saved: SavedTensors | None = None,
    ) -> None:
        self._saved = saved
        with torch.enable_grad(), saved.caught() if saved else nullcontext():
            given: Tensor = Beginning.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
            version = given._version
            output = run(index, given, call)
        if given._version != version:  # another graph may have saved it, or it is to be kept; of a leaf, PyTorch itself would refuse
            raise ModelError("a layer writes over its input, which its gradients need; this model cannot be streamed")
        if saved:
            saved.leave(hidden.shape[0] * hidden.shape[1])
        self._ends = get_gradient_edge(given), get_gradient_edge(output)
        self._hidden = None if saved else hidden  # the plan reckons with it, though not every graph saves it
        self.output: Tensor | None = output.detach()

    def take_output(self) -> Tensor:
        """The layer's output, once: the graph lets go of it."""
        output, self.output = self.output, None
        assert output is not None
        return output

    def gradients(self, parameters: Collection[Tensor], grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the hidden states and of `parameters`, where `grad` is the output's. Once: the graph is spent."""
        given, output = self._ends
        wanted: list[Any] = [given, *parameters]  # torch's annotation knows no mixture of both
        with self._saved or nullcontext():
            return torch.autograd.grad([output], wanted, [grad], allow_unused=True)


class SavedTensors:
    """What one graph saved for backward: sent to host RAM when it is whole, and fetched back in time for its gradients.

    Args:
        stays: addresses of memory that is not the graph's own: weights, masks, rotary tables.
    """

    def __init__(self, keeper: Offload, stays: Collection[int]) -> None:
        self._keeper, self._stays = keeper, stays
        self._tensors: list[Tensor] = []
        self._places: dict[Any, int] = {}
        self.parked: Parked | None = None

    def caught(self) -> AbstractContextManager[Any]:
        """While the graph is made."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def leave(self, tokens: int) -> None:
        """The graph is whole, of so many tokens."""
        self._places.clear()
        self.parked = self._keeper.park_all(self._tensors, tokens)
        self._tensors = []

    def _pack(self, tensor: Tensor) -> Tensor | int:
        storage = tensor.untyped_storage().data_ptr()
        if tensor.device != self._keeper.compute.device or storage in self._stays or not _is_dense(tensor):
            return tensor.detach()
        shape = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        place = self._places.setdefault(shape, len(self._tensors))
        if place == len(self._tensors):
            self._tensors.append(tensor.detach())
        return place

    def _unpack(self, packed: Tensor | int) -> Tensor:
        return self._tensors[packed] if isinstance(packed, int) else packed

    def __enter__(self) -> None:
        """Fetch what is needed while gradients are computed."""
        assert self.parked is not None
        self._tensors = self._keeper.take_all(self.parked)

    def __exit__(self, *_: object) -> None:
        assert self.parked is not None
        self._tensors = []
        self._keeper.release(self.parked)


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill a stretch of memory, in whatever order."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < tensor.numel() == last + 1
