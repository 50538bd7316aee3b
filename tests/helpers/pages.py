"""How tests read pages, and look at them in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# quiet: nothing that a browser asks for by itself
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


def data_of(html: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', html)
    data: dict[str, Any] = json.loads(found)
    return data


def block(data: dict[str, Any], title: str) -> dict[str, Any]:
    (found,) = [one for one in data["blocks"] if one.get("title") == title]
    return dict(found)


def curve(data: dict[str, Any], title: str, label: str, run: int = 0) -> dict[int, float]:
    """A line of a chart: {step: value}."""
    lines = block(data, title)["lines"]
    (line,) = [one for one in lines if (one["label"], one["run"]) == (label, run)]
    return dict(zip(line["x"], line["y"], strict=True))


def browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def looked_at(path: Path, folder: Path, *options: str) -> tuple[str, list[str]]:
    """(the drawn document, messages of the console) of a page."""
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser() or "", *QUIET, profile, "--enable-logging=stderr", *options]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
