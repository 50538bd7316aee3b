"""Rates of GPUs at work together: assumed ones against what two H200 reached, and those kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.machine.hardware import GIB, Gpu, Hardware, shared_out
from megatrain.machine.profile import (
    UPDATE_BYTES,
    assumed,
    fingerprint,
    interpolate,
    joined,
    known,
    load,
    part_of,
    save_profile,
    typical,
)
from tests.helpers.planned import H200, LAPTOP

HOST = replace(H200, physical_cores=32, host_available_bytes=250 * GIB)
ALONE = typical(HOST)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("megatrain.machine.profile.driver_version", lambda: "1")


def of(name: str) -> Hardware:
    return replace(HOST, gpu=Gpu(name, 80 * GIB, 79 * GIB, (9, 0)))


def test_two_h200_are_assumed_to_reach_what_they_did():
    """14 threads of each rank (benchmarks/results of the design: 142 GB/s idle, 73 beside busy
    links; 53 and 69 GB/s of each link; 238 and 264 GB/s between them)."""
    found = assumed(ALONE, HOST, 2)
    idle = 2 * interpolate(found.update, 14) * UPDATE_BYTES
    assert idle == pytest.approx(145e9, rel=0.1)
    assert 2 * found.update_busy * UPDATE_BYTES == pytest.approx(idle - found.both, rel=0.01)
    assert found.upload == pytest.approx(53.3e9, rel=0.02)
    assert found.both == pytest.approx(69.4e9, rel=0.02)
    assert (found.gather, found.reduce) == pytest.approx((238e9, 264e9), rel=0.02)
    assert (found.ranks, found.gather_loss, found.reduce_loss) == (2, 0.31, 0.28)


def test_four_h200_are_assumed_to_reach_what_they_did():
    """Of a host with 64 cores: benchmarks/results/2026-11-26-h200."""
    found = assumed(ALONE, HOST, 4)
    assert (found.upload, found.download) == pytest.approx((44.4e9, 37.0e9), rel=0.02)
    assert (found.gather, found.reduce) == pytest.approx((309e9, 270e9), rel=0.02)
    assert (found.both, found.reduce_loss) == pytest.approx((43.5e9, 0.64), rel=0.02)
    idle = interpolate(found.update, 7) * UPDATE_BYTES
    assert found.update_busy * UPDATE_BYTES == pytest.approx(idle - found.both / 2, rel=0.02)


def test_gpus_without_nvlink_exchange_through_the_host():
    card = of("NVIDIA GeForce RTX 4090")
    found = assumed(typical(card), card, 2)
    assert found.gather < found.upload and found.reduce < found.upload


def test_more_gpus_share_the_host_s_memory():
    each = [interpolate(assumed(ALONE, HOST, n).update, 2) for n in (1, 2, 4, 8)]
    assert each == sorted(each, reverse=True)
    assert 8 * each[-1] <= 1.01 * ALONE.update[-1][1]
    assert assumed(ALONE, HOST, 1) is ALONE


def test_processes_without_gpus_share_its_cores():
    alone = typical(LAPTOP)
    found = assumed(alone, LAPTOP, 2)
    assert 2 * found.matmul[0][1] == alone.matmul[0][1]
    assert found.gather > 0 and found.upload == found.gather_loss == 0.0


def test_a_rank_has_its_part_of_the_host():
    part = part_of(HOST, 4)
    assert (part.physical_cores, part.host_available_bytes) == (8, HOST.host_available_bytes // 4)
    assert (part.disk_free_bytes, part.gpu) == (HOST.disk_free_bytes, HOST.gpu)
    assert part_of(HOST, 64).physical_cores == 1


def test_ranks_share_what_each_of_them_found_by_its_tightest():
    assert HOST.gpu is not None
    full = replace(HOST, gpu=replace(HOST.gpu, free_bytes=9), resident_bytes=3, memlock_bytes=7)
    full = replace(full, host_available_bytes=103, physical_cores=3, disk_free_bytes=5)
    part = shared_out([HOST, full, HOST], 2)
    assert part.gpu == full.gpu and shared_out([LAPTOP], 1).gpu is None
    most = max(HOST.resident_bytes, 3)
    assert (part.resident_bytes, part.host_available_bytes) == (most, most + 50)
    assert (part.host_total_bytes, part.physical_cores) == (HOST.host_total_bytes // 2, 1)
    assert (part.memlock_bytes, part.disk_free_bytes) == (7, 5)
    assert shared_out([HOST], 1).memlock_bytes is None


def test_what_was_measured_together_holds_for_what_nccl_was_told(monkeypatch):
    before = fingerprint(HOST, 2), fingerprint(HOST)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert (fingerprint(HOST, 2), fingerprint(HOST)) == before
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert fingerprint(HOST, 2) != before[0] and fingerprint(HOST) == before[1]


def test_what_was_measured_together_is_kept_for_as_many():
    assert known(ALONE, HOST, 2) is None
    found = replace(assumed(ALONE, HOST, 2), gather=1e9, matmul=((1, 1.0),))
    save_profile(replace(found, fingerprint=fingerprint(HOST, 2)))
    here = known(ALONE, HOST, 2)
    assert here is not None and here.gather == 1e9
    assert here.matmul == ALONE.matmul, "one's by itself is not measured together"
    assert known(ALONE, HOST, 4) is None
    assert fingerprint(HOST, 2) == fingerprint(part_of(HOST, 1), 2) != fingerprint(HOST)
    assert joined(ALONE, found).update == found.update
    assert load(fingerprint(HOST)) is None
