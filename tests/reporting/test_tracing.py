"""The timeline of a step: a file that Perfetto reads, with every thread under its name."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.engine.streams import Lane
from megatrain.errors import StorageError
from megatrain.reporting.tracing import claim, covered, record_timeline

CPU = torch.device("cpu")


def read(path: Path) -> dict[str, Any]:
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt") as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def row_names(trace: dict[str, Any]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_lanes_do_is_on_the_timeline_under_their_names(tmp_path, name):
    lane = Lane("upload")
    a, shown = torch.ones(8, 8), list[str]()
    try:
        with record_timeline(tmp_path / name, CPU, "step 3", shown.append):
            a @ a
            lane.submit(lambda _: a.cumsum(0)).wait_host()
        trace_of = read(tmp_path / name)
    finally:
        lane.close()
    rows = row_names(trace_of)
    done = {
        event["name"]: rows[event["tid"]]
        for event in trace_of["traceEvents"]
        if event.get("cat") == "cpu_op"
    }
    assert done["aten::cumsum"] == "megatrain-upload"
    assert done["aten::mm"] == threading.current_thread().name
    assert "aten::mm" in shown[0] and f"step 3 is in {tmp_path / name}" in shown[0]


def test_a_file_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="choose another file for --profile"):
        claim(tmp_path / "file" / "trace.json")


def test_what_overlaps_is_covered_once():
    assert covered([]) == 0
    assert covered([(5, 7), (0, 2), (1, 3), (1, 2), (3, 4)]) == 6
