"""What will be trained on, for people: rows with their loss mask in colour, and what became of the source's rows."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.data.dataset import IdArray, MaskArray, Rows
from megatrain.data.packing import PackedRows

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

BARS = "▁▂▃▄▅▆▇█"
BINS = 16
TARGET_STYLE, CONTEXT_STYLE = "green", "dim"
TARGET_BRACKETS = ("⟦", "⟧")  # shown instead of colour where there is none


def summary(rows: Rows) -> dict[str, Any]:
    """Counts of the rows that will be trained on, and of what was cut, dropped or refused on the way: JSON-able."""
    lengths, counts = rows.lengths, rows.counts
    return {
        "rows": len(rows),
        "tokens": int(lengths.sum()),
        "target_tokens": int(rows.target_counts.sum()),
        "longest": int(lengths.max()),
        "median": int(np.median(lengths)),
        "packed": isinstance(rows, PackedRows),
        "remainder_tokens": rows.remainder if isinstance(rows, PackedRows) else 0,
        "rows_read": counts.read,
        "bad_rows": counts.bad,
        "first_bad_rows": list(counts.first_bad),
        "truncated_rows": counts.truncated,
        "truncated_tokens": counts.truncated_tokens,
        "rows_without_target": counts.without_target,
        "rewritten_turns": counts.rewritten_turns,
    }


def describe(rows: Rows) -> list[str]:
    """The summary as plain lines; a line about what was lost only where something was."""
    found = summary(rows)
    tokens, targets = found["tokens"], found["target_tokens"]
    kind = "blocks of packed documents" if found["packed"] else "rows"
    lines = [
        f"{found['rows']:,} {kind}, {tokens:,} tokens, {targets:,} of them targets ({targets / tokens:.1%})",
        f"length: median {found['median']:,}, longest {found['longest']:,}  {histogram(rows)}",
    ]
    if found["remainder_tokens"]:
        lines.append(f"the last block holds the remaining {found['remainder_tokens']:,} tokens")
    if found["bad_rows"]:
        lines.append(
            f"{found['bad_rows']:,} of {found['rows_read']:,} rows are bad and skipped; the first: {found['first_bad_rows'][0]}"
        )
    if found["truncated_rows"]:
        lines.append(
            f"{found['truncated_rows']:,} rows cut to seq_len; {found['truncated_tokens']:,} tokens are not trained on"
        )
    if found["rows_without_target"]:
        lines.append(
            f"{found['rows_without_target']:,} rows dropped, because no token to train on is left in them"
        )
    if found["rewritten_turns"]:
        lines.append(
            f"{found['rewritten_turns']:,} earlier answers are trained on as the chat template rewrites them in mid-conversation"
        )
    return lines


def histogram(rows: Rows) -> str:
    """How the lengths are spread between zero and the longest, in one line of bars."""
    heights, _ = np.histogram(rows.lengths, bins=BINS, range=(0, int(rows.lengths.max())))
    return "".join(
        " " if height == 0 else BARS[min(7, 8 * height // (heights.max() + 1))]
        for height in heights.tolist()
    )


def show_rows(rows: Rows, tokenizer: PreTrainedTokenizerBase, count: int, console: Console) -> None:
    """Print the first `count` rows, targets in green (in brackets where there is no colour), then the counts."""
    colour = console.color_system is not None
    for index in range(min(count, len(rows))):
        ids, mask = rows.row(index)
        console.rule(
            f"row {index}: {len(ids)} tokens, {int(mask.sum())} targets", style=CONTEXT_STYLE
        )
        console.print(painted(ids, mask, tokenizer, colour), soft_wrap=True)
    console.rule(style=CONTEXT_STYLE)
    for line in describe(rows):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def painted(
    ids: IdArray, mask: MaskArray, tokenizer: PreTrainedTokenizerBase, colour: bool
) -> Text:
    """A row as text with its special tokens visible and its targets marked."""
    from rich.text import Text

    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = Text()
    kinds = [
        (bool(target), token in special, token)
        for target, token in zip(mask.tolist(), ids.tolist(), strict=True)
    ]
    for target, run in groupby(kinds, key=lambda kind: kind[0]):
        text.append(TARGET_BRACKETS[0] if target and not colour else "")
        for is_special, tokens in groupby(run, key=lambda kind: kind[1]):
            piece = tokenizer.decode(
                [token for _, _, token in tokens],
                skip_special_tokens=False,
                clean_up_tokenization_spaces=False,
            )
            style = TARGET_STYLE if target else CONTEXT_STYLE
            text.append(_printable(str(piece)), style=f"{style} bold" if is_special else style)
        text.append(TARGET_BRACKETS[1] if target and not colour else "")
    return text


def _printable(piece: str) -> str:
    """Control characters spelt out: data must not steer the terminal."""
    return "".join(
        char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in piece
    )
