"""All tests that need a GPU: `python -m tests.gpu [--only PART ...] [options of pytest]`.

Most run on two GPUs at once where there are two. Those that measure, and those of ranks, follow
alone. Says of each part how long it took and how it ended, last; exit code 1 if one failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megatrain.machine.hardware import visible_gpus

HERE = Path(__file__).parent
ALONE = "limits", "measure", "ranks", "rank_runs"
MOST_PROCESSES = 12  # on one GPU, whose memory they share
SUMMARY = re.compile(r"\d+ \w+.* in \d+\.\d+s")  # pytest's; libraries may speak after it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["gpu", "rest", *ALONE], default=None)
    args, options = parser.parse_known_args()
    gpus, cores = visible_gpus(), len(os.sched_getaffinity(0))
    if not gpus:
        sys.exit("python -m tests.gpu: there is no GPU")
    files = {name: str(HERE / f"test_gpu_{name}.py") for name in ALONE}
    processes = str(min(MOST_PROCESSES, max(1, cores // 2)))
    parts = {
        "gpu": [str(HERE), *(f"--ignore={path}" for path in files.values())],
        "rest": [str(HERE.parent), f"--ignore={HERE}", "-n", processes],
        **{name: [path] for name, path in files.items()},
    }
    wanted = args.only or list(parts)
    at_once = [name for name in wanted if name not in ALONE]
    ended: list[tuple[str, int, str]] = []
    with ThreadPoolExecutor(len(gpus)) as pool:
        devices = gpus[:1], gpus[-1:]
        ran = pool.map(run, at_once, map(parts.__getitem__, at_once), devices, [options] * 2)
        ended += ran
    ended += [run(name, parts[name], gpus, options) for name in wanted if name in ALONE]
    for name, _, words in ended:
        say(name, words)
    sys.exit(any(code for _, code, _ in ended))


def run(name: str, tests: list[str], gpus: list[str], options: list[str]) -> tuple[str, int, str]:
    """The part's name, exit code, and how many tests passed, by pytest's words."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", *tests, *options]
    env = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    began, said = time.monotonic(), "no test ran"
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=env, text=True, stdout=out, stderr=err) as process:
        for line in process.stdout or ():
            say(name, line.strip())
            said = line.strip() if SUMMARY.search(line) else said
    return name, process.returncode, f"{said} ({time.monotonic() - began:.0f} s in all)"


def say(name: str, words: str) -> None:
    sys.stdout.write(f"{name}: {words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
