"""Publishes the final model of a run: the files of `final/`, in one commit, on the hub."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megatrain.errors import ConfigError, MegaTrainError, StorageError
from megatrain.models.hub import LOG_IN, reachable
from megatrain.storage.carried import CONFIG, OF_PROCESSOR
from megatrain.storage.manifest import (
    MANIFEST,
    Manifest,
    check_model_files,
    describe_files,
    manifest_of_model,
    read_bytes,
    stray_files,
    would_be_read,
)
from megatrain.storage.run_folder import CARD, FINAL
from megatrain.storage.saves import RUN_ONLY, model_files
from megatrain.storage.system_calls import system_errors
from megatrain.version import VERSION

# Of a `final/` whose manifest is gone, what goes along with what transformers reads.
BESIDES = (CARD, "*.safetensors.index.json", *OF_PROCESSOR)
AGAIN = "run the command again: what has arrived is not sent again"
REASONS = {
    401: "the hub does not know the token ({said}); {LOG_IN}",
    403: "the token may not write there ({said}); choose a repository of your own, or a token with "
    "write access from {endpoint}/settings/tokens, then {LOG_IN}",
    404: "the hub shows no such repository to this token ({said}); check the name, or {LOG_IN}",
    409: "the repository was changed meanwhile ({said}); {AGAIN}",
    412: "the repository was changed meanwhile ({said}); {AGAIN}",
}
REFUSED = "the hub refuses it ({said}); see {endpoint}/{repo_id}"
PASSING = (408, 425, 429)  # of those below 500, what may go away
QUERY = re.compile(r"\?[^\s'\"<>]+")  # of a URL: that of an upload has its signature there

logger = logging.getLogger("megatrain")


@dataclass(frozen=True)
class Pushed:
    """What was published.

    Attributes:
        url: of the repository.
        commit: its SHA; that of the last one if the repository had all of it.
        files: names, all of which the repository holds now.
        removed: names of files that would have been read as parts of the model.
    """

    url: str
    commit: str
    files: tuple[str, ...]
    nbytes: int
    private: bool
    removed: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        whole = {"url": self.url, "commit": self.commit, "private": self.private}
        lists = {"files": list(self.files), "removed": list(self.removed)}
        return {**whole, "bytes": self.nbytes, **lists}


def push(run_dir: Path | str, repo_id: str, private: bool = False) -> Pushed:
    """Upload `final/` of a run to a repository of the hub, which is made if it is not there.

    All of it is one commit, so that nobody loads halves of two models. What has arrived before an
    interruption is not sent again. The token is the hub library's to find: HF_TOKEN, or the store
    of `hf auth login`.

    Args:
        repo_id: owner/name; without an owner the token's.
        private: make it private; refused if it is there and public.

    Raises:
        ConfigError: the name, the token or the run cannot be used.
        DamagedError: a file of `final/` is not as it was saved; nothing was sent.
        StorageError: the hub cannot be reached, or did not take it.
    """
    import huggingface_hub

    _check_start(repo_id)
    folder = _final_of(Path(run_dir))
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
        removed = [name for name in _names_in(there) if _is_stale(name, names)]
        commit = _commit(api, made.repo_id, folder, names, removed)
        _check_arrived(api.model_info(made.repo_id, revision=commit), names)
    except _errors() as error:
        raise _explained(error, repo_id) from error
    for name in removed:
        logger.warning(f"{name}: was removed from {made}, as it would be read with this model")
    files = tuple(names)
    return Pushed(str(made), commit, files, nbytes, bool(there.private), tuple(removed))


def _check_start(repo_id: str) -> None:
    """Raise ConfigError or StorageError for what can be told before a file is read."""
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


def _final_of(run_dir: Path) -> Path:
    folder = run_dir / FINAL
    with system_errors(folder, "look at it"):
        if (folder / CONFIG).is_file():
            return folder
    raise ConfigError(
        f"{run_dir}: has no {FINAL}/ with a model, which a run writes at its end unless "
        f"checkpoint.final is none; name a run's folder; `megatrain resume {run_dir}` finishes one "
        "that was stopped"
    )


def published_files(folder: Path) -> list[str]:
    """Names of what is to be published of `final/`: the model's files in its manifest, verified.

    A card that was edited is taken as it is. Without a manifest it is what transformers reads.
    Whatever else is there is named as left out.

    Raises StorageError for a file that is missing, changed, or would be read and does not belong.
    """
    manifest = manifest_of_model(folder)
    with system_errors(folder, "read it"):
        there = stray_files(folder, Manifest(0, 0, {}))
    if manifest is None:
        logger.warning(f"{folder}: has no {MANIFEST}, so its files cannot be verified")
        names = [name for name in there if _is_of_a_model(name)]
    else:
        names = [name for name in model_files(manifest) if name != CARD]
        check_model_files(folder, manifest, names, code=True)
        if CARD in there:
            names.append(CARD)
            if manifest.files.get(CARD) != describe_files(folder, [CARD])[0]:
                logger.info(f"{folder / CARD}: was edited; it is uploaded as it is")
        elif CARD in manifest.files:
            logger.warning(f"{folder / CARD}: is gone; the model is uploaded without a card")
    if CARD in names:
        _check_card(folder / CARD)
    for name in dict.fromkeys(_top(name) for name in there if name not in names):
        logger.info(f"{folder / name}: is no part of the model; it is not uploaded")
    return sorted(names)


def _check_card(path: Path) -> None:
    """Raise ConfigError for a card that the hub's library cannot read."""
    try:
        read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is no UTF-8 text ({error.reason}); save it as such") from error


