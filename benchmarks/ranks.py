"""Steps of an engine on the GPUs of one host, each a rank, or on one of them.

    torchrun --nproc-per-node 2 -m benchmarks.ranks --model qwen2.5-7b --tokens 65536
    python -m benchmarks.ranks --model qwen2.5-7b --tokens 65536     # a rank alone, beside it

Random weights and tokens, `--tokens` for each rank. Options say what lies where. What the planner
makes of them is printed beside what was measured: seconds, GPU memory, and host RAM of a rank. It
takes the machine's rates as `megatrain doctor --gpus N` has found them, or with `--measure` anew.
Losses and norms are written as hexadecimal digits, to compare runs to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from benchmarks.records import machine
from megatrain.engine.build import prepare
from megatrain.engine.engine import Engine
from megatrain.engine.resolved import Machine, Weights, make_job, resolve
from megatrain.machine.hardware import GIB, keep_caches_small, read_hardware, update_threads
from megatrain.machine.together import part_of
from megatrain.models.skeleton import Skeleton
from megatrain.optim import AdamW
from megatrain.planner.job import Budget, Choices
from megatrain.planner.memory import Layout
from megatrain.planner.plan import Plan, lay_out
from megatrain.recipes.doctor import measured_or_typical, measured_together
from megatrain.recipes.shapes import bench_config, shape_config
from megatrain.reporting.meters import GpuMeter, peak_host_bytes
from megatrain.settings import ALL, Settings
from megatrain.world import World


def join(device: str) -> tuple[World, str]:
    """This process' rank under torchrun, or a rank alone, and its device."""
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return World(), device
    backend = "cpu:gloo,cuda:nccl" if device != "cpu" else "gloo"
    distributed.init_process_group(backend)
    return World.joined(torch.device(device)), device


