"""A page of charts and tables in one HTML file, which needs no network.

Its content is a list of blocks, JSON that assets/page.js draws: cards, chart, table, samples and
text. Charts are drawn by uPlot (assets/uPlot.LICENSE), unchanged.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.errors import StorageError, printable
from megatrain.version import VERSION

REPORT_FILE = "report.html"
ASSETS = Path(__file__).parent / "assets"
DIGITS = 6  # of a figure
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

Block = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    run: number of the run that it is of. style: line, faint, trend (the mean of a faint one),
    marked (with its points), points alone, or limit.
    """

    label: str
    points: Sequence[tuple[Any, ...]]  # (step, value)
    run: int = 0
    style: str = "line"


def chart(title: str, curves: Sequence[Curve], unit: str = "", stacked: bool = False) -> Block:
    """Lines over steps. unit: bytes, share, or none. stacked: they have the same steps."""
    lines = [
        {
            "label": curve.label,
            "run": curve.run,
            "style": curve.style,
            "x": [point[0] for point in curve.points],
            "y": [float(f"{point[1]:.{DIGITS}g}") for point in curve.points],
        }
        for curve in curves
    ]
    return {"kind": "chart", "title": title, "unit": unit, "stacked": stacked, "lines": lines}


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Block:
    return {"kind": "table", "title": title, "head": [*head], "rows": [[*row] for row in rows]}


def text(title: str, content: str) -> Block:
    """A text that is folded up until somebody opens it."""
    return {"kind": "text", "title": title, "text": printable(content)}


def page(
    title: str, runs: Sequence[str], blocks: Sequence[Block], about: Sequence[str] = ()
) -> str:
    """The HTML. runs: their names; one is not named beside its figures. about: a line for each."""
    written = f"megatrain {VERSION}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    shown: Block = {"title": printable(title), "written": written}
    shown |= {"about": [*map(printable, about)], "runs": [*runs], "blocks": [*blocks]}
    # `<` is written so that no text can end the script it is in
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{html.escape(printable(title))}</title>
<style>{_asset("uPlot.min.css")}{_asset("page.css")}</style>
</head>
<body>
<noscript>This page draws its charts with JavaScript, which is switched off.</noscript>
<main></main>
<script id="data" type="application/json">{data}</script>
{code}</body>
</html>
"""


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def write_page(path: Path, content: str) -> None:
    """Replace the file as a whole. Raises StorageError.

    It can be written again at any time, so it need not survive a power loss at once.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.unlink(missing_ok=True)
        with os.fdopen(os.open(partial, NEW_FILE, 0o666), "wb") as file:
            file.write(content.encode())
        partial.replace(path)
    except OSError as error:
        reason = f"{path}: cannot be written ({error.strerror})"
        raise StorageError(f"{reason}; free space or choose another file") from error
