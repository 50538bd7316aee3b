"""Answers of a model whose weights do not fit on the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from megatrain.engine.components import EngineParts, naming_the_gpu
from megatrain.engine.inference import writing
from megatrain.engine.step import Passes
from megatrain.errors import ConfigError
from megatrain.models.skeleton import Skeleton

logger = logging.getLogger("megatrain")


class StreamedModel:
    """Called as transformers' own model is; its weights pass through the device once a call, so
    that calls of many rows are worth it.

    Weights of several ranks are gathered: each call of one is a call of all (`finish`).
    """

    def __init__(self, skeleton: Skeleton, passes: Passes) -> None:
        self.skeleton, self.passes = skeleton, passes
        family: Any = skeleton.model
        self.config, self.forward = family.config, family.forward
        self.dtype, self.device = skeleton.dtype, passes.device
        self.set_attn_implementation = family.set_attn_implementation
        self.base_model = partial(self, base=True)
        self._visits = range(passes.head + 1)

    def __call__(
        self, *, base: bool = False, use_cache: bool = False, **inputs: Any
    ) -> tuple[Tensor]:
        """Logits [rows, tokens, vocabulary], or with `base` hidden states."""
        self.passes.peers.all_gather(True)
        with closing(self.passes.streamer.sweep(self._visits)) as visits:
            next(visits)
            hidden, calls = self.skeleton.embed(inputs)
            for index, call in enumerate(calls):
                next(visits)
                hidden = self.skeleton.layer(index, hidden, call)
            next(visits)
            if not base:
                hidden = self.skeleton.head(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)
        return (hidden,)

    def finish(self) -> None:
        """Take part in calls of other ranks until all have finished."""
        while any(self.passes.peers.all_gather(False)):
            for _ in self.passes.streamer.sweep(self._visits):
                pass


@contextmanager
def streamed_model(skeleton: Skeleton, parts: EngineParts) -> Iterator[StreamedModel]:
    """Inside, the model writes; all ranks have finished at the end. Raises ConfigError for a reward
    model, which transformers does not let write either."""
    if skeleton.anatomy.labels is not None:
        raise ConfigError(
            "generate: a reward model gives scores and writes no text; take a language model"
        )
    logger.warning(
        "the weights have no room on the device beside an answer's keys and values: each token "
        "streams all of them, for all rows that are written at once"
    )
    model = StreamedModel(skeleton, parts.passes)
    skeleton.set_training(False)
    with naming_the_gpu("a layer of rows that are written"), writing(parts):
        try:
            yield model
        finally:  # also of a rank that is asked to stop: others go on
            model.finish()
    skeleton.forget_lengths()
