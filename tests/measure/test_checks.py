"""Advice is given where something is off, and only there."""

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatrain.machine import hardware as machine_hardware
from megatrain.machine.cgroups import cgroup_cpus
from megatrain.machine.hardware import GIB, Gpu, Hardware, read_hardware
from megatrain.machine.profile import typical
from megatrain.measure import checks
from megatrain.measure.checks import PcieLink, pcie


@pytest.fixture
def hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """A machine of 8 cores and 16 GiB where nothing is off."""
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    monkeypatch.setattr(checks, "cgroup_memory", lambda: (None, None))
    monkeypatch.setattr(checks, "cgroup_cpus", lambda: None)
    sizes: Any = {"host_total_bytes": 16 * GIB, "disk_free_bytes": 100 * GIB}
    return replace(read_hardware(tmp_path, "cpu"), physical_cores=8, memlock_bytes=None, **sizes)


def test_a_healthy_machine_gets_no_advice(hardware, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "huge_pages", lambda: checks.Finding("huge pages", "madvise"))
    found = checks.check(hardware, typical(hardware), load=1.0)
    whats = ["cores", "load before", "host memory", "huge pages", "free disk"]
    assert [(finding.what, finding.advice) for finding in found] == [(what, None) for what in whats]


def test_a_gpu_brings_its_own_checks(hardware, monkeypatch):
    monkeypatch.setattr(checks, "pcie_link", lambda: None)
    hardware = replace(hardware, gpu=Gpu("NVIDIA H200", 1, 1, (9, 0)))
    whats = [finding.what for finding in checks.check(hardware, typical(hardware), load=1.0)]
    assert {"PCIe link", "memlock limit", "C compiler"} <= set(whats)


def test_the_pcie_link():
    for link, upload, advice in [
        (PcieLink(5, 16, 5, 16), 55e9, None),
        (PcieLink(4, 8, 4, 8), 13e9, None),
        (PcieLink(4, 16, 5, 16), 25e9, "the GPU can do generation 5 with 16 lanes"),
        (PcieLink(5, 8, 5, 16), 27e9, "the GPU can do generation 5 with 16 lanes"),
        (PcieLink(5, 16, 5, 16), 30e9, "copies reach only 30 of 63 GB/s"),
        (PcieLink(9, 16, 9, 16), 110e9, None),  # a generation that the table does not know yet
        (None, 5e9, None),
    ]:
        found = pcie(link, upload).advice
        assert found is None if advice is None else advice in str(found)


QUOTA = "the container may use only {} cores' time; raise its CPU limit"
TASKSET = "start it without taskset"


def test_cores_that_are_withheld_are_blamed_on_the_tighter_limit(tmp_path, monkeypatch):
    """On 16 cores, from the quota's file to the sentence."""
    for quota, mask, figure, advice in [
        ("400000 100000", 16, "4 of 16", QUOTA.format(4)),  # docker run --cpus=4
        ("250000 100000", 16, "2 of 16", QUOTA.format(2.5)),
        ("50000 100000", 16, "1 of 16", QUOTA.format(0.5)),
        ("400000 100000", 3, "3 of 16", TASKSET),  # the mask is tighter
        ("max 100000", 8, "8 of 16", TASKSET),
        ("1600000 100000", 16, "16 of 16", None),
        ("max 100000", 16, "16 of 16", None),
    ]:
        (tmp_path / "cpu.max").write_text(quota)
        (tmp_path / "self").write_text("0::/\n")
        for module in (checks, machine_hardware):
            quota_of = partial(cgroup_cpus, tmp_path, tmp_path / "self")
            monkeypatch.setattr(module, "cgroup_cpus", quota_of)
        monkeypatch.setattr(machine_hardware, "TOPOLOGY", tmp_path)
        monkeypatch.setattr(psutil, "cpu_count", lambda logical: 16)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, mask=mask: set(range(mask)))
        found = checks.usable_cores(read_hardware(tmp_path, "cpu"))
        assert found.figure == figure
        assert found.advice is None if advice is None else advice in str(found.advice)


def test_a_busy_machine():
    assert checks.other_programs(3.0, 8).advice is None
    assert "measure again when the machine is idle" in str(checks.other_programs(3.1, 8).advice)


def test_the_load_of_a_machine_is_compared_with_all_its_cores(hardware):
    """A container of two of eight cores sees the load of all."""
    two = replace(hardware, physical_cores=2)
    advice = {load: checks.check(two, typical(two), load)[1].advice for load in (3.0, 4.0)}
    assert advice[3.0] is None
    assert "other programs" in str(advice[4.0])


def test_a_container_below_ram(hardware, monkeypatch):
    total = psutil.virtual_memory().total
    monkeypatch.setattr(checks, "cgroup_memory", lambda: (total - 1, 0))
    found = checks.host_memory(replace(hardware, host_available_bytes=GIB // 2))
    assert found.figure == "16.0 GiB, 0.5 for this process"
    assert "raise its memory limit" in str(found.advice)
    monkeypatch.setattr(checks, "cgroup_memory", lambda: (total, 0))
    assert checks.host_memory(hardware).advice is None


def test_huge_pages(tmp_path):
    for text, figure, advised in [
        ("always [madvise] never\n", "madvise", False),
        ("always madvise [never]\n", "never", True),
        ("", "unknown", False),
    ]:
        (tmp_path / "enabled").write_text(text)
        found = checks.huge_pages(tmp_path / "enabled")
        assert (found.figure, found.advice is not None) == (figure, advised)
        assert checks.huge_pages(tmp_path / "nothing").figure == "unknown"


def test_locked_memory(hardware):
    assert checks.pinned_memory(hardware).advice is None
    below = checks.pinned_memory(replace(hardware, memlock_bytes=8 << 20))
    # more than that was pinned just now
    assert (below.advice, "not enforced" in below.figure) == (None, True)
    above = checks.pinned_memory(replace(hardware, memlock_bytes=4 * GIB))
    assert "ulimit -l unlimited" in str(above.advice)


def test_shared_memory_is_for_several_gpus(tmp_path, monkeypatch):
    for gpus, size, advised in [(1, 64 << 20, False), (8, 64 << 20, True), (8, GIB, False)]:
        monkeypatch.setattr(
            shutil, "disk_usage", lambda folder, size=size: SimpleNamespace(total=size)
        )
        found = checks.shared_memory(gpus, tmp_path)
        assert found.figure == f"{size / GIB:.2f} GiB"
        assert ("--shm-size" in str(found.advice)) == advised
        assert checks.shared_memory(gpus, tmp_path / "none").figure == "unknown"


def test_folders_that_lie_on_no_drive(monkeypatch):
    for kind, advice in [
        ("tmpfs", "lies in RAM"),
        ("overlay", "docker run --volume"),
        ("ext4", None),
        (None, None),
    ]:
        mount = None if kind is None else SimpleNamespace(fstype=kind)
        monkeypatch.setattr(checks, "mount_of", lambda folder, mount=mount: mount)
        found = [*checks.places([Path("runs")])]
        assert [(one.what, one.figure) for one in found] == ([("runs", kind)] if advice else [])
        assert all(str(advice) in str(one.advice) for one in found)


def test_a_compiler_is_needed_and_triton(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "gcc" else None)
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    assert checks.compiler() == checks.Finding("C compiler", "gcc")
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    assert "Triton is missing" in str(checks.compiler().advice)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "install gcc" in str(checks.compiler().advice)


def test_a_disk_smaller_than_ram(hardware):
    found = checks.free_disk(replace(hardware, disk_free_bytes=15 * GIB))
    assert "name a larger disk" in str(found.advice)
