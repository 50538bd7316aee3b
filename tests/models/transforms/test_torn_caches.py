"""A compiler's cache that a killed process has left half written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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

    def compiled() -> str:
        done = subprocess.run(
            [sys.executable, "-c", COMPILES], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "is torn" not in compiled()
    (folder,) = tmp_path.glob("compiled-*")
    (library,) = folder.rglob("*.main.so")
    library.write_bytes(library.read_bytes()[:100])
    said = compiled()
    assert f"{folder}: is torn (" in said and said.count("compiled anew") == 1
