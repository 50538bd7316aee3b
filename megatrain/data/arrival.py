"""What a chat template leaves out: it may render a conversation and drop parts of it.

Text to be trained on and system prompts must arrive, or the row is refused. What else is left out
is counted, and so are messages that spell a special token. White space is not compared: templates
trim and indent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from megatrain.data.fields import RowError
from megatrain.data.messages import Message
from megatrain.data.samples import Chat
from megatrain.data.template import WORDS, Span, Template
from megatrain.data.tools import texts_of

REMEDY = "use another chat template (data.chat_template)"
SYSTEM_ROLES = ("system", "developer")


def check_arrival(
    chat: Chat, template: Template, text: str, spans: Sequence[Span | None]
) -> list[str]:
    """What is left out of `text`, as notes to count.

    spans: the characters of each message that is trained on, None for the others.

    Raises RowError where text to be trained on or a system prompt is missing.
    """
    whole, behind = squeezed(text), 0
    _check_tools(chat, template, whole)
    unknown = (name for name in chat.variables if not template.names(name))
    notes = [f"chat_template_kwargs set {name!r}, which the template has not" for name in unknown]
    for index, (message, span) in enumerate(zip(chat.messages, spans, strict=True)):
        notes += map(_spelt_note, sorted(template.spelt(message.content)))
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
    if not _arrives(message.content, whole):
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


def _check_tools(chat: Chat, template: Template, whole: str) -> None:
    names = [str(tool.get("function", tool)["name"]) for tool in chat.tools]
    if names and not (template.shows_tools and all(_arrives(name, whole) for name in names)):
        raise RowError(f"field 'tools': the chat template leaves them out; {REMEDY}")


def _words(message: Message) -> Iterator[tuple[str, str]]:
    """(name, text) of all that the model says in a turn."""
    yield "text", message.content
    yield from ((name, message.extra[name]) for name in WORDS if name in message.extra)
    for call in message.extra.get("tool_calls", ()):
        said = texts_of([call["function"]["name"], call["function"]["arguments"]])
        yield from (("tool_calls", text) for text in said)


def _left_out(message: Message, whole: str) -> list[str]:
    """Notes of the other fields of a turn that are left out."""
    own = (*WORDS, "tool_calls", "tool_call_id")  # ids join turns, and say nothing
    others = {name: said for name, said in message.extra.items() if name not in own}
    missing = (name for name, said in others.items() if not _arrives(said, whole))
    return [*map(_field_note, missing)]


def _spelt_note(token: str) -> str:
    return f"messages spell {token}, which becomes the special token itself"


def _field_note(name: str) -> str:
    return f"fields {name!r} of messages are left out by the chat template"


def _alone(chat: Chat, index: int, template: Template) -> str:
    """The conversation through turn `index`, as if it ended there."""
    try:
        return squeezed(template.render(template.scene(chat).beginning(index + 1)))
    except RowError:
        return ""


def squeezed(text: str) -> str:
    """The text without its white space."""
    return "".join(text.split())


def _arrives(said: str, text: str, start: int = 0) -> bool:
    """Whether a squeezed text holds what was said, and not all of it before `start`.

    A template may have written it as JSON.
    """
    if not said.strip() or said in text[start:]:
        return True
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
    found = ((text.rfind(form), len(form)) for form in map(squeezed, forms))
    return any(place >= 0 and place + length > start for place, length in found)
