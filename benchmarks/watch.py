"""Times a look of the watch over ranks, in processor seconds of the store's one thread.

    python -m benchmarks.watch --ranks 8 64 256 512

Every rank looks once a second: above a second in all, healthy runs would seem dead.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from megatrain.recipes.ranks.liveness import Liveness, sign_of_life
from megatrain.recipes.ranks.rendezvous import Sealed
from megatrain.world import World

LOOKS = 200


def serve(told: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send(store.port)
    told.recv()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 256, 512])
    args = parser.parse_args()
    told, ours = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(ours,))
    server.start()
    port = told.recv()
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    thread = psutil.Process(server.pid)
    for ranks in args.ranks:
        sealed = Sealed(store, b"", "").part(str(ranks))
        for rank in range(ranks):
            sealed.set(*sign_of_life(rank, f"host-{rank // 8}"))
        alive = Liveness(World(1, ranks, 1, 8, store=sealed), "host-0")
        before, began = sum(thread.cpu_times()[:2]), time.perf_counter()
        assert all(alive.failed() is None for _ in range(LOOKS))
        seconds = (sum(thread.cpu_times()[:2]) - before) / LOOKS
        found = {"ranks": ranks, "all_ranks_s": round(seconds * ranks, 3)}
        found["wall_s"] = round((time.perf_counter() - began) / LOOKS, 4)
        print(json.dumps(found), flush=True)
    told.send(None)
    server.join()


if __name__ == "__main__":
    main()
