"""Which characters of a rendered conversation the assistant wrote.

A chat template is a program, which says so in one of three ways. In order of trust:
1. Its own `{% generation %}` blocks, where it has them.
2. Renderings of the conversation's beginnings: what precedes an answer, generation prompt included,
   ends where the answer starts; what ends with the answer ends where it ends. Both are verified to
   be beginnings of the whole rendering.
3. Where 2 fails (templates that rewrite earlier turns, such as dropping their thinking, or have no
   generation prompt): the same conversation with another text in the answer's place. What is equal
   before and after that text encloses the answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatrain.data.fields import RowError
from megatrain.data.formats import Chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters [start, stop)
Turns = Sequence[dict[str, Any]]
Given = Mapping[str, Any]
STAND_IN = "Zq7vXstandinXv7qZ"  # in no text, and unchanged by trimming


@dataclass(frozen=True)
class Marked:
    """A text ready for the tokenizer.

    Attributes:
        spans: the characters to train on; None for all.
        add_special: let the tokenizer add its special tokens, which a chat template has written
            into the text itself.
        eos: append the end-of-sequence token, as a target.
        rewritten: number of answers that the template renders otherwise once others follow.
    """

    text: str
    spans: tuple[Span, ...] | None
    add_special: bool = False
    eos: bool = False
    rewritten: int = 0


class ChatTemplate:
    """A tokenizer's chat template. Raises RowError for conversations that it refuses or garbles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._template: str = tokenizer.get_chat_template()
        self._special: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._eos = tokenizer.eos_token or ""
        self._marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", self._template) is not None
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        # GPT-NeoX adds runs of spaces, which end no turn
        self._added = sorted(filter(str.strip, added), key=len, reverse=True)
        self._end_of_turn = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self._added)) or '(?!)'})")
        self._prompts = self._has_generation_prompt()

    def render(self, turns: Turns, given: Given, generation_prompt: bool = False) -> str:
        """The conversation as text. given: the row's own variables of the template."""
        return self._run(turns, given, generation_prompt, marks=False)[0]

    def mark(self, chat: Chat) -> Marked:
        """The conversation with the spans of its trained answers, each through its end-of-turn."""
        turns = [message.as_template_input() for message in chat.messages]
        answers = [(i, turn) for i, turn in enumerate(chat.messages) if turn.role == "assistant"]
        text, marked = self._run(turns, chat.variables, False, marks=self._marks_answers)
        if self._marks_answers and len(marked) == len(answers):
            pairs = zip(marked, answers, strict=True)
            return Marked(text, tuple(span for span, (_, answer) in pairs if answer.trained))
        found = [
            self._answer(turns, chat.variables, index, text)
            for index, answer in answers
            if answer.trained
        ]
        spans = tuple(span for span, _ in found)
        return Marked(text, spans, rewritten=sum(rewritten for _, rewritten in found))

    def _answer(self, turns: Turns, given: Given, index: int, text: str) -> tuple[Span, bool]:
        """The answer of turn `index` in `text`, and whether it is rewritten in mid-conversation."""
        start = None
        if self._prompts:
            start = self._end_of_beginning(turns[:index], given, text, generation_prompt=True)
        stop = self._end_of_beginning(turns[: index + 1], given, text, generation_prompt=False)
        rewritten = stop is None
        if start is None or stop is None:
            before, after = self._around(turns, given, index, text)
            start = before if start is None or start > before else start
            if stop is None:
                end_of_turn = self._end_of_turn.match(text, after)
                stop = end_of_turn.end() if end_of_turn else after
        stop = self._through_end_of_turn(text, start, stop)
        if start >= stop:
            raise RowError(f"messages[{index}]: the chat template leaves nothing of this answer")
        return (start, stop), rewritten

    def _end_of_beginning(
        self, turns: Turns, given: Given, text: str, generation_prompt: bool
    ) -> int | None:
        """Length of what `turns` render to if `text` begins with it, else None."""
        if not turns:
            return None
        try:
            beginning = self.render(turns, given, generation_prompt)
        except RowError:  # the whole conversation renders: its beginning alone is none
            return None
        return len(beginning) if text.startswith(beginning) else None

    def _around(self, turns: Turns, given: Given, index: int, text: str) -> Span:
        """The characters of `text` that the template made of the content of turn `index`."""
        other = {**turns[index], "content": STAND_IN}
        rendered = self.render([*turns[:index], other, *turns[index + 1 :]], given)
        before, _, after = rendered.partition(STAND_IN)
        once = rendered.count(STAND_IN) == 1 and len(before + after) < len(text)
        if not (once and text.startswith(before) and text.endswith(after)):
            raise RowError(
                f"messages[{index}]: the chat template rewrites the conversation so that this "
                "answer cannot be found in it; use a template with {% generation %} blocks, or "
                "train_on: all"
            )
        return len(before), len(text) - len(after)

    def _through_end_of_turn(self, text: str, start: int, stop: int) -> int:
        """The end-of-turn token belongs to the answer, white space after it does not."""
        answer = text[start:stop].rstrip()
        if answer.endswith(tuple(self._added)):
            return start + len(answer)
        # some templates end a turn only when the next one begins
        return stop + len(self._eos) if text.startswith(self._eos, stop) else stop

    def _has_generation_prompt(self) -> bool:
        probe = [{"role": "user", "content": STAND_IN}]
        try:
            return self.render(probe, {}, generation_prompt=True) != self.render(probe, {})
        except RowError:
            return False

    def _run(
        self, turns: Turns, given: Given, generation_prompt: bool, marks: bool
    ) -> tuple[str, list[Span]]:
        import jinja2
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            found: Any = render_jinja_template(  # declared as str, returns (texts, spans)
                conversations=[list(turns)],
                chat_template=self._template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=generation_prompt,
                **{**self._special, **given},
            )
        # what a template's own code may raise
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RowError(f"the chat template refuses this conversation: {error}") from error
        texts, spans = found
        return texts[0], list(spans[0]) if marks else []
