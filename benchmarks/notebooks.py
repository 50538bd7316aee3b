"""Runs the notebooks of examples/ and writes what they show into their files.

    python -m benchmarks.notebooks [NAME ...]

Their model is that of `make demo`, which fetches it. What they write stays in build/notebooks.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "notebooks"
WORK = ROOT / "build" / "notebooks"  # as deep as FOLDER: `../..` is the same
# Neither bars nor their warnings are for a file.
QUIET = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore", "MEGATRAIN_CACHE": str(WORK / "cache")}
OF_THIS_MACHINE = re.compile(rf"^.*{re.escape(tempfile.gettempdir())}/.*\n", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(p.stem for p in FOLDER.glob("*.ipynb")))
    os.environ.update(QUIET)
    for name in parser.parse_args().names:
        write(FOLDER / f"{name}.ipynb")


def write(path: Path) -> None:
    """Run a notebook and write it with its outputs, which name no folder of this machine."""
    notebook = nbformat.read(path, as_version=4)
    metadata = dict(notebook.metadata)
    WORK.mkdir(parents=True, exist_ok=True)
    at = {"metadata": {"path": str(WORK)}}
    nbclient.NotebookClient(notebook, resources=at, record_timing=False).execute()
    notebook.metadata = metadata  # without the release of Python
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if plain(output)]
    nbformat.write(notebook, path)


def plain(output: Any) -> bool:
    """Leave of an output its text, without this machine's folders; whether anything is left."""
    if "data" in output:
        output.data = {"text/plain": output.data["text/plain"]}
    holder, name = (output.data, "text/plain") if "data" in output else (output, "text")
    relative = holder[name].replace(f"{WORK}/", "").replace(f"{ROOT}/", "../../")
    holder[name] = OF_THIS_MACHINE.sub("", relative)
    return bool(holder[name].strip())


if __name__ == "__main__":
    main()
