"""A tokenizer's chat template: a program from a conversation to text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatrain.data.fields import RowError
from megatrain.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatrain.data.formats import Chat

Span = tuple[int, int]  # characters [start, stop)
STAND_IN = "Zq7vXstandinXv7qZ"  # in no text, and unchanged by trimming
# What a template's own code may raise, besides errors of the template language.
OF_ITS_CODE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Scene:
    """What a template is given: turns, and the row's own variables of the template."""

    turns: tuple[dict[str, Any], ...]
    variables: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(chat: Chat) -> Scene:
        turns = tuple(message.as_template_input() for message in chat.messages)
        return Scene(turns, chat.variables)

    def beginning(self, count: int) -> Scene:
        return replace(self, turns=self.turns[:count])

    def with_turn(self, index: int, turn: dict[str, Any]) -> Scene:
        """The same with another turn in this place."""
        return replace(self, turns=(*self.turns[:index], turn, *self.turns[index + 1 :]))


QUESTION = {"role": "user", "content": "question"}
ANSWERED = Scene((QUESTION, {"role": "assistant", "content": STAND_IN}))
FOLLOWED = Scene((*ANSWERED.turns, QUESTION))


class Template:
    """A tokenizer's chat template, and what its text shows of how it writes turns."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            self._source: str = tokenizer.get_chat_template()
        except ValueError as error:  # several, and none of them the default
            raise DataError(f"{tokenizer.name_or_path}: no default chat template") from error
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self.eos = tokenizer.eos_token or ""
        self.marks_answers = GENERATION.search(self._source) is not None
        tokens = tokenizer.added_tokens_decoder.values()
        self._special = {str(token) for token in tokens if token.special}
        # GPT-NeoX adds runs of spaces, which end no turn
        added = sorted(filter(str.strip, map(str, tokens)), key=len, reverse=True)
        any_of = "|".join(map(re.escape, added)) or "(?!)"
        self.next_token = re.compile(rf"\s*({any_of})")
        self._last_token = re.compile(rf"({any_of})\s*\Z")

    def render(self, scene: Scene, generation_prompt: bool = False) -> str:
        """The conversation as text. Raises RowError where the template refuses it."""
        return self._run(scene, generation_prompt, marks=False)[0]

    def render_marked(self, scene: Scene) -> tuple[str, list[Span]]:
        """The text, and the spans of its `{% generation %}` blocks. Raises RowError."""
        return self._run(scene, False, marks=self.marks_answers)

    @cached_property
    def prompts(self) -> bool:
        """Whether it writes something for a generation prompt."""
        asked = Scene((QUESTION,))
        try:
            return self.render(asked, generation_prompt=True) != self.render(asked)
        except RowError:
            return False

    @cached_property
    def stop(self) -> str | None:
        """The token that ends an answer, else the one with which the next turn begins, if any."""
        return self._after_answer(ANSWERED) or self._after_answer(FOLLOWED)

    def last_token(self, text: str) -> str | None:
        """The added token with which a text ends, but for white space."""
        found = self._last_token.search(text)
        return found[1] if found else None

    def ends(self, answer: str) -> bool:
        """Whether an answer's last token is one that ends it, as `</tool_call>` does not."""
        last = self.last_token(answer)
        return last is not None and (last == self.stop or last in self._special)

    def _after_answer(self, scene: Scene) -> str | None:
        """The token right after the content of an answer."""
        try:
            tail = self.render(scene).partition(STAND_IN)[2]
        except RowError:  # a template for another kind of data
            return None
        token = self.next_token.match(tail)
        return token[1] if token else None

    def _run(self, scene: Scene, generation_prompt: bool, marks: bool) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(  # declared as str, returns (texts, spans)
                conversations=[list(scene.turns)],
                chat_template=self._source,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **{**self._variables, **scene.variables},
            )
        except (jinja2.TemplateError, *OF_ITS_CODE) as error:
            raise RowError(f"the chat template refuses this conversation: {error}") from error
        texts, spans = found
        return texts[0], list(spans[0]) if marks else []
