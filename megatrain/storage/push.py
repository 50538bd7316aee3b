"""Uploads of a run's models to the hub, each in one commit: of `final/`, and of checkpoints while
training goes on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain.errors import ConfigError, MegaTrainError, StorageError, logger, system_errors
from megatrain.heartbeat import doing
from megatrain.models.hub import LOG_IN, reachable, said_by
from megatrain.storage import manifest, run_folder
from megatrain.storage.run_folder import CARD, CONFIG, FINAL, RUN_ONLY, UPLOADING, link_or_copy
from megatrain.version import VERSION

AGAIN = "run the command again: what has arrived is not sent again"
REFUSED = (
    "the hub refuses it ({said}); check the name, and that the token may write there "
    f"({LOG_IN}); see {{endpoint}}/{{repo_id}}"
)
PASSING = (408, 409, 412, 425, 429)  # of those below 500, what may go away
QUERY = re.compile(r"\?[^\s'\"<>]+")  # of a URL: that of an upload has its signature there


@dataclass(frozen=True)
class Pushed:
    """A model that was published."""

    url: str  # of the repository
    commit: str  # its SHA; that of the last one if nothing was missing there
    files: tuple[str, ...]  # names, all of which the repository holds now
    nbytes: int
    private: bool
    removed: tuple[str, ...] = ()  # names of files that would have been read with the model

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["bytes"] = found.pop("nbytes")
        return found


def push(run_dir: Path | str, repo_id: str, private: bool = False) -> Pushed:
    """Upload `final/` of a run to a repository of the hub, which is made if it is not there.

    All of it is one commit, so that nobody loads halves of two models. The token is HF_TOKEN, or
    that of `hf auth login`. repo_id: owner/name; without an owner the token's.

    Raises ConfigError for a name, token or run that cannot be used, DamagedError for a file that is
    not as it was saved, StorageError where the hub cannot be reached, or does not take it.
    """
    _check_start(repo_id)
    folder = Path(run_dir) / FINAL
    with system_errors(folder, "look at it"):
        there = (folder / CONFIG).is_file()
    if not there:
        raise ConfigError(
            f"{run_dir}: has no {FINAL}/ with a model, which a run writes at its end unless "
            f"checkpoint.final is none; name a run's folder; `megatrain resume {run_dir}` finishes "
            "one that was stopped"
        )
    return publish(folder, repo_id, private)


def publish(folder: Path, repo_id: str, private: bool = False) -> Pushed:
    """Upload the model in a folder that a run has written, as `push` does, whose errors it has."""
    import huggingface_hub

    names = published_files(folder)
    with system_errors(folder, "read it"):
        nbytes = sum((folder / name).stat().st_size for name in names)
    api = huggingface_hub.HfApi(library_name="megatrain", library_version=VERSION)
    try:
        made = api.create_repo(repo_id, private=private or None, exist_ok=True)
        there = api.model_info(made.repo_id)
        if private and not there.private:
            raise ConfigError(
                f"{made}: is there and public, and --private makes only a new repository private; "
                f"change it at {made}/settings, or choose another name"
            )
        present = [file.rfilename for file in there.siblings or ()]
        removed = [name for name in present if _is_stale(name, names)]
        operations: list[Any] = [
            *(huggingface_hub.CommitOperationDelete(name, is_folder=False) for name in removed),
            *(huggingface_hub.CommitOperationAdd(name, folder / name) for name in names),
        ]
        message = f"Upload a model trained by MegaTrain {VERSION}"
        with doing(f"uploading {nbytes / 2**30:.1f} GiB"):  # inside, the hub's own bars
            commit = str(api.create_commit(made.repo_id, operations, commit_message=message).oid)
        arrived = api.model_info(made.repo_id, revision=commit)
        if lost := sorted({*names} - {file.rfilename for file in arrived.siblings or ()}):
            raise StorageError(
                f"{arrived.id}: the hub left out {', '.join(lost)}; see whether the .gitignore of "
                "the repository names them"
            )
    except _errors() as error:
        raise _explained(error, repo_id) from error
    for name in removed:
        logger.warning(f"{name}: was removed from {made}, as it would be read with this model")
    private = bool(there.private)
    return Pushed(str(made), commit, tuple(names), nbytes, private, tuple(removed))


class Uploads:
    """Uploads of a run's models while it goes on, by a thread. A checkpoint that comes while one is
    under way is left out. Failures are warnings."""

    def __init__(self, repo_id: str, run_dir: Path) -> None:
        """Make the repository, private, unless it is there. Raises as `push` does."""
        import huggingface_hub

        _check_start(repo_id)
        self._repo_id, self._linked, self._last = repo_id, run_dir / UPLOADING, Future[None]()
        self._last.set_result(None)
        self._thread = ThreadPoolExecutor(1, "megatrain-push")
        shutil.rmtree(self._linked, ignore_errors=True)
        try:
            huggingface_hub.HfApi().create_repo(repo_id, private=True, exist_ok=True)
        except _errors() as error:
            raise _explained(error, repo_id) from error

    def begin(self, checkpoint: Path) -> None:
        """Upload the model of a checkpoint, whose files are linked: the run may remove it."""
        if not self._last.done():
            logger.info(f"{checkpoint}: is not uploaded, as the one before it still is")
            return
        for path in filter(Path.is_file, checkpoint.rglob("*")):
            target = self._linked / path.relative_to(checkpoint)
            if path.relative_to(checkpoint).parts[0] not in RUN_ONLY:
                target.parent.mkdir(exist_ok=True, parents=True)
                link_or_copy(path, target)
        self._last = self._thread.submit(self._upload, checkpoint, self._linked)

    def _upload(self, model: Path, folder: Path) -> None:
        try:
            logger.info(f"{model} is uploaded to {publish(folder, self._repo_id).url}")
        except MegaTrainError as error:
            logger.warning(f"{model} is not uploaded: {error}")
        finally:
            shutil.rmtree(self._linked, ignore_errors=True)

    def finish(self, final: Path) -> None:
        """Upload `final`, if it is there, behind all others."""
        self._thread.shutdown()
        if final.is_dir():
            self._upload(final, final)


def _check_start(repo_id: str) -> None:
    """Check the name, the token and the network before a file is read."""
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        said = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"{repo_id!r}: cannot be a name on the hub: {said}") from error
    token = huggingface_hub.get_token()
    if token is None:
        raise ConfigError(f"{repo_id}: nothing is uploaded without a token; {LOG_IN}")
    if not re.fullmatch(r"[!-~]+", token):  # which the HTTP library would print
        raise ConfigError(f"the token of the hub has characters that no token has; {LOG_IN}")
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(f"{repo_id}: HF_HUB_OFFLINE forbids to reach the hub; unset it")
    if not reachable(constants.ENDPOINT):
        raise StorageError(f"{repo_id}: {constants.ENDPOINT} cannot be reached; check the network")


def published_files(folder: Path) -> list[str]:
    """Names of the files of `final/` to publish: the model's of its manifest, verified. A card that
    was edited is taken as it is. Other files are logged as left out. Raises StorageError for a file
    that is missing, changed, or would be read and does not belong."""
    saved = manifest.manifest_of_model(folder)
    if saved is None:
        again = f"`megatrain resume {folder.parent}` writes it again"
        raise StorageError(
            f"{folder}: has no {manifest.MANIFEST}, which says what is the model; {again}"
        )
    with system_errors(folder, "read it"):
        there = manifest.stray_files(folder, manifest.Manifest(0, 0, {}))
    names = [name for name in run_folder.model_files(saved) if name != CARD]
    manifest.check_model_files(folder, saved, names, code=True)
    card = folder / CARD
    if CARD in there:
        names.append(CARD)
        if saved.files.get(CARD) != manifest.describe_files(folder, [CARD])[0]:
            logger.info(f"{card}: was edited; it is uploaded as it is")
    elif CARD in saved.files:
        logger.warning(f"{card}: is gone; the model is uploaded without a card")
    tops = ((name, name.split("/")[0]) for name in there if name not in names)
    for name in dict.fromkeys(top if top in RUN_ONLY else name for name, top in tops):
        logger.info(f"{folder / name}: is no part of the model; it is not uploaded")
    return sorted(names)


def _is_stale(name: str, names: Sequence[str]) -> bool:
    """True for a file of the repository that would be read along with a model of `names`."""
    folders = {str(PurePosixPath(known).parent) for known in names}
    here = str(PurePosixPath(name).parent) in {".", *folders}
    indexes = name.endswith(".safetensors.index.json")
    return here and name not in names and (manifest.would_be_read(name) or indexes)


def _errors() -> tuple[type[Exception], ...]:
    """Errors of the hub's library: its own, those of HTTP and Xet, and those around them."""
    from huggingface_hub.errors import HfHubHTTPError

    of_http = HfHubHTTPError.__bases__[0]  # of the HTTP library that it uses
    assert issubclass(of_http, Exception)
    return of_http, OSError, ValueError, RuntimeError


def _explained(error: Exception, repo_id: str) -> MegaTrainError:
    """The error of ours for one of the hub's library, without the token or a signature."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    # of its checks, such as of the card's head
    checks = isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError)
    said = " ".join(str(error).split()) if checks else said_by(cause or error.__cause__ or error)
    said = QUERY.sub("", said.rstrip(".:")).replace(get_token() or "\0", "(the token)")
    if not (checks or (400 <= status < 500 and status not in PASSING)):
        return StorageError(f"{repo_id}: the upload failed ({said}); {AGAIN}")
    reason = REFUSED.format(said=said, endpoint=constants.ENDPOINT, repo_id=repo_id)
    return ConfigError(f"{repo_id}: {reason}")
