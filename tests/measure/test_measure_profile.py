"""The whole measurement on the CPU, with small arrays: measurements replace guesses."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import pytest
import torch

from megatrain.machine.hardware import Gpu, read_hardware
from megatrain.machine.profile import MachineProfile, Rates, typical, usual_grouped
from megatrain.measure import compute, disk, profile
from megatrain.measure.compute import Device
from megatrain.measure.profile import MeasuredSizes, measure_machine
from megatrain.measure.transfers import Clock
from megatrain.optim import AdamW
from megatrain.reporting.mfu import CausalAttention, ModelFlops

CPU = torch.device("cpu")
OF_GPUS = {"upload", "download", "both", "both_busy", "fp8", "grouped"}
OF_RANKS = {"ranks", "gather", "reduce", "gather_loss", "reduce_loss", "network"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "PARAMETERS", 1 << 16)
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 16)
    monkeypatch.setattr(disk.disk_rates, "__defaults__", (2 << 16,))
    monkeypatch.setattr(compute, "WIDTH", 64)
    monkeypatch.setattr(compute, "WIDE", 128)
    monkeypatch.setattr(compute, "MODEL", 32)
    monkeypatch.setattr(compute, "INNER", 16)
    monkeypatch.setattr(compute, "MOST_ROWS", 128)
    for quick in (False, True):
        monkeypatch.setitem(
            profile.SIZES, ("cpu", quick), MeasuredSizes((2, 4), (8, 16), 16, 1 << 16)
        )
    monkeypatch.setattr(Clock, "sample_s", 0.0)
    monkeypatch.setattr(Clock.__init__, "__defaults__", (0.0, 0.0))


def differing(found: MachineProfile, guess: MachineProfile) -> set[str]:
    names = {field.name for field in fields(found)}
    return {name for name in names if getattr(found, name) != getattr(guess, name)}


def a_second(clock: Clock, work: Callable[[], object]) -> float:
    """Stands for Clock.seconds: does the work once and says that it took a second."""
    work()
    return 1.0


def test_everything_is_measured(tmp_path):
    hardware, noted = read_hardware(tmp_path, "cpu"), list[str]()
    found = measure_machine(hardware, CPU, tmp_path, noted.append)
    names = {field.name for field in fields(found)}
    assert differing(found, typical(hardware)) == names - OF_GPUS - OF_RANKS - {"over_plan"}
    assert noted == list(profile.STEPS)


def test_a_quick_one_leaves_the_rest_to_the_guess(tmp_path):
    hardware, noted = read_hardware(tmp_path, "cpu"), list[str]()
    found = measure_machine(hardware, CPU, tmp_path, noted.append, quick=True)
    assert noted == list(profile.QUICK_STEPS)
    assert not differing(found, typical(hardware)) & {"disk_write", "disk_read"}


@pytest.mark.parametrize(
    ("fast", "dtype", "measured", "guessed"),
    [
        (True, torch.bfloat16, "matmul", "matmul_fp32"),
        (False, torch.float32, "matmul_fp32", "matmul"),
    ],
)
def test_a_quick_one_computes_in_the_precision_that_runs_choose(
    tmp_path, monkeypatch, fast, dtype, measured, guessed
):
    timed: list[torch.dtype] = []

    def attention(_device: Device, lengths: Sequence[int], _tokens: int, of: torch.dtype) -> Rates:
        timed.append(of)
        return tuple((length, 1e9) for length in lengths)

    monkeypatch.setattr(profile, "bf16_is_fast", lambda device: fast)
    monkeypatch.setattr(Device, "attention", attention)
    hardware = read_hardware(tmp_path, "cpu")
    found = differing(measure_machine(hardware, CPU, tmp_path, str, quick=True), typical(hardware))
    assert measured in found and guessed not in found
    assert timed == [dtype]


def test_a_quick_one_begins_nothing_when_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "QUICK_S", 0.0)
    hardware, noted = read_hardware(tmp_path, "cpu"), list[str]()
    found = measure_machine(hardware, CPU, tmp_path, noted.append, quick=True)
    assert noted == []
    assert differing(found, typical(hardware)) == {"fingerprint", "measured_on"}


def test_a_gpu_without_grouped_matmuls_reaches_their_usual_share(tmp_path, monkeypatch):
    sizes = MeasuredSizes((2, 4), (8, 16), 16, 1 << 16, rows=(1, 4))
    monkeypatch.setitem(profile.SIZES, ("cpu", False), sizes)
    with_gpu = replace(read_hardware(tmp_path, "cpu"), gpu=Gpu("NVIDIA H200", 1, 1, (9, 0)))

    def measured() -> MachineProfile:
        return measure_machine(with_gpu, CPU, tmp_path, str)

    assert [rows for rows, _ in measured().grouped] == [1, 4]
    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    found = measured()
    assert found.grouped == usual_grouped(found.matmul) != typical(with_gpu).grouped


def test_no_disk_is_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "FILE_BYTES", 1 << 60)
    hardware = read_hardware(tmp_path, "cpu")
    assert measure_machine(hardware, CPU, tmp_path, str).disk_write == typical(hardware).disk_write


def test_random_numbers_of_the_run_stay_as_they_are(tmp_path):
    before = torch.get_rng_state()
    measure_machine(read_hardware(tmp_path, "cpu"), CPU, tmp_path, str)
    assert torch.equal(torch.get_rng_state(), before)


def test_arithmetic_is_counted_as_in_a_steps_figures(monkeypatch):
    monkeypatch.setattr(Clock, "seconds", a_second)
    monkeypatch.setattr(compute, "HEADS", 3)
    device = compute.Device(Clock(CPU))
    assert device.matmul([5], torch.float32) == ((5, 2 * 5 * 64 * 128),)
    step = ModelFlops(
        active_parameters=0,
        matrix_parameters=0,
        attention=(CausalAttention(3 * compute.HEAD_SIZE),),
    )
    assert device.attention([4, 8], 16, torch.float32) == (
        (4, step.flops([4] * 4)),
        (8, step.flops([8] * 2)),
    )
    assert device.grouped([1, 4]) == ((1, 6 * 64 * 32 * 16), (4, 6 * 4 * 32 * 32 * 16))
    assert device.memory(4096) == 2 * 4096
    assert device.fp8() == 0.0


@pytest.mark.parametrize(("threads", "passes"), [(1, 1), (3, 3), (9, compute.PASSES)])
def test_each_pass_of_the_update_covers_every_parameter_once(monkeypatch, threads, passes):
    monkeypatch.setattr(Clock, "seconds", a_second)
    monkeypatch.setattr(compute, "MOST_OF_A_PIECE", 100)
    pieces: list[tuple[int, int]] = []
    monkeypatch.setattr(
        AdamW, "updating", lambda *_, **__: lambda start, stop: pieces.append((start, stop))
    )
    with compute.HostUpdate(1001, threads=2) as work:
        assert work.rate(threads, Clock(CPU)) == passes * 1001
    times = torch.zeros(1001)
    for start, stop in pieces:
        times[start:stop] += 1
    assert (times == passes).all()
    assert max(stop - start for start, stop in pieces) <= 100


@pytest.mark.slow
def test_every_page_of_the_update_is_written_to_first(monkeypatch):
    monkeypatch.setattr(compute, "TOUCH_BYTES", 1 << 10)
    with compute.HostUpdate(1 << 20, threads=3) as work:
        assert all(
            (array.view(torch.uint8) == compute.TOUCH_VALUE).all()
            for array in work._arrays.values()
        )


def test_repeated_updates_keep_ordinary_numbers():
    """Infinite and denormal ones would take another time."""
    with compute.HostUpdate(1 << 10, threads=1) as work:
        for _ in range(1000):
            work._update(0, 1 << 10)
        numbers = torch.cat(
            [array.float() for name, array in work._arrays.items() if name != "remainder"]
        )
    assert 1e-6 < numbers.min() < numbers.max() < 1.0
