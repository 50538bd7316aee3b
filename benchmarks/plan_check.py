"""The plan against reality: plans small and middle-sized runs, makes two steps of each in a process of its own, and compares the peaks.

    python benchmarks/plan_check.py                       # the cases for this machine, on CUDA if there is any
    python benchmarks/plan_check.py --only qwen-7b --json out.json

Columns: bytes where the model computes (what PyTorch allocates and reserves, what the driver counts) and of host RAM (peak resident
memory of the process), predicted and measured. "other" is what the host holds beyond the rows that can be counted, less what the process
held at planning: the figure behind hardware.py's CPU_LIBRARY_BYTES and CUDA_LIBRARY_BYTES. Exits 1 if a promise is broken: GPU 3%, host 2%.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

GPU_TOLERANCE, HOST_TOLERANCE = 0.03, 0.02
MIB = 2**20


@dataclass(frozen=True)
class Case:
    """One run: Qwen2's layers (biases in attention, 128 wide heads), so many of them, random weights."""

    hidden: int
    layers: int
    tokens: int  # per step
    micro_batch: int  # tokens
    vocab: int = 32_768
    seq_len: int = 512
    groups: int = 1
    resident: int = 0  # blocks
    sums: int = 0  # blocks whose gradient sums stay on the device between groups
    retained: int = 0  # layers
    offload: bool = False
    compiled: bool = False
    cheap: bool = False  # retention
    clipping: bool = True
    tied: bool = False
    precision: str = "bfloat16"
    head_chunk: int | None = None  # None: the planner's

    def config(self) -> Any:
        from transformers import Qwen2Config

        heads = max(2, self.hidden // 128)
        return Qwen2Config(
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 16 // 3 // 128 * 128,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
        )


CUDA_CASES = {
    "small": Case(1024, 8, 16_384, 2048),
    "tied, large vocabulary": Case(1024, 16, 32_768, 8192, vocab=151_936, tied=True),
    "float32": Case(1024, 8, 16_384, 4096, precision="float32"),
    "unclipped": Case(2048, 8, 32_768, 8192, clipping=False),
    "groups, sums on the GPU": Case(2048, 8, 32_768, 4096, groups=2, sums=10),
    "groups, sums on the host": Case(2048, 8, 32_768, 4096, groups=2),
    "half resident": Case(2048, 8, 32_768, 8192, resident=5),
    "all resident, all retained": Case(2048, 8, 32_768, 4096, groups=4, resident=10, sums=10, retained=8),
    "half retained, sums here and there": Case(2048, 8, 32_768, 4096, groups=2, resident=3, sums=6, retained=4),
    "compiled, retained": Case(2048, 8, 32_768, 4096, groups=2, sums=10, retained=8, compiled=True),
    "compiled, cheaply retained": Case(2048, 8, 32_768, 4096, groups=2, sums=10, retained=8, compiled=True, cheap=True),
    "offloaded": Case(2048, 8, 65_536, 4096, resident=3, offload=True),
    "qwen-7b, 4 layers": Case(3584, 4, 65_536, 16_384, vocab=152_064, seq_len=1024, head_chunk=4096),
    "qwen-7b, 4 layers, head decides": Case(3584, 4, 65_536, 8192, vocab=152_064, seq_len=1024, head_chunk=4096),
}
CPU_CASES = {
    "small": Case(512, 8, 2048, 512, vocab=8192, seq_len=128),
    "tied, large vocabulary": Case(512, 8, 2048, 1024, vocab=49_152, seq_len=256, tied=True),
    "float32": Case(512, 8, 2048, 1024, vocab=8192, seq_len=256, precision="float32"),
    "float32, tied": Case(512, 4, 1024, 512, vocab=49_152, seq_len=256, precision="float32", tied=True),
    "unclipped": Case(512, 8, 2048, 1024, vocab=8192, seq_len=256, clipping=False),
    "groups": Case(512, 8, 2048, 512, vocab=8192, seq_len=128, groups=2, sums=10),
    "all resident, all retained": Case(512, 8, 2048, 512, vocab=8192, seq_len=128, groups=4, resident=10, sums=10, retained=8),
    "half retained, sums here and there": Case(512, 8, 2048, 512, vocab=8192, seq_len=128, groups=2, resident=3, sums=6, retained=4),
    "middle": Case(1024, 8, 2048, 1024, vocab=16_384, seq_len=256),
}


# -- one case, in a process of its own ----------------------------------------------------------------------------------------------


def plan_case(case: Case, device: str) -> Any:
    """The plan of a case, made as a run makes it: from a skeleton and the machine, before anything is allocated."""
    # what a run has in memory by now, too
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM  # noqa: F401

    import megatrain.recipes.run  # noqa: F401
    from megatrain.engine.settings import PRECISIONS
    from megatrain.hardware import keep_heap_small, probe
    from megatrain.machine import typical
    from megatrain.models.shape import shape_of
    from megatrain.models.skeleton import Skeleton
    from megatrain.planner import Job, lay_out, make_plan
    from megatrain.recipes.setup import next_token_on_meta

    keep_heap_small()
    hardware = probe(".", device)
    skeleton = Skeleton(case.config(), dtype=PRECISIONS[case.precision])
    sizes, loss = [case.micro_batch], next_token_on_meta
    shape = shape_of(skeleton, case.seq_len, sizes, head_loss=loss, runs_on=device, compiled=case.compiled)
    asked = {"micro_batch_tokens": case.micro_batch, "groups": case.groups, "resident": case.resident, "retained": case.retained}
    asked |= {"offload": case.offload, "compiled": case.compiled, "cheap_retention": case.cheap}
    job = Job(case.precision, case.tokens, case.seq_len, case.clipping, **asked)
    machine = typical(hardware)
    plan = make_plan(job, shape, hardware, machine)
    choices = replace(plan.choices, sums_on_device=case.sums, head_chunk_tokens=case.head_chunk or plan.choices.head_chunk_tokens)
    return lay_out(choices, job, shape, hardware, machine, plan.budget)


def measure(case: Case, device: str, steps: int) -> dict[str, Any]:
    """Plan, train, and report predicted and measured bytes."""
    import torch

    from megatrain.engine.build import choose_device, from_config
    from megatrain.meters import GpuMeter, host_bytes
    from megatrain.recipes.setup import settings_of

    where = choose_device(device)
    plan = plan_case(case, where.type)
    choices = plan.choices
    settings = settings_of(plan)
    limit = 1.0 if case.clipping else None
    cuda = where.type == "cuda"
    with (
        from_config(case.config(), precision=case.precision, max_grad_norm=limit, device=str(where), settings=settings) as engine,
        GpuMeter(where) as meter,
    ):
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            ids = torch.randint(case.vocab, (case.tokens // case.seq_len, case.seq_len), generator=generator)
            engine.train_step([{"input_ids": rows, "labels": rows} for rows in ids.split(case.micro_batch // case.seq_len)])
        for block in engine.anatomy.blocks:
            engine.wait_ready(block.index)  # the last update is deferred
        peak = {
            "allocated": torch.cuda.max_memory_allocated() if cuda else None,
            "reserved": torch.cuda.max_memory_reserved() if cuda else None,
            "driver": meter.peak_bytes(),
            "host": host_bytes(),
        }
    predicted = {"allocated": plan.allocated_bytes if cuda else None, "driver": plan.gpu_bytes if cuda else None, "host": plan.host_bytes}
    return {
        "case": asdict(case),
        "parameters": plan.parameters,
        "predicted": predicted,
        "measured": peak,
        "other": peak["host"] - (plan.host_bytes - plan.host["libraries at work"]),
        "device": plan.device,
        "host": plan.host,
        "working_sets": plan.working_sets,
        "head_chunk": choices.head_chunk_tokens,
    }


# -- all cases ----------------------------------------------------------------------------------------------------------------------


def run_case(case: Case, device: str, steps: int) -> dict[str, Any]:
    """`measure` in a fresh interpreter, so that the peaks are its own."""
    command = [sys.executable, __file__, "--device", device, "--steps", str(steps), "--one", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{case} failed:\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def errors(result: dict[str, Any]) -> dict[str, float]:
    """Predicted over measured, less one, for every figure that was measured."""
    return {name: value / result["measured"][name] - 1 for name, value in result["predicted"].items() if value is not None}


def broken(result: dict[str, Any]) -> list[str]:
    """The promises that a result does not keep."""
    limits = {"allocated": GPU_TOLERANCE, "driver": GPU_TOLERANCE, "host": HOST_TOLERANCE}
    return [f"{name} {error:+.1%}" for name, error in errors(result).items() if abs(error) > limits[name]]


def row(name: str, result: dict[str, Any]) -> str:
    def figure(kind: str, what: str) -> str:
        value = result[kind].get(what)
        return f"{value / MIB:>9,.0f}" if value is not None else f"{'-':>9}"

    cells = [
        figure("predicted", "allocated"),
        figure("measured", "allocated"),
        figure("measured", "reserved"),
        figure("predicted", "driver"),
    ]
    cells += [figure("measured", "driver"), figure("predicted", "host"), figure("measured", "host"), f"{result['other'] / MIB:>9,.0f}"]
    return f"{name:32}" + "".join(cells) + "  " + "  ".join(f"{what} {error:+.1%}" for what, error in errors(result).items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(Case(**json.loads(args.one)), args.device, args.steps)))
        return
    import torch

    device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    cases = {name: case for name, case in (CUDA_CASES if device == "cuda" else CPU_CASES).items() if args.only in name}
    columns = ("allocated", "measured", "reserved", "driver", "measured", "host", "measured", "other")
    print(f"{'MiB':32}" + "".join(f"{column:>9}" for column in columns) + "  predicted over measured", flush=True)
    results = {}
    for name, case in cases.items():
        results[name] = run_case(case, device, args.steps)
        print(row(name, results[name]), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"torch": torch.__version__, "device": device, "cases": results}, indent=1) + "\n")
    failures = [f"{name}: {', '.join(broken(result))}" for name, result in results.items() if broken(result)]
    if failures:
        raise SystemExit("beyond tolerance: " + "; ".join(failures))


if __name__ == "__main__":
    main()
