"""Text from an engine's weights: by transformers' own `generate` where all of them fit on the
device, else by streaming the model once for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.parts import EngineParts
from megatrain.heartbeat import beat
from megatrain.models.skeleton import Skeleton

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

Choose = Callable[[Tensor], int]  # logits [vocab] -> token

# What generation takes on a GPU beside weights and keys and values, in hidden states a token and in
# bytes: a layer's widest activations over a prompt, logits, workspaces.
HIDDEN_STATES, RESERVE_BYTES = 32, 1 << 30


def likeliest(logits: Tensor) -> int:
    return int(logits.argmax())


def has_room(skeleton: Skeleton, parts: EngineParts, tokens: int) -> bool:
    """True if all weights are on the device, or fit there beside the keys and values of `tokens`
    tokens. On a CPU they are there."""
    store, device = parts.store, parts.compute.device
    blocks = range(store.resident, len(store.layouts))
    if device.type == "cpu":
        return True
    itemsize = store.arrays["weight"].dtype.itemsize
    weights = sum(store.layouts[block].numel for block in blocks) * itemsize
    states = tokens * skeleton.anatomy.hidden_size * itemsize
    kept = states * (2 * len(skeleton.layers) + HIDDEN_STATES)
    return weights + kept + RESERVE_BYTES <= free_bytes(device)


def free_bytes(device: torch.device) -> int:
    """Bytes of a GPU that PyTorch can still hand out within this process's limit."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free, limit - held) + held - torch.cuda.memory_allocated(device)


def weights_on_device(parts: EngineParts) -> list[Tensor]:
    """Every block's weights, flat, on the device, once their updates are done; none may write them.

    Copies, but for those of resident blocks and, on a CPU, those in RAM.
    """
    store, device, found = parts.store, parts.compute.device, []
    for block in range(len(store.layouts)):
        parts.updater.wait_ready(block)
        if store.is_resident(block):
            found.append(store.array("weight", block))
        else:
            found.append(store.lasting("weight", block).to(device))
    return found


@contextmanager
def starting_from(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Inside, `generate` of a transformers model starts from these settings, not from its own."""
    own, model.generation_config = model.generation_config, settings
    try:
        yield
    finally:
        model.generation_config = own


def generated(
    model: Any, input_ids: Tensor, max_new_tokens: int, ends: Sequence[int], choose: Choose
) -> list[int]:
    """What transformers' `generate` appends to input_ids [1, tokens], choosing each token by
    `choose`; nothing that the model's own generation settings say counts."""
    from transformers import GenerationConfig, LogitsProcessorList

    nothing: Any = GenerationConfig()  # type: ignore[no-untyped-call]
    with starting_from(model, nothing):
        ids = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(ends) or None,
            pad_token_id=next(iter(ends), 0),
            logits_processor=LogitsProcessorList([chosen_by(choose)]),
        )
    new: list[int] = ids[0, input_ids.shape[1] :].tolist()
    return new


def chosen_by(choose: Choose) -> LogitsProcessor:
    """Leaves one token to a greedy search, the one that `choose` picks."""
    from transformers import LogitsProcessor

    class Chosen(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            beat()
            only = torch.full_like(scores, -torch.inf)
            only[0, choose(scores[0])] = 0.0
            return only

    return Chosen()
