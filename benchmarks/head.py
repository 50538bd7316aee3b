r"""Time of the LM head, forward and backward with loss, against its matrix products alone.

    python benchmarks/head.py --tokens 65536 --hidden 3584 --vocabulary 152064 \
        --chunks 2048 4096 8192 16384 --json out.json
    python benchmarks/head.py --device cpu --tokens 1024 --hidden 576 --vocabulary 49152 \
        --chunks 512 --variants products before eager

By variant and chunk size. Final norm and an untied linear head with random weights. Every variant
adds the weight's gradient to the same kind of fp32 sum; the column "error" is the relative distance
of that sum from the first variant's that has one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.engine import head
from megatrain.engine.products import Sum
from megatrain.losses import Targets, next_token


class Problem:
    """Hidden states, the head's norm and weight, targets, and the fp32 sums of their gradients."""

    def __init__(self, args: argparse.Namespace) -> None:
        device, dtype = torch.device(args.device), getattr(torch, args.dtype)
        torch.manual_seed(0)
        self.hidden = torch.randn(args.tokens, args.hidden, device=device).to(dtype)
        norm = torch.ones(args.hidden, device=device, dtype=dtype)
        weight = (torch.randn(args.vocabulary, args.hidden, device=device) * 0.02).to(dtype)
        self.parameters = [norm.requires_grad_(), weight.requires_grad_()]
        self.sums = [torch.zeros_like(p, dtype=torch.float32) for p in self.parameters]
        self.targets = Targets(
            torch.arange(args.tokens, device=device),
            torch.randint(args.vocabulary, (args.tokens,), device=device),
        )

    def project(self, x: Tensor) -> Tensor:
        return functional.linear(self.normed(x), self.parameters[1])

    def project_by_autograd(self, x: Tensor) -> Tensor:
        """The same, with the weight's gradient from autograd, to be added to the sum."""
        return self.normed(x) @ self.parameters[1].T

    def normed(self, x: Tensor) -> Tensor:
        norm = self.parameters[0]
        return functional.rms_norm(x, norm.shape, norm, 1e-6)

    def add(self, grads: list[Tensor | None]) -> None:
        for total, grad in zip(self.sums, grads, strict=True):
            if grad is not None:
                total.add_(grad)

    def open_sums(self) -> list[Sum]:
        return [Sum(total, empty=False) for total in self.sums]

    def run(self, project: Callable[[Tensor], Tensor], chunk: int, *, fused: bool = False) -> None:
        head.loss_and_gradients(
            project,
            self.hidden,
            self.targets,
            next_token,
            1 / len(self.hidden),
            chunk,
            self.parameters,
            self.open_sums(),
            fused,
        )


# -- variants ------------------------------------------------------------------------------------


def products(problem: Problem, chunk: int) -> None:
    """The three matrix products of every chunk, and nothing else: what the head would take at
    best."""
    weight = problem.parameters[1].detach()
    for rows in problem.hidden.split(chunk):
        logits = rows @ weight.T
        logits @ weight
        logits.T @ rows


