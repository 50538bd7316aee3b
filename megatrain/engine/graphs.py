"""A layer's graph between forward and backward: its two ends, and what it saved, which may be
offloaded to host RAM meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

from megatrain.engine.activations import HostCopy, Offload
from megatrain.errors import ModelError
from megatrain.models.recorder import LayerCall


class Beginning(torch.autograd.Function):
    """Hidden states as the first node of a graph, which unlike a leaf does not keep them alive.

    They get a version counter of their own.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor) -> Tensor:
        return hidden.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients end here")


@dataclass
class Graph:
    """The ends of a layer's graph."""

    given: GradientEdge  # where its input begins
    root: GradientEdge  # where its output ends
    # its input on the device: not every graph saves it, but the planner counts it
    hidden: Tensor | None
    saved: SavedTensors | None  # what it saved, if that is offloaded

    def gradients(
        self, parameters: Collection[Tensor], grad: Tensor | None, *, ends_here: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Gradients of input and `parameters` from the output's `grad`. Spends the graph.

        ends_here: nothing before the layer is trained, so the input's is None.
        """
        wanted: list[Any] = [*parameters] if ends_here else [self.given, *parameters]
        with self.saved or nullcontext():  # torch annotates no mixture of both
            found = torch.autograd.grad([self.root], wanted, [grad], allow_unused=True)
        return (None, *found) if ends_here else found


def run_for_graph(
    run: Callable[[int, Tensor, LayerCall], Tensor],
    index: int,
    hidden: Tensor,
    call: LayerCall,
    saved: SavedTensors | None = None,
) -> tuple[Graph, Tensor]:
    """The graph of `run(index, hidden, call)`, and its output, detached.

    Args:
        hidden: the layer's input [batch, tokens, hidden], as is its output.
        saved: takes what the graph saves; None leaves that in place.

    Raises ModelError for a layer that writes over its input, which another graph may have saved.
    Of a leaf PyTorch itself would refuse that.
    """
    # the anchor requires gradients, as detached hidden states do not
    with torch.enable_grad(), saved.caught() if saved else nullcontext():
        given: Tensor = Beginning.apply(torch.empty(0, requires_grad=True), hidden)  # type: ignore[no-untyped-call]
        version = given._version
        output = run(index, given, call)
    if given._version != version:
        raise ModelError(
            "a layer writes over its input, which its gradients need; this model cannot be streamed"
        )
    if saved:
        saved.leave(hidden.shape[0] * hidden.shape[1])
    ends = get_gradient_edge(given), get_gradient_edge(output)
    return Graph(*ends, None if saved else hidden, saved), output.detach()


@dataclass(frozen=True)
class Saved:
    """A tensor that a graph saved, as a view of memory that travels whole.

    `number`: of the memory, in the order in which it was first seen.
    """

    number: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """The tensors that one graph saved for backward: sent to host RAM when the graph is complete,
    and fetched back for its gradients.

    Memory travels whole and once, however many views of it were saved. What is not the graph's own
    stays: weights, the layer's arguments (masks, rotary tables) and constants.
    """

    def __init__(
        self, keeper: Offload, weights: Tensor, call: LayerCall, constants: Sequence[Tensor]
    ) -> None:
        own = pytree.tree_leaves((weights, call.args, call.kwargs, constants))
        tensors = (leaf for leaf in own if isinstance(leaf, Tensor))
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._keeper = keeper
        self._memory: list[Tensor] = []  # flat, uint8
        self._numbers: dict[int, int] = {}
        self.sent: HostCopy | None = None

    def caught(self) -> AbstractContextManager[Any]:
        """Take what a graph saves that is made inside."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def leave(self, tokens: int) -> None:
        """The graph is complete: send what it saved. `tokens`: of its micro-batch."""
        self.sent = self._keeper.save_graph(self._memory, tokens)
        self._memory = []

    def _pack(self, tensor: Tensor) -> Tensor | Saved:
        storage = tensor.untyped_storage()
        address, device = storage.data_ptr(), self._keeper.compute.device
        if tensor.device != device or address in self._stays or storage.nbytes() == 0:
            return tensor.detach()  # an output that its own graph held would never be freed
        number = self._numbers.setdefault(address, len(self._memory))
        if number == len(self._memory):
            self._memory.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage))
        offset = int(tensor.storage_offset())
        return Saved(number, tensor.dtype, offset, tensor.shape, tensor.stride())

    def _unpack(self, packed: Tensor | Saved) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        memory = self._memory[packed.number].view(packed.dtype)
        offset = memory.storage_offset() + packed.offset
        return memory.as_strided(packed.shape, packed.stride, offset)

    def __enter__(self) -> None:
        """Bring what the graph saved to the device, for its gradients."""
        assert self.sent is not None
        self._memory = [*self._keeper.restore(self.sent)]

    def __exit__(self, *_: object) -> None:
        assert self.sent is not None
        self._memory = []
        self._keeper.free(self.sent)
