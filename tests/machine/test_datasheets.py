"""One table of GPUs: plans, MFU and energy read the same row, and only of a card that is listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.errors import ConfigError
from megatrain.machine.datasheets import GPUS, UNKNOWN_GPU, board_power_w, data_sheet, peak_tflops
from megatrain.machine.hypothetical import find_gpu, hypothetical
from megatrain.machine.profile import MATMUL_SHARE, typical

GIB = 2**30
DEVICE_NAMES = {  # as drivers give them: the row's name, or None
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200 NVL",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe 40GB",
    "NVIDIA L4": "L4",
    "Tesla T4": "T4",
    "Tesla V100-SXM2-32GB": "V100 32GB",
    "Tesla V100-PCIE-16GB": "V100",
    "NVIDIA GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA GeForce RTX 3060": "RTX 3060",
    "NVIDIA GeForce RTX 4060 Ti": "RTX 4060 Ti",
    "NVIDIA GeForce RTX 4070": "RTX 4070",
    "NVIDIA GeForce RTX 4070 SUPER": "RTX 4070 SUPER",
    "NVIDIA A10": "A10",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA GeForce RTX 3080 Ti": "RTX 3080 Ti",
    "NVIDIA GeForce RTX 5070 Ti": "RTX 5070 Ti",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    "NVIDIA GeForce RTX 4090 D": None,
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": None,
    "NVIDIA A1000": None,
    "NVIDIA A10G": None,
    "Some future thing": None,
}
ALL_NAMES = [*DEVICE_NAMES, *(f"NVIDIA {name}" for name in GPUS)]


def test_a_device_is_found_by_whole_words():
    for device, row in DEVICE_NAMES.items():
        assert data_sheet(device) is (None if row is None else GPUS[row]), device


def test_every_row_is_found_by_its_own_name_and_has_every_use():
    for name, row in GPUS.items():
        sheet = data_sheet(f"NVIDIA {name.replace(' ', '-')} 80GB")
        assert sheet is row and find_gpu(name) == (name, sheet, True)
        assert sheet.watts and sheet.watts == board_power_w(name)
        guess = typical(hypothetical(name, sheet, 64 * GIB))
        planned = guess.matmul[-1][1] / MATMUL_SHARE[-1][1]
        assert planned == pytest.approx(1e12 * sheet.bfloat16, rel=0.005)


def test_plans_and_mfu_agree():
    for name in [*ALL_NAMES, None]:
        sheet = data_sheet(name)
        assert peak_tflops(name) == (None if sheet is None else sheet.bfloat16)
        assert (board_power_w(name) is None) == (sheet is None)


def test_figures_are_not_rounded():
    peaks = {"H200 NVL": 835.5, "H100 PCIe": 756.4, "H200": 989.4, "L4": 121, "RTX 4090": 165.2}
    assert {name: peak_tflops(name) for name in peaks} == peaks
    for half, whole in [("RTX 5060", "RTX 5090"), ("RTX 4060", "RTX 4090")]:  # 8 lanes of 16
        one, other = GPUS[half].link, GPUS[whole].link
        assert (2 * one.one_way, 2 * one.both) == (other.one_way, other.both)


@pytest.mark.parametrize("tflops", [30, 60, 120])
def test_a_card_is_described_by_hand(tflops):
    name, sheet, listed = find_gpu("RTX 2070", 12 * GIB, tflops, 12.5)
    assert (name, listed, sheet.bfloat16, sheet.mebibytes) == ("RTX 2070", False, tflops, 12 * 1024)
    assert sheet.memory / UNKNOWN_GPU.memory == tflops / UNKNOWN_GPU.bfloat16
    hardware = hypothetical(name, sheet, 64 * GIB)
    guess = typical(hardware, sheet)
    assert (guess.upload, guess.download, guess.both) == (12.5e9, 12.5e9, 22e9)
    assert guess.matmul[0][1] == pytest.approx(0.51e12 * tflops)
    assert hardware.gpu is not None
    assert 11 * GIB < hardware.gpu.free_bytes < hardware.gpu.total_bytes == 12 * GIB


def test_a_card_without_a_name_is_described_too():
    assert find_gpu(None, 12 * GIB, 60, 25) == (
        "GPU of 60 TFLOP/s", replace(UNKNOWN_GPU, mebibytes=12 * 1024), False
    )  # fmt: skip


def test_a_description_replaces_figures_of_a_row():
    name, sheet, listed = find_gpu("rtx-4090", pcie=12.5)
    assert (name, listed, sheet.link.one_way) == ("RTX 4090", True, 12.5e9)
    assert replace(sheet, link=GPUS[name].link) == GPUS[name]


@pytest.mark.parametrize(
    ("gpu", "memory", "tflops", "reason"),
    [
        ("RTX 4090 Laptop GPU", None, None, "did you mean RTX 4090.* Or describe it: --gpu-memory"),
        ("Voodoo 2", None, None, "choose one of B200, .*RTX 2080 Ti. Or describe it"),
        ("RTX 2070", GIB, 60.0, "a GPU that is not listed needs --pcie, too"),
        (None, GIB, None, "needs --gpu-tflops and --pcie, too"),
    ],
)
def test_what_is_neither_known_nor_described_is_refused(gpu, memory, tflops, reason):
    with pytest.raises(ConfigError, match=reason):
        find_gpu(gpu, memory, tflops)
