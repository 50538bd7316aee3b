"""The benchmarks' own arithmetic and bookkeeping, and that docs/performance.md says what
benchmarks/results holds."""

from __future__ import annotations

import argparse
import json
import subprocess
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks import (
    capacity,
    compare,
    loading,
    peak,
    plan_table,
    records,
    roofline,
    rows,
    systems,
    targets,
    what_fits,
    write_page,
)
from benchmarks.cases import CASES, LEARNT, TARGETS, Target
from benchmarks.peers import deepspeed_offload, job, model, resident, trl_dpo
from benchmarks.plot import Axes, Series, chart
from benchmarks.systems import OURS, PEERS, Run
from tests.forked import Forked

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
    assert write_page.PLOT.read_text() == write_page.plot(found), stale


def test_a_table_without_a_place_is_an_error():
    page = "<!-- a -->\nold\n<!-- /a -->\n"
    assert write_page.filled(page, {"a": ["new"]}) == "<!-- a -->\nnew\n<!-- /a -->\n"
    with pytest.raises(ValueError, match="<!-- b -->"):
        write_page.filled(page, {"b": ["new"]})


def test_every_target_is_about_cases_that_exist():
    assert set(targets.needed()) <= CASES.keys()
    assert set(write_page.COMPARED) <= CASES.keys()


def test_targets_show_what_was_measured_and_nothing_else():
    measured, first = targets.measured, TARGETS[0]
    assert targets.NOT_YET in measured(first, [])
    assert measured(first, [DONE]).startswith("500 TFLOP/s | 2.00 | - | 2026-01-02, a machine")
    assert measured(first, [FAILED]).startswith("failed: RuntimeError: no / room")
    busy = Target("7.6b-65k", "busy", 0.97, share="gpu_busy")
    half = replace(DONE, result={**FIGURES, "gpu_busy": 0.5})
    assert measured(busy, [half]).startswith("50.0%")
    fp8 = Target("7.6b-131k-fp8", "fp8", 1.3, against="7.6b-131k")
    fast, slow = replace(DONE, case="7.6b-131k-fp8"), with_tflops(DONE, 400, case="7.6b-131k")
    assert measured(fp8, [fast]).startswith(targets.NOT_YET)
    assert measured(fp8, [fast, slow]).startswith("1.25 x")


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


@pytest.mark.usefixtures("forked")
def test_a_capacity_case_is_measured_from_its_command_to_its_row(tmp_path):
    overrides = ("optimizer.moments=bfloat16", "train.learning_rate=2e-3")
    case = replace(TINY, name="depth-28", overrides=overrides, flags=LEARNT)
    record = records.execute(systems.our_run(case, steps=3, warmup=1), 120, tmp_path)
    assert record.error is None
    heading, _, row = capacity.table([record])
    cells = dict(zip(heading.split("|")[1:-1], row.split("|")[1:-1], strict=True))
    first, last = cells[" loss "].strip().split(" to ")
    assert float(last) < float(first)
    assert cells[" context "].strip() == "64"
    assert capacity.table([replace(FAILED, case="101b-16k")])[-1].count("|") == heading.count("|")


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
        assert f"failed: {error}" in compare.table([record], "tiny", [OURS])[-1]


