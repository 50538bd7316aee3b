"""The machine measured on CUDA: every figure is possible, and no memory is kept."""

from pathlib import Path

import pytest
import torch

from megatrain.machine.datasheets import peak_tflops
from megatrain.machine.hardware import CUBLAS_WORKSPACE_BYTES, MIB, bf16_is_fast, read_hardware
from megatrain.machine.profile import MachineProfile, interpolate
from megatrain.measure.checks import check
from megatrain.measure.profile import measure_machine

GPU = torch.device("cuda", 0)
HELD_BEFORE = [0, 0]  # by other tests: allocated, reserved


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    folder = tmp_path_factory.mktemp("disk")
    torch.cuda.empty_cache()
    HELD_BEFORE[:] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return measure_machine(read_hardware(folder, "cuda"), GPU, folder, str)


@pytest.fixture(scope="module")
def quick(profile: MachineProfile, tmp_path_factory: pytest.TempPathFactory) -> MachineProfile:
    folder = tmp_path_factory.mktemp("quick")
    return measure_machine(read_hardware(folder, "cuda"), GPU, folder, str, quick=True)


def much_alike(found: float, expected: float) -> bool:
    """Other tests may share the GPU: a factor of five would be a mistake of units."""
    return expected / 5 < found < expected * 5


@pytest.mark.parametrize("field", ["upload", "download", "both", "memory", "device_update"])
def test_a_quick_one_finds_the_same(
    profile: MachineProfile, quick: MachineProfile, field: str
) -> None:
    assert much_alike(getattr(quick, field), getattr(profile, field))


def test_a_quick_one_measures_the_products_that_runs_choose(
    profile: MachineProfile, quick: MachineProfile
) -> None:
    field = "matmul" if bf16_is_fast("cuda") else "matmul_fp32"
    tokens, rate = getattr(quick, field)[-1]
    assert tokens == 8192
    assert much_alike(rate, interpolate(getattr(profile, field), tokens))


def test_both_ways_carry_more_than_one_and_less_than_two(profile: MachineProfile) -> None:
    assert min(profile.upload, profile.download) > 1e9
    assert (
        0.9 * max(profile.upload, profile.download)
        < profile.both
        < 1.1 * (profile.upload + profile.download)
    )


def test_products_are_below_the_peak(profile: MachineProfile) -> None:
    rates = [rate for _, rate in (*profile.matmul, *profile.matmul_fp32, *profile.attention)]
    peak = peak_tflops(torch.cuda.get_device_name(GPU))
    assert all(rate > 1e9 for rate in rates)
    assert peak is None or max(rates) < peak * 1e12
    assert [rows for rows, _ in profile.grouped] == [128, 512, 2048]
    assert profile.grouped[0][1] < profile.grouped[-1][1] < 1.1 * max(rates)
    if torch.cuda.get_device_capability(GPU) >= (9, 0):
        assert profile.fp8 > max(rate for _, rate in profile.matmul)


def test_the_devices_update_is_bound_by_its_memory(profile: MachineProfile) -> None:
    assert 0.5 * profile.memory / 26 < profile.device_update < 1.2 * profile.memory / 26


def test_memory_is_given_back(profile: MachineProfile) -> None:
    allocated, reserved = HELD_BEFORE
    workspaces = CUBLAS_WORKSPACE_BYTES + MIB  # cuBLASLt's is what fp8 products ask for
    assert torch.cuda.memory_allocated() <= allocated + workspaces
    assert torch.cuda.memory_reserved() <= reserved + workspaces + 64 * MIB


def test_the_machine_is_checked(profile: MachineProfile, tmp_path: Path) -> None:
    whats = [finding.what for finding in check(read_hardware(tmp_path, "cuda"), profile, load=0.0)]
    assert {"PCIe link", "memlock limit", "C compiler"} <= set(whats)
