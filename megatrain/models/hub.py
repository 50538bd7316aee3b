"""Downloads from the hub, and why it delivered nothing: in its own words, and what to do."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from megatrain.errors import STORAGE_ERRNOS, ModelError
from megatrain.heartbeat import beat, may_end_here

ANSWERS_IN_S = 2.0  # unless HF_HUB_ETAG_TIMEOUT says otherwise
ELSEWHERE = "download the model where the hub can be reached and name its folder"
LOG_IN = "run `hf auth login`, or set HF_TOKEN"


def download(
    name: str, revision: str | None, files: list[str], hint: str = "", *, but: list[str]
) -> Path:
    """The folder in the hub's cache with these files of a model, `but` for those patterns."""
    import huggingface_hub
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        silent = f"HF_HUB_OFFLINE allows only what is in the hub's cache; unset it, or {ELSEWHERE}"
    elif reachable(constants.ENDPOINT):
        silent = ""
    else:
        silent = f"{constants.ENDPOINT} cannot be reached; check the network, or {ELSEWHERE}"
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=files,
            ignore_patterns=but,
            local_files_only=bool(silent),
            tqdm_class=_bar(),
        )
    except (OSError, ValueError) as error:  # what the hub's own errors derive from
        if isinstance(error, OSError) and error.errno in STORAGE_ERRNOS:
            raise
        at = f" at revision {revision}" if revision else ""
        why = silent or (
            f"the hub did not deliver it ({said_by(error)}); check name and revision on "
            f"{constants.ENDPOINT}/{name}; if it is gated or private, ask for access there, then "
            f"{LOG_IN}; if the hub is down, {ELSEWHERE}"
        )
        raise ModelError(f"{name}{at}: is no local folder{hint}, and {why}") from error
    return Path(found)


def _bar() -> Any:
    """The hub's progress bar; a download may end wherever it moves."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):
        def update(self, n: float | None = 1) -> Any:
            may_end_here()
            beat()
            return super().update(n)

    return Bar


def reachable(endpoint: str) -> bool:
    """True if the hub accepts a connection in time; its library waits much longer for one."""
    if urllib.request.getproxies():
        return True  # that is for the proxy to find out
    url = urllib.parse.urlsplit(endpoint)
    address = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    limit = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", ANSWERS_IN_S))
    answered: list[bool] = []

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=limit):
            answered.append(True)

    asking = threading.Thread(target=connect, daemon=True)  # a look-up may outlast the limit
    asking.start()
    asking.join(limit)
    return bool(answered)


def said_by(error: BaseException) -> str:
    """The hub's own sentence about a failure."""
    lines = [line for line in str(error).splitlines() if line.strip() and "Request ID" not in line]
    said = getattr(error, "server_message", None) or (lines or [type(error).__name__])[0]
    return " ".join(str(said).split()).rstrip(".")
