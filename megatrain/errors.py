"""Typed errors for users: each is one sentence (what, where, what to do) and an exit code; and the
log that users read."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger("megatrain")

UNEXPECTED = 1
OF_UNIX = ("fcntl", "resource", "termios")  # modules that Python lacks on Windows
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


# What steers a terminal, or the direction of its text; and what cannot be encoded.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


SECRET = re.compile(r"(?<=://)[^/\s'\"]+@")  # user and password, or a token, of a URL


def without_secrets(text: str) -> str:
    """`text` with *** for who logs in, and by what password, in a URL such as HF_ENDPOINT."""
    return SECRET.sub("***@", text)


def printable(text: str) -> str:
    """`text` with control characters spelt out, as \\x1b: what files say must not steer a
    terminal. Line ends and tabs stay."""
    return CONTROLS.sub(lambda found: ascii(found.group())[1:-1], text)


class MegaTrainError(Exception):
    """Base of every error that a user can cause or must act on."""

    exit_code = UNEXPECTED

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class ConfigError(MegaTrainError):
    """The command line or the config file asks for something that cannot be honoured."""

    exit_code = 2


class ModelError(MegaTrainError):
    """The model folder is broken, or the family cannot be streamed correctly."""

    exit_code = 2


class DataError(MegaTrainError):
    """Training or evaluation rows were rejected."""

    exit_code = 3


class RewardError(DataError):
    """A reward function that failed, or gave no reward for each answer."""


class PlanError(MegaTrainError):
    """The run does not fit this machine; the message says by how much, and what would fit."""

    exit_code = 4


class OutOfMemory(MegaTrainError):
    """An allocation failed although the plan said that it fits; the message names the array."""

    exit_code = 5


class DivergedError(MegaTrainError):
    """The loss or the gradient stopped being finite and the run cannot go on safely."""

    exit_code = 6


class StorageError(MegaTrainError):
    """A disk is full, a file is missing, truncated or fails its checksum."""

    exit_code = 7


class DamagedError(StorageError):
    """Files that were saved are not what was saved, or cannot be read; others may be."""


class VerificationError(MegaTrainError):
    """A result does not agree with its plain PyTorch reference."""

    exit_code = 8


class ServerError(MegaTrainError):
    """A server that writes answers cannot be reached, or does not do what it is asked for."""

    exit_code = 9


@contextmanager
def if_forbidden(kind: type[MegaTrainError], path: Path | str) -> Iterator[None]:
    """Raise an error of this kind where the block may not look at `path`, or below it.

    pathlib asks whether something is there, and raises where modes forbid to know.
    """
    try:
        yield
    except PermissionError as error:
        raise kind(forbidden(error, path)) from error


def forbidden(error: PermissionError, path: Path | str = "") -> str:
    """The sentence of one."""
    name = error.filename or path
    return f"{name}: {error.strerror}; change its mode, or that of a folder it lies in"


def storage_error(path: Path, error: OSError, doing: str, advice: str = "") -> StorageError:
    """The error for a failed system call on `path`; by default the advice depends on its errno."""
    reason = f"{error.strerror or error} (errno {error.errno})"
    if not advice and error.errno in FULL:
        advice = "free space there or choose another folder"
    if error.errno == errno.ELOOP:
        advice = "it is a symbolic link: remove it"
    advice = advice or "check the disk and the folder's permissions"
    return StorageError(f"{path}: cannot {doing}: {reason}; {advice}")


@contextmanager
def system_errors(path: Path, doing: str, advice: str = "") -> Iterator[None]:
    """Raise a StorageError for an OSError, from a library or a rename, that the block raises."""
    try:
        yield
    except OSError as error:
        raise storage_error(Path(error.filename or path), error, doing, advice) from error


def exit_code_of(error: Exception) -> tuple[int, str]:
    """The exit code and the sentence for any error that ended a command."""
    if isinstance(error, MegaTrainError):
        return error.exit_code, str(error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        advice = "set memory.host, or a smaller train.micro_batch_tokens"
        return OutOfMemory.exit_code, f"out of host memory; {advice}"
    if isinstance(error, ImportError) and error.name in OF_UNIX:
        instead = "on Windows run it inside WSL 2, elsewhere in a Linux container"
        return ConfigError.exit_code, f"MegaTrain needs Linux (there is no {error.name}); {instead}"
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return ConfigError.exit_code, f"{error.filename}: is too long for the name of a file"
    if isinstance(error, PermissionError) and error.filename:
        return StorageError.exit_code, forbidden(error)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
        what = f"{error.filename or 'storage'}: {error.strerror}"
        return StorageError.exit_code, f"{what}; free some space or choose another folder"
    text = ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))
    return UNEXPECTED, f"unexpected {text}; run again with --debug for the traceback"


def number_of(number: int, noun: str) -> str:
    """A number with its noun, in a sentence: "1 block", "2 blocks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
