"""What a user reads when the hub delivers no model: its own sentence, the page, and what to do."""

from __future__ import annotations

import errno
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from megatrain import heartbeat
from megatrain.errors import ModelError, without_secrets
from megatrain.models.pretrained import resolve_source

PAGE = "https://huggingface.co/some/model"
LOG_IN = "`hf auth login`, or set HF_TOKEN"
SENTENCE = "Access to model some/model is restricted. Please log in."
TOP = "403 Client Error. (Request ID: Root=1-6)"
TOLD = f"Cannot access it for url {PAGE}"
OFFLINE = "HF_HUB_OFFLINE allows only what is in the hub's cache; unset it, or download the model"

KINDS = (
    errors.GatedRepoError,
    errors.RepositoryNotFoundError,
    errors.HfHubHTTPError,
    errors.HFValidationError,
    errors.LocalEntryNotFoundError,
)


def error_of(kind: Any) -> Any:
    """As the hub's library raises it."""
    text = f"{TOP}\n\nCannot access it for url {PAGE}.\n{SENTENCE}"
    if not issubclass(kind, errors.HfHubHTTPError):
        return kind(text)
    response = SimpleNamespace(headers={}, request=None)
    return kind(text, response=response, server_message=SENTENCE)


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub can be reached."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("megatrain.models.hub.reachable", lambda endpoint: True)


def test_a_password_in_a_url_is_shown_nowhere(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:pass@wo:rd@127.0.0.1:9")
    with pytest.raises(ModelError) as caught:
        resolve_source("somebody/model")
    assert "and http://***@127.0.0.1:9 cannot be reached" in str(caught.value)
    assert without_secrets("see https://hf_token@hub/a@b") == "see https://***@hub/a@b"


def test_each_error_of_the_hub_says_what_to_do(monkeypatch, online):
    for kind in KINDS:
        refuse = Mock(side_effect=error_of(kind))
        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        with pytest.raises(ModelError) as caught:
            resolve_source("some/model", "v1", weights=False)
        said = str(caught.value)
        assert said.startswith("some/model at revision v1: is no local folder")
        said_there = SENTENCE[:-1] if issubclass(kind, errors.HfHubHTTPError) else TOLD
        words = ("did not deliver it", said_there, f"revision on {PAGE};", LOG_IN)
        assert [part for part in words if part not in said] == []
        assert "\n" not in said and ".)" not in said and ".;" not in said


def test_other_programs_copies_of_the_weights_stay_there(monkeypatch, online, tmp_path):
    names = ["config.json", "model-1.safetensors", "original/model.safetensors", "a/b.jinja"]
    names += ["consolidated-1.safetensors", "tokenizer.json", "model.bin"]
    taken: list[str] = []

    def download(*_: object, allow_patterns: Any, ignore_patterns: Any, **__: object) -> str:
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        taken.extend(filter_repo_objects(names, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_source("some/model")
    assert taken == ["config.json", "model-1.safetensors", "a/b.jinja", "tokenizer.json"]


def test_a_full_disk_is_not_the_hubs_fault(monkeypatch, online):
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(OSError, match="No space left"):
        resolve_source("some/model")


def test_a_download_may_be_ended_wherever_it_moves(monkeypatch, online):
    def download(*_: object, tqdm_class: Any, **__: object) -> None:
        tqdm_class(disable=True).update(1)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with heartbeat.ending(Mock(side_effect=KeyboardInterrupt)), pytest.raises(KeyboardInterrupt):
        resolve_source("some/model")


def test_offline_by_choice_is_said():
    with pytest.raises(ModelError) as caught:
        resolve_source("some/model")
    assert OFFLINE in str(caught.value)


def test_a_hub_that_cannot_be_reached_is_said_soon(monkeypatch):
    """Nor is it waited for when nothing tells that it cannot."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    given_up = threading.Event()

    def wait(*_: object, **__: object) -> None:
        given_up.wait(30)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", wait)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("megatrain.models.hub.ANSWERS_IN_S", 0.05)
    started = time.monotonic()
    with pytest.raises(ModelError, match=r"https://huggingface.co cannot be reached; check the ne"):
        resolve_source("some/model")
    given_up.set()
    assert time.monotonic() - started < 20
