"""What a text names as data, looked at before anything is read: special files, links, odd names,
and names that only the hub could know."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from megatrain.data import files
from megatrain.data.sources import open_source
from megatrain.errors import DataError


def texts(given: Any) -> str:
    return "".join(row.value["text"] for row in open_source(given).read())  # type: ignore[index]


@pytest.fixture
def special(tmp_path: Path) -> Path:
    """A folder with a good file, beside what is not to be read."""
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "secret.txt").write_text("secret")
    return folder


SPECIAL_FILES = {
    "fifo": (os.mkfifo, "is no regular file but a pipe"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
    "broken": (lambda path: path.symlink_to("gone.txt"), "cannot be read: No such file"),
}


@pytest.mark.parametrize(("make", "words"), SPECIAL_FILES.values(), ids=SPECIAL_FILES)
def test_only_regular_files_of_the_folder_are_read(special, make, words):
    make(special / "b.txt")
    for look in (open_source, lambda given: files.check_source(str(given))):
        with pytest.raises(DataError, match=rf"b\.txt: {words}"):
            look(special)


def test_a_link_to_a_folder_is_refused(special):
    (special / "more").symlink_to(special.parent)
    with pytest.raises(DataError, match="more: is a link to a folder"):
        open_source(special)


@pytest.mark.parametrize("name", ["fifo.jsonl", "*.jsonl"])
def test_pipes_and_devices_are_refused_by_name_too(tmp_path, name):
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(DataError, match=r"fifo\.jsonl: is no regular file"):
        open_source(tmp_path / name)
    with pytest.raises(DataError, match="/dev/zero: is no regular file"):
        open_source("/dev/zero")


def test_links_that_stay_inside_or_are_named_are_read(special):
    (special / "b.jsonl").symlink_to("a.jsonl")
    assert texts(special) == "aa"
    (special.parent / "link.txt").symlink_to("secret.txt")
    assert texts(special.parent / "link.txt") == "secret"


def test_the_cache_of_the_hub_consists_of_links(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    (snapshot / "data").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0f").write_text('{"text": "a"}')
    (snapshot / "data" / "rows.jsonl").symlink_to("../../../blobs/0f")
    assert texts(snapshot) == texts(snapshot / "data") == "a"


ODD_NAMES = ["~nosuch", "~\ud800", "\ud800.jsonl", "a\0b", "x" * 256, "x/" * 3000, "é" * 200]
ODD_NAMES += ["~nosuch/a.jsonl", "*" * 300, "\ud800*", "~nosuch/*.csv", "?" * 5, "::"]


def test_odd_names_are_refused_in_one_sentence():
    for name in ODD_NAMES:
        for look in (open_source, files.check_source):
            with pytest.raises(DataError) as caught:
                look(name)
            assert "\n" not in str(caught.value)
            str(caught.value).encode()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(files, "HUB_TIMEOUT_S", 0.1)
        yield silent


def test_a_bare_name_does_not_wait_for_the_hub(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "date").mkdir()
    started = time.monotonic()
    words = r"^data: no such file or folder; did you mean date\?; and the hub does not answer"
    with pytest.raises(DataError, match=words):
        files.check_source("data")
    assert time.monotonic() - started < 1
    with pytest.raises(DataError, match=r"^owner/name: no such file or folder, and no folder "):
        files.check_source("owner/name")
    assert time.monotonic() - started < 2
    for place in ("datasets/owner___name", "hub/datasets--owner--other-name"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files.check_source("owner/Name:test")
    files.check_source("owner/other-name")
    with pytest.raises(DataError, match=r"no such: no such file .* no data set of the hub"):
        files.check_source("no such")
