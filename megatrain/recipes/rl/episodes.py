"""Answers of several turns: the model calls tools, and goes on behind what they say.

No token that the model drew is tokenised again: a turn is continued behind the tokens so far and
the template's text around the tools' results, which is tokenised once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.data.template import Toolbox
from megatrain.engine.rollout.decode import Answer, AnswerRequest
from megatrain.heartbeat import beat
from megatrain.recipes.rl.judges import Judges
from megatrain.recipes.rl.prompts import Prompt
from megatrain.recipes.signals import StopRequest


@dataclass
class Episodes:
    """Answers as they end, while the tools of others run; if asked to stop, no more than there are
    by then. most: tokens behind a prompt, those of tools included. turns: of an answer, that tools
    reply to; None: any number."""

    toolbox: Toolbox
    judges: Judges
    prompts: Mapping[int, Prompt]
    stop: StopRequest
    most: int
    turns: int | None = None
    _open: dict[tuple[int, int], Answer] = field(default_factory=dict)  # that go on
    _calling: dict[Future[Any], Answer] = field(default_factory=dict)
    _whole: deque[Answer] = field(default_factory=deque)

    def written(self, rollout: Callable[..., Any], *given: Any) -> Generator[Answer, None, None]:
        """Answers that `Engine.rollout` writes, once they are whole. Raises RewardError where an
        environment does not begin."""
        with closing(rollout(*given, more=self._more)) as found:
            for turn in found:
                self._take(turn)
                while self._whole:
                    yield self._whole.popleft()
        yield from self._whole

    def _take(self, turn: Answer) -> None:
        """Have the calls of a turn answered, or let the answer end with it."""
        prompt = self.prompts[turn.key]
        nothing = replace(turn, ids=[], logprobs=[], kept_mass=turn.kept_mass and [])
        before = self._open.pop((turn.key, turn.number), replace(nothing, mask=[], turns=[]))
        said, calls = self.toolbox.read(turn.ids, [*prompt.ids, *before.ids])
        answer = extended(before, turn, 1, [said])
        turns = [one for one in answer.turns or () if one["role"] == "assistant"]
        is_last = self.turns is not None and len(turns) > self.turns
        if calls and turn.finish == "stop" and not is_last:
            about = turn.key, turn.number, calls, prompt.begins, prompt.where
            self._calling[self.judges.call(*about)] = answer
        else:
            self._whole.append(answer)

    def _more(self, idle: bool) -> list[AnswerRequest]:
        """Answers that go on, since their tools have replied; if idle, wait for one."""
        found = list[AnswerRequest]()
        while True:
            for one in [one for one in self._calling if one.done()]:
                found += self._continued(self._calling.pop(one), *one.result())
            if found or not (idle and self._calling) or self.stop.here:
                return found
            wait(self._calling, 1.0, FIRST_COMPLETED)
            beat()

    def _continued(
        self, answer: Answer, replies: list[dict[str, Any]], failures: int
    ) -> Iterator[AnswerRequest]:
        """The request of an answer that goes on behind replies. It ends before them if they leave
        no room for a token."""
        counts = answer.calls + len(replies), answer.failures + failures
        answer = replace(answer, calls=counts[0], failures=counts[1])
        ids = self.toolbox.ids(self.toolbox.between(replies))
        room = self.most - len(answer.ids) - len(ids)
        if room <= 0:
            self._whole.append(answer)
            return
        kept = None if answer.kept_mass is None else [1.0] * len(ids)
        part = replace(answer, ids=ids, logprobs=[math.nan] * len(ids), kept_mass=kept)
        answer = self._open[answer.key, answer.number] = extended(answer, part, 0, replies)
        whole = [*self.prompts[answer.key].ids, *answer.ids]
        yield AnswerRequest(answer.key, whole, (answer.number,), room, drawn=len(answer.ids))


def extended(answer: Answer, part: Answer, drawn: int, turns: list[dict[str, Any]]) -> Answer:
    """An answer and what comes behind it. drawn: 1 if the model drew that, else 0."""
    kept = None if part.kept_mass is None else [*(answer.kept_mass or ()), *part.kept_mass]
    return replace(
        answer,
        ids=[*answer.ids, *part.ids],
        logprobs=[*answer.logprobs, *part.logprobs],
        kept_mass=kept,
        finish=part.finish,
        mask=[*(answer.mask or ()), *[drawn] * len(part.ids)],
        turns=[*(answer.turns or ()), *turns],
    )
