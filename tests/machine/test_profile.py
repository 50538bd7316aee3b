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
    interpolate_log,
    keep_ratio,
    load,
    load_drives,
    processor,
    save_drive,
    save_profile,
    typical,
    usual_grouped,
)

NOTHING: Any = {field.name: 0 for field in fields(Hardware)}
MEMORY = {"host_total_bytes": 64 * GIB, "host_available_bytes": 60 * GIB}
MACHINE: Any = {"gpu": None, "memlock_bytes": None, "physical_cores": 16, **MEMORY}
CPU = Hardware(**NOTHING | MACHINE | {"disk_free_bytes": 100 * GIB})


def with_gpu(name: str, **changes: Any) -> Hardware:
    return replace(CPU, gpu=Gpu(name, 80 * GIB, 79 * GIB, (9, 0)), **changes)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    return tmp_path


PROFILE = replace(typical(CPU), fingerprint="this-one", measured_on="2026-11-21")


def test_a_profile_survives_the_cache():
    path = save_profile(PROFILE)
    assert load("this-one") == PROFILE
    assert sorted(path.parent.iterdir()) == [path]


def test_what_steps_took_beside_their_plan_is_kept_for_later_plans():
    keep_ratio(PROFILE, 10.0, 10.5)
    assert load("this-one") is None, "a guess is nobody's profile"
    save_profile(PROFILE)
    for planned, measured, kept in (
        (10.0, 10.5, 1.05),
        (10.5, 10.0, 1.0),  # by a plan that knew of it
        (10.0, 20.0, 1.0),  # other programs ran
        (0.1, 0.11, 1.0),  # kernels are launched as fast as they run
        (10.0, None, 1.0),
    ):
        known = load("this-one")
        assert known is not None
        keep_ratio(known, planned, measured)
        known = load("this-one")
        assert known is not None and known.over_plan == pytest.approx(kept)


STALE: list[dict[str, Any]] = [
    {"fingerprint": "another"},
    *({"upload": wrong} for wrong in ("fast", -1.0, float("nan"), True)),
    *({"update": wrong} for wrong in ([], [[1.5, 1e9]], [[1, None]], 3.0)),
    *({"grouped": wrong} for wrong in ([[0, 1e9]], None)),
    {"measured_on": 3},
    {"a key of a later version": 1.0},
]


def test_what_is_stale_or_broken_or_no_profile_is_not_read():
    assert load("this-one") is None
    older = {key: value for key, value in asdict(PROFILE).items() if key != "launch"}
    texts = [json.dumps(one) for one in [older, *(asdict(PROFILE) | one for one in STALE)]]
    for text in [*texts, "", "{", "[]", "null", "{}", "\x00"]:
        cache_file("this-one").write_text(text)
        assert load("this-one") is None, text


def test_an_older_version_knows_no_grouped_matmuls_which_reach_their_usual_share():
    measured = replace(typical(with_gpu("NVIDIA H200")), fingerprint="this-one", grouped=())
    measured = replace(measured, matmul=((512, 400e12), (8192, 700e12)), grouped=((128, 1.0),))
    values = asdict(measured)
    del values["grouped"]
    cache_file("this-one").write_text(json.dumps(values))
    found = load("this-one")
    assert found == replace(measured, grouped=usual_grouped(measured.matmul))
    assert interpolate_log(found.grouped, 2048) == pytest.approx(0.88 * 700e12)


def test_data_sheets_say_nothing_of_grouped_matmuls():
    for name in ["NVIDIA H200", "NVIDIA A10", "Some Other GPU"]:
        guess = typical(with_gpu(name))
        assert guess.grouped == usual_grouped(guess.matmul)
    assert typical(CPU).grouped == ()


# TFLOP/s of both passes and of a lone matmul of the same size, by rows an expert:
# benchmarks/results/2026-11-23-h200/grouped.json
MEASURED_GROUPED = [(128, 246, 638), (256, 416, 715), (256, 397, 662), (512, 540, 732)]
MEASURED_GROUPED += [(512, 505, 661), (512, 485, 681), (1024, 578, 697), (1024, 590, 688)]
MEASURED_GROUPED += [(2048, 643, 689), (2048, 608, 733), (4096, 673, 728), (8192, 625, 706)]


def test_the_usual_share_of_grouped_matmuls_is_what_was_measured():
    for rows, grouped, lone in MEASURED_GROUPED:
        usual = usual_grouped(((512, 1.0), (8192, float(lone))))
        assert interpolate_log(usual, rows) == pytest.approx(grouped, rel=0.07)


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path / "file"))
    words = r"cannot write it: .*; name another folder in MEGATRAIN_CACHE"
    with pytest.raises(StorageError, match=words):
        save_profile(PROFILE)


FAST, SLOW = DriveRates(3e9, 5e9, "2026-11-22"), DriveRates(1e9, 2e9, "2026-11-23")


def test_drives_are_kept_beside_the_profile():
    save_profile(PROFILE)
    save_drive("this-one", "259:1 /a", FAST)
    save_drive("this-one", "259:2 /b", FAST)
    save_drive("this-one", "259:2 /b", SLOW)
    save_profile(PROFILE)
    assert load_drives("this-one") == {"259:1 /a": FAST, "259:2 /b": SLOW}
    assert load_drives("another") == {}
    assert load("this-one") == PROFILE


