"""DeepSpeed ZeRO-2 or ZeRO-3 on one GPU, or under torchrun on several, with the optimizer (and, for
ZeRO-3, the parameters) in pinned host RAM.
python -m benchmarks.peers.deepspeed_offload --stage 3 --shape qwen2.5-7b --tokens 65536
--micro-batch-rows 32
bf16 with fp32 master weights and moments, DeepSpeedCPUAdam (compiled on first use, which needs a
C++ compiler and ninja), gradients reduced and offloaded while backward runs. `--ratio` below 1
leaves that share's complement of a ZeRO-3 optimizer on the GPU.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.job import LEARNING_RATE, MAX_GRAD_NORM, Job, Trainer, job_of, parser, run
from benchmarks.peers.model import build, parameters_of

# elements of a gradient bucket: DeepSpeed's default, and more than two layers of a 7B model
BUCKET = 500_000_000


def settings_of(job: Job, stage: int, ratio: float) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    pinned = {"device": "cpu", "pin_memory": job.device == "cuda"}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": {**pinned, "ratio": ratio},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": BUCKET,
    }
    if stage == 3:
        zero |= {
            "offload_param": pinned,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": 2 * BUCKET,
        }
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch_rows,
        "gradient_accumulation_steps": job.micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_GRAD_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": False}},
        "zero_optimization": zero,
        "steps_per_print": 1_000_000,
    }


def stand_alone() -> None:
    """Say to torch.distributed what a launcher would, if none has: a world of one."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def prepare(job: Job, stage: int, ratio: float) -> Trainer:
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    stand_alone()
    import deepspeed  # type: ignore[import-not-found]

    model = build(job, torch.bfloat16)
    parameters = parameters_of(model)  # before ZeRO-3 empties them
    if (
        stage == 3
    ):  # a layer's parameters are gathered together: fewer hooks, and none inside what is compiled
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.decoder.layers[0])])
    settings = settings_of(job, stage, ratio)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )

    def step(batches: list[Tensor]) -> float:
        total = torch.zeros((), device=job.device)
        for ids in batches:
            loss = engine(ids)
            engine.backward(loss)  # divides by the number of micro-batches
            engine.step()  # does nothing before the last of them
            total += loss.detach() / len(batches)
        return float(total)

    return Trainer(step, parameters, model.decoder.config.vocab_size, settings, ("deepspeed",))


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--stage", type=int, choices=(2, 3), default=3)
    arguments.add_argument(
        "--ratio", type=float, default=1.0, help="share of the optimizer that the CPU does (ZeRO-3)"
    )
    args = arguments.parse_args()
    run(f"zero{args.stage}", job_of(args), lambda job: prepare(job, args.stage, args.ratio))


if __name__ == "__main__":
    main()
