"""The timeline on CUDA: what the streams do is on it, each under what it is for."""

from __future__ import annotations

import json
import time

import torch

from megatrain.engine.streams import Lane
from megatrain.reporting.tracing import computing_seconds, record_timeline


def test_threads_have_names(tmp_path):
    device = torch.device("cuda", 0)
    host = torch.ones(1 << 20).pin_memory()
    there, a = torch.empty(1 << 20, device=device), torch.ones(256, 256, device=device)
    upload, download, shown = Lane("upload", device), Lane("download", device), list[str]()
    try:
        with record_timeline(tmp_path / "trace.json", device, "a step", shown.append):
            upload.submit(lambda _: there.copy_(host, non_blocking=True)).wait_host()
            a @ a
            torch.cuda.synchronize()
            download.submit(lambda _: host.copy_(there, non_blocking=True)).wait_host()
    finally:
        upload.close()
        download.close()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"megatrain-upload", "megatrain-download"} <= names
    assert "CUDA" in shown[0]


def test_only_kernels_count_as_computing():
    """On a GPU that waits for a transfer of 256 MiB, and on one that multiplies all the time."""
    device = torch.device("cuda", 0)
    host, there, a = (
        torch.ones(1 << 26).pin_memory(),
        torch.empty(1 << 26, device=device),
        torch.ones(8192, 8192, device=device),
    )
    spent = []
    for work in (lambda: there.copy_(host), lambda: [a @ a for _ in range(3)]):
        work()
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        spent.append(computing_seconds(work, device) / seconds)
    assert spent[0] < 0.05, spent
    assert 0.5 < spent[1] < 1.5, spent
