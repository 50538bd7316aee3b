"""A limit on address space (`ulimit -v`) is in the plan, and named where it is met all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain import cli
from megatrain.errors import OutOfMemory
from megatrain.machine import address_space
from megatrain.machine.address_space import AddressSpace, address_space_errors
from tests.commands import Forker

GIB = 2**30
LIMITED = "`ulimit -v` lets this process map "


def limited(forker: Forker, limit: int, *arguments: str) -> tuple[int, str]:
    """(the exit code of a command in a process that may map so many bytes, what it said)."""
    log = Path("forked.log")
    log.unlink(missing_ok=True)
    first = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}))"
    forker.start(*arguments, first=first)
    return forker.wait(), log.read_text()


def test_a_run_is_refused_below_what_it_needs_and_runs_above(forker, project):
    known = 16 * GIB
    said = limited(forker, known, "plan", "cfg.yaml", "--json")[1]
    host = json.loads(said[said.index("{") :])["totals"]["host"]
    needed = known + host["need"] - host["have"]
    code, said = limited(forker, int(0.9 * needed), "train", "cfg.yaml")
    assert code == 4, said
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert f"{LIMITED}{0.9 * needed / GIB:.2f} GiB, of which " in error
    assert "are taken; raise it" in error
    assert "other programs" not in error
    code, said = limited(forker, int(1.1 * needed), "train", "cfg.yaml", "train.max_steps=2")
    assert code == 0, said
    assert (project / "run" / "final").is_dir()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> AddressSpace:
    space = AddressSpace(2 * GIB, GIB)
    monkeypatch.setattr(address_space, "read_address_space", lambda: space)
    monkeypatch.setattr("megatrain.cli.keep_address_space_small", lambda: None)
    monkeypatch.setattr("megatrain.machine.hardware.keep_address_space_small", lambda: None)
    return space


ERRORS = [
    MemoryError(),
    RuntimeError("can't start new thread"),
    RuntimeError("could not create a primitive"),
    OSError("Could not find/load shared object file 'libllvmlite.so'"),
    ImportError("libparquet.so: failed to map segment from shared object"),
    OSError(12, "Cannot allocate memory"),
]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_what_libraries_raise_then_is_out_of_memory(limit, error):
    words = r"out of address space: `ulimit -v` lets this process map 2\.00 GiB, of which 1\.00"
    with pytest.raises(OutOfMemory, match=words), address_space_errors():
        raise error


def test_nothing_else_is(limit, monkeypatch):
    with pytest.raises(RuntimeError, match="deep down"), address_space_errors():
        raise RuntimeError("deep down")
    monkeypatch.setattr(address_space, "read_address_space", lambda: None)
    with pytest.raises(RuntimeError, match="thread"), address_space_errors():
        raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("error", ERRORS[:2], ids=repr)
@pytest.mark.parametrize("place", ["recipes.loop.train_step", "recipes.run.open_rows"])
def test_a_command_ends_with_5(project, limit, monkeypatch, capfd, error, place):
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(f"megatrain.{place}", fails)
    assert cli.main(["train", "cfg.yaml"]) == 5
    assert "error: out of address space: `ulimit -v` lets" in capfd.readouterr().err


@pytest.mark.parametrize(("stated", "limit"), [("unlimited", None), ("4096", 4096)])
def test_the_limit_is_read_from_the_process(tmp_path: Path, monkeypatch, stated, limit):
    (tmp_path / "limits").write_text(f"Max address space     {stated}      unlimited   bytes\n")
    monkeypatch.setattr(address_space, "LIMITS", tmp_path / "limits")
    found = address_space.read_address_space()
    assert (found and found.limit_bytes) == limit
    assert found is None or found.taken_bytes > 2**20
