"""Inference with an engine's weights: losses, log-probabilities, logits; and transformers' own
model with its weights on the device, for what writes text (engine/rollout)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.batches import Batch, answers_of, check_batches
from megatrain.engine.components import EngineParts, computing, naming_the_gpu
from megatrain.engine.head import (
    Values,
    first_scores,
    likeliest_tokens,
    of_labels,
    token_logprobs,
)
from megatrain.engine.objective import EvalResult, Objective
from megatrain.engine.step import Passes
from megatrain.heartbeat import beat
from megatrain.losses import IGNORE, Tally, Targets
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.probe import replace_all

if TYPE_CHECKING:
    from transformers import GenerationConfig, LogitsProcessor

CPU = torch.device("cpu")
Choose = Callable[[Tensor], int]  # logits [vocab] -> token

# What generation takes on a GPU beside weights and keys and values, in hidden states a token and in
# bytes: a layer's widest activations over a prompt, logits, workspaces.
HIDDEN_STATES, RESERVE_BYTES = 32, 1 << 30


# -- sweeps over the layers ------------------------------------------------------------------------


def evaluate(passes: Passes, batches: Sequence[Batch], objective: Objective) -> EvalResult:
    """The mean of an objective over all processes' micro-batches, in evaluation mode, in one
    sweep."""
    prepared = passes.prepare(batches, loss=objective.of_sequences)
    total, values = Tally[Tensor](), []
    for mb, hidden in passes.through_layers(prepared):
        rows = hidden.flatten(0, 1), mb.targets
        if objective.of_sequences:
            of_targets, mb.targets = objective.first_pass(passes.outputs, *rows)
            values.append(of_targets)
        else:
            total.add(passes.outputs.loss_sum(*rows, objective.of_tokens[0], objective.values))
    if objective.whole_step:
        answers = answers_of(prepared, values, passes.peers, passes.device)
        return objective.result_of_answers(answers.to(CPU))
    for mb, of_targets in zip(prepared, values, strict=False):
        total.add(objective.judge(of_targets, mb.targets.examples).detached())
    return objective.result(passes.peers.total(objective, total).numbers())


def logprobs(
    passes: Passes,
    batches: Sequence[Batch],
    targets: Sequence[Targets] | None,
    temperature: float = 1.0,
) -> list[tuple[Targets, tuple[Tensor, ...]]]:
    """Each micro-batch's targets, their log-probabilities, or a classifier's scores, and 1 for
    those that are the likeliest tokens if `targets` are given, in one sweep.

    targets: in place of those that the labels show; a position may have several.
    """
    prepared, found = passes.prepare(batches, whole=True), []
    scores = passes.skeleton.anatomy.labels is not None
    options = {} if scores else {"temperature": temperature}
    cooled = of_labels(first_scores if scores else token_logprobs, **options)
    likeliest = of_labels(likeliest_tokens)
    values: tuple[Values, ...] = (cooled,) if targets is None else (cooled, likeliest)
    for mb, given in zip(prepared, targets or (), strict=targets is not None):
        mb.targets = given.to(passes.device)
    for mb, hidden in passes.through_layers(prepared):
        rows = hidden.flatten(0, 1), mb.targets
        found.append((mb.targets, passes.outputs.target_values(*rows, *values)))
    return found


def last_states(engine: Any, batches: Sequence[Batch]) -> list[Tensor]:
    """The hidden states [targets, hidden] that the head gets at each micro-batch's targets, on the
    CPU: one sweep over an engine's weights."""
    check_batches(batches, engine.anatomy)
    with engine.reading("a teacher's activations") as passes:
        return [
            hidden.flatten(0, 1).index_select(0, mb.targets.index).cpu()
            for mb, hidden in passes.through_layers(passes.prepare(batches, whole=True))
        ]


@contextmanager
def held_head(engine: Any) -> Iterator[Callable[[Tensor], Tensor]]:
    """Inside, the head stays on the device: a function of hidden states [n, hidden] that gives
    logits [n, vocab], to be called without gradients. The engine computes nothing else."""
    passes = engine.parts.passes
    passes.skeleton.set_training(False)
    needed = (0, passes.head) if engine.anatomy.embed_feeds_head else (passes.head,)
    with closing(passes.streamer.sweep(needed)) as visits:
        for _ in needed:
            next(visits)
        engine.parts.compute.synchronize()
        yield passes.outputs.project


