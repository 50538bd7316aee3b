"""Rows for people to look at, with their loss mask in colour, and counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from megatrain.data.rows import IdArray, MaskArray, PackedRows, Rows, TokenRows
from megatrain.data.samples import JUDGED, PAIRS, PLAIN, PROMPTS
from megatrain.errors import number_of, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_NOUNS = {PLAIN: "row", PAIRS: "pair", JUDGED: "judged row", PROMPTS: "prompt"}
BARS = "▁▂▃▄▅▆▇█"
BINS = 16
# Of a row, unless it is shown in full: a screen of 80 x 24.
HEAD_CHARACTERS, HEAD_LINES = 1280, 16
TAIL_CHARACTERS, TAIL_LINES = 640, 8
TARGET_STYLE, CONTEXT_STYLE = "green", "dim"
TARGET_BRACKETS = ("⟦", "⟧")  # on a terminal without colour


def summary(rows: Rows) -> dict[str, Any]:
    """Counts of the rows to train on, and of what was cut, dropped or refused; JSON-able."""
    lengths, counts = rows.lengths, rows.counts
    wanted = 0 if rows.values is None else int(np.nansum(rows.values))
    return {
        "rows": len(rows),
        "kind": rows.kind,
        "wanted_rows": wanted if rows.kind == JUDGED else None,
        "tokens": int(lengths.sum()),
        "target_tokens": int(rows.target_counts.sum()),
        "longest": int(lengths.max()),
        "longest_sequence": int(rows.side_lengths.max()),
        "median": int(np.median(lengths)),
        "packed": isinstance(rows, PackedRows),
        "remainder_tokens": rows.remainder if isinstance(rows, PackedRows) else 0,
        "rows_read": counts.read,
        "bad_rows": counts.bad,
        "first_bad_rows": list(counts.first_bad),
        "truncated_rows": counts.truncated,
        "truncated_tokens": counts.truncated_tokens,
        "rows_too_long": counts.too_long,
        "rows_without_target": counts.without_target,
        "rewritten_turns": counts.rewritten_turns,
        "split_texts": counts.split_texts,
        "cut_answers": counts.cut_answers,
        "unknown_tokens": counts.unknown,
        "lossy_rows": counts.lossy,
        "choices": list(counts.choices),
        "wrapped": dict(counts.wrapped),
        "notes": dict(counts.notes),
        "unread_columns": list(counts.unread),
        "warnings": warnings(rows),
    }


def describe(rows: Rows) -> list[str]:
    """The summary as plain lines; a line about what was lost only where something was."""
    found, counts = summary(rows), rows.counts
    tokens, targets = found["tokens"], found["target_tokens"]
    what = number_of(found["rows"], _NOUNS[rows.kind])
    if found["packed"]:
        what = f"{number_of(found['rows'], 'block')} of packed documents"
    if found["wanted_rows"] is not None:
        what += f", {found['wanted_rows']:,} of them wanted"
    sizes = f"{tokens:,} tokens"
    if rows.kind != PROMPTS:  # whose targets are written later
        sizes += f", {targets:,} of them targets ({targets / tokens:.1%})"
    which = "one of their answers" if rows.kind == PAIRS else "them"
    first, cut = next(iter(counts.first_bad), ""), counts.truncated_tokens
    lost = (
        (found["remainder_tokens"], "token", "left over, which the last block holds"),
        (counts.truncated, "row", f"cut to seq_len; {cut:,} tokens are not trained on"),
        (counts.split_texts, "text", "longer than a row; method: pretrain packs texts"),
        (counts.too_long, "row", "dropped, because they are longer than seq_len"),
        (counts.without_target, "row", f"dropped, because no token to train on is left in {which}"),
        (counts.rewritten_turns, "earlier answer", "trained on as the chat template has them"),
    )
    longest = f"longest {found['longest']:,}"
    if rows.kind == PAIRS:
        longest += f" (of one answer and its prompt {found['longest_sequence']:,})"
    length = f"length: median {found['median']:,}, {longest}  {histogram(rows)}"
    more = [f"{number_of(count, noun)} {how}" for count, noun, how in lost if count]
    if counts.bad:
        bad = f"{counts.bad:,} of {counts.read:,} rows are bad and skipped; the first: {first}"
        more.insert(found["remainder_tokens"] > 0, bad)
    ways = [f"{count:,} {way}" for way, count in counts.wrapped.items()]
    if ways:
        more.insert(0, f"rows became text: {'; '.join(ways)}")
    if counts.unread:
        more.append(f"columns that are not read: {printable(', '.join(counts.unread))}")
    return [f"{what}, {sizes}", length, *more, *counts.choices]


def held_out_line(held_out: Rows) -> str:
    """The count of the rows that evaluations compute."""
    return f"{number_of(len(held_out), 'row')} held out for evaluation"


def warnings(rows: Rows, held_out: Rows | None = None) -> list[str]:
    """Warnings about rows that were changed or lost."""
    counts = rows.counts
    lines = [*counts.warned, *(f"{count:,} {what}" for what, count in counts.notes.items())]
    if held_out is not None and held_out.counts is not counts:  # of a source of their own
        lines += [f"data.eval: {line}" for line in warnings(held_out)]
    return lines


def histogram(rows: Rows) -> str:
    """The distribution of lengths between zero and the longest, in one line of bars."""
    heights, _ = np.histogram(rows.lengths, bins=BINS, range=(0, int(rows.lengths.max())))
    highest = heights.max() + 1
    return "".join(BARS[8 * height // highest] if height else " " for height in heights.tolist())


def show_rows(
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    console: Console,
    held_out: Rows | None = None,
    full: bool = True,
) -> None:
    """Print the first rows, targets in green (in brackets without colour), then counts; with `full`
    all of a row, else what fits a screen."""
    colour = console.color_system is not None
    for index in range(min(count, len(rows))):
        for title, ids, mask in _pieces(rows, index):
            console.rule(title, style=CONTEXT_STYLE)
            text = painted(ids, mask, tokenizer, colour)
            console.print(text if full else on_a_screen(text), soft_wrap=True)
    console.rule(style=CONTEXT_STYLE)
    piped = not console.is_terminal  # a terminal's lines end at words
    for line in describe(rows):
        console.print(line, soft_wrap=piped, markup=False, highlight=False)
    for line in warnings(rows, held_out):
        console.print(f"warning: {line}", soft_wrap=piped, markup=False, highlight=False)


def _pieces(rows: Rows, index: int) -> Iterator[tuple[str, IdArray, MaskArray]]:
    """(title, ids, mask) of what is shown of a row: of a pair the prompt, then both answers."""
    ids, mask = rows.row(index)
    value = math.nan if rows.values is None else float(rows.values[index])
    if rows.kind != PAIRS:
        judgement = ("wanted, " if value else "unwanted, ") if rows.kind == JUDGED else ""
        title = f"row {index}: {judgement}{len(ids)} tokens, {int(mask.sum())} targets"
        yield title + _images_of(rows, index), *_with_images_once(rows, ids, mask)
        return
    other, flags = rows.side(index, 1)
    margin = "" if math.isnan(value) else f", margin {value:g}"
    begin = min(int(mask.argmax()), int(flags.argmax()))
    if not np.array_equal(ids[:begin], other[:begin]):
        begin = 0  # two ends of prompts, as truncation_mode keep_end leaves them
    else:
        title = f"row {index}: prompt, {begin} tokens" + _images_of(rows, index)
        yield title, *_with_images_once(rows, ids[:begin], mask[:begin])
    for name, tokens, of_answer in (("chosen", ids, mask), ("rejected", other, flags)):
        sizes = f"{len(tokens) - begin} tokens, {int(of_answer.sum())} targets"
        yield f"row {index}, {name}: {sizes}{margin}", tokens[begin:], of_answer[begin:]


def _images_of(rows: Rows, index: int) -> str:
    """Names and sizes of a row's images, for its title."""
    seen = rows.pictures(index, 0) if isinstance(rows, TokenRows) else []
    return "".join(f", {Path(one.path).name} ({one.width} x {one.height})" for one in seen)


