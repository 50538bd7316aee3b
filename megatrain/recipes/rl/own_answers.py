"""Rows whose answers the model has just written: of a rollout, and of distillation on-policy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from megatrain.data.loader import Loader, StepBatch
from megatrain.data.micro_batches import MicroBatch
from megatrain.data.rows import Counts, TokenRows
from megatrain.engine.rollout.decode import AnswerRequest
from megatrain.engine.rollout.draw import Draw, mix
from megatrain.errors import ConfigError, DataError
from megatrain.heartbeat import doing
from megatrain.losses import IGNORE
from megatrain.recipes.sample import end_tokens

KNOWN = {"input_ids", "labels", "attention_mask", "position_ids", "token_real"}


def answered_rows(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    trained: Sequence[bool | Sequence[int]],
    values: Any = None,
    of_tokens: Mapping[str, Sequence[Sequence[float]]] | None = None,
) -> TokenRows:
    """Answers behind their prompts as rows: targets are the tokens of those that are trained on,
    or, of 1 and 0 for each token, those with 1. values: a number of each; of_tokens: numbers of
    each answer's tokens, by name."""

    def flat(of_prompts: Iterable[Any], of_answers: Iterable[Any], dtype: Any) -> Any:
        both = zip(of_prompts, of_answers, strict=True)
        return np.concatenate([np.asarray(part, dtype) for parts in both for part in parts])

    zeros = [np.zeros(len(ids)) for ids in prompts]
    masks = (np.full(len(ids), one) for ids, one in zip(answers, trained, strict=True))
    sizes = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    nothing = np.zeros(len(sizes))
    return TokenRows(
        ids=flat(prompts, answers, np.int32),
        mask=flat(zeros, masks, np.bool_),
        offsets=np.cumsum([0, *sizes]),
        targets=nothing.astype(np.int64),
        hashes=nothing.astype(np.uint64),
        joined=nothing.astype(np.bool_),
        contexts=nothing.astype(np.uint64),
        chosen=np.arange(len(sizes)),
        counts=Counts(),
        of_rows=None if values is None else np.asarray(values, np.float32),
        of_tokens={k: flat(zeros, found, np.float32) for k, found in (of_tokens or {}).items()},
    )


def on_policy(run: Any, batch: StepBatch) -> StepBatch:
    """The step of a run (state.py: Run); in `distill.lmbda` of them with the model's own answers to
    its prompts in place of the rows'. A prompt is what comes before a row's last answer; which
    steps, and which answers, follow from the seed, the step and the weights."""
    options, train, loader = run.config.distill, run.config.train, run.loader
    chance = mix(train.seed, run.step, 1) / 2**63
    if not options.lmbda or chance >= options.lmbda or not isinstance(loader, Loader):
        return batch
    began = time.perf_counter()
    prompts = [prompt for one in batch.micro_batches for prompt in prompts_in(run, one)]
    draw = Draw(seed=mix(train.seed, run.step), temperature=options.temperature)
    longest = options.max_completion_length
    requests = [
        AnswerRequest(number, ids, (0,), min(longest, train.seq_len - len(ids)))
        for number, ids in enumerate(prompts)
    ]
    ends = end_tokens(run.model)
    with doing("writing answers", aloud=False):
        made = sorted(run.engine.rollout(requests, draw, ends), key=lambda one: one.key)
    rows = answered_rows(prompts, [one.ids for one in made], [True] * len(made))
    batches, lengths = [*loader.batches_of(rows)], tuple(rows.lengths.tolist())
    spent = {"rollout": time.perf_counter() - began}
    return replace(batch, micro_batches=batches, lengths=lengths, spent_s=spent)


def prompts_in(run: Any, batch: MicroBatch) -> Iterator[list[int]]:
    """The tokens before the last answer of each row of a micro-batch. Raises ConfigError for rows
    that hold more than tokens, such as images, and DataError for one without a prompt."""
    if more := batch.keys() - KNOWN:
        where = run.config.where("distill.lmbda")
        raise ConfigError(f"{where}: rows with {min(more)} cannot be answered anew; set 0")
    starts = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    starts[:, 0] = True
    if "position_ids" in batch:
        starts |= batch["position_ids"] == 0
    for ids, labels, begins in zip(batch["input_ids"], batch["labels"], starts, strict=True):
        ends = [*begins.nonzero().flatten().tolist(), len(ids)]
        for start, stop in pairwise(ends):
            targets = (labels[start:stop] != IGNORE).nonzero().flatten()
            if len(targets):
                gaps = (targets.diff() != 1).nonzero().flatten()
                first = int(targets[int(gaps[-1]) + 1 if len(gaps) else 0])
                if first < 2:
                    raise DataError(
                        f"{run.config.where('distill.lmbda')}: a row is a text without a prompt, "
                        "which no answer can be written to; set 0"
                    )
                yield ids[start : start + first].tolist()
