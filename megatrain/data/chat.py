"""Find the characters of a rendered conversation that the assistant wrote.

A chat template is a program, which says so in one of three ways. In order of trust:
1. Its own `{% generation %}` blocks, where it has them.
2. Renderings of the conversation's beginnings: what precedes an answer, generation prompt included,
   ends where the answer starts; what ends with the answer ends where it ends. Both are verified to
   be beginnings of the whole rendering.
3. Where 2 fails (templates that rewrite earlier turns, such as dropping their thinking, or have no
   generation prompt): the same conversation with another text in the answer's place. What is equal
   before and after that text encloses the answer.

An answer must end in a token at which generation stops, or the model never learns to stop. Where
the template writes none, that is the token with which the next turn begins, else the tokenizer's
end-of-sequence token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megatrain.data.samples import Chat, Message, Picture, RowError, schema_texts, shared_length
from megatrain.data.template import CALLED, OWN_WORDS, STAND_IN, CharSpan, Scene, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEMPLATE = "by the chat template"


@dataclass(frozen=True)
class Marked:
    """A text ready for the tokenizer."""

    text: str
    spans: tuple[CharSpan, ...] | None  # the characters to train on; None for all
    # let the tokenizer add its special tokens, which a chat template has written into the text
    add_special: bool = False
    eos: bool = False  # append the end-of-sequence token, as a target
    rewritten: int = 0  # answers that the template renders otherwise once others follow
    notes: tuple[str, ...] = ()  # words behind a count in a message
    wrapping: str = ""  # how a conversation became this text
    keep: CharSpan | None = None  # the characters whose tokens are the row's; None for all
    pictures: tuple[Picture, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template. Raises RowError for conversations that it refuses or garbles."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, day: date | None = None) -> None:
        self._template = Template(tokenizer, day)

    def whole(self, chat: Chat) -> Marked:
        """The conversation with all of it to train on, through the end of its last answer."""
        scene = self._template.scene(chat)
        text = self._template.render(scene)
        if scene.turns[-1]["role"] == "assistant" and not self._template.ends(text):
            text += self._ending(len(scene.turns) - 1)
        spans = [(0, len(text)) if turn.role == "assistant" else None for turn in chat.messages]
        notes = (*check_arrival(chat, self._template, text, spans),)
        if any(turn.role == "assistant" and not turn.trained for turn in chat.messages):
            notes += ("rows have answers that are context, and data.train_on: all trains them",)
        return Marked(text, None, notes=notes, wrapping=_TEMPLATE)

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """The tokens that end answers: the usual one first, then what ends a call of a tool."""
        found = [self._template.stop]
        try:
            text, spans, _ = self._answers(CALLED, [1])
            found.append(self._template.last_token(text[slice(*spans[1])]))
        except RowError:  # it knows no tools
            pass
        return tuple(dict.fromkeys(token for token in found if token))

    def mark(self, chat: Chat) -> Marked:
        """The conversation with the spans of its trained answers, each through its end-of-turn."""
        scene = self._template.scene(chat)
        trained = [i for i, m in enumerate(chat.messages) if m.role == "assistant" and m.trained]
        text, spans, rewritten = self._answers(scene, trained)
        of_each = [spans.get(index) for index in range(len(scene.turns))]
        dropped = check_arrival(chat, self._template, text, of_each)
        notes, of_trained = (*dropped, *self._endless(text, spans.values())), (*spans.values(),)
        return Marked(text, of_trained, rewritten=rewritten, notes=notes, wrapping=_TEMPLATE)

    def _answers(self, scene: Scene, trained: list[int]) -> tuple[str, dict[int, CharSpan], int]:
        """The text; the characters of the answers of these turns, each through a token that ends
        it; and how many of them are rewritten once other turns follow."""
        indices = [i for i, turn in enumerate(scene.turns) if turn["role"] == "assistant"]
        text, marked = self._template.render_marked(scene)
        # a message may have several blocks; then they do not tell which is whose
        in_blocks = len(marked) == len(indices)
        spans, rewritten = dict[int, CharSpan](), 0
        for index in trained:
            if in_blocks:
                start, stop = marked[indices.index(index)]
            else:
                (start, stop), otherwise = self._answer(scene, index, text)
                rewritten += otherwise
            if not self._template.ends(text[start:stop]):
                text, stop = self._through_next_token(text, stop, index)
            if start >= stop:
                nothing = "the chat template leaves nothing of this answer"
                raise RowError(f"messages[{index}]: {nothing}")
            spans[index] = start, stop
        return text, spans, rewritten

    def _answer(self, scene: Scene, index: int, text: str) -> tuple[CharSpan, bool]:
        """The answer of turn `index`, without the white space behind a token that ends it, and
        whether it is rewritten once other turns follow."""
        start = self._start(scene.beginning(index), text) if self._template.prompts else None
        stop = self._end_of(scene.beginning(index + 1), text)
        rewritten = stop is None
        if start is None or stop is None:
            before, after = self._around(scene, index, text)
            start = before if start is None or start > before else start
            stop = after + self._tail(scene, index, text[after:]) if stop is None else stop
        if self._template.ends(text[start:stop]):
            stop = start + len(text[start:stop].rstrip())
        return (start, stop), rewritten

    def _start(self, beginning: Scene, text: str) -> int | None:
        """The end in `text` of what the generation prompt supplies, None if that is not in it. An
        answer may not have all of a prompt, such as its `<think>`."""
        prompted = self._template.tried(beginning, generation_prompt=True)
        if prompted is None or text.startswith(prompted):
            return None if prompted is None else len(prompted)
        before, shared = self._end_of(beginning, text), shared_length(prompted, text)
        return shared if before is not None and shared > before else None

    def _end_of(self, beginning: Scene, text: str) -> int | None:
        """Length of what a conversation renders to if `text` begins with it, else None."""
        rendered = self._template.tried(beginning)
        return len(rendered) if rendered is not None and text.startswith(rendered) else None

    def _around(self, scene: Scene, index: int, text: str) -> CharSpan:
        """The characters of `text` that the template made of what turn `index` says."""
        other = scene.with_stand_ins(index)
        rendered = self._template.render(scene.with_turn(index, other))
        before, _, rest = rendered.partition(STAND_IN)
        after = rest.rpartition(STAND_IN)[2]
        once = 0 < rendered.count(STAND_IN) <= str(other).count(STAND_IN)
        fits = text.startswith(before) and text.endswith(after)
        if not (once and fits and len(before + after) < len(text)):
            raise RowError(
                f"messages[{index}]: the chat template rewrites the conversation so that this "
                "answer cannot be found in it; use a template with {% generation %} blocks, or "
                "train_on: all"
            )
        lead = self._lead(scene, index, other)
        start = len(before) - (len(lead) if before.endswith(lead) else 0)
        return start, len(text) - len(after)

    def _lead(self, scene: Scene, index: int, other: dict[str, Any]) -> str:
        """The template's words of an answer before its first text, such as `<tool_call>`."""
        if "tool_calls" not in other:
            return ""
        beginning = scene.beginning(index + 1)
        plain = {"role": "assistant", "content": STAND_IN}
        heads = [
            self._template.render(beginning.with_turn(index, turn)).partition(STAND_IN)[0]
            for turn in (plain, other)
        ]
        return heads[1][shared_length(*heads) :]

    def _tail(self, scene: Scene, index: int, rest: str) -> int:
        """Number of characters in `rest`, the text behind an answer's texts, that belong to it."""
        last = scene.with_stand_ins(index)
        ended = self._template.render(scene.beginning(index + 1).with_turn(index, last))
        tail = ended.rpartition(STAND_IN)[2]
        if tail and rest.startswith(tail):
            return len(tail)
        token = self._template.next_token.match(rest)
        return token.end() if token else 0

    def _through_next_token(self, text: str, stop: int, index: int) -> tuple[str, int]:
        """The text, with a token behind an answer that ends it, and the end of that token."""
        if following := self._template.next_token.match(text, stop):
            return text, following.end()
        if text[stop:].strip():
            raise RowError(
                f"messages[{index}]: the chat template writes no token after this answer, so the "
                "model would not learn to stop there; give earlier answers a weight of 0, or use "
                "another chat template (data.chat_template)"
            )
        text += self._ending(index)
        return text, len(text)

    def _ending(self, index: int) -> str:
        """The token to append to a conversation whose last answer has none."""
        if ending := self._template.stop or self._template.eos:
            return ending
        raise RowError(
            f"messages[{index}]: the chat template ends this answer with no token, and the "
            "tokenizer has no eos_token; use another chat template (data.chat_template)"
        )

    def _endless(self, text: str, spans: Iterable[CharSpan]) -> tuple[str, ...]:
        """Notes of answers in mid-conversation that end otherwise than the last, as gpt-oss's."""
        lasts = [self._template.last_token(text[start:stop]) for start, stop in spans]
        return tuple(
            f"answers end in {last}, where the chat template ends the last one in {self.stops[0]}"
            for last in lasts
            if self._template.stop and last not in (*self.stops, self._template.eos)
        )


