"""The command line: parses arguments, calls one function, prints its result.

torch is imported only by what a command calls. Results go to stdout, logs to stderr. Exit codes: 0
ok, 1 unexpected, 2 usage or config, 3 data, 4 does not fit, 5 out of memory, 6 diverged, 7 storage,
8 verification, 75 stopped by a signal with a checkpoint, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import typer

from megatrain.cli.app import GIVEN, app
from megatrain.errors import StorageError, exit_code_of, printable
from megatrain.machine.cgroups import keep_to_quota
from megatrain.methods import METHODS
from megatrain.reporting.streams import lasting_streams, results_alone

# In the order in which `megatrain --help` lists their commands.
# isort: off
from megatrain.cli import training
from megatrain.cli import reading
# isort: on

__all__ = ["app", "main", "reading", "training"]

INTERRUPTED = 130
UsageError: Any = typer.BadParameter.__base__  # of click, which some versions of typer contain


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. `--debug` anywhere prints an error's traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    words = [argument for argument in given if argument != "--debug"]
    GIVEN[:] = given
    with lasting_streams() as stdout:
        with results_alone() if "--json" in words else nullcontext():
            code = _code_of(words, debug=words != given)
        stdout.flush()
        # to a reader that has read enough (`| head`) nothing is lost
        if stdout.error is not None and stdout.error.errno != errno.EPIPE:
            lost = f"stdout cannot be written: {os.strerror(stdout.error.errno or 0)}"
            if words[0] in ("train", "resume"):
                typer.echo(f"warning: {lost}; the summary is lost, the run is not", err=True)
            else:
                typer.echo(f"error: {lost}; free some space or send it elsewhere", err=True)
                code = code or StorageError.exit_code
    return code


def _code_of(words: list[str], debug: bool) -> int:
    """The exit code of a command, which is run; its error is printed."""
    try:
        keep_to_quota()
        done = app(args=words, prog_name="megatrain", standalone_mode=False)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 0
    except UsageError as error:
        return _usage(error, words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001  every error becomes a sentence and a code
        code, sentence = exit_code_of(error)
        if debug:
            traceback.print_exception(error)
        for line in sentence.splitlines():
            typer.echo(f"error: {printable(line)}", err=True)
        return code
    return done if isinstance(done, int) else 0


def _usage(error: Any, words: list[str]) -> int:
    """Print how the command is used and what is wrong with `words`; the exit code."""
    usage = "" if error.ctx is None else error.ctx.get_usage()
    if not words:
        error.show()  # help
        return int(error.exit_code)
    said = str(error.format_message()).rstrip(".")
    if said.startswith("No such option") and "KEY=VALUE" in usage:
        said += "; keys of the config are set as key=value, such as train.learning_rate=1e-5"
    if said.startswith("No such command") and words[0] in METHODS:
        said += f"; {words[0]} is a method: megatrain train CONFIG method={words[0]}"
    command = "megatrain" if error.ctx is None else error.ctx.command_path
    typer.echo(f"{usage}\nerror: {printable(said)}; see `{command} --help`", err=True)
    return int(error.exit_code)
