"""A conversation with a model: its turns, and answers to them as they are written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatrain.engine.engine import Engine
from megatrain.engine.generation import Choose, generated
from megatrain.errors import ModelError
from megatrain.recipes.inspect import checkpoint_of, reader, run_folder_of
from megatrain.recipes.model import Model, check_writes, describe_model
from megatrain.recipes.sample import (
    Enough,
    Sampling,
    ids_of,
    is_cut,
    positions_of,
    rendered_ids,
    system_turns,
    text_of,
    unseen,
    user,
    written,
)
from megatrain.recipes.setup import quiet_libraries

LEAST_SHARE = 4  # an answer may have this part of the model's positions, at least

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Reply:
    """An answer, and how long it took.

    Attributes:
        tokens: of the answer, its end included.
        seconds: from the question to the last of them.
        ended: by itself ("end"), because it may not be longer ("length"), or when it was asked to
            ("stop").
    """

    text: str
    tokens: int
    seconds: float
    ended: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class Held:
    """Text of an engine whose weights stay on the device between answers, where they have room."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._stack = ExitStack()
        self._model: Any = None
        self._tokens = 0  # for whose keys and values there is room beside them

    def generate(self, input_ids: torch.Tensor, room: int, ends: list[int], choose: Choose) -> Any:
        """As `Engine.generate`."""
        needed = input_ids.numel() + room
        if needed > self._tokens:
            self._take(needed)
        if self._model is None:
            return self._engine.generate_streamed(input_ids, room, ends, choose)
        ids = input_ids.to(self._engine.device)
        return generated(self._model, ids, room, ends, choose)

    def _take(self, needed: int) -> None:
        """Fetch the weights anew, since what is free is known only without them."""
        said = self._model is None and self._tokens  # that none have room
        for self._tokens in (2 * needed, needed):  # later turns need more
            self.close()
            self._model = self._stack.enter_context(self._engine.whole(self._tokens))
            if self._model is not None:
                return
        if not said:
            logger.warning(
                "the weights have no room on the device: each token streams all of them once"
            )

    def close(self) -> None:
        self._model = None
        self._stack.close()


class Chat:
    """Turns of a user and answers to them, each told all of those before.

    Turns that the model cannot read beside an answer are forgotten, the oldest first, which is
    logged; the system prompt stays.
    """

    def __init__(
        self,
        engine: Engine,
        model: Model,
        max_new_tokens: int,
        sampling: Sampling,
        system: list[dict[str, str]],
    ) -> None:
        self.turns: list[dict[str, str]] = []  # but for the system prompt
        self._model, self._held, self._system = model, Held(engine), system
        self._max_new_tokens, self._sampling = max_new_tokens, sampling
        self._choose = sampling.chooser()

    def answer(
        self,
        prompt: str,
        show: Callable[[str], None] = unseen,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Reply:
        """The model's answer, which is a turn of the conversation from now on.

        show: gets the text in pieces of whole words as it grows. stopped: asked before each token
        whether the answer is to end there; what there is of it counts, unless that is nothing.

        Raises ConfigError and ModelError for a prompt that cannot be asked; it is no turn then.
        """
        began = time.perf_counter()
        turns, ids = self._fitting([*self.turns, user(prompt)])
        longest, room = positions_of(self._model), self._max_new_tokens
        if longest is not None:
            room = min(room, longest - len(ids))
        was_stopped = False

        def choose(logits: torch.Tensor) -> int:
            nonlocal was_stopped
            if stopped():
                was_stopped = True
                raise Enough
            return self._choose(logits)

        tokens = written(self._held.generate, self._model, ids, room, choose, show)
        seconds, text = time.perf_counter() - began, text_of(self._model, tokens)
        if tokens or not was_stopped:
            self.turns = [*turns, {"role": "assistant", "content": text}]
        ended = "length" if is_cut(self._model, tokens, room) else "end"
        return Reply(text, len(tokens), seconds, "stop" if was_stopped else ended)

    def _fitting(self, turns: list[dict[str, str]]) -> tuple[list[dict[str, str]], list[int]]:
        """(the newest turns that leave room for an answer, their token ids with the system's)."""
        longest, forgotten = positions_of(self._model), 0
        while longest is not None and len(turns) > 1:
            kept = min(self._max_new_tokens, longest // LEAST_SHARE)
            if len(rendered_ids(self._model, [*self._system, *turns])) + kept <= longest:
                break
            turns, forgotten = turns[2:], forgotten + 1  # a question and its answer
        if forgotten:
            logger.warning(
                f"the model reads {longest:,} tokens, an answer included: the oldest "
                f"{'turn is' if forgotten == 1 else f'{forgotten} turns are'} forgotten"
            )
        return turns, ids_of(self._model, [*self._system, *turns])

    def begin_anew(self) -> None:
        """Forget all turns; what is drawn begins anew, too."""
        self.turns, self._choose = [], self._sampling.chooser()

    def close(self) -> None:
        self._held.close()


@contextmanager
def open_chat(
    named: str | Path,
    max_new_tokens: int,
    sampling: Mapping[str, Any] | None = None,
    system: str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[Chat]:
    """A conversation with a model, whose weights are held until the block ends.

    Args:
        named, trust_remote_code: as for `inspect.evaluate`.
        sampling: fields of `Sampling`; by default greedy.
        system: a system prompt.

    Raises ModelError for a model without a chat template, or whose template takes no such prompt,
    before weights are read.
    """
    drawn = Sampling(**(sampling or {}))
    quiet_libraries()
    checkpoint = checkpoint_of(Path(named))
    model = describe_model(str(checkpoint), trust_remote_code=trust_remote_code)
    check_writes(model, str(named))
    if model.tokenizer.chat_template is None:
        raise ModelError(
            f"{named}: has no chat template, which says how turns are written; leave --chat out to "
            "have a text continued, or put a chat_template.jinja into the model's folder"
        )
    turns = system_turns(model, system)
    with reader(checkpoint, run_folder_of(Path(named)), trust_remote_code) as engine:
        chat = Chat(engine, model, max_new_tokens, drawn, turns)
        try:
            yield chat
        finally:
            chat.close()
