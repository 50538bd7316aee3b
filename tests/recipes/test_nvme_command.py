"""A run with a third tier, as its user sees it: the same run."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatrain.config.load import bench_config
from megatrain.engine import resolved
from megatrain.errors import StorageError
from megatrain.machine import hardware, profile
from megatrain.machine.hardware import Gpu, read_hardware
from megatrain.machine.profile import DriveRates, fingerprint, save_drive, typical
from megatrain.recipes import doctor
from tests.recipes.same_run import same_run

SWAP = ["memory.nvme=swap", "memory.nvme_blocks=3"]


@pytest.mark.slow
def test_a_run_with_arrays_on_nvme_is_the_run_without_and_may_go_on_without(
    megatrain, project, trained_once
):
    bfloat16 = "precision=bfloat16"  # whose arrays are more
    megatrain("train cfg.yaml output=there train.max_steps=2", bfloat16, *SWAP)
    assert list((project / "swap").iterdir()) == []
    # the same schedule from the start: steps 1 to 10 on NVMe, in one go
    megatrain("train cfg.yaml output=whole", bfloat16, *SWAP)
    same_run(trained_once(bfloat16) / "run", project / "whole")
    megatrain("resume there train.max_steps=3 memory.nvme=null memory.nvme_blocks=auto")


def test_the_plan_shows_the_tier_its_traffic_and_its_wear(megatrain):
    answer = megatrain("plan cfg.yaml --full", *SWAP)
    assert "NVMe space" in answer.out
    assert "state of 3 blocks" in answer.out and "endurance" in answer.out
    plan = megatrain("plan cfg.yaml --json", *SWAP).json
    assert plan["choices"]["nvme_blocks"] == 3
    assert "wear out a drive of 600 TB endurance" in plan["reasons"]["NVMe"]
    assert plan["totals"]["nvme"]["need"] == sum(plan["nvme"].values()) > 0


@pytest.mark.slow
def test_arrays_of_an_optimizer_of_whole_tensors_may_be_there(megatrain, project):
    changes = ["optimizer.name=muon", "memory.resident=0", "precision=bfloat16"]
    megatrain("train cfg.yaml output=here", *changes)
    megatrain("train cfg.yaml output=there", *changes, *SWAP)
    same_run(project / "here", project / "there")
    written = [project / run / "plan.json" for run in ("here", "there")]
    here, there = (json.loads(path.read_text()) for path in written)
    moved = {key: there["nvme"][key] + there["host"].get(key, 0) for key in there["nvme"]}
    assert set(moved) == {"remainder", "exp_avg", "exp_avg_sq"}
    # slabs are whole huge pages
    assert moved == {key: pytest.approx(here["host"][key], abs=4 << 20) for key in moved}


def test_folders_have_equal_shares_of_which_the_fullest_drive_decides(megatrain, monkeypatch):
    """The run's own folder is on one of them, where checkpoints take room."""
    free = {"small": 1 << 30, "large": 1 << 40}
    monkeypatch.setattr(resolved, "drive_of", lambda folder: folder.name.replace("run", "large"))
    monkeypatch.setattr(resolved, "disk_free", lambda folder: free[folder.name])
    plan = megatrain("plan cfg.yaml 'memory.nvme=[small, large, small]' --json").json
    assert plan["totals"]["nvme"]["have"] == 3 * (1 << 29)


def test_a_drive_that_fails_ends_the_run_with_a_sentence(megatrain, project, monkeypatch):
    monkeypatch.setattr(os, "pwritev", Mock(side_effect=OSError(errno.EIO, "broken")))
    answer = megatrain("train cfg.yaml train.max_steps=3", *SWAP, code=7)
    assert "swap: cannot write the run's files there" in answer.err
    assert not list((project / "run").glob("**/MANIFEST.json"))


