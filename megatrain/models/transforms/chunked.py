"""A token-wise module computed a chunk of tokens at a time, forward and backward.

Between the two only its input is kept: an MLP's gate and up activations never have more tokens than
a chunk. Backward recomputes each chunk and adds weight gradients to fp32 accumulators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.models.meta import lent


# why: decision 0025
class Chunks:
    """Takes the place of a token-wise module's forward, x [batch, tokens, ...] -> the same shape.

    Args:
        tokens: of a chunk, over all sequences of the batch.
        for_gradients: a context in which the module leaves out what its own gradients do not need.
    """

    def __init__(
        self,
        module: nn.Module,
        tokens: int,
        for_gradients: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module, self.tokens, self.for_gradients = module, tokens, for_gradients
        self.run: Callable[[Tensor], Tensor] = module.forward  # for one chunk
        self.absent = False  # True: the output is not computed, as nobody reads it; gradients are
        # called with the tokens of each sequence that run next; None: all, again
        self.entered: Callable[[slice | None], object] = lambda part: None
        names = [name.rpartition(".") for name, _ in module.named_parameters()]
        self._owners = [(module.get_submodule(path), leaf) for path, _, leaf in names]

    # its loop would be unrolled; `run` may be compiled
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, x: Tensor) -> Tensor:
        weights = [owner._parameters[leaf] for owner, leaf in self._owners]
        return Chunked.apply(self, x, *weights)  # type: ignore[no-untyped-call, no-any-return]

    def parts(self, x: Tensor) -> Iterator[slice]:
        """Slices of x's tokens, each announced to `entered`: as few as possible, of equal length
        but for the last."""
        rows, length = x.shape[:2]
        count = -(-length // max(1, self.tokens // rows))
        step = -(-length // count)
        for start in range(0, length, step):
            part = slice(start, min(start + step, length))
            self.entered(part)
            yield part
        self.entered(None)

    def whole(self, x: Tensor) -> Tensor:
        """The output for all of x, without a graph."""
        output = uninitialised(x, *x.shape)
        for part in self.parts(x):
            output[:, part] = self.run(x[:, part].contiguous())
        return output

    def gradients(
        self, x: Tensor, weights: Sequence[Tensor], dy: Tensor, needed: Sequence[bool]
    ) -> list[Tensor | None]:
        """Gradients of x and, in fp32, of each of `weights`; None where not `needed`."""
        trained = [weight for weight, needs in zip(weights, needed[1:], strict=True) if needs]
        sums = [torch.zeros(w.shape, dtype=torch.float32, device=w.device) for w in trained]
        dx = uninitialised(x, *x.shape) if needed[0] else None
        # with the weights of the forward, which torch.func.functional_call may only have lent
        with lent(self._owners, weights), self.for_gradients(), torch.enable_grad():
            for part in self.parts(x):
                piece = x[:, part].contiguous().detach().requires_grad_()
                grads = torch.autograd.grad(
                    self.run(piece), [piece, *trained], dy[:, part], allow_unused=True
                )
                if dx is not None:
                    dx[:, part] = grads[0]
                for total, grad in zip(sums, grads[1:], strict=True):
                    if grad is not None:
                        total += grad
                del grads, piece  # before the next chunk's are there
        totals = iter(sums)
        return [dx, *(next(totals) if needs else None for needs in needed[1:])]


class Chunked(torch.autograd.Function):
    """`Chunks` as one operation that saves its input and the weights."""

    @staticmethod
    def forward(ctx: Any, chunks: Chunks, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.chunks = chunks
        return uninitialised(x, *x.shape) if chunks.absent else chunks.whole(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        return None, *ctx.chunks.gradients(x, weights, grads[0], ctx.needs_input_grad[1:])


def uninitialised(like: Tensor, *shape: int) -> Tensor:
    """Contiguous memory of a tensor's dtype, with whatever it holds; nothing may depend on it."""
    return like.new_empty(shape)


def chunks_of(module: nn.Module) -> Chunks | None:
    """The replacement that `chunk` has put into the module."""
    found = vars(module).get("forward")
    return found if isinstance(found, Chunks) else None


def chunk(
    modules: Mapping[nn.Module, Callable[[], AbstractContextManager[None]]],
    tokens: int,
    compiled: bool = False,
) -> None:
    """Have modules, each with its `for_gradients`, compute `tokens` at a time."""
    for module, for_gradients in modules.items():
        chunks = Chunks(module, tokens, for_gradients)
        if compiled:
            chunks.run = torch.compile(chunks.run)
        vars(module)["forward"] = chunks


def unchunk(modules: Mapping[nn.Module, Any]) -> None:
    """Undo `chunk`."""
    for module in modules:
        del vars(module)["forward"]