class FirstLogprobs(torch.autograd.Function):
    """Log-probabilities as they were first built: softmax in fp32, twice, into a second array of
    the logits' size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits, labels)
        result = torch.empty(len(labels), device=logits.device)
        for rows in first_pieces(logits):
            result[rows] = (
                torch.log_softmax(logits[rows], dim=-1, dtype=torch.float32)
                .gather(1, labels[rows, None])
                .squeeze(1)
            )
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (logits, labels), (grad,) = ctx.saved_tensors, grads
        result = torch.empty_like(logits)
        for rows in first_pieces(logits):
            piece = torch.softmax(logits[rows], dim=-1, dtype=torch.float32).mul_(-grad[rows, None])
            result[rows] = piece.scatter_add_(1, labels[rows, None], grad[rows, None])
        return result, None


def first_pieces(logits: Tensor) -> Iterator[slice]:
    step = max(1, (256 << 20) // (4 * logits.shape[-1]))
    return (slice(start, start + step) for start in range(0, len(logits), step))


def before(problem: Problem, chunk: int) -> None:
    """The head as it was first built."""
    for part in problem.targets.chunks(chunk):
        rows = problem.hidden[part.index].requires_grad_()
        value = -FirstLogprobs.apply(problem.project(rows), part.labels).sum() / len(problem.hidden)
        _, *grads = torch.autograd.grad(value, [rows, *problem.parameters])
        problem.add([*grads])


VARIANTS: dict[str, Callable[[Problem, int], None]] = {
    "products": products,
    "before": before,
    "eager": lambda problem, chunk: problem.run(problem.project_by_autograd, chunk),
    "eager, sums": lambda problem, chunk: problem.run(problem.project, chunk),
    "fused": lambda problem, chunk: problem.run(problem.project_by_autograd, chunk, fused=True),
    "fused, sums": lambda problem, chunk: problem.run(problem.project, chunk, fused=True),
}


# -- the embedding -------------------------------------------------------------------------------


def embedding_dense(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """The embedding's gradient as autograd makes it, a whole weight of mostly zeros, added to the
    fp32 sum."""
    total.add_(torch.ops.aten.embedding_dense_backward(grad, ids, len(total), -1, False))


def embedding_rows(total: Tensor, ids: Tensor, grad: Tensor) -> None:
    """The same, adding to the rows of the sum that were looked up, in a fixed order."""
    Sum(total, empty=False).add_rows(ids, grad)


EMBEDDINGS = {"embedding, dense": embedding_dense, "embedding, rows": embedding_rows}


# -- measuring -----------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """The best of `repeats`, after one to warm up. On a CPU, whose cores other programs use too,
    seconds of all threads' own time."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    times = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = clock()
        work()
        synchronize(device)
        times.append(clock() - started)
    return min(times[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rows_of(args: argparse.Namespace, problem: Problem) -> Iterator[dict[str, Any]]:
    """One row of the table for every variant and chunk."""
    device, reference, before_bytes = problem.hidden.device, None, 0
    flops = 6 * args.tokens * args.hidden * args.vocabulary
    for name in args.variants:
        for chunk in args.chunks:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before_bytes = torch.cuda.memory_allocated(device)
            taken = seconds(lambda: VARIANTS[name](problem, chunk), device, args.repeats)  # noqa: B023  (called at once)
            peak = (
                torch.cuda.max_memory_allocated(device) - before_bytes
                if device.type == "cuda"
                else 0
            )
            for total in problem.sums:
                total.zero_()
            VARIANTS[name](problem, chunk)
            error = None
            if name != "products":
                reference = problem.sums[1].clone() if reference is None else reference
                error = float((problem.sums[1] - reference).norm() / reference.norm())
            yield {
                "variant": name,
                "chunk": chunk,
                "s": taken,
                "tflops": flops / taken / 1e12,
                "peak_bytes": peak,
                "error": error,
            }


def embedding_rows_of(args: argparse.Namespace, problem: Problem) -> Iterator[dict[str, Any]]:
    """Seconds of the embedding's backward for all tokens, in micro-batches of each size."""
    ids = problem.targets.labels
    for name, work in EMBEDDINGS.items():
        for size in args.chunks:

            def step(work: Callable[..., None] = work, size: int = size) -> None:
                for part, grad in zip(ids.split(size), problem.hidden.split(size), strict=True):
                    work(problem.sums[1], part, grad)

            yield {
                "variant": name,
                "chunk": size,
                "s": seconds(step, problem.hidden.device, args.repeats),
            }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--chunks", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    problem = Problem(args)
    table = []
    for row in chain(rows_of(args, problem), embedding_rows_of(args, problem)):
        table.append(row)
        print(
            "  ".join(
                f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
            ),
            flush=True,
        )
    if args.json:
        hardware = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        options = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key != "json"
        }
        report = {
            "hardware": hardware,
            "torch": torch.__version__,
            "arguments": options,
            "rows": table,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
