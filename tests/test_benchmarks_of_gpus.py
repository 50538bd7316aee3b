"""Benchmarks of several GPUs: what they run, what they read of the machine, what they predict."""

from __future__ import annotations

import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace

from benchmarks import clocks, gpus, scaling


def test_a_case_of_several_gpus_runs_on_one_and_on_all_and_beside_peers(monkeypatch):
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["3", "5", "7"])
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    one, both = gpus.runs(gpus.CASES["7.6b-32k-each-no-peer-access"], [2, 1], steps=3, warmup=1)
    assert one.environ == (("CUDA_VISIBLE_DEVICES", "3"),) and "32768" in one.arguments
    visible = ("CUDA_VISIBLE_DEVICES", "3,5")
    assert both.environ == (visible, ("NCCL_P2P_DISABLE", "1")) and "65536" in both.arguments
    assert (one.name, both.name) == tuple(f"{one.case.name}.ours.{v}" for v in ("1-gpu", "2-gpus"))
    ours, zero3, fsdp2 = gpus.runs(gpus.CASES["3.4b-65k-each"], [1, 2], steps=3, warmup=1)
    assert "131072" in ours.arguments
    for peer in (zero3, fsdp2):
        assert peer.environ == (("OMP_NUM_THREADS", "16"),)
        assert {"torch.distributed.run", "131072"} < {*peer.arguments}
    (context,) = gpus.runs(gpus.CASES["7.6b-context-512k"], [2], steps=1, warmup=0)
    assert "train.context_parallel=2" in context.arguments


def test_what_holds_clocks_down_is_told_whichever_kind_of_heat_it_is(monkeypatch):
    given, over = iter([0x20, 0x40, 0x24, 0x00]), threading.Event()

    def reasons(_: int) -> int:
        try:
            return next(given)
        except StopIteration:
            over.set()
            raise OSError from None

    nvml = SimpleNamespace(
        NVMLError=OSError,
        NVML_CLOCK_SM=1,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetUtilizationRates=lambda _: SimpleNamespace(gpu=99),
        nvmlDeviceGetClockInfo=lambda *_: 1410,
        nvmlDeviceGetPowerUsage=lambda _: 690_000,
        nvmlDeviceGetCurrentClocksEventReasons=reasons,
    )
    monkeypatch.setattr(clocks, "opened_nvml", lambda: nullcontext(nvml))
    monkeypatch.setattr(clocks, "EVERY_S", 0.001)
    with clocks.Clocks() as meter:
        assert over.wait(10)
    found = meter.figures()["0"]
    assert (found["readings"], found["mhz"], found["watts"]) == (4, 1410, 690)
    assert found["held_by"] == {"power cap": 0.25, "heat": 0.75}


def test_scaling_says_what_more_gpus_give(monkeypatch):
    monkeypatch.setattr(scaling, "HOSTS", ((1, 1), (2, 1), (8, 2)))
    one, two, rest = scaling.row(scaling.Case("", "tiny", 8192, each=False))  # 8 rows
    assert min(float(one), float(two)) > 0 and rest == "-"