@pytest.mark.usefixtures("forked")
def test_a_peer_runs_in_a_process_of_its_own_and_trains(tmp_path):
    (run,) = systems.runs_of(TINY, "fsdp2", [256], steps=1, warmup=1)
    arguments = (*run.arguments, "--no-compiled", "--device", "cpu", "--layers", "2")
    record = records.execute(replace(run, arguments=arguments), 120, tmp_path)
    assert record.error is None
    found = record.result
    expected = 6 * found["parameters"] * 512 / found["step_s"] / 1e12
    assert found["tflops"] == pytest.approx(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.fsdp2.4-rows.json"]


# -- systems -------------------------------------------------------------------------------------


def test_peers_are_tried_with_every_micro_batch_that_the_step_holds():
    runs = systems.runs_of(CASES["7.6b-16k"], "zero3", [8192, 16384, 65536], 4, 2)
    assert [run.variant for run in runs] == ["8-rows", "16-rows"]


def test_cases_that_only_ours_can_honour_are_left_out():
    case = CASES["1.8b-16k-12gib"]
    assert all(not systems.runs_of(case, system, [16384], 4, 2) for system in PEERS)
    (ours,) = systems.runs_of(case, OURS, [16384], 4, 2)
    assert ours.arguments[-1] == "memory.gpu=12GiB"


def test_deepspeed_accumulates_the_whole_step():
    settings = deepspeed_offload.settings_of(JOB, 3, 1.0)
    rows = settings["train_micro_batch_size_per_gpu"] * settings["gradient_accumulation_steps"]
    assert rows * JOB.seq_len == JOB.tokens
    assert "offload_param" in settings["zero_optimization"]
    assert "offload_param" not in deepspeed_offload.settings_of(JOB, 2, 1.0)["zero_optimization"]


def test_words_of_pairs_are_tokens_and_fill_both_sequences():
    tokenizer, pairs = trl_dpo.tokenizer_of(512), trl_dpo.pairs_of(JOB, 512)
    assert len(pairs) * 2 * JOB.seq_len == (JOB.warmup + JOB.steps) * JOB.tokens
    for pair in pairs:
        prompt = tokenizer(pair["prompt"])["input_ids"]
        assert prompt == [int(word[1:]) for word in pair["prompt"].split()]
        for answer in ("chosen", "rejected"):  # TRL appends the end
            whole = tokenizer(pair["prompt"] + pair[answer] + trl_dpo.END)["input_ids"]
            assert (whole[: len(prompt)], whole[-1]) == (prompt, tokenizer.eos_token_id)
            assert (len(prompt), len(whole)) == (JOB.seq_len // 2, JOB.seq_len)


def test_trl_counts_micro_batches_in_pairs():
    settings = trl_dpo.deepspeed_settings(JOB, 1.0)
    assert settings["train_micro_batch_size_per_gpu"] == JOB.micro_batch_rows // 2
    assert settings["train_batch_size"] * 2 * JOB.seq_len == JOB.tokens


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


# -- roofline and plot ---------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [1_000_000, 7_000_000_000])
def test_the_roofline_bends_where_the_formulas_say(parameters):
    limits = roofline.Limits(flops=600e12, pcie=50e9, dram=130e9)
    # tokens above which the update hides in the forward pass
    hidden = 13 * limits.flops / limits.dram
    many, half = int(2 * hidden), int(hidden / 2)
    assert roofline.tflops(parameters, many, limits) == pytest.approx(600)
    assert roofline.tflops(parameters, many, limits, recomputed=1.0) == pytest.approx(450)
    # forward twice as long
    assert roofline.tflops(parameters, half, limits) == pytest.approx(450, rel=1e-3)
    few = roofline.step_s(parameters, 1, limits)
    # update, then upload in backward
    assert few == pytest.approx(parameters * (26 / limits.dram + 2 / limits.pcie))


def test_a_chart_puts_points_where_the_axes_say():
    axes = Axes([1024, 2048, 4096], range(0, 101, 50))
    ours = Series("<ours>", [(1024, 0), (2048, 100)])
    limit = Series("limit", [(1024, 50), (4096, 50)], limit=True)
    drawn = ElementTree.fromstring(chart("title", "across", "up", axes, [ours, limit]))
    lines = [line.attrib["points"].split() for line in drawn.iter() if "points" in line.attrib]
    (first, second), (left, right) = (
        [tuple(map(float, pair.split(","))) for pair in pairs] for pairs in lines
    )
    assert first == (axes.x(1024), axes.y(0))
    assert second[1] < left[1] == right[1] < first[1]  # up is smaller
    # equal ratios, equal distances
    assert second[0] - left[0] == pytest.approx(right[0] - second[0])


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
    for day, cases in days.items():
        (tmp_path / f"2026-01-{day}").mkdir()
        file = tmp_path / f"2026-01-{day}" / "plan_check.json"
        file.write_text(json.dumps({"device": "cpu", "cases": cases}))
    checked = plan_table.newest(tmp_path, "cpu")
    assert {name: one.day for name, one in checked.items()} == {
        "small": "2026-01-02",
        "unclipped": "2026-01-01",
        "edge, 0.95x host": "2026-01-02",
        "edge, 1.05x host": "2026-01-03",
    }
    assert plan_table.table(checked, "cpu") == [
        "- host GiB: 2 of 2 within 2%, all within +0.0% and +0.0%",
        "- s/step: 1 of 2 within 10%, all within -50.0% and +5.0%",
        "- 1 of 2 edges right: refused just below the need, accepted and kept just above",
        "",
        "| configuration | parameters | host GiB | plan | s/step | plan | run on |",
        "|---|---|---|---|---|---|---|",
        "| small | 0.05B | 1.00 | +0.0% | 1 | +5.0% | 2026-01-02 |",
        "| unclipped | 0.05B | 1.00 | +0.0% | 1 | -50.0% | 2026-01-01 |",
        "| edge, 0.95x host | 0.05B | refused |  | refused |  | 2026-01-02 |",
        "| edge, 1.05x host | 0.05B | refused |  | refused |  | 2026-01-03 |",
    ]


# -- a GPU's memory ------------------------------------------------------------------------------


def test_what_is_alive_at_the_worst_moment_is_told_by_the_line_that_asked_for_it():
    def event(action: str, addr: int, size: int, *names: str) -> dict[str, Any]:
        frames = [{"filename": name, "line": 7} for name in names]
        return {"action": action, "addr": addr, "size": size, "frames": frames}

    layer = ("/torch/ops.py", "/tmp/torchinductor_x/code.py", "/src/megatrain/engine/step.py")
    events = [
        event("alloc", 1, 100, "/torch/nn.py"),
        event("alloc", 2, 900, *layer),
        event("free_completed", 2, 900),
        event("free_completed", 9, 1),  # of what was there before
        event("alloc", 2, 500, *layer),
        event("alloc", 3, 500, *layer),
        event("free_requested", 3, 500),
    ]
    found = {"code.py:7 < step.py:7": (1000, 2), "nn.py:7": (100, 1)}
    assert peak.alive_at_the_peak(events) == found
    line = "qwen2.5-7b --layers 3 memory.resident=0 --steps 2 train.retained=0"
    given = peak.arguments(line.split())
    assert (given.model, given.layers) == ("qwen2.5-7b", 3)
    assert given.overrides == ["memory.resident=0", "train.retained=0"]


# -- rows of many lengths ------------------------------------------------------------------------


def test_rows_of_many_lengths_go_through_the_loader_and_the_engine():
    given: Any = {"model": "tiny", "layers": 1, "tokens": 1024, "seq_len": 128}
    asked = argparse.Namespace(**given, steps=1, warmup=1, overrides=["device=cpu"])
    padded, packed = (rows.measure(asked, name) for name in ("padded", "packed"))
    tokens = [[step["tokens"] for step in each["steps"]] for each in (padded, packed)]
    assert tokens[0] == tokens[1]
    assert packed["steps"][0]["loss"] == pytest.approx(padded["steps"][0]["loss"], rel=1e-2)
    assert 1 <= packed["computed_per_token"] < padded["computed_per_token"] + 0.2
    assert padded["tokens_per_s"] > 0


def test_loading_is_measured_both_ways(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "disk_rates", lambda *_: (2e9, 1e9))
    report = loading.measure("tiny", 2, tmp_path, ["train.seq_len=64", "device=cpu"])
    rows = "\n".join(loading.table(report))
    assert rows.count("| 2.00, 2.00 |") == 2, "beside what the disk alone writes before and after"
    rates = [
        rate for way in report["ways"] for rate in (way["bytes_per_s"], *way["disk_bytes_per_s"])
    ]
    assert min(rates) > 0 and len(rates) == 10
    assert not any(tmp_path.iterdir())


def test_what_fits_says_so_for_every_size_of_ram(monkeypatch):
    monkeypatch.setattr(what_fits, "RAM", (what_fits.RAM[0], what_fits.RAM[-1]))
    cells = what_fits.row("tiny", "RTX 4090")
    assert len(cells) == 2
    assert all(float(cell.replace(",", "")) > 1000 for cell in cells)
