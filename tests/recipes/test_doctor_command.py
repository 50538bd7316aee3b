"""`megatrain doctor` measures, caches and shows; runs take the cached profile, and measure only where that pays."""

import io
import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from megatrain import cli
from megatrain.errors import StorageError
from megatrain.machine import profile as profiles
from megatrain.machine.hardware import Gpu, Hardware, drive_name, read_hardware
from megatrain.machine.profile import DriveRates, fingerprint, typical
from megatrain.recipes import doctor
from megatrain.recipes.doctor import measured_or_typical

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(profiles, "driver_version", lambda: "1")
    return replace(read_hardware(tmp_path, "cpu"), gpu=Gpu("NVIDIA H200", 1, 1, (9, 0)))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each measurement was a quick one; a measurement finds a launch of 1.5 s and guesses the rest."""
    made: list[bool] = []

    def measure(hardware, device, folder, note, *, quick=False):
        note("something")
        made.append(quick)
        return replace(
            typical(hardware),
            fingerprint=fingerprint(hardware),
            measured_on="2026-11-21",
            launch=1.5,
        )

    monkeypatch.setattr(doctor, "measure_machine", measure)
    monkeypatch.setattr(doctor, "choose_device", lambda wanted: CPU)
    return made


def test_a_plan_touches_no_device(hardware: Hardware, measured: list[bool]) -> None:
    assert measured_or_typical(hardware, GPU) == typical(hardware)
    assert measured == []


@pytest.mark.parametrize(
    ("name", "aloud"), [("NVIDIA H200", False), ("NVIDIA GeForce RTX 4090 Laptop GPU", True)]
)
def test_the_rates_of_a_gpu_without_a_data_sheet_are_guessed_aloud(
    hardware: Hardware,
    measured: list[bool],
    caplog: pytest.LogCaptureFixture,
    name: str,
    aloud: bool,
) -> None:
    unlisted = replace(hardware, gpu=Gpu(name, 1, 1, (8, 9)))
    guessed = f"{name} is not in the table of GPUs: its rates are guessed, not measured"
    assert measured_or_typical(unlisted, GPU) == typical(unlisted)
    assert (guessed in caplog.text) == aloud
    caplog.clear()
    assert measured_or_typical(unlisted, GPU, may_measure=True).launch == 1.5
    assert "guessed" not in caplog.text


def test_a_run_on_a_gpu_measures_once(hardware: Hardware, measured: list[bool]) -> None:
    found = measured_or_typical(hardware, GPU, may_measure=True)
    assert found.launch == 1.5
    assert measured_or_typical(hardware, GPU, may_measure=True) == found
    assert measured_or_typical(hardware, GPU) == found
    assert measured == [True]


def test_a_run_on_the_cpu_does_not_wait(hardware: Hardware, measured: list[bool]) -> None:
    on_cpu = replace(hardware, gpu=None)
    assert measured_or_typical(on_cpu, CPU, may_measure=True) == typical(on_cpu)
    assert measured == []


def test_a_run_goes_on_without_a_cache(
    hardware: Hardware,
    measured: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(profile):
        raise StorageError("nowhere to write")

    monkeypatch.setattr(profiles, "save", refuse)
    with caplog.at_level(logging.WARNING, "megatrain"):
        assert measured_or_typical(hardware, GPU, may_measure=True).launch == 1.5
    assert "nowhere to write" in caplog.text


def test_the_command_measures_anew_and_caches(
    hardware: Hardware, measured: list[bool], tmp_path: Path, capsys
) -> None:
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


def test_drives_that_are_named_are_measured_anew_each_time(
    hardware: Hardware,
    measured: list[bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rates = iter(DriveRates(1e9 * write, 7.5e9, "2026-11-22") for write in (1, 2, 3))
    monkeypatch.setattr(doctor, "drive_rates", lambda folder: next(rates))
    named = ["--nvme", str(tmp_path / "one"), "--nvme", str(tmp_path / "another of the same drive")]
    name = drive_name(tmp_path)
    for write in (1, 2):
        assert cli.main(["doctor", "--json", "--output", str(tmp_path), *named]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["drives"] == {
            name: {"write": 1e9 * write, "read": 7.5e9, "measured_on": "2026-11-22"}
        }
        assert err.count("the drive of") == 1
    assert profiles.load_drives(fingerprint(read_hardware(tmp_path, "cpu"))) == {
        name: DriveRates(2e9, 7.5e9, "2026-11-22")
    }
    assert cli.main(["doctor", "--output", str(tmp_path)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"drive {name}" in shown
    assert "writes 2, reads 7.5 GB/s, on 2026-11-22" in shown


def test_the_table_says_what_was_guessed(
    hardware: Hardware, measured: list[bool], tmp_path: Path
) -> None:
    found = doctor.examine(tmp_path, False, str)
    console = Console(record=True, width=160, file=io.StringIO())
    found.render(console)
    rows = {
        line.split("│")[1].strip(): line
        for line in console.export_text().splitlines()
        if line.startswith("│")
    }
    assert "1,500,000 µs" in rows["starting an operation"]
    assert "guess" not in rows["starting an operation"]
    assert "a guess, not measured" in rows["device memory"]
    assert not [
        what for what in rows if "PCIe" in what or what in ("device update", "fp8 products")
    ], "a CPU has none"
    assert "free disk" in rows


@pytest.mark.parametrize(
    ("value", "text"), [(55.512e9, "55.5 GB/s"), (4080e9, "4,080 GB/s"), (0.4923e9, "0.492 GB/s")]
)
def test_three_digits(hardware: Hardware, value: float, text: str) -> None:
    profile = replace(typical(hardware), upload=value)
    assert next(doctor.figures(profile, ())).figure == text
