"""Limits are read from the machine, and the tightest one counts."""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from megatrain.errors import ConfigError
from megatrain.machine import cgroups, hardware
from megatrain.machine.cgroups import cgroup_cpus, cgroup_memory
from megatrain.machine.hardware import (
    GIB,
    MIB,
    Gpu,
    bf16_is_fast,
    disk_free,
    read_hardware,
    update_threads,
)


def group(folder: Path, **values: object) -> Path:
    """A control group's memory files, in version 2 unless they name those of version 1."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (folder / f"memory.{name.replace('__', '.')}").write_text(f"{value}\n")
    return folder


def membership(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "self-cgroup"
    file.write_text(text)
    return file


NO_LIMIT = 2**63 - 4096  # in version 1


def test_version_2_takes_the_tightest_parent_and_forgives_page_cache(tmp_path):
    mount = tmp_path / "cgroup"
    group(mount / "outer", max=1000, current=900, stat="anon 1\ninactive_file 300")
    group(mount / "outer/inner", max="max", current=100, stat="inactive_file 0")
    found = cgroup_memory(mount, membership(tmp_path, "0::/outer/inner\n"))
    assert found == (1000, 1000 - 900 + 300)


def test_version_2_inside_a_container_reads_the_mount_point(tmp_path):
    mount = group(tmp_path / "cgroup", max=500, current=100)
    assert cgroup_memory(mount, membership(tmp_path, "0::/on/the/host/only\n")) == (500, 400)


def test_version_1(tmp_path):
    mount, stat = tmp_path / "cgroup", "total_inactive_file 50"
    group(mount / "memory", limit_in_bytes=NO_LIMIT, usage_in_bytes=5)
    group(mount / "memory/job", limit_in_bytes=700, usage_in_bytes=600, stat=stat)
    own = membership(tmp_path, "4:cpu:/\n3:memory:/job\n0::/\n")
    assert cgroup_memory(mount, own) == (700, 150)


CACHE_V2 = "anon 1\nfile 500\nshmem 150\ninactive_file 200\nactive_file 150\nfile_mapped {mapped}"


def test_cache_in_use_lately_is_room_too_but_not_code_that_runs_or_shared_memory(tmp_path):
    """What was read twice, such as weights that were verified and loaded, is `active`."""
    own = membership(tmp_path, "0::/\n")
    for mapped, reclaimable in [(0, 350), (30, 320), (170, 200), (9999, 200)]:
        stat = CACHE_V2.format(mapped=mapped)
        mount = group(tmp_path / "cgroup", max=1000, current=900, stat=stat)
        assert cgroup_memory(mount, own) == (1000, 100 + reclaimable)
    # the cache of a checkpoint just written takes nothing away
    for current, inactive, active in [(300, 0, 0), (990, 590, 100)]:
        stat = f"inactive_file {inactive}\nactive_file {active}"
        mount = group(tmp_path / "cgroup", max=1000, current=current, stat=stat)
        assert cgroup_memory(mount, own) == (1000, 700)


def test_a_group_is_not_filled_beyond_where_it_is_slowed_down_and_swap_is_no_memory(tmp_path):
    swap = {"swap__max": "max", "swap__current": 0}
    mount = group(tmp_path / "cgroup", max=1000, high=600, current=100, **swap)
    group(mount / "job", max="max", high="max", current=100)
    assert cgroup_memory(mount, membership(tmp_path, "0::/job\n")) == (600, 500)


def test_version_1_knows_limits_of_parents_that_a_container_does_not_see(tmp_path):
    stat = {"hierarchical_memory_limit": 800, "total_inactive_file": 10}
    stat |= {"total_active_file": 20, "total_mapped_file": 5}
    lines = "\n".join(f"{name} {value}" for name, value in stat.items())
    mount = tmp_path / "cgroup"
    group(mount / "memory", limit_in_bytes=NO_LIMIT, usage_in_bytes=300, stat=lines)
    assert cgroup_memory(mount, membership(tmp_path, "3:memory:/docker/abc\n")) == (800, 525)


LEVELS = {"": "800000 100000", "a": "400000 100000", "a/b": "max 100000"}
QUOTAS: list[tuple[dict[str, str], str, float | None]] = [
    ({"cpu.max": "max 100000"}, "0::/", None),
    ({"cpu.max": "150000 100000"}, "0::/", 1.5),
    ({f"{folder}/cpu.max": quota for folder, quota in LEVELS.items()}, "0::/a/b", 4.0),
    ({"cpu.max": "50000 100000"}, "0::/../elsewhere", 0.5),
    # version 1, and controllers that are mounted together, without links of their own
    ({"cpu/job/cpu.cfs_quota_us": "-1"}, "5:cpu,cpuacct:/job\n4:memory:/job", None),
    ({"cpu/job/cpu.cfs_quota_us": "250000"}, "5:cpu,cpuacct:/job\n4:memory:/job", 2.5),
    ({"cpu,cpuacct/cpu.cfs_quota_us": "50000"}, "5:cpu,cpuacct:/docker/abc", 0.5),
    ({"cpuacct,cpu/cpu.cfs_quota_us": "50000"}, "5:cpuacct,cpu:/docker/abc", 0.5),
]


def test_processors_of_a_container(tmp_path):
    for number, (files, own, cpus) in enumerate(QUOTAS):
        mount = tmp_path / str(number)
        for name, quota in files.items():
            file = mount / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{quota}\n")
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
        assert cgroup_cpus(mount, membership(tmp_path, f"{own}\n")) == cpus, own


def test_files_that_say_something_else_are_no_limit(tmp_path):
    mount = group(tmp_path / "cgroup", max="much", current="", stat="anon\nfile x\nshmem 1 2")
    (mount / "cpu.max").write_text("")
    own = membership(tmp_path, "0::/\n")
    assert cgroup_memory(mount, own) == (None, None)
    assert cgroup_cpus(mount, own) is None


THREADS = [(None, None, None), (2.5, None, "2"), (0.5, None, "1"), (8.0, None, None)]


def test_pytorch_gets_as_many_threads_as_the_quota_has_processors(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, given, threads in [*THREADS, (2.5, "6", "6")]:
        monkeypatch.setattr(cgroups, "cgroup_cpus", lambda quota=quota: quota)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        cgroups.keep_to_quota()
        assert os.environ.get("OMP_NUM_THREADS") == threads


@pytest.mark.parametrize(
    ("gpu", "given", "spins"),
    [
        ("nowhere", {}, "1000"),
        ("nowhere", {"GOMP_SPINCOUNT": "7"}, "7"),
        ("nowhere", {"OMP_WAIT_POLICY": "ACTIVE"}, None),
        ("/dev/null", {}, None),
    ],
)
def test_threads_spin_shortly_for_each_other_where_the_cpu_computes(monkeypatch, gpu, given, spins):
    monkeypatch.setattr(cgroups, "NVIDIA", gpu)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    cgroups.keep_to_quota()
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_both_halves_of_a_core_are_one_core(tmp_path, monkeypatch):
    """As of `docker run --cpuset-cpus` on four cores of two threads each."""
    for number in range(8):
        folder = tmp_path / f"cpu{number}/topology"
        folder.mkdir(parents=True)
        first = number // 2 * 2
        (folder / "thread_siblings_list").write_text(f"{first}-{first + 1}\n")
    monkeypatch.setattr(hardware, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(hardware, "cgroup_cpus", lambda: None)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    masks = [({0, 1, 2, 3}, 2), ({0, 4}, 2), ({4, 5}, 1), (set(range(8)), 4), ({9}, 1)]
    for mask, cores in masks:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, mask=mask: mask)
        assert hardware.physical_cores() == cores


def test_threads_follow_the_containers_share_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 8)
    for quota, cores in [(None, 8), (3.5, 3), (0.5, 1), (64.0, 8)]:
        monkeypatch.setattr(hardware, "cgroup_cpus", lambda quota=quota: quota)
        assert hardware.physical_cores() == cores


def test_no_limit(tmp_path):
    mount = group(tmp_path / "cgroup", max="max", current=100)
    assert cgroup_memory(mount, membership(tmp_path, "0::/\n")) == (None, None)
    assert cgroup_memory(tmp_path / "nowhere", tmp_path / "nothing") == (None, None)


def test_a_container_limit_bounds_what_is_available(tmp_path, monkeypatch):
    limit = psutil.Process().memory_info().rss + 64 * MIB
    monkeypatch.setattr(hardware, "cgroup_memory", lambda: (limit, 16 * MIB))
    found = read_hardware(tmp_path, "cpu")
    assert found.host_total_bytes == limit
    # what we hold already is ours
    assert found.host_available_bytes == pytest.approx(limit - 48 * MIB, rel=0.1)
    monkeypatch.setattr(hardware, "cgroup_memory", lambda: (limit, limit))
    assert read_hardware(tmp_path, "cpu").host_available_bytes <= limit


def pretend(
    monkeypatch: pytest.MonkeyPatch, total: int, available: int, own: int, shared: int
) -> None:
    """A machine's memory and this process's share of it, in bytes, without a container."""
    machine = SimpleNamespace(total=total, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    process = SimpleNamespace(rss=own, shared=shared)
    monkeypatch.setattr(psutil.Process, "memory_info", lambda _: process)
    monkeypatch.setattr(hardware, "cgroup_memory", lambda: (None, None))


def test_what_is_available_is_counted_once_and_the_kernel_gets_its_part(tmp_path, monkeypatch):
    """The process holds 3 GiB; 1 of them is code in the page cache, one of 64 GiB available."""
    pretend(monkeypatch, 128 * GIB, 64 * GIB, 3 * GIB, GIB)
    h200 = Gpu("NVIDIA H200", 139 * GIB, 139 * GIB, (9, 0))
    for gpu, page in [(None, 4096 + 8), (h200, 4096 + 8 + 16)]:
        monkeypatch.setattr(hardware, "visible_gpu", lambda gpu=gpu: gpu)
        found = read_hardware(tmp_path)
        assert found.host_available_bytes == ((2 + 64) * GIB - 512 * MIB) * 4096 // page
        assert found.resident_bytes == 3 * GIB


def test_a_small_machine_is_spared_a_share_and_nothing_is_less_than_nothing(tmp_path, monkeypatch):
    for available, most in [(GIB, GIB - 64 * MIB), (0, 0)]:
        pretend(monkeypatch, 2 * GIB, available, 16 * MIB, 16 * MIB)
        assert read_hardware(tmp_path, "cpu").host_available_bytes == most * 4096 // (4096 + 8)


def test_probe_of_this_machine(tmp_path):
    found = read_hardware(tmp_path / "runs" / "not" / "there", "cpu")
    assert (found.gpu, found.context_bytes) == (None, 0)
    most = found.host_total_bytes + psutil.Process().memory_info().rss
    assert 0 < found.host_available_bytes <= most
    assert found.physical_cores >= 1
    assert found.disk_free_bytes == pytest.approx(disk_free(tmp_path), rel=0.05)
    assert not (tmp_path / "runs").exists()


def test_cuda_without_a_gpu_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible; set device: cpu"):
        read_hardware(tmp_path, "cuda")
    assert read_hardware(tmp_path, "auto").gpu is None


def test_update_threads_leave_some_cores():
    assert [update_threads(cores) for cores in (1, 2, 3, 16, 64)] == [1, 1, 1, 14, 56]


def test_bf16_on_cpus(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    fast = ["flags\t: fpu avx2 avx512_bf16", "flags : amx_bf16", "Features : asimd bf16"]
    for flags in [*fast, "flags : avx2", ""]:
        cpuinfo.write_text("processor : 0\n" + flags + "\n")
        assert bf16_is_fast("cpu", cpuinfo) is (flags in fast)


class FakeNvml:
    """As much of pynvml as the probe asks."""

    class NVMLError(Exception):
        pass

    asked: str | int | None = None

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked = index
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked = uuid
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> object:
        return type("Memory", (), {"total": 80, "free": 70})

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return (9, 0)

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA Test"


@pytest.mark.parametrize(("visible", "asked"), [(None, 0), ("2,3", 2), ("GPU-abc", "GPU-abc")])
def test_the_gpu_that_cuda_would_show(visible, asked, monkeypatch, tmp_path):
    nvml = FakeNvml()
    monkeypatch.setattr(hardware, "opened_nvml", lambda: nullcontext(nvml))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = read_hardware(tmp_path, "auto")
    assert found.gpu == hardware.Gpu("NVIDIA Test", 80, 70, (9, 0))
    assert nvml.asked == asked
    assert found.context_bytes > 0
    assert bf16_is_fast("cuda")


LOST = 15  # NVML_ERROR_GPU_IS_LOST


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [({}, True), ({("b", "c"): 1}, False), ({("c", "a"): LOST}, True), (None, True)],
)
def test_gpus_reach_each_other_unless_the_driver_says_no(pairs, expected, monkeypatch):
    class Nvml(FakeNvml):
        NVML_P2P_CAPS_INDEX_READ, NVML_P2P_STATUS_OK = (0,), 0  # as pynvml has them

        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            return uuid

        def nvmlDeviceGetP2PStatus(self, one: str, other: str, what: int) -> int:
            assert pairs is not None and what == 0
            if (status := pairs.get((one, other), 0)) == LOST:
                raise self.NVMLError(LOST)
            return int(status)

    found = None if pairs is None else Nvml()
    monkeypatch.setattr(hardware, "opened_nvml", lambda: nullcontext(found))
    assert hardware.reach_each_other(["a", "b", "c"]) == expected
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert not hardware.reach_each_other(["a", "b", "c"])
