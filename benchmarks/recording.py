"""Record a command on a terminal of its own, as an asciicast, and say how it moved:

    python -m benchmarks.recording OUT.cast [--columns 80] [--every 10] -- megatrain train CONFIG

Prints the screen every so many seconds, then, as JSON, the seconds to the first sign, the longest
silence, and the lines that stayed. Play the file with `asciinema play OUT.cast`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import struct
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

ROWS = 24
REDRAW_S = 0.03  # pieces of one redraw come closer to each other


def recorded(
    command: list[str], columns: int, rows: int = ROWS
) -> tuple[list[tuple[float, str]], int]:
    """What a command writes to a terminal of this size, each piece with the seconds since it began,
    and its exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
        os.execvpe(command[0], command, {**os.environ, "TERM": "xterm-256color"})
    began, pieces = time.monotonic(), list[tuple[float, str]]()
    with suppress(OSError):  # the other end is closed
        while piece := os.read(terminal, 1 << 16):
            pieces.append((time.monotonic() - began, piece.decode(errors="replace")))
    return pieces, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def lines_left(text: str) -> list[str]:
    """Lines that stay on the screen: what is drawn over is not among them."""
    lines, row, column = [""], 0, 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r|\n)", text):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part in ("\x1b[2K", "\x1b[K"):
            lines[row] = lines[row][: column * (part != "\x1b[2K")]
        elif moved := re.fullmatch(r"\x1b\[(\d+)A", part):
            row -= int(moved[1])
        elif part and not part.startswith("\x1b"):
            lines[row] = lines[row][:column] + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines if line.strip()]


def screens(pieces: list[tuple[float, str]], every: float) -> Iterator[tuple[float, list[str]]]:
    """(seconds, the screen's lines) every so many seconds, where a redraw has ended."""
    text, due = "", every
    for (when, piece), (then, _) in pairwise([*pieces, (math.inf, "")]):
        text += piece
        if when >= due and then - when > REDRAW_S:
            due = when + every
            yield when, lines_left(text)[-ROWS:]


def main(
    out: Path,
    command: Annotated[list[str], typer.Argument(help="The command, behind `--`.")],
    columns: int = 80,
    every: float = 10.0,
) -> None:
    """Record the command."""
    pieces, code = recorded(command, columns)
    for when, lines in screens(pieces, every):
        print(f"--- {when:.0f} s", *lines, sep="\n")
    header = {"version": 2, "width": columns, "height": ROWS, "command": " ".join(command)}
    events = [[round(when, 3), "o", text] for when, text in pieces]
    out.write_text("".join(json.dumps(line) + "\n" for line in [header, *events]))
    times = [0.0, *(when for when, _ in pieces)]
    left = lines_left("".join(text for _, text in pieces))
    found = {
        "exit_code": code,
        "first_sign_s": round(times[1], 2),
        "seconds": round(times[-1], 1),
        "longest_silence_s": round(max(b - a for a, b in pairwise(times)), 2),
        "lines": left,
    }
    json.dump(found, sys.stdout, indent=1, ensure_ascii=False)
    print()


if __name__ == "__main__":
    typer.run(main)
