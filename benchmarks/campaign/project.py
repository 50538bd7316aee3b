"""The tiny project on which everything is tried: a random model, sixty rows, runs of ten steps."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.campaign.children import Ended, command, in_child
from tests.helpers.commands import make_project, save_tiny_model, tiny_tokenizer


def new_project(folder: Path) -> Path:
    """`project` in a folder, with a model and a cache of its own."""

    def make() -> None:
        save_tiny_model(folder / "made", tiny_tokenizer())

    ended = in_child(make)
    assert ended.code == 0, ended.words
    project = make_project(folder / "project", folder / "made")
    (project / "model").unlink()
    shutil.move(folder / "made", project / "model")
    return project


def whole_run(project: Path, keys: Sequence[str] = (), output: str = "whole") -> Ended:
    """A run to its end."""
    ended = command(project, "train", "cfg.yaml", *keys, f"output={output}", limit_s=300)
    assert ended.code == 0, ended.words
    return ended


def stopped_run(project: Path) -> None:
    """`run`, of which the steps after the checkpoint of step 5 are lost, and `whole`."""
    whole_run(project, output="run")
    shutil.copytree(project / "run", project.parent / "whole", symlinks=True)
    for name in ("final", "checkpoint-10"):
        shutil.rmtree(project / "run" / name)
    for link in ("last", "best", "proven"):
        (project / "run" / link).unlink(missing_ok=True)


def put_back(copy: Path, project: Path) -> None:
    """The project at its own place, as it was."""
    shutil.rmtree(project, ignore_errors=True)
    shutil.copytree(copy, project, symlinks=True)


def warm(folder: Path) -> None:
    """Load here, once, what commands load; nothing is computed in this process.

    Makes a project in `folder` and looks at what its commands import.
    """
    from megatrain.optim import AdamW, Lion, Muon

    for optimizer in (AdamW(), AdamW(moments="int8"), Lion(), Muon()):
        optimizer.compile()
    project, found = new_project(folder), folder / "modules"

    def look() -> None:
        from megatrain import cli

        os.chdir(project)
        os.environ["MEGATRAIN_CACHE"] = str(project / "cache")
        for words in ("train cfg.yaml", "data cfg.yaml", "export run out", "generate run hi"):
            cli.main(words.split())
        found.write_text("\n".join(sys.modules))

    ended = in_child(look, 300)
    assert ended.code == 0, ended.words
    for name in found.read_text().splitlines():
        if name.split(".")[0] in ("megatrain", "transformers", "torch", "datasets", "numba"):
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001  some are made up when they are needed
                continue
