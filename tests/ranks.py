"""Several ranks in processes of their own: forked from the tests', or with a GPU each."""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from megatrain.world import World

LIMIT_S = 60.0


def run_ranks(
    size: int, job: Callable[[World], Any], folder: Path, *, gpus: bool = False
) -> list[Any]:
    """What `job` returns on each of so many ranks. Fails with the first error of one."""
    meeting = folder / f"meeting-{len(list(folder.iterdir()))}"
    context: Any = multiprocessing.get_context("spawn" if gpus else "fork")
    ends, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, size, meeting, job, gpus, theirs))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        found = [_received(end, rank) for rank, end in enumerate(ends)]
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = [said for said, _ in found if said]
    assert not errors, errors[0]
    return [result for _, result in found]


def _received(end: Connection, rank: int) -> tuple[str, Any]:
    if not end.poll(LIMIT_S):
        return f"rank {rank} said nothing for {LIMIT_S:.0f} s", None
    try:
        said: tuple[str, Any] = pickle.loads(end.recv_bytes())
    except EOFError:
        return f"rank {rank} died", None
    return said


def _rank(
    rank: int,
    size: int,
    meeting: Path,
    job: Callable[[World], Any],
    gpus: bool,
    end: Connection,
) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{meeting}", rank=rank, world_size=size
    )
    try:
        found = "", job(World.joined(device))
    except BaseException:  # noqa: BLE001  the test says it
        found = traceback.format_exc(), None
    end.send_bytes(pickle.dumps(found))  # whole: tensors would be lent, and end with the process
