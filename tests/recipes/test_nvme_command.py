"""A run with a third tier, as its user sees it: the same run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from megatrain.engine.far_boundaries import FarBoundaries
from megatrain.hardware import probe
from megatrain.machine import typical
from megatrain.recipes import nvme
from megatrain.recipes.shapes import bench_config
from tests.commands import Command
from tests.recipes.same_run import same_run

SWAP = ["memory.nvme=swap", "memory.nvme_blocks=3", "memory.nvme_arrays=all"]
INPUTS = ["memory.nvme=swap", "memory.nvme_activations=2"]
SHORT = ["train.max_steps=3", "train.epochs=null"]


def test_a_run_with_arrays_on_nvme_is_the_run_without_and_may_go_on_without(megatrain: Command, project: Path) -> None:
    assert megatrain("train", "cfg.yaml", "output=here").code == 0
    started = megatrain("train", "cfg.yaml", "output=there", "train.max_steps=5", *SWAP)
    assert started.code == 0, started.err
    assert list((project / "swap").iterdir()) == []
    # the same schedule from the start: steps 1 to 10 on NVMe, in one go
    assert megatrain("train", "cfg.yaml", "output=whole", *SWAP).code == 0
    same_run(project / "here", project / "whole")
    assert megatrain("resume", "there", "train.max_steps=6", "memory.nvme=null", "memory.nvme_blocks=auto").code == 0


def test_the_plan_shows_the_tier_its_traffic_and_its_wear(megatrain: Command) -> None:
    answer = megatrain("plan", "cfg.yaml", *SWAP)
    assert answer.code == 0
    assert "NVMe space" in answer.out
    assert "600 TB" in " ".join(answer.out.split())
    plan = json.loads(megatrain("plan", "cfg.yaml", "--json", *SWAP).out)
    assert plan["choices"]["nvme_blocks"] == 3
    assert plan["totals"]["nvme"]["need"] == sum(plan["nvme"].values()) > 0


def test_layers_inputs_may_go_there_with_every_optimizer(megatrain: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    renew = FarBoundaries._renew

    def count(self: FarBoundaries, nbytes: int, piece: int) -> None:
        made.append(nbytes)
        renew(self, nbytes, piece)

    monkeypatch.setattr(FarBoundaries, "_renew", count)
    for name in ("adamw", "adafactor"):
        optimizer = f"optimizer.name={name}"
        assert megatrain("train", "cfg.yaml", f"output={name}", optimizer).code == 0
        started = megatrain("train", "cfg.yaml", f"output={name}-far", optimizer, *INPUTS)
        assert started.code == 0, started.err
        plan = json.loads((project / f"{name}-far" / "plan.json").read_text())
        assert plan["choices"]["nvme_activations"] == 2
        assert made == [plan["nvme"]["boundary activations"]], "once, though rows have many lengths"
        made.clear()
        same_run(project / name, project / f"{name}-far")


def test_so_may_the_arrays_of_an_optimizer_of_whole_tensors(megatrain: Command, project: Path) -> None:
    changes = ["optimizer.name=muon", "memory.resident=0"]
    assert megatrain("train", "cfg.yaml", "output=here", *changes).code == 0
    started = megatrain("train", "cfg.yaml", "output=there", *changes, *SWAP)
    assert started.code == 0, started.err
    same_run(project / "here", project / "there")
    here, there = (json.loads((project / run / "plan.json").read_text()) for run in ("here", "there"))
    moved = {key: there["nvme"][key] + there["host"].get(key, 0) for key in there["nvme"]}
    assert set(moved) > {"weight", "remainder", "grad"}
    assert moved == {key: pytest.approx(here["host"][key], abs=4 << 20) for key in moved}  # slabs are whole huge pages


def test_a_drive_that_fails_ends_the_run_with_a_sentence(megatrain: Command, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", broken)
    answer = megatrain("train", "cfg.yaml", *SHORT, *SWAP)
    assert answer.code == 7
    assert "swap: cannot write the run's files there" in answer.err
    assert not list((project / "runs").glob("**/MANIFEST.json"))


def test_the_slowest_of_its_drives_is_planned_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"fast": (3e9, 5e9), "slow": (2e9, 6e9)}
    monkeypatch.setattr(nvme, "disk_rates", lambda folder: rates[folder.name])
    monkeypatch.setattr(nvme, "drive_of", lambda folder: folder.name)
    config, profile = bench_config("tiny"), typical(probe(tmp_path, "cpu"))
    assert nvme.with_drives(profile, config) == profile
    there = config.with_values({"memory.nvme": [str(tmp_path / name) for name in rates]})
    found = nvme.with_drives(profile, there)
    assert (found.disk_write, found.disk_read) == (2e9, 5e9)
