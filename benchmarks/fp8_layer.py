"""One decoder layer of Qwen2.5-7B's shape, forward and backward: bf16 against fp8 products by
policy.
python benchmarks/fp8_layer.py --rows 16 4 --json out.json
Three tables: the bare products of the layer (what fp8 could give), quantising their operands (what
it costs), and the whole layer. Its TFLOP/s = 6 x parameters x tokens / seconds of forward and
backward; attention's own arithmetic is not counted. Errors are relative L2 distances from the same
layer in float32, on 2 rows.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

import megatrain
from megatrain.models.transforms.fp8 import (
    ATTENTION,
    ROUTERS,
    Fp8Policy,
    apply_fp8,
    multiply,
    quantize,
)

REPEATS, WARMUPS = 20, 3
CHECKED_ROWS = 2
KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
POLICIES: dict[str, Fp8Policy | None] = {
    "bfloat16": None,
    "fp8": Fp8Policy(),
    "all fast": Fp8Policy(grad_input="fp8_fast", grad_weight="fp8_fast"),
    "all fp32 sums": Fp8Policy(output="fp8"),
    "grad_weight in bf16": Fp8Policy(grad_weight="bfloat16"),
    "output alone": Fp8Policy(grad_input="bfloat16", grad_weight="bfloat16"),
    "attention too": Fp8Policy(keep_output=()),
    "attention in bf16": Fp8Policy(keep=(*ROUTERS, *ATTENTION)),
}

Records = list[dict[str, Any]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[16],
        help="rows of a micro-batch; the first for the small tables too",
    )
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument(
        "--hidden", type=int, default=3584, help="other sizes stay in Qwen2.5-7B's proportion"
    )
    parser.add_argument("--variants", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--eager", action="store_true", help="do not compile the layer")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def layer_config(hidden: int) -> Any:
    heads = hidden // 128
    config = transformers.Qwen2Config(
        hidden_size=hidden,
        intermediate_size=hidden * 37 // 7,
        num_attention_heads=heads,
        num_key_value_heads=heads // 7,
        num_hidden_layers=1,
        vocab_size=128,
        max_position_embeddings=32768,
    )
    config._attn_implementation = "sdpa"
    return config


def milliseconds(call: Callable[[], object], device: torch.device) -> float:
    """Median of REPEATS calls, each to its end."""

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARMUPS):
        call()
    taken = []
    for _ in range(REPEATS):
        finish()
        started = time.perf_counter()
        call()
        finish()
        taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)


def show(title: str, records: Iterator[dict[str, Any]]) -> Records:
    """Print records as they come, one a line, and return them."""
    print(f"\n{title}")
    kept = []
    for record in records:
        print(
            "  "
            + ", ".join(
                f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                for key, value in record.items()
            ),
            flush=True,
        )
        kept.append(record)
    return kept


# -- the small tables ----------------------------------------------------------------------------


def products(layer: nn.Module, tokens: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Each distinct product of the layer, bare: operands are quantised before the clock runs."""
    shapes = {
        tuple(module.weight.shape) for module in layer.modules() if isinstance(module, nn.Linear)
    }
    for out, into in sorted(shapes):
        for what, (m, n, k) in {
            "output": (tokens, out, into),
            "grad_input": (tokens, into, out),
            "grad_weight": (out, into, tokens),
        }.items():
            a, b = (torch.randn(size, k, device=device).bfloat16() for size in (m, n))
            (a8, a_scales), (b8, b_scales) = quantize(a), quantize(b)
            scaled = partial(
                torch._scaled_mm,
                a8,
                b8.t(),
                scale_a=a_scales,
                scale_b=b_scales.t(),
                out_dtype=torch.bfloat16,
            )
            ms = {
                "bfloat16": milliseconds(partial(multiply, a, b, "bfloat16"), device),
                "fp8": milliseconds(partial(scaled, use_fast_accum=False), device),
                "fp8_fast": milliseconds(partial(scaled, use_fast_accum=True), device),
            }
            tflops = {f"{mode}_tflops": 2 * m * n * k / t / 1e9 for mode, t in ms.items()}
            yield {
                "product": what,
                "out": out,
                "in": into,
                **{f"{mode}_ms": t for mode, t in ms.items()},
                **tflops,
            }


