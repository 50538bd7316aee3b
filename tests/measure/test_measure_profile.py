"""The whole measurement on the CPU, with small arrays: what is measured replaces the guess, and arithmetic is counted as elsewhere."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from megatrain.flops import Attention, Work
from megatrain.hardware import probe
from megatrain.machine import MachineProfile, typical
from megatrain.measure import compute, disk, measure, profile, update
from megatrain.measure.clock import Clock
from megatrain.measure.profile import Sizes
from megatrain.optim import AdamW

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "PARAMETERS", 1 << 16)
    monkeypatch.setattr(disk, "FILE_BYTES", 2 * disk.PIECE_BYTES)
    monkeypatch.setattr(compute, "WIDTH", 64)
    monkeypatch.setattr(compute, "WIDE", 128)
    for quick in (False, True):
        monkeypatch.setitem(profile.SIZES, ("cpu", quick), Sizes((2, 4), (8, 16), 16, 1 << 16))
    monkeypatch.setattr(Clock, "sample_s", 0.0)
    monkeypatch.setattr(Clock.__init__, "__defaults__", (0.0, 0.0))


def differing(found: MachineProfile, guess: MachineProfile) -> set[str]:
    return {field.name for field in fields(found) if getattr(found, field.name) != getattr(guess, field.name)}


def a_second(clock: Clock, work: Callable[[], object]) -> float:
    """Stands for Clock.seconds: does the work once and says that it took a second."""
    work()
    return 1.0


NOT_ON_CPU = {"upload", "download", "both", "fp8"}


def test_everything_is_measured(tmp_path: Path) -> None:
    hardware, noted = probe(tmp_path, "cpu"), list[str]()
    found = measure(hardware, CPU, tmp_path, noted.append)
    assert differing(found, typical(hardware)) == {field.name for field in fields(found)} - NOT_ON_CPU
    assert noted == list(profile.STEPS)


def test_a_quick_one_leaves_the_rest_to_the_guess(tmp_path: Path) -> None:
    hardware, noted = probe(tmp_path, "cpu"), list[str]()
    found = measure(hardware, CPU, tmp_path, noted.append, quick=True)
    assert noted == list(profile.QUICK_STEPS)
    assert not differing(found, typical(hardware)) & {"disk_write", "disk_read"}


def test_a_quick_one_begins_nothing_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "QUICK_S", 0.0)
    hardware, noted = probe(tmp_path, "cpu"), list[str]()
    found = measure(hardware, CPU, tmp_path, noted.append, quick=True)
    assert noted == []
    assert differing(found, typical(hardware)) == {"fingerprint", "measured_on"}


def test_no_disk_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "FILE_BYTES", 1 << 60)
    hardware = probe(tmp_path, "cpu")
    assert measure(hardware, CPU, tmp_path, str).disk_write == typical(hardware).disk_write


def test_random_numbers_of_the_run_stay_as_they_are(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    measure(probe(tmp_path, "cpu"), CPU, tmp_path, str)
    assert torch.equal(torch.get_rng_state(), before)


def test_arithmetic_is_counted_as_in_a_steps_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Clock, "seconds", a_second)
    monkeypatch.setattr(compute, "HEADS", 3)
    device = compute.Device(CPU)
    assert device.matmul([5], torch.float32) == ((5, 2 * 5 * 64 * 128),)
    step = Work(parameters=0, matrix_parameters=0, attention=(Attention(3 * compute.HEAD_SIZE),))
    assert device.attention([4, 8], 16, torch.float32) == ((4, step.flops([4] * 4)), (8, step.flops([8] * 2)))
    assert device.memory(4096) == 2 * 4096
    assert device.fp8() == 0.0


@pytest.mark.parametrize("threads", [1, 3])
def test_each_pass_of_the_update_covers_every_parameter_once(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    monkeypatch.setattr(Clock, "seconds", a_second)

    def zeroing(_: AdamW, arrays: dict[str, torch.Tensor], **__: float) -> Callable[[int, int], None]:
        def zero(start: int, stop: int) -> None:
            for array in arrays.values():
                array[start:stop].zero_()

        return zero

    monkeypatch.setattr(AdamW, "updating", zeroing)
    with update.HostUpdate(1001) as work:
        assert work.rate(threads) == 1001
        assert all(not array.any() for array in work._arrays.values())
