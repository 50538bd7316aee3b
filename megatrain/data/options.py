"""Options of how rows are read, rendered and cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date

from megatrain.data import truncation
from megatrain.data.formats import ROW_FORMATS
from megatrain.data.samples import KINDS, PLAIN
from megatrain.errors import DataError

ON_BAD_ROW = ("refuse", "skip")


@dataclass(frozen=True)
class RowOptions:
    """Options of how rows are read and cut.

    Attributes:
        seq_len: longest row in tokens; None keeps whole documents, for packing.
        text_field: the column of plain text; None finds it.
        columns: columns that go by another name, ours first.
        prompts: as in `Encoder`.
        kind: of rows, as the method trains them: one of KINDS. Rows of another kind are bad.
        truncation_mode: which tokens of a longer row stay, the first or the last; `drop`: none.
        vocab_size: token ids from here on are refused; None allows all.
        day: the date that chat templates get as the time; None: today's.
        processes: that tokenise a set of more than a thousand rows.
        streaming: the set is too large to be read before it is used: see `streaming.py`.
    """

    seq_len: int | None
    train_on: str = "assistant"
    format: str = "auto"
    on_bad_row: str = "refuse"
    text_field: str | None = None
    columns: Mapping[str, str] | None = None
    prompts: str = "text"
    kind: str = PLAIN
    truncation_mode: str = truncation.KEEP_START
    split: str | None = None
    vocab_size: int | None = None
    day: date | None = None
    processes: int = 1
    streaming: bool = False

    def __post_init__(self) -> None:
        known = {
            "format": ("auto", *ROW_FORMATS),
            "on_bad_row": ON_BAD_ROW,
            "truncation_mode": truncation.TRUNCATION_MODES,
        }
        for key, values in known.items():
            value = getattr(self, key)
            if value not in values:
                raise DataError(f"data.{key}: {value!r} is unknown; use one of {', '.join(values)}")
        if self.kind != PLAIN and self.train_on == "all":
            raise DataError(
                "data.train_on: all trains prompts, too, but "
                f"method: {KINDS[self.kind].methods} compares answers; leave it at assistant"
            )