REMEDY = "use another chat template (data.chat_template)"
SYSTEM_ROLES = ("system", "developer")


def check_arrival(
    chat: Chat, template: Template, text: str, spans: Sequence[CharSpan | None]
) -> list[str]:
    """Notes to count about what `text` leaves out. spans: the characters of each message that is
    trained on, None for the others. Raises RowError where text to be trained on or a system prompt
    is missing."""
    whole, behind = squeezed(text), 0
    names = [str(tool.get("function", tool)["name"]) for tool in chat.tools]
    if names and not (template.shows_tools and all(_arrives(name, whole) for name in names)):
        raise RowError(f"field 'tools': the chat template leaves them out; {REMEDY}")
    unknown = (name for name in chat.variables if not template.names(name))
    notes = [f"chat_template_kwargs set {name!r}, which the template has not" for name in unknown]
    for index, (message, span) in enumerate(zip(chat.messages, spans, strict=True)):
        spelt = sorted(template.spelt(message.content))
        notes += [f"messages spell {one}, which becomes the special token itself" for one in spelt]
        if span is None:
            notes += _of_context(message, index, whole)
            continue
        # a generation prompt may hold the answer's first characters, such as `<think>`
        begin, behind = min(behind, span[0]), span[1]
        before, answer = squeezed(text[begin : span[0]]), squeezed(text[begin : span[1]])
        for name, said in _words(message):
            if _arrives(said, answer, len(before)):
                continue
            if index + 1 < len(chat.messages) and _arrives(said, _alone(chat, index, template)):
                notes.append(f"earlier answers lose their {name} once other turns follow")
                continue
            raise RowError(
                f"messages[{index}]: the chat template leaves out the {name} of this answer, which "
                f"is to be trained on; {REMEDY}"
            )
        notes += _left_out(message, whole)
    return notes


