"""Writes docs/commands.md, the reference of all commands, from what `megatrain --help` says.

    python -m benchmarks.command_reference

Run it again when a command, an option or an exit code changes; tests/test_docs.py fails until then.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from megatrain import errors
from megatrain.cli import INTERRUPTED, app
from megatrain.recipes.signals import STOPPED

PAGE = Path(__file__).parent.parent / "docs" / "commands.md"
WIDTH = 118
INTRODUCTION = """# Commands

Generated from `megatrain COMMAND --help` by `python -m benchmarks.command_reference`.

Keys of the config follow a command as `key=value` and win over the file: [config.md](config.md).
Results go to stdout, logs to stderr; `--debug` anywhere adds the traceback of an error.
"""
MEANINGS = {
    0: "Done; also a reader of the output that has read enough (`| head`).",
    1: "Unexpected, a bug of ours: `--debug` shows the traceback. Also a run that hung.",
    STOPPED: "A signal (SIGTERM, SIGHUP, SIGUSR1, SIGXCPU, SIGALRM) stopped the "
    "run; a checkpoint is saved, unless it came before the first step: then nothing was trained, "
    "and a new run may begin there.",
    INTERRUPTED: "Ctrl-C: the same, unless it was pressed twice.",
}
# What we or our libraries read, by who reads it.
ENVIRONMENT = {
    "MEGATRAIN_CACHE": "Folder of the token cache, the machine's profile and other caches; "
    "default: `megatrain` below `XDG_CACHE_HOME` or `~/.cache`.",
    "CUDA_VISIBLE_DEVICES": "`train`, `resume` and `bench` use the GPUs named there, others the "
    "first one.",
    "WORLD_SIZE": "Above 1, with RANK and LOCAL_RANK, as torchrun sets them: this process is a "
    "rank of `train`, `resume` or `bench` ([several GPUs](scale.md)); `eval`, `generate`, "
    "`export`, `push` and `doctor` refuse it.",
    "MEGATRAIN_SECRET": "Text by which ranks of several hosts know each other "
    "([trusted networks](scale.md)); ranks of one host have one by themselves.",
    "SLURM_PROCID": "With SLURM_NTASKS above 1 and SLURM_LOCALID: the same under Slurm, in a "
    "task of srun; a job's script, which has them without SLURM_STEP_ID, is one process.",
    "SLURM_STEP_TASKS_PER_NODE": "Tasks of each host; else SLURM_NTASKS_PER_NODE, or all.",
    "SLURM_NODEID": "Which of these hosts this is.",
    "SLURM_STEP_ID": "With SLURM_JOB_ID: the port where ranks meet follows from them, unless "
    "MASTER_PORT is set.",
    "SLURM_STEP_NODELIST": "Its first host is where ranks meet under Slurm, unless MASTER_ADDR is "
    "set.",
    "HF_TOKEN": "Token for gated and private models, and for push; `hf auth login` keeps one.",
    "HF_HOME": "Where the hub's downloads are kept.",
    "HF_DATASETS_CACHE": "Where `datasets` keeps what it made of them; by default below `HF_HOME`.",
    "HF_HUB_OFFLINE": "1: nothing is asked of the hub.",
    "HF_ENDPOINT": "Another hub, such as a mirror.",
    "HF_HUB_DISABLE_XET": "1: push uploads whole files, for a hub that does not speak Xet.",
    "HF_HUB_ETAG_TIMEOUT": "Seconds to wait for the hub's answer.",
    "PYTORCH_CUDA_ALLOC_CONF": "Ours is `expandable_segments:True`, unless it is set.",
    "CUDA_DEVICE_ORDER": "Ours is `PCI_BUS_ID`, as the driver counts, unless it is set.",
    "CUBLAS_WORKSPACE_CONFIG": "Ours is `:4096:8` in deterministic runs, unless it is set.",
    "OMP_NUM_THREADS": "Threads of PyTorch on the CPU; ours is a container's share of processors "
    "(`--cpus`) where it is below what the machine has, unless it is set.",
    "GOMP_SPINCOUNT": "How long PyTorch's threads on the CPU spin for each other; ours is 1000 "
    "without an NVIDIA driver, unless it or OMP_WAIT_POLICY is set.",
    "TERM": "`dumb` or none: no line shows that a command works while it prints nothing.",
    "TQDM_DISABLE": "Ours is 1 for `train` and `resume`, and where stderr is no terminal, unless "
    "it is set.",
    "TORCHINDUCTOR_CACHE_DIR": "What torch.compile keeps; ours is a folder of MEGATRAIN_CACHE for "
    "each version, unless it is set.",
    "GLOO_SOCKET_IFNAME": "Ours is `lo` for ranks of one host, unless it is set.",
    "TORCH_CPP_LOG_LEVEL": "Ours is `FATAL` in ranks, unless it is set: stacks of C++ add nothing "
    "to what a run says of the death of one.",
    "WANDB_PROJECT": "Project of `track: wandb`; default: `megatrain`. Its other variables hold.",
    "WANDB_MODE": "`offline` keeps the run in its folder, to be synced.",
    "TRACKIO_PROJECT": "The same of `track: trackio`.",
}


def main() -> None:
    PAGE.write_text(page())


def page() -> str:
    """The whole reference: commands, exit codes, environment variables."""
    parts = [INTRODUCTION]
    parts += [f"## megatrain {name}\n\n{help_of(name)}\n" for name in commands()]
    parts.append("## Exit codes\n\n| code | meaning |\n|---|---|")
    parts += [f"| {code} | {words} |" for code, words in sorted(exit_codes())]
    parts.append("\n## Environment variables\n\n| name | effect |\n|---|---|")
    parts += [f"| `{name}` | {words} |" for name, words in ENVIRONMENT.items()]
    return "\n".join(parts) + "\n"


def commands() -> list[str]:
    """In the order of `megatrain --help`."""
    return list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def help_of(name: str) -> str:
    """What the command does, and its arguments and options."""
    command: Any = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    rows = []
    for one in (one for one in command.params if not getattr(one, "hidden", False)):
        option = one.param_type_name == "option"
        called = " ".join(one.opts) if option else one.metavar or one.name.upper()
        rows.append(f"| `{called.replace('|', ' or ')}` | {one.help} |")
    words = [textwrap.fill(part, WIDTH) for part in command.help.split("\n\n")]
    return "\n".join(["\n\n".join(words), "", "| | |", "|---|---|", *rows])


def exit_codes() -> Iterator[tuple[int, str]]:
    """(code, meaning): of the errors, as they describe themselves, and of signals."""
    for kind in vars(errors).values():
        ours = isinstance(kind, type) and issubclass(kind, errors.MegaTrainError)
        if ours and kind is not errors.MegaTrainError and "exit_code" in vars(kind):
            yield kind.exit_code, " ".join((kind.__doc__ or "").split())
    yield from MEANINGS.items()


if __name__ == "__main__":
    main()