def placed(
    batches: Sequence[Batch], found: Sequence[tuple[Targets, tuple[Tensor, ...]]]
) -> list[Tensor]:
    """Log-probabilities at the targets' places in tensors [batch, tokens] on the CPU."""
    values = [torch.zeros(batch["input_ids"].shape) for batch in batches]
    for value, (targets, (of_targets, *_)) in zip(values, found, strict=True):
        value.view(-1)[targets.index.cpu() + 1] = of_targets.cpu()  # a last one predicts nothing
    return values


def logits(passes: Passes, input_ids: Tensor, positions: slice) -> Tensor:
    """Logits [batch, positions, vocab], in evaluation mode, whole."""
    batch = {"input_ids": input_ids, "labels": torch.full_like(input_ids, IGNORE)}
    (found,) = [
        passes.skeleton.head(rows.flatten(0, 1)).view(*rows.shape[:2], -1)
        for _, hidden in passes.through_layers(passes.prepare([batch], whole=True))
        for rows in [hidden[:, positions]]
    ]
    return found


# -- the whole model on the device -----------------------------------------------------------------


@contextmanager
def whole_model(skeleton: Skeleton, parts: EngineParts, tokens: int) -> Iterator[Any | None]:
    """Put transformers' own model with its weights on the device inside; None without room for it
    and a cache of `tokens` tokens, or if it cannot generate."""
    family: Any = skeleton.model
    here = all(parts.passes.peers.all_gather(has_room(skeleton, parts, tokens)))
    if not family.can_generate() or not here:
        yield None
        return
    with naming_the_gpu("the whole model"):
        weights = weights_on_device(parts)
    with writing(parts), family_model(skeleton, weights) as model:
        yield model
    parts.compute.synchronize()  # wait: nothing may read the store when a step updates it


@contextmanager
def writing(parts: EngineParts) -> Iterator[None]:
    """Layers run eagerly inside, as they do for a few tokens of many rows."""
    compiled, device = parts.passes.settings.compile, parts.compute.device
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with computing(device, "the keys and values of an answer", lengths_vary=True), eager:
        yield


@contextmanager
def family_model(skeleton: Skeleton, flats: Sequence[torch.Tensor]) -> Iterator[Any]:
    """Bind the family's own model to `flats`, its weights by block on the device, inside."""
    skeleton.set_training(False)
    skeleton.forget_lengths()
    blocks, bound = skeleton.anatomy.blocks, []
    for block in blocks:
        places = [skeleton.owner(spec.name) for spec in block.layout.tensors]
        bound.append([module._parameters[leaf] for module, leaf in places])
    try:
        for block, flat in zip(blocks, flats, strict=True):
            skeleton.bind(block, flat)
        replace_all(skeleton.stack, skeleton.layers)
        yield skeleton.model
    finally:  # the blocks get their parameters back
        replace_all(skeleton.stack, skeleton.recorders)
        for block, parameters in zip(blocks, bound, strict=True):
            skeleton.place(block, parameters)


def has_room(skeleton: Skeleton, parts: EngineParts, tokens: int) -> bool:
    """True if all weights, and keys and values of `tokens` tokens, fit on the device."""
    store, device = parts.store, parts.compute.device
    if device.type == "cpu":
        return True
    itemsize = store.arrays["weight"].dtype.itemsize
    weights = sum(layout.numel for layout in store.layouts[store.resident :]) * itemsize
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
    """Every block's weights, flat, on the device, to be read only: perhaps the store's own. Of
    several ranks each has a copy; all of them call it."""
    store, device, found = parts.store, parts.compute.device, []
    if parts.passes.peers.several:
        streamer = parts.passes.streamer
        return [streamer.flat(n).clone() for n in streamer.sweep(range(len(store.layouts)))]
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
    model: Any,
    input_ids: Tensor,
    max_new_tokens: int,
    ends: Sequence[int],
    choose: Choose,
    **images: Tensor,
) -> list[int]:
    """The tokens that transformers' `generate` appends to input_ids [1, tokens], each picked by
    `choose`; the model's own generation settings are ignored. images: of the model's forward."""
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
            **images,
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
