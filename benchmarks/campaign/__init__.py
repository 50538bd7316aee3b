"""Long trials of what must never be lost, and of what must never crash or hang: kills, damaged
files, failing system calls, odd input. `python -m benchmarks.campaign --help` says how they run."""
