"""What the experts of a mixture reach of the rate of a lone matmul, by rows per expert.

    python -m benchmarks.grouped --json out.json

For each shape and number of tokens: forward and backward of the grouped matmuls alone, of the
whole block of experts as transformers runs it (sorting, gathering and weighing rows included), and
of one matmul of as many FLOPs. Rows are divided evenly among the experts, then at random. TFLOP/s
count the products alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import grouped_mm
from transformers import AutoConfig, PretrainedConfig

from benchmarks.records import machine
from megatrain.models.shapes import SHAPES

TOKENS = (4096, 8192, 16384, 65536)
REPEATS, WARMUPS = 10, 3
SIZES = {  # by model, the keys of: hidden size, an expert's inner size, number of experts
    "qwen3-30b-a3b": ("hidden_size", "moe_intermediate_size", "num_experts"),
    "qwen3.5-35b-a3b": ("hidden_size", "moe_intermediate_size", "num_experts"),
    "gpt-oss-20b": ("hidden_size", "intermediate_size", "num_local_experts"),
}


def seconds(work: Callable[[], object]) -> float:
    """Of the median of some calls, by the device's clock."""
    times: list[float] = []
    for _ in range(WARMUPS + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[WARMUPS:])


def ends_of(rows: int, experts: int, evenly: bool) -> Tensor:
    """Where each expert's rows end: int32 of `experts`."""
    if evenly:
        counts = torch.full((experts,), rows // experts)
    else:
        counts = torch.bincount(torch.randint(experts, (rows,)), minlength=experts)
    return counts.cumsum(0).to(torch.int32).cuda()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * 0.02


def backward_of(output: Tensor, inputs: list[Tensor]) -> Callable[[], object]:
    grad = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)


def both(output: Callable[[], Tensor], inputs: list[Tensor]) -> dict[str, float]:
    return {
        "forward_s": seconds(output),
        "backward_s": seconds(backward_of(output(), inputs)),
    }


def of_grouped(rows: int, wide: int, narrow: int, experts: int, evenly: bool) -> dict[str, float]:
    """One product of (rows, wide) with (experts, narrow, wide), as experts' first one."""
    inputs = [normal(rows, wide).requires_grad_(), normal(experts, narrow, wide).requires_grad_()]
    ends = ends_of(rows, experts, evenly)
    return both(lambda: grouped_mm(inputs[0], inputs[1].transpose(-2, -1), offs=ends), inputs)


def of_lone(rows: int, wide: int, narrow: int) -> dict[str, float]:
    inputs = [normal(rows, wide).requires_grad_(), normal(narrow, wide).requires_grad_()]
    return both(lambda: inputs[0] @ inputs[1].T, inputs)


def experts_of(config: PretrainedConfig) -> torch.nn.Module:
    """The experts of the model's last layer, with random weights."""
    from transformers import AutoModelForCausalLM

    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[-1:]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    found: torch.nn.Module = next(m for n, m in model.named_modules() if n.endswith("mlp.experts"))
    found.to_empty(device="cuda")
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return found


def of_block(block: Any, tokens: int, hidden: int, chosen: int) -> dict[str, float]:
    """The whole block of experts, tokens assigned at random."""
    states = normal(tokens, hidden).requires_grad_()
    scores, ids = torch.rand(tokens, block.num_experts, device="cuda").topk(chosen)
    return both(lambda: block(states, ids, scores.bfloat16()), [states, *block.parameters()])


def rates(times: dict[str, float], flops: float) -> dict[str, float]:
    """flops: of the forward."""
    return times | {
        "forward_tflops": flops / times["forward_s"] / 1e12,
        "backward_tflops": 2 * flops / times["backward_s"] / 1e12,
    }


def measure(name: str, tokens: int) -> list[dict[str, Any]]:
    config = AutoConfig.for_model(**SHAPES[name])
    hidden, inner, experts = (getattr(config, key) for key in SIZES[name])
    chosen = config.num_experts_per_tok
    rows, narrow = tokens * chosen, 2 * inner
    product = 2.0 * rows * hidden * narrow
    found = {
        "grouped, even": rates(of_grouped(rows, hidden, narrow, experts, True), product),
        "grouped, random": rates(of_grouped(rows, hidden, narrow, experts, False), product),
        "lone matmul": rates(of_lone(rows, hidden, narrow), product),
        "block": rates(of_block(experts_of(config), tokens, hidden, chosen), 1.5 * product),
    }
    torch.cuda.empty_cache()
    return [
        {"model": name, "tokens": tokens, "rows_per_expert": rows // experts, "what": what} | values
        for what, values in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--json", type=Path, help="file of the figures")
    args = parser.parse_args()
    torch.manual_seed(0)
    found = [row for name in args.models for tokens in args.tokens for row in measure(name, tokens)]
    for row in found:
        print(
            f"{row['model']:16} {row['tokens']:6} tokens, {row['rows_per_expert']:5} rows an expert"
            f"  {row['what']:16} {row['forward_tflops']:5.0f} {row['backward_tflops']:5.0f} TFLOP/s"
        )
    if args.json:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        args.json.write_text(
            json.dumps(
                {"date": date.today().isoformat(), "machine": machine(), **versions, "rows": found},
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
