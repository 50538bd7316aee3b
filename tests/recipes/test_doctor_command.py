"""`megatrain doctor` measures, caches and shows; runs take the cached profile, and measure only
where that pays."""

import io
import json
import logging
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from megatrain import cli
from megatrain.errors import StorageError
from megatrain.machine import profile as profiles
from megatrain.machine.hardware import Gpu, Hardware, drive_name, read_hardware
from megatrain.machine.profile import DriveRates, fingerprint, known, typical
from megatrain.measure import checks
from megatrain.recipes import doctor
from megatrain.recipes.doctor import measured_or_typical, measured_together
from megatrain.reporting.meters import LoadMeter
from megatrain.world import World

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiles, "driver_version", lambda: "1")
    return replace(read_hardware(tmp_path, "cpu"), gpu=Gpu("NVIDIA H200", 1, 1, (9, 0)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each measurement was a quick one; a measurement finds a launch of 1.5 s and guesses
    the rest."""
    made: list[bool] = []

    def measure(hardware, device, folder, note, *, quick=False):
        note("something")
        made.append(quick)
        found: Any = {"fingerprint": fingerprint(hardware), "measured_on": "2026-11-21"}
        return replace(typical(hardware), **found, launch=1.5)

    monkeypatch.setattr(doctor, "measure_machine", measure)
    monkeypatch.setattr(doctor, "choose_device", lambda wanted: CPU)
    monkeypatch.setattr(doctor, "LoadMeter", lambda: meter(busy=0))
    return made


def meter(busy: float) -> LoadMeter:
    """Of a machine with 8 cores, of which other processes keep so many busy."""
    readings = ((second, second * busy, 0.0) for second in count())
    return LoadMeter(lambda: next(readings), 8)


@pytest.mark.parametrize(
    ("name", "aloud"), [("NVIDIA H200", False), ("NVIDIA GeForce RTX 4090 Laptop GPU", True)]
)
def test_the_rates_of_a_gpu_without_a_data_sheet_are_guessed_aloud(
    hardware, measured, caplog, name, aloud
):
    unlisted = replace(hardware, gpu=Gpu(name, 1, 1, (8, 9)))
    guessed = f"{name} is not in the table of GPUs: its rates are guessed, not measured"
    assert measured_or_typical(unlisted, GPU) == typical(unlisted)
    assert (guessed in caplog.text) == aloud
    caplog.clear()
    assert measured_or_typical(unlisted, GPU, may_measure=True).launch == 1.5
    assert "guessed" not in caplog.text


def test_a_run_on_a_gpu_measures_once(hardware, measured):
    found = measured_or_typical(hardware, GPU, may_measure=True)
    assert found.launch == 1.5
    assert measured_or_typical(hardware, GPU, may_measure=True) == found
    assert measured_or_typical(hardware, GPU) == found
    assert measured == [True]


def test_neither_a_plan_nor_a_run_on_the_cpu_measures(hardware, measured):
    without = replace(hardware, gpu=None)
    assert measured_or_typical(hardware, GPU) == typical(hardware)
    assert measured_or_typical(without, CPU, may_measure=True) == typical(without)
    assert measured == []


def test_rates_of_a_busy_machine_are_not_kept(hardware, measured, monkeypatch, caplog):
    monkeypatch.setattr(doctor, "LoadMeter", lambda: meter(busy=3))
    assert measured_or_typical(hardware, GPU, may_measure=True).launch == 1.5
    assert "other processes use 3.0 of 8 cores while this machine was measured" in caplog.text
    assert measured_or_typical(hardware, GPU) == typical(hardware)


def test_a_run_goes_on_without_a_cache(hardware, measured, monkeypatch, caplog):
    def refuse(profile):
        raise StorageError("nowhere to write")

    monkeypatch.setattr(profiles, "save_profile", refuse)
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert measured_or_typical(hardware, GPU, may_measure=True).launch == 1.5
    assert "nowhere to write" in caplog.text


def test_the_command_measures_anew_and_caches(hardware, measured, tmp_path, capsys):
    for flags in ([], ["--quick"]):
        assert cli.main(["doctor", "--json", "--output", str(tmp_path), *flags]) == 0
    assert measured == [False, True]
    out, err = capsys.readouterr()
    shown = json.loads(out[: out.index("}\n{") + 1])
    assert shown["profile"]["launch"] == 1.5
    assert "launch" not in shown["guessed"] and "memory" in shown["guessed"]
    assert err == "measuring something\n" * 2
    here = read_hardware(tmp_path, "cpu")
    assert measured_or_typical(here, CPU).launch == 1.5
    assert shown["saved"] == str(profiles.cache_file(fingerprint(here)))


@pytest.mark.parametrize("found", [(), ((128, 2.5e14), (2048, 6.25e14))])
def test_what_experts_reach_is_shown_and_said_to_be_guessed_where_it_is(
    hardware, tmp_path, monkeypatch, capsys, found
):
    def measure(hardware, device, folder, note, *, quick=False):
        return replace(typical(hardware), matmul=((512, 7e14),), grouped=found)

    monkeypatch.setattr(doctor, "measure_machine", measure)
    monkeypatch.setattr(doctor, "choose_device", lambda wanted: CPU)
    monkeypatch.setattr(doctor, "read_hardware", lambda output, device: hardware)
    assert cli.main(["doctor", "--json", "--output", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert ("grouped" in shown["guessed"]) == (not found)
    assert "matmul" not in shown["guessed"]
    assert len(shown["profile"]["grouped"]) == (len(found) or 3)
    assert cli.main(["doctor", "--output", str(tmp_path)]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "experts' products" in line)
    assert ("128: 250" in row) == bool(found)
    assert ("guess" in row) == (not found)


def test_drives_that_are_named_are_measured_anew_each_time(
    hardware, measured, tmp_path, monkeypatch, capsys
):
    rates = iter(DriveRates(1e9 * write, 7.5e9, "2026-11-22") for write in (1, 2, 3))
    monkeypatch.setattr(doctor, "drive_rates", lambda folder: next(rates))
    command = ["doctor", "--output", str(tmp_path)]
    named = ["--nvme", str(tmp_path / "one"), "--nvme", str(tmp_path / "another of the same drive")]
    name = drive_name(tmp_path)
    for write in (1, 2):
        assert cli.main([*command, "--json", *named]) == 0
        out, err = capsys.readouterr()
        found = {"write": 1e9 * write, "read": 7.5e9, "measured_on": "2026-11-22"}
        assert json.loads(out)["drives"] == {name: found}
        assert err.count("the drive of") == 1
    saved = profiles.load_drives(fingerprint(read_hardware(tmp_path, "cpu")))
    assert saved == {name: DriveRates(2e9, 7.5e9, "2026-11-22")}
    assert cli.main(command) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"drive {name}" in shown
    assert "writes 2, reads 7.5 GB/s, on 2026-11-22" in shown


def test_the_table_says_what_was_guessed(hardware, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "mount_of", lambda folder: SimpleNamespace(fstype="tmpfs"))
    console = Console(record=True, width=160, file=io.StringIO())
    doctor.examine(tmp_path, False, str).render(console)
    lines = [line for line in console.export_text().splitlines() if line.startswith("│")]
    rows = {line.split("│")[1].strip(): line for line in lines}
    assert "1,500,000 µs" in rows["starting an operation"]
    assert "guess" not in rows["starting an operation"]
    assert "a guess, not measured" in rows["device memory"]
    assert "free disk" in rows and any("it lies in RAM" in row for row in lines)
    of_gpus = [what for what in rows if what.startswith(("PCIe", "device update", "fp8 products"))]
    assert of_gpus == [], "a CPU has none"


TOGETHER: dict[str, Any] = {"ranks": 2, "gather": 2e9, "reduce": 1e9, "gather_loss": 0.3}


def test_gpus_at_work_together_are_measured_and_kept(
    hardware, measured, tmp_path, monkeypatch, capsys
):
    asked: list[Any] = []

    def measure(*arguments):
        asked.append(arguments)
        return TOGETHER

    monkeypatch.setattr(doctor, "measure_processes", measure)
    assert cli.main(["doctor", "--output", str(tmp_path), "--gpus", "2"]) == 0
    out, err = capsys.readouterr()
    assert "weights of the others, each of 2" in out and "30 %" in " ".join(out.split())
    assert err.endswith("measuring 2 processes at work together\n")
    here = read_hardware(tmp_path, "cpu")
    assert asked == [(2, "cpu")]
    kept = known(measured_or_typical(here, CPU), here, 2)
    assert kept is not None and kept.gather == 2e9


def test_more_gpus_than_there_are_cannot_be_measured(hardware, measured, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "choose_device", lambda wanted: GPU)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert cli.main(["doctor", "--gpus", "2"]) == 2
    assert "--gpus: 2, but this machine shows 1" in capsys.readouterr().err


@pytest.mark.parametrize("may_measure", [False, True])
def test_ranks_measure_together_where_they_may(hardware, monkeypatch, may_measure):
    cores: list[int] = []

    def measure(*given: Any) -> dict[str, Any]:
        cores.append(given[-1])
        return TOGETHER

    monkeypatch.setattr(doctor, "measure_together", measure)
    monkeypatch.setattr(World, "all_gather", lambda world, mine: [mine] * world.size)
    hardware = replace(hardware, physical_cores=64)
    given = typical(hardware), hardware, GPU, World(0, 2, 0, 2)
    found, is_assumed = measured_together(*given, may_measure=may_measure)
    assert is_assumed == (not may_measure)
    assert (found.gather == 2e9) == may_measure
    assert cores == ([32] if may_measure else []), "a rank's part of the host's"
    again, is_assumed = measured_together(*given)
    assert (again == found, is_assumed) == (True, not may_measure)
