"""A conversation with a model: its turns, and answers to them as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.data.samples import Picture, Turns
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest, answers
from megatrain.engine.rollout.draw import Draw
from megatrain.errors import ModelError, logger
from megatrain.recipes.inspect import reader, run_folder_of, writer_of
from megatrain.recipes.model import Model
from megatrain.recipes.sample import (
    draw_of,
    ids_of,
    positions_of,
    rendered_ids,
    system_turns,
    text_of,
    user,
    written,
)

HELD_TOKENS = 8192  # of a conversation whose weights stay on the device
LEAST_SHARE = 4  # an answer may have this part of the model's positions, at least


@dataclass(frozen=True)
class Reply:
    """An answer."""

    answer: str
    tokens: int  # the end included
    seconds: float  # from the question to the last
    ended: str  # "end" by itself, "length" at the longest that it may be


class Conversation:
    """Turns of a user and answers to them. Weights stay on the device where they have room."""

    def __init__(
        self,
        engine: Engine,
        model: Model,
        max_new_tokens: int,
        draw: Draw,
        system: Turns,
        pictures: Sequence[Picture] = (),
    ) -> None:
        self._turns: list[dict[str, Any]] = []  # but for the system prompt
        self._pictures = pictures  # of the first question
        self._engine, self._model, self._system = engine, model, system
        self._max_new_tokens, self._draw, self._answers = max_new_tokens, draw, 0
        self._positions = positions_of(model)
        self._held = ExitStack()
        # for whose keys and values there is room beside the weights
        self._tokens = min(HELD_TOKENS, self._positions or HELD_TOKENS)
        self._whole: Any = self._held.enter_context(engine.whole(self._tokens))
        if self._whole is None:
            logger.warning(
                "the weights have no room to stay on the device: each answer fetches them, or each "
                "token streams all of them once"
            )

    def answer(self, prompt: str, show: Callable[[str], object] = str) -> Reply:
        """Answer a prompt; both become turns. Raises ConfigError and ModelError if it cannot be."""
        began = time.perf_counter()
        pictures, self._pictures = self._pictures, ()
        turns, ids = self._fitting([*self._turns, user(prompt, pictures)])
        about = self._model, turns, ids, self._max_new_tokens, self._draw, show, self._answers
        made = written(self._rollout, *about)
        text, ended = text_of(self._model, made.ids), "length" if made.finish == "length" else "end"
        self._answers += 1
        self._turns = [*turns, {"role": "assistant", "content": text}]
        return Reply(text, len(made.ids), time.perf_counter() - began, ended)

    def _fitting(self, turns: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[int]]:
        """(the newest turns that leave room for an answer, their token ids with the system's)."""
        longest, asked = self._positions, len(turns)
        while longest is not None and len(turns) > 1:
            kept = min(self._max_new_tokens, longest // LEAST_SHARE)
            if len(rendered_ids(self._model, [*self._system, *turns])) + kept <= longest:
                break
            turns = turns[2:]  # a question and its answer
        if len(turns) < asked:
            words = f"the model reads {longest:,} tokens, an answer included: the oldest"
            logger.warning(f"{words} {(asked - len(turns)) // 2} questions are forgotten")
        return turns, ids_of(self._model, [*self._system, *turns])

    def _rollout(self, requests: Sequence[AnswerRequest], *how: Any) -> Iterator[Answer]:
        """As `Engine.rollout`, by the weights that stay on the device, if they do."""
        (asked,) = requests
        if self._whole is not None and len(asked.ids) + asked.most <= self._tokens:
            return answers(self._whole, requests, *how)
        self.close()  # what is free is known only without them
        return self._engine.rollout(requests, *how)

    def close(self) -> None:
        self._whole = None
        self._held.close()


@contextmanager
def open_chat(
    named: str | Path,
    max_new_tokens: int,
    sampling: Mapping[str, Any],
    system: str | None,
    trust_remote_code: bool,
    images: Sequence[str] = (),
) -> Iterator[Conversation]:
    """A conversation with a model; arguments as `inspect.generate` has them. Raises ModelError for
    a template that is missing, or takes no system prompt."""
    draw = draw_of(**sampling)
    checkpoint, model, pictures = writer_of(named, trust_remote_code, images)
    if model.tokenizer.chat_template is None:
        raise ModelError(
            f"{named}: has no chat template, which says how turns are written; leave --chat out to "
            "have a text continued, or put a chat_template.jinja into the model's folder"
        )
    turns = system_turns(model, system)
    with reader(checkpoint, run_folder_of(Path(named)), trust_remote_code, model.sight) as engine:
        chat = Conversation(engine, model, max_new_tokens, draw, turns, pictures)
        with closing(chat):
            yield chat
