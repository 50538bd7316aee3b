"""The machine profile: its cache reads nothing stale or broken; guesses agree with measurements."""

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import StorageError
from megatrain.machine import profile
from megatrain.machine.hardware import GIB, Gpu, Hardware, update_threads
from megatrain.machine.profile import (
    DriveRates,
    MachineProfile,
    cache_file,
    cache_folder,
    drives_file,
    fingerprint,
    interpolate,
    load,
    load_drives,
    processor,
    save,
    save_drive,
    typical,
)

CPU = Hardware(
    gpu=None,
    host_total_bytes=64 * GIB,
    host_available_bytes=60 * GIB,
    physical_cores=16,
    disk_free_bytes=100 * GIB,
    memlock_bytes=None,
    context_bytes=0,
    workspace_bytes=0,
    resident_bytes=0,
    library_bytes=0,
)


def with_gpu(name: str, **changes: int) -> Hardware:
    return replace(CPU, gpu=Gpu(name, 80 * GIB, 79 * GIB, (9, 0)), **changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    return tmp_path


PROFILE = replace(typical(CPU), fingerprint="this-one", measured_on="2026-11-21")


def test_a_profile_survives_the_cache() -> None:
    path = save(PROFILE)
    assert load("this-one") == PROFILE
    assert sorted(path.parent.iterdir()) == [path]


def test_nothing_cached_is_nothing() -> None:
    assert load("this-one") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"fingerprint": "another"},
        {"upload": "fast"},
        {"upload": -1.0},
        {"upload": float("nan")},
        {"upload": True},
        {"update": []},
        {"update": [[1.5, 1e9]]},
        {"update": [[1, None]]},
        {"update": 3.0},
        {"measured_on": 3},
        {"a key of a later version": 1.0},
    ],
)
def test_what_is_stale_or_broken_is_not_read(changes: dict[str, object]) -> None:
    cache_file("this-one").write_text(json.dumps(asdict(PROFILE) | changes))
    assert load("this-one") is None


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", "\x00"])
def test_what_is_no_profile_is_not_read(text: str) -> None:
    cache_file("this-one").write_text(text)
    assert load("this-one") is None


def test_an_older_version_lacks_a_figure() -> None:
    values = asdict(PROFILE)
    del values["launch"]
    cache_file("this-one").write_text(json.dumps(values))
    assert load("this-one") is None


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        StorageError, match=r"cannot be written: .*; name another folder in MEGATRAIN_CACHE"
    ):
        save(PROFILE)


FAST, SLOW = DriveRates(3e9, 5e9, "2026-11-22"), DriveRates(1e9, 2e9, "2026-11-23")


def test_drives_are_kept_beside_the_profile() -> None:
    save(PROFILE)
    save_drive("this-one", "259:1 /a", FAST)
    save_drive("this-one", "259:2 /b", FAST)
    save_drive("this-one", "259:2 /b", SLOW)
    save(PROFILE)
    assert load_drives("this-one") == {"259:1 /a": FAST, "259:2 /b": SLOW}
    assert load_drives("another") == {}
    assert load("this-one") == PROFILE


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"d": 1}',
        '{"d": {}}',
        '{"d": {"write": 0, "read": 1, "measured_on": ""}}',
        "\x00",
    ],
)
def test_drives_that_cannot_be_read_are_measured_anew(text: str) -> None:
    save(PROFILE)
    drives_file("this-one").write_text(text)
    assert load_drives("this-one") == {}
    assert load("this-one") == PROFILE
    save_drive("this-one", "d", FAST)
    assert load_drives("this-one") == {"d": FAST}


@pytest.mark.parametrize(
    "changes",
    [{"write": 0.0}, {"read": -1.0}, {"read": "fast"}, {"write": float("nan")}, {"measured_on": 3}],
)
def test_what_cannot_be_a_drive_s_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="DriveRates"):
        replace(FAST, **changes)


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder() == tmp_path
    monkeypatch.delenv("MEGATRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/megatrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/megatrain")


