"""Our own launcher for the GPUs of one host, and what a process takes as its rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

import megatrain as mt
from megatrain.config import Config, load_config
from megatrain.errors import ConfigError
from megatrain.machine.launcher import Place, share_of_cores
from megatrain.recipes.doctor import find_machine
from megatrain.recipes.ranks import launch
from megatrain.recipes.ranks.launch import environment_of, free_port, ranks_for, run_ranks
from megatrain.recipes.ranks.rendezvous import as_rank, bind, own_device
from megatrain.world import World
from tests.helpers.commands import wait_for
from tests.helpers.ranks import Started
from tests.recipes.test_rank_runs import train

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}


def config(**keys: Any) -> Config:
    return load_config({"model": "m", "data": {"train": "x.jsonl"}, **keys})


def torch_of(monkeypatch: pytest.MonkeyPatch, cuda: str | None) -> None:
    """PyTorch is a build for that version of CUDA."""
    monkeypatch.setattr("megatrain.machine.hardware.run_path", lambda _: {"cuda": cuda})


@pytest.fixture
def gpus(monkeypatch):
    """gpus(4): the driver has so many."""

    def there(count: int) -> None:
        nvml = SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: count,
            NVMLError=OSError,
        )
        monkeypatch.setitem(sys.modules, "pynvml", nvml)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    torch_of(monkeypatch, "13.0")
    return there


@pytest.mark.parametrize(
    ("there", "visible", "keys", "ranks"),
    [
        (4, None, {}, 4),
        (4, "0,2", {}, 2),
        (4, "1,-1,3", {}, 1),
        (4, "", {}, 1),
        (4, None, {"gpus": 2}, 2),
        (4, None, {"train": {"rows_per_step": 3}}, 3),
        (4, None, {"train": {"rows_per_step": 3}, "gpus": 4}, 4),
        (4, None, {"train": {"rows_per_step": 1, "context_parallel": 2}}, 2),
        (4, None, {"device": "cpu"}, 1),
        (0, None, {}, 1),
    ],
)
def test_so_many_gpus_are_used(gpus, monkeypatch, capsys, there, visible, keys, ranks):
    gpus(there)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ranks_for(config(**keys)) == ranks
    fewer = "train" in keys and ranks < there
    said = f"a step has work for {ranks} of {there} GPUs (train.rows_per_step)\n"
    assert capsys.readouterr().err == (said if fewer else "")


def test_gpus_that_cannot_be_used_are_refused(gpus, monkeypatch, capsys):
    gpus(4)
    with pytest.raises(ConfigError, match="gpus: 8, but 4 are visible here"):
        ranks_for(config(gpus=8))
    with pytest.raises(ConfigError, match="gpus: 2, but device: cpu"):
        ranks_for(config(gpus=2, device="cpu"))
    torch_of(monkeypatch, None)
    assert ranks_for(config()) == 1
    assert capsys.readouterr().err == "PyTorch without CUDA cannot use the 4 GPUs here\n"
    with pytest.raises(ConfigError, match="gpus: 2, but 0 are visible here"):
        ranks_for(config(gpus=2))


RANK = """
import os, signal, sys, time
rank, code = os.environ["RANK"], {codes}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
os.write(1, f"rank {{rank}} of {{os.environ['WORLD_SIZE']}}\\n".encode())  # at once
if code[rank] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if code[rank] is not None:
    sys.exit(code[rank])
