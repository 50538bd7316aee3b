"""kill -9 at random instants while rows are tokenised, until the cache is complete."""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.campaign.children import Child, in_child
from benchmarks.campaign.trials import COMMAND_S, Trial
from megatrain.data import encoding, shards, workers
from megatrain.data.build import DataOptions, encode_source
from megatrain.data.samples import JUDGED, KINDS, PAIRS
from tests.commands import tiny_tokenizer

ROWS, BATCH_ROWS, SHARD_ROWS = 2000, 20, 150
KILLS = 10  # of one set
PROCESSES = (1, 2, 3)
OPTIONS = DataOptions(seq_len=48, on_bad_row="skip")


def row(kind: str, number: int) -> dict[str, Any]:
    """A row; every ninth is bad."""
    asked, said = f"what is {number}?", f"it is {number}" + " and more" * (number % 23)
    if number % 9 == 4:
        return {"prompt": asked}
    if kind == PAIRS:
        return {"prompt": asked, "chosen": said, "rejected": f"no {number}"}
    label = {"label": number % 2 == 0} if kind == JUDGED else {}
    return {"prompt": asked, "completion": said, **label}


class KilledCaches(Trial):
    """A case is a set of rows that is killed several times and then completed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tokenizer = folder, tiny_tokenizer()
        encoding.BATCH_ROWS, shards.SHARD_ROWS, workers.ALONE_BATCHES = BATCH_ROWS, SHARD_ROWS, 1
        self.whole_s = dict[str, float]()
        self.whole = dict[str, dict[str, bytes]]()
        for kind in KINDS:
            lines = (json.dumps(row(kind, number)) for number in range(ROWS))
            (folder / f"{kind}.jsonl").write_text("\n".join(lines))
            began = time.monotonic()
            ended = in_child(partial(self._make, folder / f"whole {kind}", kind, 1))
            assert ended.code == 0, ended.words
            self.whole_s[kind] = time.monotonic() - began
            self.whole[kind] = contents(folder / f"whole {kind}")

    def attempt(self, case: str) -> int:
        draw, cache = random.Random(case), self.folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        kind, kills, kept = draw.choice([*KINDS]), 0, 0
        while True:
            processes = draw.choice(PROCESSES)
            child = Child(partial(self._make, cache, kind, processes))
            if kills < KILLS:
                time.sleep(draw.uniform(0, 0.4) * self.whole_s[kind])
                child.kill()
            ended = child.wait(COMMAND_S)
            if ended.code == 0:
                break
            assert ended.code == -signal.SIGKILL, f"{ended.code}: {ended.words}"
            kills += 1
            there = sum(path.name.isdecimal() for path in cache.glob("*/*"))
            assert there >= kept, f"{kept} shards were there, and {there} are left"
            kept = there
        assert contents(cache) == self.whole[kind], "the cache is not that without kills"
        return kills

    def _make(self, cache: Path, kind: str, processes: int) -> None:
        options = replace(OPTIONS, kind=kind, processes=processes)
        encode_source(self.folder / f"{kind}.jsonl", self.tokenizer, options, cache)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
