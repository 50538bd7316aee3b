"""The model that every peer trains: transformers' own, with a head whose logits never exist
whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.peers.job import Job
from megatrain.config.load import bench_config
from megatrain.recipes.model import shape_config

HEAD_CHUNK = 4096  # rows of logits at a time: 2.5 GB in fp32 with a vocabulary of 152,064


class MeanLoss(nn.Module):
    """A causal language model that maps token ids [rows, length] to the mean loss of predicting
    each next token."""

    def __init__(self, model: Any, compiled: bool) -> None:
        super().__init__()
        self.decoder = model.model
        self.head = ChunkedHead(model.lm_head.weight, compiled)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        loss: Tensor = self.head(hidden[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return loss


class ChunkedHead(nn.Module):
    """LM head and cross-entropy in one, as fused implementations do it: gradients are made in the
    forward pass, chunk by chunk."""

    def __init__(self, weight: nn.Parameter, compiled: bool) -> None:
        super().__init__()
        self.weight = weight
        self.softmax_loss = torch.compile(softmax_loss) if compiled else softmax_loss

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = ChunkedLoss.apply(hidden, self.weight, labels, self.softmax_loss)
        return loss


class ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of hidden [n, width] through weight [vocabulary, width] against labels
    [n]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, softmax_loss: Any
    ) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(labels), HEAD_CHUNK):
            rows = slice(start, start + HEAD_CHUNK)
            loss, grad = softmax_loss(hidden[rows] @ weight.t(), labels[rows], 1 / len(labels))
            total += loss
            torch.mm(grad, weight, out=grad_hidden[rows])
            grad_weight.addmm_(grad.t(), hidden[rows])
        ctx.grads = grad_hidden, grad_weight
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.grads
        return grad_hidden.mul_(outer[0]), grad_weight.mul_(outer[0]), None, None


def softmax_loss(logits: Tensor, labels: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(`scale` x sum of the losses in fp32, its gradient in the dtype of `logits` [n,
    vocabulary])."""
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    loss = -logprobs.gather(1, labels[:, None]).sum() * scale
    is_label = (
        torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    )  # compiles into the pass; a scatter would not
    return loss, ((logprobs.exp() - is_label.float()) * scale).to(logits.dtype)


def build(job: Job, dtype: torch.dtype) -> MeanLoss:
    """The job's model with random weights by its family's own rule, drawn on the job's device."""
    config = shape_config(bench_config(job.shape), job.layers)
    torch.manual_seed(0)
    with torch.device(job.device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    if job.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    result = MeanLoss(model, compiled=job.compiled).train()
    if job.compiled:
        for layer in result.decoder.layers:
            layer.forward = torch.compile(
                layer.forward
            )  # inside the hooks of checkpointing and sharding, which cannot be compiled
    return result


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
