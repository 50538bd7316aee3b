"""The planner's question, in the parts that a plan without torch takes it from: the machine that is
planned for, and the job and shape of a model, which are kept on disk once they are worked out.

`known_question` alone decides whether a question is known. It is kept in the cache folder under a
digest of all that it follows from: the model, the options that it depends on, versions, and the
package's own source. `questions.json.gz` has those of the named shapes with default options, each
for the releases of torch and transformers that were found to give it (decision 0010).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

from megatrain.data.samples import name_for
from megatrain.errors import StorageError
from megatrain.machine.hardware import Hardware
from megatrain.machine.profile import (
    PACKAGES,
    MachineProfile,
    cache_folder,
    installed_version,
    read_cached,
    write_json,
)
from megatrain.planner.cost.shape import ModelShape
from megatrain.planner.job import Job

# With these transformers computes otherwise, where they are installed.
KERNELS = ("flash-linear-attention", "fla-core", "mamba-ssm", "causal-conv1d", "kernels")
SHIPPED = Path(__file__).with_name("questions.json.gz")


@dataclass(frozen=True)
class Site:
    """The machine of a plan: precision, sizes and rates."""

    precision: str
    hardware: Hardware
    profile: MachineProfile
    compiles: bool | None = None  # a C compiler and Triton are at hand; None: look here
    drives_assumed: tuple[Path, ...] = ()  # folders on drives that were not measured
    here: bool = True  # False for a machine that is only described
    ranks: int = 1  # GPUs of a host; `hardware` and `profile` are what each has, while all work
    hosts: int = 1
    together_assumed: bool = False  # nobody measured that
    peers: bool = True  # the GPUs of a host reach each other's memory
    alone: Any = None  # the same machine with one GPU at work


@dataclass(frozen=True)
class Question:
    """The part of a plan's question that follows from model, method and optimizer."""

    job: Job  # `posed` replaces what it says of machine and options
    shape: ModelShape
    compile: bool | Literal["loss"]


def posed(job: Job, site: Site, transport: str, **fields: Any) -> Job:
    """The job on a machine. fields: options that the user fixed, and what is known of rows."""
    if transport == "auto":  # why: decision 0103
        transport = "gather" if site.peers or site.hosts > 1 else "read"
    fields |= {"ranks": site.ranks, "hosts": site.hosts, "peers": site.peers}
    return replace(job, transport=transport, **fields)


# -- questions that are kept -----------------------------------------------------------------------


def known_question(causes: Mapping[str, Any], named: str | None = None) -> Question | None:
    """The question that follows from `causes`, if it was worked out before.

    Args:
        causes: the model and the options, as JSON.
        named: the name of a shape, whose question may be shipped.
    """
    return shipped(causes, named) or read_cached(question_file(causes), Question)


def keep_question(causes: Mapping[str, Any], question: Question) -> None:
    """Keep a question for `known_question`; a cache that cannot be written is no error."""
    with suppress(StorageError):
        write_json(question_file(causes), asdict(question))


def question_file(causes: Mapping[str, Any]) -> Path:
    """Path of the kept question that follows from these, with the versions in use now."""
    versions = {name: installed_version(name) for name in (*PACKAGES, *KERNELS)}
    versions |= {"python": platform.python_version(), "source": source_digest()}
    return cache_folder() / f"question-{name_for({**causes, **versions})}.json"


@cache
def source_digest() -> str:
    """SHA-256 of the package's own source."""
    sources = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def shipped(causes: Mapping[str, Any], named: str | None) -> Question | None:
    """The question of a named shape that comes with the package, for the releases in use now."""
    if named is None or any(map(installed_version, KERNELS)):
        return None
    row = json.loads(gzip.decompress(SHIPPED.read_bytes())).get(named)
    if row is None or row["causes"] != name_for(causes) or releases() not in row["releases"]:
        return None
    question: Question = TypeAdapter(Question).validate_python(row["question"])
    return question


def releases() -> list[str]:
    """Releases, without their last number, of torch and transformers."""
    versions = (installed_version(name) or "" for name in ("torch", "transformers"))
    return [".".join(version.split(".")[:2]) for version in versions]