def _of_context(message: Message, index: int, whole: str) -> list[str]:
    notes = _left_out(message, whole)
    if not all(_arrives(text, whole) for text in message.texts):
        if message.role in SYSTEM_ROLES:
            raise RowError(
                f"messages[{index}]: the chat template leaves out this {message.role} message; "
                f"{REMEDY}, or put its text into the first question"
            )
        notes.append(f"{message.role} messages are left out by the chat template")
    if message.role == "assistant":
        missing = {name for name, said in _words(message) if not _arrives(said, whole)}
        missing.discard("text")  # counted above
        notes += map(_field_note, sorted(missing))
    return notes


def _words(message: Message) -> Iterator[tuple[str, str]]:
    """(name, text) of all that the model says in a turn."""
    yield from (("text", text) for text in message.texts)
    yield from ((name, message.extra[name]) for name in OWN_WORDS if name in message.extra)
    for call in message.extra.get("tool_calls", ()):
        said = schema_texts([call["function"]["name"], call["function"]["arguments"]])
        yield from (("tool_calls", text) for text in said)


def _left_out(message: Message, whole: str) -> list[str]:
    """Notes of the other fields of a turn that are left out."""
    own = (*OWN_WORDS, "tool_calls", "tool_call_id")  # ids join turns, and say nothing
    others = {name: said for name, said in message.extra.items() if name not in own}
    missing = (name for name, said in others.items() if not _arrives(said, whole))
    return [*map(_field_note, missing)]


def _field_note(name: str) -> str:
    return f"fields {name!r} of messages are left out by the chat template"


def _alone(chat: Chat, index: int, template: Template) -> str:
    """The conversation through turn `index`, as if it ended there."""
    return squeezed(template.tried(template.scene(chat).beginning(index + 1)) or "")


def squeezed(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


def _arrives(said: str, text: str, start: int = 0) -> bool:
    """True if a squeezed text holds these words, maybe as JSON, not all of them before `start`."""
    if not said.strip() or said in text[start:]:
        return True
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
    found = ((text.rfind(form), len(form)) for form in map(squeezed, forms))
    return any(place >= 0 and place + length > start for place, length in found)
