"""Files that are damaged between two runs: each is found, or changes nothing."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks.campaign.children import command
from benchmarks.campaign.project import new_project, put_back, stopped_run
from benchmarks.campaign.trials import Trial, check_same, warned
from megatrain.storage.checkpoint import find_resumable, load_resumable
from tests.helpers.still import save_steps, still_engine

A_CASE = 20  # corruptions of checkpoints: more than the process costs
BLOCK = 512
OTHERS = [b"", b"{}", b"[]", b"null", b"\0" * 4096, b"[" * 10_000, b"\xff\xfe", b"a: b: c"]


def damage(path: Path, files: Sequence[Path], draw: random.Random) -> str:
    """Damage a file in one of many ways; returns which. What other names it has keep theirs."""
    data = bytearray(path.read_bytes())
    place = draw.randrange(len(data) or 1)
    kinds = ["flip"] * 6 + ["cut", "cut", "more", "zeros", "noise", "moved", "digit"]
    kind = draw.choice([*kinds, "removed", "swapped", "replaced", "folder", "link"])
    path.unlink()
    match kind:
        case "flip" if data:
            data[place] ^= 1 << draw.randrange(8)
        case "cut":
            del data[place:]
        case "more":
            data += data[: draw.randrange(1, 9)] or b"\n"
        case "zeros" | "noise":
            piece = len(data[place : place + BLOCK])
            data[place : place + BLOCK] = draw.randbytes(piece) if kind == "noise" else bytes(piece)
        case "moved":
            data = data[place:] + data[:place]
        case "digit":
            digits = [at for at, byte in enumerate(data) if chr(byte).isdigit()]
            if digits:
                data[draw.choice(digits)] = draw.choice(b"0123456789")
        case "swapped":
            other = draw.choice(files)
            data = bytearray(other.read_bytes()) if other.is_file() else bytearray()
        case "replaced":
            data = bytearray(draw.choice(OTHERS))
        case "removed":
            return kind
        case "folder":
            path.mkdir()
            return kind
        case "link":
            path.symlink_to("nowhere")
            return kind
    path.write_bytes(data)
    return kind


def files_in(folder: Path) -> list[Path]:
    """Regular files below it, but of runs that others are compared with, in one order."""
    found = (path for path in folder.rglob("*") if "whole" not in path.parts)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


class DamagedCheckpoints(Trial):
    """The newest of two checkpoints is damaged; what is loaded then is one of the two, bit for
    bit, and not the newest in silence if any of its bytes differs."""

    def __init__(self, folder: Path) -> None:
        self.run, self.copy, self.engine = folder / "run", folder / "copy", still_engine()
        self.bits = []
        for step in (1, 2):
            save_steps(self.copy, self.engine, step, keep=2)
            self.bits.append(self.engine.bits())

    def attempt(self, case: str) -> int:
        logging.getLogger("megatrain").setLevel(logging.ERROR)  # of this child alone
        draw = random.Random(case)
        put_back(self.copy, self.run)
        newest = self.run / "checkpoint-2"
        files = files_in(newest)
        for _ in range(A_CASE):
            path = draw.choice(files)
            before = path.read_bytes()
            kind = damage(path, files_in(self.run), draw)
            found = find_resumable(self.run, deep=False)
            source, state = load_resumable(self.run, self.engine, found)
            step, what = state["step"], f"{kind}: {path.name}"
            assert self.engine.bits() == self.bits[step - 1], f"wrong bits of step {step}: {what}"
            same = path.is_file() and path.read_bytes() == before
            assert (source == newest) == same, f"loaded {source.name}: {what}"
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(before)
        return A_CASE


class DamagedFiles(Trial):
    """Any file of a stopped run, its cache, its model or its rows is damaged; then it is resumed.

    It ends as if nothing had happened, or says what is wrong.
    """

    def __init__(self, folder: Path) -> None:
        self.project, self.copy = new_project(folder), folder / "copy"
        stopped_run(self.project)
        shutil.copytree(self.project, self.copy, symlinks=True)
        self.whole = folder / "whole"
        ended = command(self.project, "resume", "run")
        check_same(ended, self.whole, self.project / "run")
        assert not warned(ended), ended.words

    def attempt(self, case: str) -> int:
        draw = random.Random(case)
        put_back(self.copy, self.project)
        folder = self.project / draw.choice(["run", "run", "cache", "cache", "model", "."])
        files = files_in(folder)
        path = draw.choice(files)
        kind = damage(path, files, draw)
        ended = command(self.project, "resume", "run")
        try:
            check_same(ended, self.whole, self.project / "run")
        except AssertionError as error:
            raise AssertionError(f"{kind}: {path.relative_to(self.project)}: {error}") from error
        return 1