def test_the_fingerprint_names_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "driver_version", lambda: "1")
    here = fingerprint(with_gpu("NVIDIA H200"))
    assert here.startswith("nvidia-h200-")
    assert here == fingerprint(
        with_gpu("NVIDIA H200", host_available_bytes=GIB, disk_free_bytes=0)
    ), "what changes from day to day"
    others = {
        fingerprint(with_gpu("NVIDIA H100")),
        fingerprint(with_gpu("NVIDIA H200", physical_cores=8)),
        fingerprint(with_gpu("NVIDIA H200", host_total_bytes=32 * GIB)),
        fingerprint(CPU),
    }
    monkeypatch.setattr(profile, "driver_version", lambda: "2")
    others.add(fingerprint(with_gpu("NVIDIA H200")))
    monkeypatch.setattr(profile, "processor", lambda: "another")
    others.add(fingerprint(with_gpu("NVIDIA H200")))
    monkeypatch.setattr(profile, "installed_version", lambda _package: "9.9")
    others.add(fingerprint(with_gpu("NVIDIA H200")))
    assert len(others - {here}) == 7


def test_the_processor_is_read(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz: fast\n")
    assert processor(file) == "Some CPU @ 3 GHz: fast"
    assert isinstance(processor(tmp_path / "nothing"), str)


def test_rates_between_points_lie_on_lines() -> None:
    rates = ((4, 10.0), (8, 20.0), (16, 24.0))
    assert [interpolate(rates, size) for size in (1, 4, 6, 8, 12, 16, 99)] == [
        10,
        10,
        15,
        20,
        22,
        24,
        24,
    ]
    assert interpolate(((4, 10.0),), 1) == 10


MEASURED_ON_H200 = {
    "upload": 55.5e9,
    "download": 55.6e9,
    "both": 101e9,
    "update_busy": 3.6e9 * 28 / 26,  # PyTorch's fused AdamW moves 28 bytes a parameter
    "disk_write": 2.75e9,
    "disk_read": 3.5e9,
    "fp8": 1410e12,
}


@pytest.mark.parametrize("field", MEASURED_ON_H200)
def test_the_guess_for_an_h200_is_what_was_measured_on_one(field: str) -> None:
    assert getattr(typical(with_gpu("NVIDIA H200")), field) == pytest.approx(
        MEASURED_ON_H200[field], rel=0.05
    )


def test_the_guessed_rates_for_an_h200_are_what_was_measured_on_one() -> None:
    guess = typical(with_gpu("NVIDIA H200"))
    assert 640e12 < interpolate(guess.matmul, 4096) < 720e12
    assert [rate for _, rate in guess.attention] == pytest.approx(
        [311e12, 505e12, 578e12], rel=0.02
    )
    assert interpolate(guess.update, 14) == pytest.approx(7.6e9 / 1.37, rel=0.1)


@pytest.mark.parametrize(
    "hardware",
    [CPU, with_gpu("NVIDIA H100 80GB HBM3"), with_gpu("Some Other GPU")],
    ids=["cpu", "h100", "unknown"],
)
@pytest.mark.parametrize("cores", [1, 2, 6, 16, 64])
def test_a_guess_is_a_profile_of_the_machine_at_hand(hardware: Hardware, cores: int) -> None:
    guess = typical(replace(hardware, physical_cores=cores))
    threads = [count for count, _ in guess.update]
    assert threads == sorted(set(threads))
    assert (threads[0], threads[-1]) == (1, cores)
    assert update_threads(cores) in threads
    assert (guess.upload > 0) == (hardware.gpu is not None)
    positive = {field.name for field in fields(MachineProfile)} - {
        "fingerprint",
        "measured_on",
        "upload",
        "download",
        "both",
        "fp8",
    }
    assert all(getattr(guess, name) for name in positive)


def test_reading_a_profile_loads_no_torch() -> None:
    code = (
        "import sys, megatrain.machine.profile as m; m.load('x'); "
        "print([n for n in ('torch', 'numba', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