def chosen(args: argparse.Namespace, world: World) -> dict[str, Any]:
    """What the options say, by fields of `Chosen`."""
    return {
        "head_chunk_tokens": args.head_chunk,
        "groups": args.groups,
        "sums_on_device": args.sums if args.groups > 1 else 0,
        "resident": args.resident,
        "retained": args.retained,
        "offload_activations": args.offload,
        "update_threads": max(1, update_threads() // world.size),
    }


def planned(args: argparse.Namespace, world: World, device: str) -> Plan:
    """The plan of what the options say. All ranks call it, before anything is allocated."""
    keep_caches_small()
    where = torch.device(device)
    hardware = read_hardware(".", where.type)
    base = None
    if world.rank == 0:  # alone
        base = measured_or_typical(hardware, where, may_measure=args.measure)
    base = world.every(base)[0]
    assert base is not None
    profile, assumed = base, False
    if not world.is_alone:
        given = base, hardware, where, world
        profile, assumed = measured_together(*given, may_measure=args.measure)
    part = part_of(hardware, world.size)
    there = {"ranks": world.size, "together_assumed": assumed}
    machine = Machine(where, "bfloat16", part, profile, **there)
    model = shape_config(bench_config(args.model), args.layers)
    resolved = resolve(
        Skeleton(model, dtype=torch.bfloat16),
        machine,
        optimizer=AdamW(moments=args.moments),
        max_grad_norm=None if args.unclipped else 1.0,
        router_aux_loss_coef=0.0,
        seq_len=args.seq_len,
        weights=Weights(None),
        compile=args.compile,
        micro_batch_tokens=args.micro_batch,
        layer_chunk_tokens=None,
    )
    tokens = world.size * args.tokens
    job = make_job(resolved, tokens_per_step=tokens, checkpoints_written=0)
    choices = Choices(micro_batch_tokens=args.micro_batch, **chosen(args, world))
    budget = Budget(None if part.gpu is None else part.gpu.free_bytes, part.host_available_bytes)
    plan = lay_out(Layout.of(choices, job, resolved.shape, part), profile, budget)
    return replace(plan, ranks_assumed=assumed)


def open_engine(args: argparse.Namespace, world: World, device: str) -> Engine:
    settings = Settings(**chosen(args, world), compile=args.compile)
    prepared = prepare(
        shape_config(bench_config(args.model), args.layers),
        optimizer=AdamW(moments=args.moments),
        max_grad_norm=None if args.unclipped else 1.0,
        router_aux_loss_coef=0.0,
        device=device,
        settings=settings,
        weights=Weights(None),
    )
    engine = Engine(**prepared.arguments(), world=world)
    engine.draw_weights()
    return engine


def micro_batches(args: argparse.Namespace, engine: Engine, number: int) -> list[dict[str, Any]]:
    """One step's of this rank."""
    draws = torch.Generator().manual_seed(1000 * number + engine.world.rank)
    shape = args.tokens // args.seq_len, args.seq_len
    ids = torch.randint(engine.anatomy.vocab_size, shape, generator=draws)
    return [{"input_ids": part, "labels": part} for part in ids.split(args.micro_batch // shape[1])]


def measured(args: argparse.Namespace, world: World, device: str) -> dict[str, Any]:
    found = []
    with open_engine(args, world, device) as engine, GpuMeter(engine.device) as meter:
        for number in range(args.warmup + args.steps):
            batches = micro_batches(args, engine, number)
            world.every(None)
            started = time.perf_counter()
            result = engine.train_step(batches, lr=1e-5)
            seconds = time.perf_counter() - started
            assert result.grad_norm is not None
            bits = result.loss.hex(), result.grad_norm.hex()
            found.append({"seconds": seconds, "bits": bits, "stalls_s": dict(result.stalls_s)})
            if world.rank == 0:
                print(f"{seconds:.3f} s, loss {result.loss:.4f}", flush=True)
        for block in engine.anatomy.blocks:
            engine.wait_ready(block.index)  # the last update is deferred
        parameters, driver = engine.anatomy.parameters, meter.peak_bytes()
    on_gpu = device != "cpu"
    return {
        "rank": world.rank,
        "parameters": parameters,
        "step_s": statistics.median(one["seconds"] for one in found[args.warmup :]),
        "steps": found,
        "gpu_peak_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else 0,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else 0,
        "driver_bytes": driver,
        "host_peak_bytes": peak_host_bytes(),
    }


def compare(plan: Plan, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Print what was planned beside the most that any rank has measured."""

    def most(name: str) -> float:
        return float(max(one[name] or 0 for one in ranks))

    rows = {
        "seconds": (plan.timing.seconds, most("step_s")),
        "allocated": (plan.allocated_bytes, most("allocated_bytes")),
        "driver": (plan.gpu_bytes, most("driver_bytes")),
        "host": (plan.host_bytes, most("host_peak_bytes")),
    }
    rates = "assumed" if plan.ranks_assumed else "measured"
    print(f"planned, with {rates} rates of ranks together, and measured:")
    for name, (expected, found) in rows.items():
        unit, digits = (1, ".3f") if name == "seconds" else (GIB, ".2f")
        error = f"{expected / found - 1:+.1%}" if found else "-"
        print(f"  {name:10}{expected / unit:>10{digits}}{found / unit:>10{digits}}  {error}")
    waits = {name: seconds for name, seconds in plan.timing.waits.items() if seconds}
    print(f"  waits planned: {waits}")
    print(f"  waits measured: {ranks[0]['steps'][-1]['stalls_s']}")
    return {name: {"planned": e, "measured": f} for name, (e, f) in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="qwen2.5-7b", help="a named shape, folder or hub id")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=65536, help="of a step, for each rank")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=16384, help="tokens")
    parser.add_argument("--head-chunk", type=int, default=8192, help="tokens")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--sums", type=int, default=ALL, help="blocks whose sums stay on the GPU")
    parser.add_argument("--resident", type=int, default=0, help="blocks")
    parser.add_argument("--retained", type=int, default=0, help="layers")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--offload", action="store_true", help="activations")
    parser.add_argument("--unclipped", action="store_true")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="the machine, for the plan")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    world, device = join(args.device)
    plan = planned(args, world, device)
    ranks = world.every(measured(args, world, device))
    if world.rank:
        return
    step_s, parameters = max(one["step_s"] for one in ranks), ranks[0]["parameters"]
    tflops = 6 * parameters * args.tokens / step_s / 1e12
    about = {"date": date.today().isoformat(), "machine": machine(), "torch": torch.__version__}
    result = {**about, "options": {**vars(args), "output": None}, "ranks": ranks}
    result |= {"size": world.size, "step_s": step_s, "tflops_per_rank": tflops}
    result |= {"plan": plan.to_dict(), "compared": compare(plan, ranks)}
    if args.output is not None:
        args.output.write_text(json.dumps(result, indent=1, default=str) + "\n")
    total = world.size * args.tokens / step_s
    print(f"{world.size} rank(s): {step_s:.3f} s, {total:,.0f} tokens/s, {tflops:.0f} TFLOP/s each")
    print(f"bits of the last step: {' '.join(ranks[0]['steps'][-1]['bits'])}")


if __name__ == "__main__":
    main()