NO_WRITE = '{"d": {"write": 0, "read": 1, "measured_on": ""}}'


def test_drives_that_cannot_be_read_are_measured_anew():
    save_profile(PROFILE)
    for text in ["", "{", "[]", "null", '{"d": 1}', '{"d": {}}', NO_WRITE, "\x00"]:
        drives_file("this-one").write_text(text)
        assert load_drives("this-one") == {}, text
        assert load("this-one") == PROFILE
        save_drive("this-one", "d", FAST)
        assert load_drives("this-one") == {"d": FAST}


def test_what_cannot_be_a_drive_s_is_refused():
    wrong = [("write", 0.0), ("read", -1.0), ("read", "fast"), ("write", float("nan"))]
    for name, value in [*wrong, ("measured_on", 3)]:
        with pytest.raises(ValueError, match="DriveRates"):
            replace(FAST, **{name: value})  # type: ignore[arg-type]


def test_where_the_cache_lies(tmp_path, monkeypatch):
    assert cache_folder() == tmp_path
    monkeypatch.delenv("MEGATRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/megatrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/megatrain")


def test_the_fingerprint_names_the_machine(monkeypatch):
    def of(name: str = "NVIDIA H200", **changes: int) -> str:
        return fingerprint(with_gpu(name, **changes))

    monkeypatch.setattr(profile, "driver_version", lambda: "1")
    here = of()
    assert here.startswith("nvidia-h200-")
    # what changes from day to day
    assert here == of(host_available_bytes=GIB, disk_free_bytes=0)
    others = {of("NVIDIA H100"), of(physical_cores=8), of(host_total_bytes=32 * GIB)}
    others.add(fingerprint(CPU))
    monkeypatch.setattr(profile, "driver_version", lambda: "2")
    others.add(of())
    monkeypatch.setattr(profile, "processor", lambda: "another")
    others.add(of())
    monkeypatch.setattr(profile, "installed_version", lambda _package: "9.9")
    others.add(of())
    assert len(others - {here}) == 7


def test_the_processor_is_read(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: Some CPU @ 3 GHz: fast\n")
    assert processor(file) == "Some CPU @ 3 GHz: fast"
    assert isinstance(processor(tmp_path / "nothing"), str)


def test_rates_between_points_lie_on_lines():
    rates = ((4, 10.0), (8, 20.0), (16, 24.0))
    for size, rate in {1: 10, 4: 10, 6: 15, 8: 20, 12: 22, 16: 24, 99: 24}.items():
        assert interpolate(rates, size) == rate
    assert interpolate(((4, 10.0),), 1) == 10


def test_rates_of_few_rows_lie_on_lines_over_the_logarithm():
    rates = ((128, 10.0), (512, 20.0), (2048, 24.0))
    for size, rate in {1: 10, 128: 10, 256: 15, 512: 20, 1024: 22, 2048: 24, 9999: 24}.items():
        assert interpolate_log(rates, size) == pytest.approx(rate)


MEASURED_ON_H200 = {
    "upload": 55.5e9,
    "download": 55.6e9,
    "both": 101e9,
    "update_busy": 3.6e9 * 28 / 26,  # PyTorch's fused AdamW moves 28 bytes a parameter
    "disk_write": 2.75e9,
    "disk_read": 3.5e9,
    "fp8": 1410e12,
}


def test_the_guess_for_an_h200_is_what_was_measured_on_one():
    guess = typical(with_gpu("NVIDIA H200"))
    for field, rate in MEASURED_ON_H200.items():
        assert getattr(guess, field) == pytest.approx(rate, rel=0.05), field
    assert 640e12 < interpolate(guess.matmul, 4096) < 720e12
    rates = [rate for _, rate in guess.attention]
    assert rates == pytest.approx([128e12, 309e12, 445e12], rel=0.02)
    assert interpolate(guess.update, 14) == pytest.approx(7.6e9 / 1.37, rel=0.1)


@pytest.mark.parametrize(
    "hardware", [CPU, with_gpu("NVIDIA H100 80GB HBM3"), with_gpu("Some Other GPU")]
)
@pytest.mark.parametrize("cores", [1, 2, 6, 16, 64])
def test_a_guess_is_a_profile_of_the_machine_at_hand(hardware, cores):
    guess = typical(replace(hardware, physical_cores=cores))
    threads = [count for count, _ in guess.update]
    assert threads == sorted(set(threads))
    assert (threads[0], threads[-1]) == (1, cores)
    assert update_threads(cores) in threads
    assert (guess.upload > 0) == (hardware.gpu is not None)
    of_gpus, texts = (
        {"upload", "download", "both", "both_busy", "fp8", "grouped"},
        {"fingerprint", "measured_on"},
    )
    of_ranks = {"gather", "reduce", "gather_loss", "reduce_loss", "network"}
    for name in {field.name for field in fields(MachineProfile)} - of_gpus - texts - of_ranks:
        assert getattr(guess, name), name


def test_reading_a_profile_loads_no_torch():
    code = (
        "import sys, megatrain.machine.profile as m; m.load('x'); "
        "print([n for n in ('torch', 'numba', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