# -- what drives do ------------------------------------------------------------------------------


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were measured. Each is a drive; "slow" writes slowly, the others read
    slowly."""
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    made: list[str] = []

    def rates(folder: Path) -> DriveRates:
        made.append(folder.name)
        if folder.name == "full":
            raise StorageError("the disk cannot be measured")
        return DriveRates(*((2e9, 6e9) if folder.name == "slow" else (3e9, 5e9)), "2026-11-22")

    monkeypatch.setattr(doctor, "drive_rates", rates)
    monkeypatch.setattr(hardware, "drive_of", lambda folder: folder.name)
    for module in (doctor, profile):
        monkeypatch.setattr(module, "drive_name", lambda folder: folder.name)
    return made


def planned(folder: Path, *names: str, gpu: bool = True, may_measure: bool = True) -> Any:
    """Bytes/s written and read that a plan counts on, and the drives of which it assumes them."""
    here = read_hardware(folder, "cpu")
    here = replace(here, gpu=Gpu("NVIDIA H200", 1, 1, (9, 0))) if gpu else here
    drives = [str(folder / name) for name in names] or None
    config = bench_config("tiny").with_values({"memory.nvme": drives})
    machine = replace(typical(here), disk_write=1e9, disk_read=9e9)
    found, assumed = doctor.rates_with_drives(machine, config, here, may_measure=may_measure)
    return found.disk_write, found.disk_read, [path.name for path in assumed]


def test_the_slowest_of_its_drives_is_planned_with(tmp_path, measured):
    assert planned(tmp_path) == (1e9, 9e9, [])
    assert measured == []
    assert planned(tmp_path, "fast", "slow", "fast") == (2e9, 5e9, [])
    assert measured == ["fast", "slow"]


@pytest.mark.parametrize("may_measure", [False, True], ids=["plan", "run"])
def test_a_drive_is_measured_once_for_plans_and_runs(tmp_path, measured, may_measure):
    (tmp_path / "fast").mkdir()
    for asks in (may_measure, True, False):
        assert planned(tmp_path, "fast", may_measure=asks) == (3e9, 5e9, [])
    assert measured == ["fast"]
    planned(tmp_path, "fast", "slow")
    assert measured == ["fast", "slow"]


def test_a_plan_writes_to_no_folder_that_is_not_there_and_says_what_it_assumes(tmp_path, measured):
    assert planned(tmp_path, "fast", may_measure=False) == (1e9, 9e9, ["fast"])
    (tmp_path / "slow").mkdir()
    assert planned(tmp_path, "fast", "slow", may_measure=False) == (1e9, 6e9, ["fast"])
    assert measured == ["slow"]


def test_on_a_cpu_nothing_is_measured_and_what_is_kept_is_taken(tmp_path, measured):
    (tmp_path / "fast").mkdir()
    assert planned(tmp_path, "fast", gpu=False) == (1e9, 9e9, ["fast"])
    here = fingerprint(read_hardware(tmp_path, "cpu"))
    save_drive(here, "fast", DriveRates(4e9, 4e9, "2026-11-22"))
    assert planned(tmp_path, "fast", gpu=False) == (4e9, 4e9, [])
    assert measured == []


def test_a_drive_or_a_cache_that_cannot_be_written_stops_nothing(tmp_path, measured):
    assert planned(tmp_path, "full") == (1e9, 9e9, ["full"])
    (tmp_path / "cache").write_text("")
    assert planned(tmp_path, "fast") == (3e9, 5e9, [])


def test_the_plan_s_last_words_on_a_drive(megatrain, project, monkeypatch):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    words = " ".join(megatrain("plan cfg.yaml", *SWAP).out.split())
    assert "speed is assumed, not measured; `megatrain doctor --nvme swap` measures it" in words
    drive = hardware.drive_name(project / "swap")
    here = fingerprint(read_hardware(project, "cpu"))
    save_drive(here, drive, DriveRates(1e6, 2e6, "2026-11-22"))
    assert "assumed, not measured" not in megatrain("plan cfg.yaml", *SWAP).out
    plan = megatrain("plan cfg.yaml --json", *SWAP).json
    assert plan["drives_assumed"] == []
    assert plan["timing"]["seconds"] > plan["totals"]["nvme"]["need"] / 2e6


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_folder_in_ram_is_no_drive_and_that_is_said(
    tmp_path, measured, caplog, monkeypatch, kind
):
    monkeypatch.setattr(doctor, "mount_of", lambda folder: SimpleNamespace(fstype=kind))
    planned(tmp_path, "fast")
    assert ("fast lies in RAM (tmpfs), which it takes away" in caplog.text) == (kind == "tmpfs")
