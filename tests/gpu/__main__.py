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
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers.utils.versions import require_version
from typer import echo

from megatrain.machine.hardware import visible_gpus

HERE = Path(__file__).parent
PROJECT = HERE.parents[1] / "pyproject.toml"
JUPYTER = HERE.parent / "test_notebooks.py"  # which a machine with a GPU need not have
ALONE = "limits", "measure", "ranks", "rank_runs"
MOST_PROCESSES = 12  # on one GPU, whose memory they share
SUMMARY = re.compile(r"\d+ \w+.* in \d+\.\d+s")  # pytest's; libraries may speak after it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=["gpu", "rest", *ALONE], default=None)
    args, options = parser.parse_known_args()
    if not (gpus := visible_gpus()):
        sys.exit("python -m tests.gpu: there is no GPU")
    for one in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]:
        require_version(one)
    files = {name: str(HERE / f"test_gpu_{name}.py") for name in ALONE}
    processes = str(min(MOST_PROCESSES, max(1, len(os.sched_getaffinity(0)) // 2)))
    parts = {
        "gpu": [str(HERE), *(f"--ignore={path}" for path in files.values())],
        "rest": [str(HERE.parent), f"--ignore={HERE}", f"--ignore={JUPYTER}", "-n", processes],
        **{name: [path] for name, path in files.items()},
    }
    wanted = args.only or list(parts)
    at_once = [name for name in wanted if name not in ALONE]
    with ThreadPoolExecutor(len(gpus)) as pool:
        how = map(parts.__getitem__, at_once), (gpus[:1], gpus[-1:]), [options] * 2
        ended = [*pool.map(run, at_once, *how)]
    ended += [run(name, parts[name], gpus, options) for name in wanted if name in ALONE]
    for name, _, words in ended:
        echo(f"{name}: {words}")
    sys.exit(any(code for _, code, _ in ended))


def run(name: str, tests: list[str], gpus: list[str], options: list[str]) -> tuple[str, int, str]:
    """The part's name, exit code, and how many tests passed, by pytest's words."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", *tests, *options]
    env = os.environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    began, said = time.monotonic(), "no test ran"
    out, err = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=env, text=True, stdout=out, stderr=err) as process:
        for line in process.stdout or ():
            echo(f"{name}: {line.strip()}")
            said = line.strip() if SUMMARY.search(line) else said
    return name, process.returncode, f"{said} ({time.monotonic() - began:.0f} s in all)"


if __name__ == "__main__":
    main()
