"""The plain PyTorch loop that the engine has to agree with."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatrain.engine.engine import Engine
from megatrain.engine.rollout.draw import mix
from megatrain.engine.verify import gradients_of
from megatrain.models.anatomy import decaying
from megatrain.models.trials.small import count_targets, plain_gradients
from tests.helpers.runs import Steps, Trace, masters_of
from tests.helpers.support import Batch, micro_batches

MAX_NORM, DECAY = 0.5, 0.1  # as `engine_of` has them


def named_gradients(model: nn.Module) -> dict[str, Tensor]:
    named = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        named[name] = parameter.grad.cpu()
    return named


def plain_optimizer(
    model: nn.Module, lr: float, kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """torch's, or one that is made alike, with the usual exclusions from weight decay."""
    return optimizer_of(model.named_parameters(), decaying(model), lr, kind)


def optimizer_of(
    named: Iterable[tuple[str, Tensor]],
    decay: Collection[str],
    lr: float,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> torch.optim.Optimizer:
    """One of parameters by name, of which those in `decay` decay."""
    of_kind: dict[bool, list[Tensor]] = {True: [], False: []}
    for name, parameter in named:
        of_kind[name in decay].append(parameter)
    groups = [
        {"params": of_kind[True], "weight_decay": DECAY},
        {"params": of_kind[False], "weight_decay": 0.0},
    ]
    make: Any = kind
    made: torch.optim.Optimizer = make(groups, lr=lr)
    return made


def train_plain(
    model: nn.Module,
    steps: Steps,
    rates: Sequence[float],
    optimizers: Sequence[torch.optim.Optimizer] = (),
    *,
    max_norm: float = MAX_NORM,
    backwards: bool = False,
) -> Trace:
    """What the engine must reproduce: accumulate, clip_grad_norm_, AdamW.

    Args:
        optimizers: in AdamW's place. Each one's rate follows `rates` in proportion.
        backwards: take each step's micro-batches in opposite order.
    """
    optimizers = optimizers or [plain_optimizer(model, rates[0])]
    trace, first = Trace(), [[g["lr"] for g in each.param_groups] for each in optimizers]
    for batches, lr in zip(steps, rates, strict=True):
        ordered = list(reversed(batches)) if backwards else batches
        trace.losses.append(plain_gradients(model, ordered))
        trace.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        for each, base in zip(optimizers, first, strict=True):
            for group, rate in zip(each.param_groups, base, strict=True):
                group["lr"] = rate * lr / rates[0]
            each.step()
        model.zero_grad()
    trace.weights = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    return trace


def gradients_without_recompute(
    model: nn.Module, batches: Sequence[Batch], engine: Engine, step: int
) -> float:
    """Plain autograd over whole graphs, dropout seeded before each block as the engine seeds it.

    Returns:
        The loss.
    """
    number = 0

    def seed(block: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            torch.manual_seed(mix(engine.seed, step, block, number))

        return hook

    path = engine.anatomy.blocks[1].layout.tensors[0].name.split(".0.")[0]
    layers: Any = model.get_submodule(path)
    handles = [model.register_forward_pre_hook(seed(0))]
    handles += [layer.register_forward_pre_hook(seed(i + 1)) for i, layer in enumerate(layers)]
    total = 0.0
    for number, batch in enumerate(batches):  # noqa: B007  (`seed` reads it)
        total += plain_gradients(model, [batch], count_targets(batches))
    for handle in handles:
        handle.remove()
    return total


def follow_in_fp32(engine: Engine, rates: Sequence[float]) -> dict[str, Tensor]:
    """Train a bfloat16 engine, and beside it fp32 masters by torch on the engine's own gradients.

    Returns:
        The masters that torch.optim.AdamW has made.
    """
    assert engine.max_grad_norm is not None
    masters = {name: nn.Parameter(m.clone()) for name, m in masters_of(engine).items()}
    tensors = [tensor for block in engine.anatomy.blocks for tensor in block.layout.tensors]
    decay = {tensor.name for tensor in tensors if tensor.decay}
    optimizer = optimizer_of(masters.items(), decay, rates[0])
    for step, lr in enumerate(rates):
        engine.forward_backward(micro_batches(step))
        for name, gradient in gradients_of(engine).items():
            assert gradient.dtype == torch.bfloat16
            masters[name].grad = gradient.float()
        for group in optimizer.param_groups:
            group["lr"] = lr
        norm = float(nn.utils.clip_grad_norm_(masters.values(), engine.max_grad_norm))
        assert norm > engine.max_grad_norm, "clipping must be active"
        optimizer.step()
        assert abs(engine.step(lr) - norm) <= 1e-6 * norm
    return {name: master.detach() for name, master in masters.items()}


class PlainLion(torch.optim.Optimizer):
    """As anybody would write it."""

    def __init__(
        self,
        parameters: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for parameter in group["params"]:
                m: Tensor = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_((m * beta1).add_(parameter.grad, alpha=1 - beta1).sign_(), alpha=-lr)
                m.mul_(beta2).add_(parameter.grad, alpha=1 - beta2)
