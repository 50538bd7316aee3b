"""Times a run of a model with random weights while its checkpoints are written.

    python -m benchmarks.saving FOLDER --every 12 --steps 36

FOLDER holds a config.json and a tokenizer. Prints one JSON line: seconds of every step as the clock
on the wall has them, what the log says of saves, and the share of time that training stood still.
The last checkpoint is one that training waits for.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

TOKENS, ROWS = 1024, 2048
KEYS = """model: {init: random}
method: pretrain
train: {schedule: constant, warmup: 0, seq_len: 1024, tokens_per_step: 65536}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=12)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--keys", nargs="*", default=[], help="further keys")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        work, draws = Path(name), random.Random(0)
        texts = ("".join(f" {draws.randrange(1000)}" for _ in range(TOKENS)) for _ in range(ROWS))
        (work / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
        (work / "config.yaml").write_text(KEYS)
        keys = [f"model.config={args.folder}", f"data.train={work}/rows.jsonl", "data.eval=null"]
        keys += [f"output={work}/run", f"train.max_steps={args.steps}", "checkpoint.keep=1"]
        keys += [f"checkpoint.every={args.every}", "checkpoint.final=none", *args.keys]
        found = timed(work, keys)
    steps, every = found["wall_s"], args.every
    alone = statistics.median(steps[3:every])  # no save is under way
    stood = sum(steps[every:]) / (alone * len(steps[every:])) - 1
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    named = {"device": device, "folder": args.folder.name, "keys": args.keys}
    print(json.dumps({**named, "step_s": alone, "slower": stood, **found}))


def timed(work: Path, keys: list[str]) -> dict[str, Any]:
    """Seconds from each step's end to the end of the next one, and the log's words on saves."""
    command = [sys.executable, "-m", "megatrain", "train", str(work / "config.yaml"), *keys]
    child = subprocess.Popen(command, stdout=sys.stderr)
    path, ends = work / "run" / "metrics.jsonl", list[float]()
    while child.poll() is None:
        seen = path.read_text().count('"step_s"') if path.is_file() else 0
        ends += [time.perf_counter()] * (seen - len(ends))
        time.sleep(0.01)
    log = (work / "run" / "train.log").read_text().splitlines()
    plan = json.loads((work / "run" / "plan.json").read_text())
    return {
        "wall_s": [round(b - a, 3) for a, b in pairwise(ends)],
        "saved": [line for line in log if "saved " in line],
        "saves_beside": plan["saves_beside"],
        "checkpoint_bytes": plan["disk"]["checkpoint 1"],
        "host": plan["totals"]["host"],
    }


if __name__ == "__main__":
    main()
