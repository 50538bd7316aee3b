"""PyTorch FSDP2 on one GPU, or under torchrun on several, with parameters, gradients and optimizer
in host RAM.
python -m benchmarks.peers.fsdp2 --shape qwen2.5-7b --tokens 65536 --micro-batch-rows 64
Every layer is a shard group of its own, so that it is on the GPU only while it computes; bf16
computation, fp32 parameters, fused AdamW on the CPU. Gradients of several micro-batches are summed
on the GPU (`--sum-on device`, 4 bytes a parameter) or in host RAM.
"""

from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from benchmarks.peers.job import (
    LEARNING_RATE,
    MAX_GRAD_NORM,
    RANKS,
    Job,
    Trainer,
    job_of,
    parser,
    run,
)
from benchmarks.peers.model import MeanLoss, build, parameters_of


def start_process_group(device: str) -> None:
    """A launcher's, or a world of one. gloo beside NCCL: the norm of gradients in host RAM is
    reduced there."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
        return
    store = FileStore(os.path.join(tempfile.mkdtemp(), "store"), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def shard(model: MeanLoss, device: str) -> FSDPModule:
    """Embedding, every layer and the head are groups of their own; all are gathered ahead by FSDP
    itself."""
    mesh = init_device_mesh(device, (RANKS,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device == "cuda")
    for part in (model.decoder.embed_tokens, *model.decoder.layers, model.head):
        fully_shard(part, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=offload)


def prepare(job: Job, sum_on: str) -> Trainer:
    start_process_group(job.device)
    model = build(job, torch.float32)
    parameters = parameters_of(model)
    sharded = shard(model, job.device)
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(batches: list[Tensor]) -> float:
        total = torch.zeros((), device=job.device)
        for number, ids in enumerate(batches):
            sharded.set_requires_gradient_sync(sum_on == "host" or number == len(batches) - 1)
            loss = model(ids) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        adamw.step()
        adamw.zero_grad()
        return float(total)

    return Trainer(step, parameters, model.decoder.config.vocab_size, {"sum_on": sum_on})


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument(
        "--sum-on",
        choices=("device", "host"),
        default="device",
        help="where gradients of micro-batches add up",
    )
    args = arguments.parse_args()
    run("fsdp2", job_of(args), lambda job: prepare(job, args.sum_on))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
