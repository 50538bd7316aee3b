"""A run on all GPUs that is killed ends everywhere, and goes on to the bits of one that was not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.helpers.commands import (
    environment,
    make_project,
    save_tiny_model,
    steps_of,
    tiny_tokenizer,
    wait_for,
)
from tests.helpers.compare import differing
from tests.recipes.same_run import everything

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
COMMAND = (sys.executable, "-m", "megatrain")
KEYS = (
    *("device=cuda", f"gpus={GPUS}", "train.deterministic=true", "compile=false"),
    *("train.max_steps=200", "train.eval_every=100", "checkpoint.every=20"),
)
STARTED_S, ENDED_S = 240.0, 20.0


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    folder = make_project(tmp_path / "project", save_tiny_model(model, tiny_tokenizer()))
    monkeypatch.chdir(folder)
    return folder


def started(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words], env=environment(), stderr=subprocess.PIPE, text=True
    )


def done(*words: str) -> None:
    command = started(*words)
    _, said = command.communicate(timeout=STARTED_S)
    assert command.returncode == 0, said


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank."""
    (found,) = (
        child.pid
        for child in psutil.Process(launcher).children()
        if child.environ().get("RANK") == str(rank)
    )
    return found


def losses(run: str) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in steps_of(Path(run))}


def test_a_killed_run_goes_on_to_the_bit_and_a_finished_one_with_fewer_gpus(project):
    done("train", "cfg.yaml", *KEYS, "output=whole")
    killed = started("train", "cfg.yaml", *KEYS)
    metrics = Path("run/metrics.jsonl")
    wait_for(lambda: metrics.exists() and max(losses("run"), default=0) >= 50, STARTED_S)
    os.kill(rank_of(killed.pid, 1), signal.SIGKILL)
    _, said = killed.communicate(timeout=ENDED_S)
    assert killed.returncode != 0 and "rank 1" in said
    assert max(losses("run")) < 200, "it was killed on its way"
    done("resume", "run")
    assert losses("run") == losses("whole")
    ours, theirs = (everything(Path(run) / "checkpoint-200") for run in ("run", "whole"))
    assert differing(ours, theirs) == []
    steps, gpus = 200, GPUS
    while gpus > 1:
        steps, gpus = steps + 4, gpus // 2
        done("resume", "run", f"train.max_steps={steps}", f"gpus={gpus}")
        assert max(losses("run")) == steps
