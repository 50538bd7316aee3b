"""The plan against reality: plans runs, trains some steps of each, compares peaks and times.

    # the cases for this machine, on CUDA if there is any
    python benchmarks/plan_check.py
    python benchmarks/plan_check.py --only qwen-7b --json out.json
    python benchmarks/plan_check.py --device cpu --budget 1200 --times

Columns: bytes where the model computes (what PyTorch allocates and reserves, what the driver
counts) and of host RAM (peak resident memory of the process), predicted and measured, and the
seconds of a step. "other" is what the host holds beyond the rows that can be counted, less what the
process held at planning: the figure behind hardware.py's CPU_LIBRARY_BYTES and CUDA_LIBRARY_BYTES.
An edge is a limit just below or above the least that the planner could make do with: the one is to
be refused, the other accepted and kept.

Exits 1 if a promise is broken: GPU 3%, host 2%, with --times 10% of a step; a wrong refusal, or a
limit that was passed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # run as a script or from a test
from plan_cases import CPU_CASES, CUDA_CASES, Case  # type: ignore[import-not-found]

GPU_TOLERANCE, HOST_TOLERANCE, TIME_TOLERANCE = 0.03, 0.02, 0.10
MIB = 2**20
COLUMNS = (  # kind and name of a figure in bytes, and its heading
    ("predicted", "allocated", "allocated"),
    ("measured", "allocated", "measured"),
    ("measured", "reserved", "reserved"),
    ("predicted", "driver", "driver"),
    ("measured", "driver", "measured"),
    ("predicted", "host", "host"),
    ("measured", "host", "measured"),
)


# -- running cases -------------------------------------------------------------------------------


def measure_rates(device: str) -> dict[str, Any]:
    """On CUDA as a run does before its first plan, but in a process that ends before any peak is
    taken."""
    quick = ["--quick"] if device == "cuda" else []
    command = [sys.executable, "-m", "megatrain", "doctor", "--json", *quick]
    done = subprocess.run(command, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)["profile"]
    return found


def interpreter(device: str, steps: int) -> subprocess.Popen[str]:
    """A fresh one for one case, so that the peaks are its own. It imports, and waits to be told
    which."""
    script = str(Path(__file__).with_name("plan_run.py"))
    pipe = subprocess.PIPE
    command = [sys.executable, script, "--device", device, "--steps", str(steps)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def run_case(case: Case, process: subprocess.Popen[str]) -> dict[str, Any]:
    """`plan_run.measure` in that interpreter; of a case that fails, its last words."""
    out, words = process.communicate(json.dumps(asdict(case)))
    if process.returncode != 0:
        last = "".join(words.strip().splitlines()[-1:])
        return {"case": asdict(case), "failed": f"failed: {last}"}
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


# -- promises ------------------------------------------------------------------------------------


def errors(result: Mapping[str, Any]) -> dict[str, float]:
    """Predicted over measured, less one, for every figure that was measured."""
    return {
        name: value / result["measured"][name] - 1
        for name, value in result.get("predicted", {}).items()
        if value is not None
    }


def misjudged(result: Mapping[str, Any]) -> list[str]:
    """A wrong refusal, or a wrong acceptance."""
    edge = result["case"]["edge"]
    if result["refused"] == (edge is not None and edge[1] < 1):
        return []
    return ["refused" if result["refused"] else "accepted"]


def over_limits(result: Mapping[str, Any]) -> list[str]:
    """Limits that were passed."""
    passed = []
    for name, limit in result["limits"].items():
        peak = result.get("measured", {}).get(name, 0)
        if limit is not None and peak > limit:
            passed.append(f"{name} {peak / limit:.1%} of its limit")
    return passed


def broken(result: Mapping[str, Any], times: bool) -> list[str]:
    """The promises that a result does not keep. A peak under the prediction breaks none where rows
    vary: how long they are is chance."""
    if "failed" in result:
        return ["failed"]
    tolerance = {"allocated": GPU_TOLERANCE, "driver": GPU_TOLERANCE, "host": HOST_TOLERANCE}
    if times:
        tolerance["seconds"] = TIME_TOLERANCE
    exact, apart = not result["case"]["varied"], []
    for name, error in errors(result).items():
        most = tolerance.get(name, 1e9)
        if error < -most or (exact and error > most):
            apart.append(f"{name} {error:+.1%}")
    return [*misjudged(result), *apart, *over_limits(result)]


# -- printing ------------------------------------------------------------------------------------


def heading() -> str:
    names = [*(name for _, _, name in COLUMNS), "other", "seconds", "measured"]
    return f"{'MiB':38}" + "".join(f"{name:>9}" for name in names) + "  predicted over measured"


def row(name: str, result: dict[str, Any]) -> str:
    if "failed" in result or result["refused"]:
        return f"{name:38}  {result.get('failed', 'refused')}"
    figures = [result[kind].get(what) for kind, what, _ in COLUMNS]
    cells = [f"{'-' if nbytes is None else f'{nbytes / MIB:,.0f}':>9}" for nbytes in figures]
    cells.append(f"{result['other'] / MIB:>9,.0f}")
    cells += [f"{result[kind]['seconds']:>9.3g}" for kind in ("predicted", "measured")]
    apart = "  ".join(f"{what} {error:+.1%}" for what, error in errors(result).items())
    return f"{name:38}{''.join(cells)}  {apart}"


# -- the command ---------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    only = "cases whose name contains one of these, in this order"
    parser.add_argument("--only", nargs="+", default=[""], help=only)
    parser.add_argument("--device", default="auto", help="cpu or cuda: whose cases")
    parser.add_argument("--steps", type=int, default=6, help="of each case; two warm it up")
    budget = "seconds after which no further case begins"
    parser.add_argument("--budget", type=float, default=float("inf"), help=budget)
    times = "hold the seconds of a step to the plan, too: on a machine with nothing else to do"
    parser.add_argument("--times", action="store_true", help=times)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_all(args: argparse.Namespace, cases: dict[str, Case], device: str) -> dict[str, Any]:
    """The results by name of the cases that the time was enough for; prints and saves each."""
    import torch

    results: dict[str, Any] = {}
    machine = measure_rates(device)
    started, following = time.monotonic(), None
    for name, case in cases.items():
        if time.monotonic() - started > args.budget:
            print(f"{name:38}  not run: the time was up")
            continue
        if args.times and device == "cpu" and results:
            # what other machines on the same host leave to this one changes with the minutes
            machine = measure_rates(device)
        process = following or interpreter(device, args.steps)
        # it imports while this one plans
        following = interpreter(device, args.steps) if device == "cuda" else None
        results[name] = run_case(case, process) | {"machine": machine}
        print(row(name, results[name]), flush=True)
        if args.json:
            found = {"torch": torch.__version__, "device": device, "cases": results}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    if following is not None:
        following.kill()
    return results


def main() -> None:
    args = parse()
    import torch

    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = CUDA_CASES if device == "cuda" else CPU_CASES
    cases = {name: case for part in args.only for name, case in known.items() if part in name}
    print(heading(), flush=True)
    results = run_all(args, cases, device)
    failures = [
        f"{name}: {', '.join(wrong)}"
        for name, result in results.items()
        if (wrong := broken(result, args.times))
    ]
    print(f"{len(results)} of {len(cases)} cases run, {len(results) - len(failures)} as promised")
    if failures:
        raise SystemExit("beyond tolerance: " + "; ".join(failures))


if __name__ == "__main__":
    main()
