"""A compiler's cache that a killed process has left half written."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.models.transforms import compiled

COMPILES = """
import logging, torch
from torch import fx, nn
from megatrain.models.transforms.compiled import Inductor, compile_when_run
logging.basicConfig()
compile_when_run([], False, False)
class Twice(nn.Module):
    def forward(self, x):
        return ((x * 2).exp() + 1,)
given = torch.ones(64)
found = Inductor()(fx.symbolic_trace(Twice()), [given])
assert torch.allclose(found(given)[0], given.mul(2).exp() + 1)
"""


@pytest.mark.slow
def test_what_cannot_be_read_is_removed_and_compiled_again(tmp_path):
    env = {name: value for name, value in os.environ.items() if name != "TORCHINDUCTOR_CACHE_DIR"}
    env |= {"MEGATRAIN_CACHE": str(tmp_path), "PYTHONPATH": str(Path.cwd())}

    def said() -> str:
        done = subprocess.run(
            [sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "is torn" not in said()
    (folder,) = tmp_path.glob("compiled-*")
    (library,) = folder.rglob("*.main.so")
    library.write_bytes(library.read_bytes()[:100])
    words = said()
    assert f"{folder}: is torn (" in words and words.count("compiled anew") == 1


def test_only_errors_about_its_own_files_remove_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    own = compiled.own_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    for error, torn in [
        (FileNotFoundError(errno.ENOENT, "No such file", "/usr/bin/cc"), False),
        (OSError(errno.ENOSPC, "No space left on device", str(own / "a.py")), False),
        (ModuleNotFoundError("No module named 'triton'"), False),
        (ValueError("bad"), False),
        (FileNotFoundError(errno.ENOENT, "No such file", str(own / "a.py")), True),
        (OSError(f"{own}/a.so: file too short"), True),
        (pickle.UnpicklingError("pickle data was truncated"), True),
    ]:
        own.mkdir(exist_ok=True)
        assert compiled.forget_if_torn(error) is torn, error
        assert own.exists() is not torn
