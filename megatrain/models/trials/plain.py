"""Plain transformers and autograd on random values: what the streamed model has to agree with."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatrain.errors import ModelError
from megatrain.losses import IGNORE
from megatrain.models.constants import kept_tensors
from megatrain.models.family import causal_lm

Batch = Mapping[str, Tensor]


@contextmanager
def small_scale() -> Iterator[None]:
    """For work on small models: in one thread, as others would only wait for each other; the random
    state stays as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


def plain_model(
    config: Any, *, seed: int = 0, attention: str = "auto", trust_remote_code: bool = False
) -> nn.Module:
    """The family's own model in float32 on the CPU, in training mode.

    Every parameter and persistent buffer is random: zero biases and unit norms would hide a
    mix-up. But zeros beside other values stay, which may be a mask.

    Raises ModelError if transformers cannot build it.
    """
    with small_scale():
        torch.default_generator.manual_seed(seed)  # not CUDA's
        try:
            model = causal_lm(copy.deepcopy(config), attention, torch.float32, trust_remote_code)
        except Exception as error:  # whatever a family's code raises
            raise ModelError(f"it cannot be built ({type(error).__name__}: {error})") from error
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.1)
        for tensor in kept_tensors(model).values():
            if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator) * 0.1
                tensor.copy_(tensor * (1 + noise) if tensor.any() else noise)
    return model.train()  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross-entropy of the next token, as transformers shifts it."""
    device = next(model.parameters()).device
    inputs = {name: value.to(device) for name, value in batch.items()}
    labels = inputs.pop("labels")[:, 1:].flatten()
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    return functional.cross_entropy(
        logits.flatten(0, 1), labels, reduction="sum", ignore_index=IGNORE
    )


def plain_gradients(
    model: nn.Module, batches: Iterable[Batch], denominator: float | None = None
) -> float:
    """Accumulate into .grad; returns the loss, over all targets unless told otherwise."""
    batches = list(batches)
    total = 0.0
    for batch in batches:
        loss = plain_loss(model, batch) / (denominator or count_targets(batches))
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total


def count_targets(batches: Iterable[Batch]) -> float:
    """Tokens with a target, of all micro-batches."""
    return float(sum((batch["labels"][:, 1:] != IGNORE).sum() for batch in batches))
