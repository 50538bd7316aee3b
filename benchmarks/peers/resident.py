"""Plain PyTorch with the whole model on the GPU: the bound for every system that moves anything.
python -m benchmarks.peers.resident --shape qwen2.5-7b --tokens 65536 --micro-batch-rows 16
--no-checkpointing
With `--optimizer adamw` a whole step: bf16 weights, fp32 master weights and moments (20 bytes a
parameter with both gradients), clipping by the global norm, fused AdamW. Where that does not fit,
`--optimizer none` is forward and backward alone; `auto` chooses by arithmetic.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.peers.job import LEARNING_RATE, MAX_GRAD_NORM, Job, Trainer, job_of, parser, run
from benchmarks.peers.model import build, parameters_of

BYTES_PER_PARAMETER = 20  # weight 2, gradient 2, master 4, its gradient 4, moments 8
SHARE_FOR_STATE = 0.7  # of the GPU's memory; the rest is for activations and the head


class MasterAdamW:
    """AdamW on fp32 copies of bf16 parameters, gradients clipped by their global norm."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.masters = [parameter.detach().float() for parameter in parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self.adamw.step()
        self.adamw.zero_grad()
        torch._foreach_copy_(list(map(torch.Tensor.detach, self.parameters)), self.masters)


def prepare(job: Job, optimizer: str) -> Trainer:
    model = build(job, torch.bfloat16)
    parameters = parameters_of(model)
    if optimizer == "auto":
        optimizer = "adamw" if fits(parameters, job.device) else "none"
    update = MasterAdamW(list(model.parameters())).step if optimizer == "adamw" else model.zero_grad

    def step(batches: list[Tensor]) -> float:
        total = torch.zeros((), device=job.device)
        for ids in batches:
            loss = model(ids) / len(batches)
            loss.backward()
            total += loss.detach()
        update()
        return float(total)

    return Trainer(step, parameters, model.decoder.config.vocab_size, {"optimizer": optimizer})


def fits(parameters: int, device: str) -> bool:
    """Whether the states of all parameters leave room for activations on this device (a CPU is
    taken to have it)."""
    if device == "cpu":
        return True
    return (
        BYTES_PER_PARAMETER * parameters
        < SHARE_FOR_STATE * torch.cuda.get_device_properties(0).total_memory
    )


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--optimizer", choices=("auto", "adamw", "none"), default="auto")
    args = arguments.parse_args()
    run("resident", job_of(args), lambda job: prepare(job, args.optimizer))


if __name__ == "__main__":
    main()