time.sleep(60)
"""


@pytest.fixture
def program(monkeypatch):
    """program(0, None): ranks that end with these codes, or wait for a signal."""
    monkeypatch.setattr(launch, "ENDS_WITHIN_S", 0.3)

    def write(*codes: object) -> None:
        text = RANK.format(codes={str(rank): code for rank, code in enumerate(codes)})
        monkeypatch.setattr(launch, "COMMAND", (sys.executable, "-c", text))

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, 0), 0), ((3, None), 3), ((None, 4), 4), ((0, 7, 0), 7), (("kill", None), 1)],
)
def test_all_end_with_one_and_its_code_is_the_command_s(program, capfd, codes, expected):
    program(*codes)
    assert run_ranks([], len(codes)) == expected
    said = capfd.readouterr()
    assert sorted(said.out.splitlines()) == [f"rank {n} of {len(codes)}" for n in range(len(codes))]
    killed = "error: rank 0 was killed by SIGKILL, so all have ended\n"
    assert said.err == (killed if "kill" in codes else "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_reaches_every_rank_once(program, capfd, number, code):
    program(None, None)
    seen: list[str] = []

    def started() -> bool:
        seen.append(capfd.readouterr().out)
        return "".join(seen).count("rank") == 2

    def send() -> None:
        wait_for(started)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert run_ranks([], 2) == code
    thread.join()


def test_cores_are_shared_out_whole(monkeypatch, tmp_path):
    """Two sockets of two cores of two threads; this process may not use the last core."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(str(cpu % 2))
        (folder / "core_id").write_text(str(cpu % 4 // 2))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6})
    assert [share_of_cores(n, 3, tmp_path) for n in range(3)] == [{0, 4}, {2, 6}, {1, 5}]
    assert share_of_cores(0, 2, tmp_path) == {0, 4}
    assert share_of_cores(1, 4, tmp_path) == {0, 1, 2, 4, 5, 6}
    assert share_of_cores(1, 2, tmp_path / "none") == {4, 5, 6}


# processors that no test machine has, and tells nothing of
FIRST, SECOND = ({*range(begin, begin + 4)} for begin in (1000, 1004))


@pytest.mark.parametrize(
    ("masks", "shares", "threads", "then"),
    [
        ([FIRST, FIRST], [{1000, 1001}, {1002, 1003}], 8, 2),
        ([FIRST, FIRST], [{1000, 1001}, {1002, 1003}], 1, 1),  # as the user, or torchrun, has asked
        ([FIRST, SECOND], [FIRST, SECOND], 8, 4),  # a launcher has shared them out
    ],
)
def test_a_rank_computes_with_its_share_of_cores(on_ranks, masks, shares, threads, then):
    found = on_ranks(2, partial(bound, masks=masks, threads=threads))
    assert found == [(share, then, len(share)) for share in shares]


def bound(world: World, masks: list[set[int]], threads: int) -> tuple[set[int], int, int]:
    """The cores and threads of a rank, and how many cores its plan counts with."""
    with (
        patch.object(os, "sched_getaffinity", lambda _: masks[world.rank]),
        patch.object(os, "sched_setaffinity") as kept_to,
        patch("psutil.cpu_count", lambda logical=True: 8),
        patch.object(World, "local_rank0_first", lambda _, work: work()),  # no store
        patch.object(torch, "get_num_threads", lambda: threads),
        patch.object(torch, "set_num_threads") as computes_with,
    ):
        cores = find_machine(config(device="cpu"), world=world).hardware.physical_cores
        bind(world, torch.device("cpu"))
    return kept_to.call_args.args[1], computes_with.call_args.args[0], cores


@pytest.mark.parametrize(
    ("visible", "place", "gpu"),
    [
        (None, Place(1, 2, 1, 2), "1"),
        ("GPU-a, GPU-b", Place(1, 2, 1, 2), "GPU-b"),
        ("3", Place(1, 2, 1, 2), "3"),  # its launcher's choice
    ],
)
def test_a_rank_sees_its_gpu_before_cuda_has_seen_any(gpus, monkeypatch, visible, place, gpu):
    gpus(4)
    for asks in ("is_available", "device_count", "init"):  # CUDA would see all of them ever after
        monkeypatch.setattr(f"torch.cuda.{asks}", Mock(side_effect=AssertionError(asks)))
    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", None)):
        monkeypatch.setenv(name, value or "")  # taken back at the end
        if value is None:
            monkeypatch.delenv(name)
    assert own_device(place, "auto") == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == gpu
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "the driver's, in which it was counted"


def test_more_ranks_than_gpus_are_refused(gpus):
    gpus(2)
    with pytest.raises(ConfigError, match=r"3 ranks on .*, which has 2 GPUs"):
        own_device(Place(2, 3, 2, 3), "auto")


def test_gpus_that_nobody_starts_are_refused(project, megatrain):
    with pytest.raises(ConfigError, match="gpus: 2, but 1 process"):
        mt.train("cfg.yaml", gpus=2)  # a Python program is one
    said = megatrain("bench model device=cpu gpus=2 --steps 1", code=2).err
    assert "gpus: 2, but device: cpu" in said


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": "2"}, SLURM])
def test_what_one_process_does_is_refused_to_several(project, environ, megatrain, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for line in (
        *("eval model", "export run out", "push run name/there", "generate model hello", "doctor"),
    ):
        assert "this is one of 2 processes of a launcher" in megatrain(line, code=2).err


@pytest.mark.slow
def test_tasks_of_slurm_are_ranks(project, finished_project):
    port = str(free_port())

    def first(rank: int) -> None:
        for name in environment_of(rank, 2, 1):
            del os.environ[name]
        given = {"PROCID": rank, "LOCALID": rank, "NTASKS": 2, "JOB_ID": 7, "STEP_ID": 0}
        os.environ |= {f"SLURM_{name}": str(value) for name, value in given.items()}
        os.environ["MASTER_PORT"] = port

    started = Started(2, train("train.max_steps=1"), first=first)
    assert started.wait() == [0, 0], started.said()
    first_said, other_said = started.said()
    assert "trained" in first_said and other_said == ""


def test_the_plan_of_another_machine_has_the_config_s_gpus(project, megatrain):
    keys = "gpus=2 train.tokens_per_step=1024 precision=bfloat16 compile=false"
    there = f"--gpu H100 --ram 256GiB {keys} --json"
    assert megatrain(f"plan cfg.yaml {there}").json["ranks"]["gpus"] == 2
    assert megatrain(f"plan cfg.yaml {there} --gpus 1").json["ranks"]["gpus"] == 1


def test_a_plan_for_more_gpus_than_have_work_is_refused(megatrain, monkeypatch):
    monkeypatch.setattr("megatrain.recipes.plan.ranks_for", lambda _: 3)
    said = megatrain("plan cfg.yaml train.rows_per_step=2 train.tokens_per_step=null", code=4).err
    assert "a step of 2 rows has work for at most 2 GPUs, not for 3: take at most 2" in said


def test_what_takes_several_gpus_or_hosts_is_said_of_one(project, megatrain):
    keys = "memory.transport=read memory.replicated=3 train.wire=bfloat16"
    said = megatrain(f"plan cfg.yaml {keys}").err
    assert "train.wire: bfloat16 has no effect where one host trains" in said
    assert "memory.transport: read has no effect where one GPU of a host trains" in said
    assert "memory.replicated: 3 has no effect where one GPU trains" in said
    assert "no effect" not in megatrain("plan cfg.yaml memory.replicated=0").err


def test_ranks_are_begun_by_the_run_alone(monkeypatch):
    for name, value in environment_of(1, 2, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="the program has started it"):
        as_rank("cpu", Mock())
