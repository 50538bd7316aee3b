"""The journal of a rollout: every finished answer and every reward, as it comes.

A run that was killed writes no answer again that is on disk. It takes the checkpoint before, and
the steps behind it get the journal's answers: with equal weights the replay is the same run.

One file of JSON lines per rollout, `rollouts/STEP.jsonl`, of the step that it begins with, and one
for each further rank, `STEP-RANK.jsonl`. The first line says what the answers follow from; then
come answers, and the rewards of whole groups. Every line ends with a checksum of what precedes it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatrain.errors import StorageError, logger, system_errors

if TYPE_CHECKING:
    from megatrain.engine.rollout.decode import Answer
    from megatrain.world import World

FOLDER, REWARDS_LOG = "rollouts", "rewards.log"
_CODES = {"ids": "<i4", "logprobs": "<f4", "kept_mass": "<f4", "mask": "|u1"}


@dataclass
class Journal:
    """A rollout's answers and rewards; with an open file each is written as it comes.

    Attributes:
        path: its file; None: what it holds is not kept.
        answers: by (key of the request, number of the answer).
        rewards: of groups, by key, with the columns that functions logged.
        old: of answers that several steps train on, log-probabilities under the weights that wrote
            them.
        unshared: lines that other ranks have not.
    """

    path: Path | None = None
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)
    rewards: dict[int, dict[str, Any]] = field(default_factory=dict)
    old: dict[tuple[int, int], list[float]] = field(default_factory=dict)
    unshared: list[str] = field(default_factory=list)
    _descriptor: int | None = None

    @classmethod
    def open(
        cls, run_dir: Path, step: int, origin: Mapping[str, Any], begun: bool, world: World
    ) -> Journal:
        """The rollout that begins with this step, without what is torn; without all that follows
        from another `origin`, unless steps of it were taken (`begun`). Raises StorageError.

        Each rank has a file, and reads those of ranks that are no more. All ranks call it.
        """
        folder, wanted = run_dir / FOLDER, None if begun else dict(origin)
        own = folder / (f"{step:06}-{world.rank}.jsonl" if world.rank else f"{step:06}.jsonl")
        journal = cls(own)
        with system_errors(own, "write answers"):
            folder.mkdir(exist_ok=True)
            ranks = {rank: path for (at, rank), path in files_of(run_dir).items() if at == step}
            theirs = [path for rank, path in ranks.items() if rank % world.size == world.rank]
            whole = {path: journal._read(path, wanted) for path in {*theirs, own}}
            for path in (path for path, size in whole.items() if not size):
                path.unlink(missing_ok=True)
            journal._descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.ftruncate(journal._descriptor, whole[own])
            if not whole[own]:
                journal._write({"origin": dict(origin)})
        journal.share(world)
        return journal

    def _read(self, path: Path, origin: dict[str, Any] | None) -> int:
        """Read the whole lines of a file; returns their bytes, 0 for a file of another origin, if
        it is given."""
        whole = 0
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return 0
        for number, (line, text) in enumerate(_records(data)):
            if number == 0 and origin is not None and json.loads(text) != {"origin": origin}:
                logger.warning(f"{path}: is of other settings, or other weights: not used")
                return 0
            if number:
                self._take(text)
                self.unshared.append(text)
            whole += len(line)
        if whole < len(data):
            lost = f"{len(data) - whole:,} bytes that are torn or changed are cut off"
            logger.warning(f"{path}: {lost}; what they held is written anew")
        return whole

    def share(self, world: World) -> None:
        """Let every rank have what each has read and written. All ranks call it."""
        for rank, lines in enumerate(world.all_gather(self.unshared)):
            for text in lines if rank != world.rank else ():
                self._take(text)
        self.unshared = []

    def _take(self, text: str) -> None:
        record = json.loads(text)
        if "rewards" in record:
            self.rewards[record["key"]] = record
        elif "old" in record:
            self.old[record["key"], record["number"]] = _numbers(record["old"], "<f4") or []
        else:
            from megatrain.engine.rollout.decode import Answer  # imports torch: reports need none

            arrays = {name: _numbers(record.get(name), code) for name, code in _CODES.items()}
            answer = Answer(**{**record, **arrays})
            self.answers[answer.key, answer.number] = answer

    def add(self, answer: Answer) -> None:
        """Keep an answer that is finished."""
        arrays = {name: _text(getattr(answer, name), code) for name, code in _CODES.items()}
        self._write({**vars(answer), **arrays})

    def judge(self, key: int, judgement: Mapping[str, Any]) -> None:
        """Keep the rewards of a group, its texts, and what functions logged: `Judges.result`."""
        self._write({"key": key, **judgement})

    def remember(self, answer: Answer, old: Sequence[float]) -> None:
        """Keep the log-probabilities of an answer's tokens under the weights of now."""
        self._write({"key": answer.key, "number": answer.number, "old": _text(old, "<f4")})

    def _write(self, record: Mapping[str, Any]) -> None:
        """Take a record in as if it were read, and write it."""
        text = json.dumps(record, separators=(",", ":"))
        if "origin" not in record:
            self._take(text)
            self.unshared.append(text)
        if self._descriptor is None:
            return
        line = f"{text} {zlib.crc32(text.encode()):08x}\n".encode()
        with system_errors(self.path or Path(), "write answers"):
            if os.write(self._descriptor, line) != len(line):
                raise StorageError(f"{self.path}: no space is left for answers; free some")

    def close(self) -> None:
        """Have the drive keep it."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None


def _records(data: bytes) -> Iterator[tuple[bytes, str]]:
    """Lines and the JSON in them, up to the first that is not whole."""
    for line in data.splitlines(keepends=True):
        text, _, checksum = line.removesuffix(b"\n").rpartition(b" ")
        if not line.endswith(b"\n") or f"{zlib.crc32(text):08x}".encode() != checksum:
            return
        yield line, text.decode()


def _text(numbers: Sequence[float] | None, code: str) -> str | None:
    return None if numbers is None else base64.b64encode(np.array(numbers, code).tobytes()).decode()


def _numbers(text: str | None, code: str) -> list[Any] | None:
    return None if text is None else np.frombuffer(base64.b64decode(text), code).tolist()


def judged_before(run_dir: Path, step: int) -> tuple[int, list[dict[str, Any]]]:
    """The newest rollout that began before a step: the step that it began with, and its groups'
    prompts, answers and rewards; none where no journal is left."""
    files = files_of(run_dir)
    newest = max((begun for begun, _ in files if begun < step), default=0)
    found = []
    for _, path in sorted((rank, path) for (begun, rank), path in files.items() if begun == newest):
        with suppress(OSError):
            found += [json.loads(text) for _, text in _records(path.read_bytes())]
    return newest, [one for one in found if "completions" in one]


def files_of(run_dir: Path) -> dict[tuple[int, int], Path]:
    """Journals by the step that the rollout begins with, and the rank that wrote them."""
    paths = [*(run_dir / FOLDER).glob("*.jsonl")]
    named = ((re.fullmatch(r"(\d{6,})(?:-(\d+))?", path.stem), path) for path in paths)
    return {(int(name[1]), int(name[2] or 0)): path for name, path in named if name}


def forget(run_dir: Path, before: int) -> None:
    """Remove the files of rollouts that began before a step, but for the newest of them, which
    reports show."""
    files = files_of(run_dir)
    newest = max((step for step, _ in files if step < before), default=0)
    for path in (path for (step, _), path in files.items() if step < newest):
        path.unlink(missing_ok=True)
