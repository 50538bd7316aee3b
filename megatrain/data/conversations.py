"""Rows of one answer, as conversations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatrain.data.fields import Row, RowError, filled_list, is_given, kind_of, text_of
from megatrain.data.messages import Message, Turns, openai_turns, sharegpt_turns
from megatrain.data.samples import Chat
from megatrain.data.tools import tools_of

# Without a chat template: the prompt of the Stanford Alpaca release, as base models know it.
ALPACA = (
    "Below is an instruction that describes a task{paired}. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
ALPACA_PAIRED = ", paired with an input that provides further context"

SYSTEM = ("system", "system_prompt")
ABOUT_CHATS = (*SYSTEM, "chat_template_kwargs", "tools", "functions")
ABOUT_ALPACA = ("input", "history", *SYSTEM, "chat_template_kwargs")
# Variables of a template that are not a row's to set.
OURS = (
    *("messages", "conversations", "tools", "chat_template", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message"),
)


def chat_of(row: Row, turns: Turns, plain: tuple[str, str] | None = None) -> Chat:
    """The conversation with what the row's columns say about it. Raises RowError."""
    prompts = [name for name in SYSTEM if is_given(row.get(name))]
    system = tuple(Message("system", text_of(row, name)) for name in prompts)
    of_turns = ["a system turn"] if any(m.role == "system" for m in turns.messages) else []
    if len(said := [*prompts, *of_turns]) > 1 and prompts:
        raise RowError(f"field {said[0]!r}: {said[1]} says the same; keep one system prompt")
    variables = row.get("chat_template_kwargs")
    variables = variables if is_given(variables) else {}
    if not isinstance(variables, Mapping):
        found = kind_of(variables)
        raise RowError(f"field 'chat_template_kwargs': expected an object, found {found}")
    given = {str(name): value for name, value in variables.items() if value is not None}
    for name in (name for name in OURS if name in given):
        raise RowError(f"chat_template_kwargs.{name}: cannot be set by a row")
    messages = (*system, *turns.messages)
    tools = tools_of(row, bare="conversations" in row)
    plain = None if system or given or tools else plain
    return Chat(messages, plain, given, tools, turns.unread)


def from_messages(row: Row) -> Chat:
    """Raises RowError, as all of these."""
    return chat_of(row, openai_turns(filled_list(row, "messages"), "messages"))


def from_sharegpt(row: Row) -> Chat:
    """A list of turns, which many sets name so and still write as role and content."""
    return chat_of(row, turns_of(filled_list(row, "conversations"), "conversations"))


def turns_of(turns: list[object], name: str) -> Turns:
    """The turns of a list: of role and content if the first is, else of from and value."""
    openai = isinstance(turns[0], Mapping) and "role" in turns[0]
    return (openai_turns if openai else sharegpt_turns)(turns, name)


def from_prompt_completion(row: Row) -> Chat:
    """Two texts, or two lists of messages."""
    plain = None
    if isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str):
        plain = (text_of(row, "prompt"), text_of(row, "completion"))
    asked, answer = _side(row, "prompt", "user"), _side(row, "completion", "assistant")
    return exchange(row, asked, answer, plain)


def exchange(row: Row, asked: Turns, answer: Turns, plain: tuple[str, str] | None = None) -> Chat:
    """A prompt, which is context only, and its answer; `plain` where both are texts."""
    context = [replace(turn, trained=False) for turn in asked.messages]
    turns = Turns((*context, *answer.messages), asked.unread | answer.unread)
    return replace(chat_of(row, turns, plain), literal=plain is not None)


def from_alpaca(row: Row, answer: str = "output") -> Chat:
    """answer: the column that holds it."""
    instruction, output = text_of(row, "instruction"), text_of(row, answer)
    given = text_of(row, "input") if is_given(row.get("input")) else ""
    parts = {"paired": ALPACA_PAIRED, "input": f"### Input:\n{given}\n\n"} if given else {}
    prompt = ALPACA.format_map({"paired": "", "input": "", "instruction": instruction, **parts})
    asked = Message("user", f"{instruction}\n\n{given}" if given else instruction)
    earlier = _history(row)
    turns = Turns((*earlier, asked, Message("assistant", output)))
    return chat_of(row, turns, None if earlier else (prompt, output))


def _history(row: Row) -> list[Message]:
    """The turns before an instruction: a list of (instruction, output)."""
    pairs = filled_list(row, "history") if is_given(row.get("history")) else []
    turns = []
    for number, pair in enumerate(pairs):
        place = f"history[{number}]"
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"{place}: expected a list of two texts, question and answer")
        sides = {"0": pair[0], "1": pair[1]}
        turns.append(Message("user", text_of(sides, "0", place)))
        turns.append(Message("assistant", text_of(sides, "1", place)))
    return turns


def _side(row: Row, name: str, role: str) -> Turns:
    if isinstance(row.get(name), list):
        return openai_turns(filled_list(row, name), name)
    return Turns((Message(role, text_of(row, name)),))
