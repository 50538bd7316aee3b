"""Throughput of the streaming engine on a model shape with random weights: whole optimizer steps, everything counted.

    python benchmarks/throughput.py --shape qwen2.5-7b --tokens 65536 --seq-len 1024 --micro-batch-rows 16 --steps 4 --json out.json

Prints a table, and writes the raw figures as JSON. TFLOP/s = 6 x all parameters x tokens / seconds of a whole step,
update and clipping included.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

import megatrain
from megatrain.engine.build import from_config
from megatrain.engine.engine import Engine
from megatrain.engine.settings import Settings
from megatrain.hardware import update_threads
from megatrain.meters import GpuMeter, host_bytes
from megatrain.optim import AdamW

QWEN = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {**QWEN, "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                     "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen2.5-1.5b": {**QWEN, "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
                     "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen2.5-7b": {**QWEN, "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                   "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "qwen2.5-14b": {**QWEN, "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
                    "num_attention_heads": 40, "num_key_value_heads": 8, "tie_word_embeddings": False},
    "tiny": {**QWEN, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--layers", type=int, help="override the number of layers")
    parser.add_argument("--tokens", type=int, default=65536, help="per optimizer step")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch-rows", type=int, default=16)
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--head-chunk", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=update_threads())
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--max-grad-norm", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action="store_true", help="torch.compile every decoder layer")
    parser.add_argument(
        "--profile", type=Path, help="trace one more step into this file (chrome://tracing, Perfetto) and print its top kernels"
    )
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def build_engine(args: argparse.Namespace) -> Engine:
    shape = dict(SHAPES[args.shape])
    if args.layers:
        shape["num_hidden_layers"] = args.layers
    config = transformers.AutoConfig.for_model(**shape)
    settings = Settings(groups=args.groups, head_chunk=args.head_chunk, update_threads=args.threads, compile=args.compile)
    clip = args.max_grad_norm or None
    return from_config(config, optimizer=AdamW(lr=1e-5), precision="bfloat16", max_grad_norm=clip, device=args.device, settings=settings)


def micro_batches(args: argparse.Namespace, vocab_size: int, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = args.tokens // args.seq_len
    ids = torch.randint(0, vocab_size, (rows, args.seq_len), generator=generator)
    return [{"input_ids": part, "labels": part} for part in ids.split(args.micro_batch_rows)]


def measure(args: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """Seconds of every measured step and where they went. Each step's time includes its part of the update of the step before it, which is
    what a long run pays; making the random batches is left out."""
    records: list[dict[str, Any]] = []
    for step in range(args.warmup + args.steps):
        batches = micro_batches(args, engine.anatomy.vocab_size, step)
        started = time.perf_counter()
        result = engine.train_step(batches)
        record = {"seconds": time.perf_counter() - started, "loss": result.loss, "grad_norm": result.grad_norm, **result.stalls_s}
        records.append(record)
        print(f"step {step}: " + ", ".join(f"{k} {v:.3f}" for k, v in record.items() if v is not None), flush=True)
    seconds = [record["seconds"] for record in records[args.warmup :]]
    return {"steps": records, "seconds_per_step": sum(seconds) / len(seconds), "median_seconds": statistics.median(seconds)}


def profile(args: argparse.Namespace, engine: Engine) -> None:
    """Trace one step after the measured ones."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    batches = micro_batches(args, engine.anatomy.vocab_size, 0)
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        engine.train_step(batches)
    print(trace.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=80))
    trace.export_chrome_trace(str(args.profile))


def main() -> None:
    args = arguments()
    started = time.perf_counter()
    engine = build_engine(args)
    setup = time.perf_counter() - started
    with engine, GpuMeter(engine.device) as meter:
        figures = measure(args, engine)
        if args.profile:
            profile(args, engine)
        parameters = engine.anatomy.parameters
        boundaries = args.tokens // args.groups * engine.anatomy.hidden_size * 2 * (engine.anatomy.layers + 1)
        cuda = engine.device.type == "cuda"
        figures |= {
            "parameters": parameters,
            "setup_seconds": setup,
            "tflops": 6 * parameters * args.tokens / figures["seconds_per_step"] / 1e12,
            "tokens_per_s": args.tokens / figures["seconds_per_step"],
            "host_bytes": host_bytes(),
            "host_bytes_per_parameter": host_bytes() / parameters,
            "gpu_peak_bytes": meter.peak_bytes(),
            "gpu_peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "gpu_peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
            "boundary_bytes": boundaries,
        }
    report = {
        "date": date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if cuda else platform.processor(),
        "versions": {"megatrain": megatrain.__version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        **figures,
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    for key, value in report.items():
        if isinstance(value, int | float):
            print(f"{key:28} {value}")


if __name__ == "__main__":
    main()
