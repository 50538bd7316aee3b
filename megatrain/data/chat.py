"""Which characters of a rendered conversation the assistant wrote.

A chat template is a program; only three questions can be put to it. In order of trust:
1. its own `{% generation %}` blocks, where it has them;
2. renderings of the conversation's beginnings: what precedes an answer, generation prompt included, ends where the answer starts;
   what ends with the answer ends where it ends. Both are verified to be beginnings of the whole rendering.
3. where 2 fails (templates that rewrite earlier turns, such as dropping their thinking, or have no generation prompt): the same
   conversation with another text in the answer's place; what is equal before and after it encloses the answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.data.formats import Chat, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, stop)
Turns = Sequence[dict[str, str]]
STAND_IN = "Zq7vXstandinXv7qZ"  # in no text, and unchanged by trimming


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, the characters to train on, and how many of the answers the template rewrites mid-conversation."""

    text: str
    spans: tuple[Span, ...]
    rewritten: int = 0


class ChatTemplate:
    """A tokenizer's chat template. Raises RowError for conversations that the template refuses or garbles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template: str = tokenizer.get_chat_template()
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._eos = tokenizer.eos_token or ""
        self._marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
        added = sorted(
            {str(token) for token in tokenizer.added_tokens_decoder.values()}, key=len, reverse=True
        )
        self._added = [
            token for token in added if token.strip()
        ]  # GPT-NeoX adds runs of spaces, which end no turn
        self._end_of_turn = (
            re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._added))})") if self._added else None
        )
        self._prompts = self._has_generation_prompt()

    def render(self, turns: Turns, generation_prompt: bool = False) -> str:
        """The conversation as text."""
        return self._run(turns, generation_prompt, marks=False)[0]

    def rendered(self, chat: Chat) -> Rendered:
        """The conversation and the spans of its trained answers, each with its end-of-turn token and without what follows that."""
        turns = [message.as_template_input() for message in chat.messages]
        answers = [
            index for index, message in enumerate(chat.messages) if message.role == "assistant"
        ]
        trained = [index for index in answers if chat.messages[index].trained]
        text, marked = self._run(turns, False, marks=self._marks_answers)
        if self._marks_answers and len(marked) == len(answers):
            return Rendered(
                text,
                tuple(
                    span for index, span in zip(answers, marked, strict=True) if index in trained
                ),
            )
        spans, rewritten = [], 0
        for index in trained:
            span, was_rewritten = self._answer(turns, index, text)
            rewritten += was_rewritten
            spans.append(span)
        return Rendered(text, tuple(spans), rewritten)

    def _answer(self, turns: Turns, index: int, text: str) -> tuple[Span, bool]:
        start = (
            self._end_of_beginning(turns[:index], text, generation_prompt=True)
            if self._prompts
            else None
        )
        stop = self._end_of_beginning(turns[: index + 1], text, generation_prompt=False)
        rewritten = stop is None
        if start is None or stop is None:
            before, after = self._around(turns, index, text)
            start = before if start is None or start > before else start
            stop = self._past_end_of_turn(text, after) if stop is None else stop
        stop = self._through_end_of_turn(text, start, stop)
        if start >= stop:
            raise RowError(f"messages[{index}]: the chat template leaves nothing of this answer")
        return (start, stop), rewritten

    def _end_of_beginning(self, turns: Turns, text: str, generation_prompt: bool) -> int | None:
        """Length of what `turns` render to if `text` begins with it, else None."""
        if not turns:
            return None
        try:
            beginning = self.render(turns, generation_prompt)
        except (
            RowError
        ):  # the whole conversation renders, so this only says that its beginning is none
            return None
        return len(beginning) if text.startswith(beginning) else None

    def _around(self, turns: Turns, index: int, text: str) -> Span:
        """The characters of `text` that come from the content of turn `index`, whatever the template made of it."""
        other = self.render(
            [*turns[:index], {**turns[index], "content": STAND_IN}, *turns[index + 1 :]]
        )
        before, found, after = other.partition(STAND_IN)
        if (
            not found
            or STAND_IN in after
            or not text.startswith(before)
            or not text.endswith(after)
            or len(before + after) >= len(text)
        ):
            raise RowError(
                f"messages[{index}]: the chat template rewrites the conversation so that this answer cannot be found in it; "
                "use a template with {% generation %} blocks, or train_on: all"
            )
        return len(before), len(text) - len(after)

    def _past_end_of_turn(self, text: str, stop: int) -> int:
        found = self._end_of_turn.match(text, stop) if self._end_of_turn else None
        return found.end() if found else stop

    def _through_end_of_turn(self, text: str, start: int, stop: int) -> int:
        """The end-of-turn token belongs to the answer, white space after it does not."""
        answer = text[start:stop].rstrip()
        if answer.endswith(tuple(self._added)):
            return start + len(answer)
        if self._eos and text.startswith(
            self._eos, stop
        ):  # some templates end a turn only when the next one begins
            return stop + len(self._eos)
        return stop

    def _has_generation_prompt(self) -> bool:
        probe = [{"role": "user", "content": STAND_IN}]
        try:
            return self.render(probe, generation_prompt=True) != self.render(probe)
        except RowError:
            return False

    def _run(self, turns: Turns, generation_prompt: bool, marks: bool) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(  # declared as str, returns (texts, spans)
                conversations=[list(turns)],
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **self._special,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
        ) as error:  # what a template's own code may raise
            raise RowError(f"the chat template refuses this conversation: {error}") from error
        texts, spans = found
        return texts[0], list(spans[0]) if marks else []
