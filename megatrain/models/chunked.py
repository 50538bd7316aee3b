"""A module that treats every token alike, computed a chunk of tokens at a time, forward and backward.

Between the two only its input is kept, so that what it holds in between, an MLP's gate and up products above all, is never longer than a
chunk. Backward computes each chunk again and adds its weights' gradients to fp32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Chunks:
    """Takes the place of a module's forward, x [batch, tokens, ...] -> the same shape and dtype.

    Args:
        module: what it computes of some tokens may depend on no others, nor on chance.
        tokens: of a chunk, over all rows of the batch.
        for_gradients: a context in which the module leaves out what its own gradients do not need.

    Attributes:
        run: the module's own forward, of one chunk.
        absent: nobody reads the output, so that it is not computed; gradients are.
    """

    def __init__(self, module: nn.Module, tokens: int, for_gradients: Callable[[], AbstractContextManager[None]]) -> None:
        self.module, self.tokens, self.for_gradients = module, tokens, for_gradients
        self.run: Callable[[Tensor], Tensor] = module.forward
        self.absent = False
        self._owners = {name: _owner(module, name) for name, _ in module.named_parameters()}

    @torch._dynamo.disable  # type: ignore[untyped-decorator]  # its loop would be unrolled; `run` may be compiled
    def __call__(self, x: Tensor) -> Tensor:
        weights = [owner._parameters[leaf] for owner, leaf in self._owners.values()]
        return Chunked.apply(self, x, *weights)  # type: ignore[no-untyped-call, no-any-return]

    def slices(self, x: Tensor) -> list[slice]:
        """Of the tokens of x's rows: as few as suffice, of equal length but for the last."""
        rows, length = x.shape[:2]
        count = -(-length // max(1, self.tokens // rows))
        step = -(-length // count)
        return [slice(start, min(start + step, length)) for start in range(0, length, step)]

    def whole(self, x: Tensor) -> Tensor:
        """The output for all of x, without a graph."""
        output = uninitialised(x)
        for part in self.slices(x):
            output[:, part] = self.run(x[:, part].contiguous())
        return output

    def gradients(self, x: Tensor, weights: Sequence[Tensor], dy: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        """Of x, and in fp32 of each weight, where needed: of x first, then of each of `weights`."""
        trained = [weight for weight, needs in zip(weights, needed[1:], strict=True) if needs]
        sums = [torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for weight in trained]
        dx = uninitialised(x) if needed[0] else None
        with self._holding(weights), self.for_gradients(), torch.enable_grad():
            for part in self.slices(x):
                piece = x[:, part].contiguous().detach().requires_grad_()
                grads = torch.autograd.grad(self.run(piece), [piece, *trained], dy[:, part], allow_unused=True)
                if dx is not None:
                    dx[:, part] = grads[0]
                for total, grad in zip(sums, grads[1:], strict=True):
                    if grad is not None:
                        total += grad
                del grads, piece  # before the next chunk's are there
        totals = iter(sums)
        return [dx, *(next(totals) if needs else None for needs in needed[1:])]

    @contextmanager
    def _holding(self, weights: Sequence[Tensor]) -> Iterator[None]:
        """The module computes with `weights`: those of its forward, which torch.func.functional_call may have lent it."""
        places = list(self._owners.values())
        before = [owner._parameters[leaf] for owner, leaf in places]
        try:
            _put(places, weights)
            yield
        finally:
            _put(places, before)


class Chunked(torch.autograd.Function):
    """`Chunks` as one operation that saves its input and the weights."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.chunks = chunks
        return uninitialised(x) if chunks.absent else chunks.whole(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return None, *ctx.chunks.gradients(x, weights, grads[0], ctx.needs_input_grad[1:])


def uninitialised(x: Tensor) -> Tensor:
    """Contiguous memory of x's shape and dtype."""
    return x.new_empty(x.shape)


def chunks_of(module: nn.Module) -> Chunks | None:
    """What `chunk` put into the module."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, Chunks) else None


def chunk(modules: Mapping[nn.Module, Callable[[], AbstractContextManager[None]]], tokens: int, compiled: bool = False) -> None:
    """Have these modules compute `tokens` at a time. Each comes with its `for_gradients`. compiled: torch.compile makes a chunk's graph."""
    for module, for_gradients in modules.items():
        chunks = Chunks(module, tokens, for_gradients)
        if compiled:
            chunks.run = torch.compile(chunks.run)
        module.__dict__["forward"] = chunks


def unchunk(modules: Mapping[nn.Module, Any]) -> None:
    """Undo `chunk`."""
    for module in modules:
        del module.__dict__["forward"]


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf


def _put(places: Sequence[tuple[nn.Module, str]], weights: Sequence[Any]) -> None:
    for (owner, leaf), weight in zip(places, weights, strict=True):
        owner._parameters[leaf] = weight