def quantising(
    config: Any, tokens: int, device: torch.device, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Quantising activations and weights by rows and, transposed, by columns; GB/s counts one read
    in bf16 and one write in fp8."""
    run = torch.compile(quantize) if compiled else quantize
    hidden, wide = config.hidden_size, config.intermediate_size
    for rows, columns in ((tokens, hidden), (tokens, wide), (wide, hidden)):
        x = torch.randn(rows, columns, device=device).bfloat16()
        for along, operand in {"rows": x, "columns": x.t()}.items():
            ms = milliseconds(partial(run, operand), device)
            yield {
                "rows": rows,
                "columns": columns,
                "along": along,
                "ms": ms,
                "gb_per_s": 3 * x.numel() / ms / 1e6,
            }


# -- the layer -----------------------------------------------------------------------------------


class Case:
    """A layer and its input, to be run forward, and forward and backward."""

    def __init__(
        self, layer: nn.Module, config: Any, rows: int, seq_len: int, device: torch.device
    ) -> None:
        self.layer = layer
        dtype = next(layer.parameters()).dtype
        generator = torch.Generator().manual_seed(0)
        shape = (rows, seq_len, config.hidden_size)
        self.hidden, self.dy = (
            torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)
        )
        positions = torch.arange(seq_len, device=device).expand(rows, -1)
        self.positions = Qwen2RotaryEmbedding(config).to(device)(self.hidden, positions)
        self.saved_bytes = 0

    @torch.no_grad()
    def forward(self) -> Tensor:
        output: Tensor = self.layer(self.hidden, position_embeddings=self.positions)
        return output

    def forward_backward(self) -> tuple[Tensor, ...]:
        """(output, gradient of the input, gradients of the parameters)."""
        cuda = self.hidden.is_cuda
        hidden = self.hidden.detach().requires_grad_()
        before = torch.cuda.memory_allocated() if cuda else 0
        output = self.layer(hidden, position_embeddings=self.positions)
        self.saved_bytes = torch.cuda.memory_allocated() - before if cuda else 0
        return (
            output.detach(),
            *torch.autograd.grad(output, [hidden, *self.layer.parameters()], self.dy),
        )


def whole_layers(
    args: argparse.Namespace, config: Any, layer: nn.Module, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Every variant at every size."""
    parameters = sum(p.numel() for p in layer.parameters())
    exact = Case(
        copy.deepcopy(layer).float(), config, CHECKED_ROWS, args.seq_len, device
    ).forward_backward()
    for name in args.variants:
        torch._dynamo.reset()  # it keeps eight graphs of a function and then runs it eagerly
        variant, policy = copy.deepcopy(layer), POLICIES[name]
        if policy is not None:
            apply_fp8(variant, policy)
        ours = Case(variant, config, CHECKED_ROWS, args.seq_len, device).forward_backward()
        errors = [
            float((a.float() - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)
        ]
        if not args.eager:
            variant.compile(dynamic=False)
        for rows in args.rows:
            case, tokens = Case(variant, config, rows, args.seq_len, device), rows * args.seq_len
            forward_ms = milliseconds(case.forward, device)
            both_ms = milliseconds(case.forward_backward, device)
            yield {
                "variant": name,
                "tokens": tokens,
                "forward_ms": forward_ms,
                "forward_backward_ms": both_ms,
                "tflops": 6 * parameters * tokens / both_ms / 1e9,
                "tflops_recomputed": 6 * parameters * tokens / (forward_ms + both_ms) / 1e9,
                "saved_mib": case.saved_bytes / 2**20,
                "output_error": errors[0],
                "grad_input_error": errors[1],
                "grad_weight_error": statistics.median(errors[2:]),
            }


def main() -> None:
    args = arguments()
    device = torch.device(args.device)
    torch.manual_seed(0)
    config = layer_config(args.hidden)
    layer = Qwen2DecoderLayer(config, 0).to(device, torch.bfloat16)
    tokens = args.rows[0] * args.seq_len
    with sdpa_kernel(KERNELS, set_priority=True):
        tables = {
            "products": show("products", products(layer, tokens, device)),
            "quantising": show("quantising", quantising(config, tokens, device, not args.eager)),
            "layers": show("layers", whole_layers(args, config, layer, device)),
        }
    report = {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name()
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "versions": {
            "megatrain": megatrain.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "arguments": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
        },
        "policies": {name: policy and asdict(policy) for name, policy in POLICIES.items()},
        **tables,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