def _with_images_once(rows: Rows, ids: IdArray, mask: MaskArray) -> tuple[IdArray, MaskArray]:
    """A row with the first alone of each image's equal tokens."""
    sight = rows.sight if isinstance(rows, TokenRows) else None
    again = np.isin(ids, [*(sight.ids if sight else ())])
    again[1:] &= ids[1:] == ids[:-1]
    again[:1] = False
    return ids[~again], mask[~again]


def on_a_screen(text: Text) -> Text:
    """`text`, or its beginning and its end with what is left out between them."""
    head = _lines(text[:HEAD_CHARACTERS], HEAD_LINES)
    tail = _lines(text[-TAIL_CHARACTERS:], TAIL_LINES, last=True)
    left_out = len(text) - len(head) - len(tail)
    if left_out <= 0:
        return text
    between = f"\n[... {left_out:,} characters more; --full shows them ...]\n"
    return head.append(between).append(tail)


def _lines(text: Text, count: int, last: bool = False) -> Text:
    """The first or last lines of a text."""
    ends = [index for index, letter in enumerate(text.plain) if letter == "\n"]
    if len(ends) < count:
        return text
    return text[ends[-count] + 1 :] if last else text[: ends[count - 1]]


def painted(
    ids: IdArray, mask: MaskArray, tokenizer: PreTrainedTokenizerBase, colour: bool
) -> Text:
    """A row as text with its special tokens visible and its targets marked."""
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = Text()
    pairs = zip(mask.tolist(), ids.tolist(), strict=True)
    for target, run in groupby(pairs, key=itemgetter(0)):
        style = TARGET_STYLE if target else CONTEXT_STYLE
        before, after = TARGET_BRACKETS if target and not colour else ("", "")
        text.append(before)
        tokens = [token for _, token in run]
        for is_special, piece in groupby(tokens, key=special.__contains__):
            shown = tokenizer.decode([*piece], clean_up_tokenization_spaces=False)
            text.append(printable(str(shown)), style=f"{style} bold" if is_special else style)
        text.append(after)
    return text
