"""Typed errors for users: each is one sentence (what, where, what to do) and an exit code."""

from __future__ import annotations


class MegaTrainError(Exception):
    """Base of every error a user can cause or must act on. `exit_code` is what the command line returns."""

    exit_code = 1


class ConfigError(MegaTrainError):
    """The command line or the config file asks for something that cannot be honoured."""

    exit_code = 2


class ModelError(MegaTrainError):
    """The model folder is broken, or the family cannot be streamed correctly."""

    exit_code = 2


class DataError(MegaTrainError):
    """Training or evaluation rows were rejected."""

    exit_code = 3


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
