"""Attention of rows of many lengths, forward and backward: the first time that a kernel meets a
shape, and every other time.
python -m benchmarks.attention --heads 28 --shared-heads 4 --json out.json
Causal, in bf16, on a CUDA device. Micro-batches have as many rows as fit their tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from megatrain.machine.hardware import MIB
from megatrain.reporting.meters import peak_host_bytes

LENGTHS = (
    2000,
    1777,
    1501,
    1333,
    1111,
    1001,
    899,
    777,
    702,
    650,
    555,
    505,
    444,
    411,
    377,
    333,
    301,
    222,
    190,
    150,
    111,
    80,
)
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
AGAIN = 4  # times; the best counts


def random_inputs(rows: int, length: int, heads: tuple[int, int, int], size: int) -> list[Tensor]:
    """Query, key and value [rows, heads, length, size], laid out as a layer's products leave
    them."""
    sizes = ((rows, length, count, size) for count in heads)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for shape in sizes
    ]


def seconds(inputs: list[Tensor], shared: bool) -> float:
    started = time.perf_counter()
    query, key, value = inputs
    output = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(kernel: SDPBackend, args: argparse.Namespace) -> dict[str, Any]:
    heads, shared = (
        (args.heads, args.shared_heads, args.shared_heads),
        args.shared_heads != args.heads,
    )
    with sdpa_kernel(kernel):
        seconds(random_inputs(2, 128, heads, args.head_size), shared)  # its library
        before, first, again = peak_host_bytes(), [], {}
        for length in args.lengths:
            inputs = random_inputs(max(1, args.tokens // length), length, heads, args.head_size)
            first.append(seconds(inputs, shared))
            again[length] = min(seconds(inputs, shared) for _ in range(AGAIN))
        grown = peak_host_bytes() - before
    return {
        "first_s": statistics.fmean(first),
        "again_s": statistics.fmean(again.values()),
        "host_bytes": grown,
        "again_s_by_length": again,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=28)
    parser.add_argument("--shared-heads", type=int, default=4, help="of keys and values")
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch, at most")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("these kernels need a CUDA device; none was found")
    results = {name: measure(kernel, args) for name, kernel in KERNELS.items()}
    for name, result in results.items():
        print(
            f"{name}: {result['first_s'] * 1e3:.1f} ms a new shape, "
            f"{result['again_s'] * 1e3:.2f} ms one seen before; "
            f"host RAM +{result['host_bytes'] / MIB / len(args.lengths):.1f} MiB a shape"
        )
    if args.json:
        given = {name: value for name, value in vars(args).items() if name != "json"}
        versions = {
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "gpu": torch.cuda.get_device_name(),
        }
        args.json.write_text(
            json.dumps({"arguments": given, **versions, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
