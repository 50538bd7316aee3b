"""The benchmarks' own arithmetic and bookkeeping, and that docs/performance.md says what
benchmarks/results holds."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import cases, gpus, measure, records, what_fits, write_page
from benchmarks.cases import CASES, LEARNT, OURS, PEERS, Run
from benchmarks.peers import deepspeed_offload, job, model, resident
from tests.helpers.forked import Forked

TINY = CASES["tiny"]
FIGURES = {"step_s": 2.0, "tokens_per_s": 10.0, "tflops": 500.0}
FIGURES |= {"gpu_peak_bytes": 2**30, "host_bytes": 2**31}
RUN = ("7.6b-65k", OURS, "", "2026-01-02", "a machine", ("python",), 9.0, None)
DONE = records.Record(*RUN, FIGURES)
FAILED = replace(DONE, date="2026-01-03", error="RuntimeError: no | room", result={})
HOW: Any = {"compiled": False, "checkpointing": True, "device": "cpu", "json": None}
JOB = job.Job("tiny", 2, 256, 64, 2, steps=1, warmup=0, **HOW)


def with_tflops(record: records.Record, tflops: float, **changes: str) -> records.Record:
    return replace(record, result={**FIGURES, "tflops": tflops}, **changes)  # type: ignore[arg-type]


# -- the page ------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_give():
    found, stale = records.load(), "run python -m benchmarks.write_page"
    page = write_page.PAGE.read_text()
    assert page == write_page.filled(page, write_page.tables(found)), stale


def test_a_table_without_a_place_is_an_error():
    page = "<!-- a -->\nold\n<!-- /a -->\n"
    assert write_page.filled(page, {"a": ["new"]}) == "<!-- a -->\nnew\n<!-- /a -->\n"
    with pytest.raises(ValueError, match="<!-- b -->"):
        write_page.filled(page, {"b": ["new"]})


def test_peers_are_compared_with_ours_on_the_same_machine():
    peer = replace(DONE, system="zero3", variant="16-rows", date="2026-01-05", machine="another")
    elsewhere, same = with_tflops(DONE, 111), with_tflops(DONE, 222, machine="another")
    table = "\n".join(write_page.peers([elsewhere, same, peer]))
    assert "222" in table
    assert "111" not in table


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    like = SimpleNamespace(Popen=Forked, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(records, "subprocess", like)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_capacity_case_is_measured_from_its_command_to_its_row(tmp_path):
    overrides = ("optimizer.moments=bfloat16", "train.learning_rate=2e-3")
    case = replace(TINY, name="depth-28", overrides=overrides, flags=LEARNT)
    record = records.execute(cases.our_run(case, steps=3, warmup=1), 120, tmp_path)
    assert record.error is None
    heading, _, row = write_page.capacity([record])
    cells = dict(zip(heading.split("|")[1:-1], row.split("|")[1:-1], strict=True))
    first, last = cells[" loss "].strip().split(" to ")
    assert float(last) < float(first)
    assert cells[" tokens/step "].strip() == "512"
    assert write_page.capacity([replace(FAILED, case="101b-16k")])[-1].count("|") == heading.count(
        "|"
    )


# -- records -------------------------------------------------------------------------------------


def test_the_newest_success_counts_and_of_one_day_the_fastest():
    older = with_tflops(DONE, 900, date="2026-01-01")
    slower = with_tflops(DONE, 400, variant="4-rows")
    assert records.latest([older, slower, DONE, FAILED], "7.6b-65k", OURS) is DONE
    assert records.latest([FAILED], "7.6b-65k", OURS) is FAILED
    assert records.latest([DONE], "7.6b-16k", OURS) is None


NOISE = "import sys; print('noise', file=sys.stderr); "
KILL = "import os; os.kill(os.getpid(), 9)"
FATES = {
    "done": ("print('{\"tflops\": 3.0}')", None),
    "raises": (f"{NOISE}raise ValueError('too large')", "ValueError: too large"),
    "refuses": ("import sys; sys.exit('error: does not fit')", "error: does not fit"),
    "killed": (KILL, "killed by SIGKILL: out of host memory, most likely"),
    "hangs": ("import time; time.sleep(60)", "not done after 1 s"),
}


@pytest.mark.parametrize("fate", FATES)
def test_every_run_leaves_a_record(fate, tmp_path):
    code, error = FATES[fate]
    limit_s = 1 if fate == "hangs" else 60
    record = records.execute(Run(TINY, OURS, ("-c", code)), limit_s, tmp_path)
    assert record.error == error
    assert record.tflops == (3.0 if error is None else 0.0)
    (tmp_path / "other.json").write_text(json.dumps({"figures": "of another script"}))
    assert records.load(tmp_path) == [record]
    if error:
        assert f"failed: {error}" in measure.table([record], "tiny", [OURS])[-1]


@pytest.mark.usefixtures("forked")
def test_a_peer_runs_in_a_process_of_its_own_and_trains(tmp_path):
    (run,) = cases.runs_of(TINY, "fsdp2", [256], steps=1, warmup=1)
    arguments = (*run.arguments, "--no-compiled", "--device", "cpu", "--layers", "2")
    record = records.execute(replace(run, arguments=arguments), 120, tmp_path)
    assert record.error is None
    found = record.result
    expected = 6 * found["parameters"] * 512 / found["step_s"] / 1e12
    assert found["tflops"] == pytest.approx(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.fsdp2.4-rows.json"]


# -- systems -------------------------------------------------------------------------------------


def test_peers_are_tried_with_every_micro_batch_that_the_step_holds():
    runs = cases.runs_of(CASES["7.6b-16k"], "zero3", [8192, 16384, 65536], 4, 2)
    assert [run.variant for run in runs] == ["8-rows", "16-rows"]


def test_cases_that_only_ours_can_honour_are_left_out():
    case = CASES["1.8b-16k-12gib"]
    assert all(not cases.runs_of(case, system, [16384], 4, 2) for system in PEERS)
    (ours,) = cases.runs_of(case, OURS, [16384], 4, 2)
    assert ours.arguments[-1] == "memory.gpu=12GiB"


def test_deepspeed_accumulates_the_whole_step():
    settings = deepspeed_offload.settings_of(JOB, 3, 1.0)
    rows = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]
    assert rows * JOB.seq_len == JOB.tokens
    assert "offload_param" in settings["zero_optimization"]
    assert "offload_param" not in deepspeed_offload.settings_of(JOB, 2, 1.0)["zero_optimization"]


def test_a_step_of_unequal_micro_batches_is_refused():
    with pytest.raises(SystemExit, match="no multiple"):
        job.job_of(job.parser("").parse_args(["--tokens", "1000"]))


def test_the_chunked_head_has_the_gradients_of_cross_entropy(monkeypatch):
    monkeypatch.setattr(model, "HEAD_CHUNK", 3)
    torch.manual_seed(0)
    hidden, labels = torch.randn(7, 8, requires_grad=True), torch.randint(0, 11, (7,))
    head = model.ChunkedHead(torch.nn.Parameter(torch.randn(11, 8)), compiled=False)
    loss = functional.cross_entropy(hidden @ head.weight.t(), labels)
    expected = torch.autograd.grad(2 * loss, [hidden, head.weight])
    found = head(hidden, labels)
    torch.testing.assert_close(found, loss)
    torch.testing.assert_close(torch.autograd.grad(2 * found, [hidden, head.weight]), expected)


def test_the_resident_peer_trains(monkeypatch):
    monkeypatch.setattr(resident, "LEARNING_RATE", 1e-3)
    trainer = resident.prepare(replace(JOB, checkpointing=False), "adamw")
    batches = job.random_rows(JOB, trainer.vocabulary, 0)
    losses = [trainer.step(batches) for _ in range(3)]
    assert len(batches) == JOB.micro_batches == 2
    assert losses[0] > losses[1] > losses[2]


# -- plans against runs --------------------------------------------------------------------------


def checked_case(seconds: float = 1.0, edge: Any = None, refused: bool = False) -> Any:
    """What plan_check writes of a configuration whose plan says 1 GiB and `seconds`."""
    measured = {"host": 2**30, "seconds": 1.0}
    case = {"case": {"edge": edge, "varied": False}, "parameters": 5 * 10**7}
    case |= {"refused": refused, "limits": {"host": 2**30}}
    run = {"predicted": {**measured, "seconds": seconds}, "measured": measured}
    return case if refused else case | run


def refused_at(share: float) -> Any:
    return checked_case(edge=["host", share], refused=True)


def test_the_newest_run_of_every_configuration_is_held_to_its_plan(tmp_path):
    untimed = {**checked_case(), "predicted": {"host": 1}}
    first = {"small": checked_case(1.5), "unclipped": checked_case(0.5), "gone": checked_case()}
    second = {"edge, 0.95x host": refused_at(0.95), "small": checked_case(1.05)}
    third = {"edge, 1.05x host": refused_at(1.05), "small": {"failed": "of something"}}
    days = {"01-cpu": first, "02-cpu": {**second, "unclipped": untimed}, "03-gpu": third}
    for day, found in days.items():
        (tmp_path / f"2026-01-{day}").mkdir()
        file = tmp_path / f"2026-01-{day}" / "plan_check.json"
        file.write_text(json.dumps({"device": "cpu", "cases": found}))
    checked = write_page.newest(tmp_path, "cpu")
    assert {name: one["day"] for name, one in checked.items()} == {
        "small": "2026-01-02",
        "unclipped": "2026-01-01",
        "edge, 0.95x host": "2026-01-02",
        "edge, 1.05x host": "2026-01-03",
    }
    assert write_page.planned(checked, "cpu") == [
        "- host GiB: 2 of 2 within 2%, all within +0.0% and +0.0%",
        "- s/step: 1 of 2 within 10%, all within -50.0% and +5.0%",
        "- 1 of 2 edges right: refused just below the need, accepted and kept just above",
        "- newest runs from 2026-01-01 to 2026-01-03",
    ]


# -- pages from plans ------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_fits_says_so_for_every_size_of_ram(monkeypatch):
    monkeypatch.setattr(what_fits, "RAM", (what_fits.RAM[0], what_fits.RAM[-1]))
    cells = what_fits.row("tiny", "RTX 4090")
    assert len(cells) == 2
    assert all(float(cell.replace(",", "")) > 1000 for cell in cells)


# -- several GPUs --------------------------------------------------------------------------------


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
    monkeypatch.setattr(records, "opened_nvml", lambda: nullcontext(nvml))
    monkeypatch.setattr(records, "EVERY_S", 0.001)
    with records.Clocks() as meter:
        assert over.wait(10)
    found = meter.figures()["0"]
    assert (found["readings"], found["mhz"], found["watts"]) == (4, 1410, 690)
    assert found["held_by"] == {"power cap": 0.25, "heat": 0.75}