def _top(name: str) -> str:
    """What is named in place of a file: of the optimizer's many the folder."""
    first = PurePosixPath(name).parts[0]
    return first if first in RUN_ONLY else name


def _is_of_a_model(name: str) -> bool:
    path = PurePosixPath(name)
    read = would_be_read(name) and path.parts[0] not in RUN_ONLY
    return read or any(path.match(pattern) and path.name == name for pattern in BESIDES)


def _names_in(info: Any) -> list[str]:
    return [file.rfilename for file in info.siblings or ()]


def _is_stale(name: str, names: Sequence[str]) -> bool:
    """Whether a file of the repository would be read along with a model that has these."""
    folders = {str(PurePosixPath(known).parent) for known in names}
    here = str(PurePosixPath(name).parent) in {".", *folders}
    indexes = name.endswith(".safetensors.index.json")
    return here and name not in names and (would_be_read(name) or indexes)


def _commit(
    api: Any, repo_id: str, folder: Path, names: Sequence[str], removed: Sequence[str]
) -> str:
    """Upload these files, remove those, and return the commit's SHA."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    operations = [
        *(CommitOperationDelete(name, is_folder=False) for name in removed),
        *(CommitOperationAdd(name, folder / name) for name in names),
    ]
    message = f"Upload a model trained by MegaTrain {VERSION}"
    return str(api.create_commit(repo_id, operations, commit_message=message).oid)


def _check_arrived(info: Any, names: Sequence[str]) -> None:
    lost = sorted({*names} - {*_names_in(info)})
    if lost:
        raise StorageError(
            f"{info.id}: the hub left out {', '.join(lost)}; see whether the .gitignore of the "
            "repository names them"
        )


def _errors() -> tuple[type[Exception], ...]:
    """What the hub's library raises: of its own, of HTTP, of Xet, and around those."""
    from huggingface_hub.errors import HfHubHTTPError

    of_http = HfHubHTTPError.__bases__[0]  # of the HTTP library that it uses
    assert issubclass(of_http, Exception)
    return of_http, OSError, ValueError, RuntimeError


def _explained(error: Exception, repo_id: str) -> MegaTrainError:
    """The error of ours for one of the hub's library."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, HfHubHTTPError):
        cause = cause.__cause__
    status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
    said, reason = _said(cause or error.__cause__ or error), REASONS.get(status)
    if isinstance(error, ValueError) and not isinstance(error, json.JSONDecodeError):
        said, reason = (
            _said(error, whole=True),
            REFUSED,
        )  # of its checks, such as of the card's head
    elif 400 <= status < 500 and status not in PASSING:
        reason = reason or REFUSED
    if reason is None:
        return StorageError(f"{repo_id}: the upload failed ({said}); {AGAIN}")
    words = {"endpoint": constants.ENDPOINT, "repo_id": repo_id, "LOG_IN": LOG_IN, "AGAIN": AGAIN}
    return ConfigError(f"{repo_id}: {reason.format(said=said, **words)}")


def _said(error: BaseException, whole: bool = False) -> str:
    """What an error says, without the token or a signature; unless `whole` its first line."""
    from huggingface_hub import get_token

    lines = [line for line in str(error).splitlines() if line.strip() and "Request ID" not in line]
    first = getattr(error, "server_message", None) or (lines or [type(error).__name__])[0]
    said = " ".join((" ".join(lines) if whole else str(first)).split()).rstrip(".:")
    return QUERY.sub("", said).replace(get_token() or "\0", "(the token)")
