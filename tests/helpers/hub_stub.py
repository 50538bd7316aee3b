"""A hub on this machine: what `huggingface_hub` asks of it to publish a model, without Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock

import huggingface_hub.constants

TOKEN = "hf_this-is-secret"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)  # summaries


@dataclass
class Hub:
    """Its state, which tests look at and change.

    Attributes:
        owners: names that the token may write to; the first is its own.
        large: content by SHA-256, of which commits refer to what they have.
        asked: (method, path) of all requests, in order.
        put: names of the content that arrived whole, and bytes of each PUT as far as it came.
        break_put: whether a PUT of this many bytes is cut off when half of them are there.
        refuse: answers (status, words) in place of those to paths that contain its key.
    """

    url: str = ""
    token: str = TOKEN
    owners: tuple[str, ...] = ("me", "my-org")
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    put: list[str] = field(default_factory=list)
    break_put: Callable[[int], bool] = lambda nbytes: False
    ignored: tuple[str, ...] = ()  # by its .gitignore
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)


class Refused(Exception):
    def __init__(self, status: int, words: str, **more: str) -> None:
        self.status, self.answer = status, {"error": words, **more}


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(self.info)

    def do_POST(self) -> None:
        self.answer(self.posted)

    def do_PUT(self) -> None:
        path, nbytes = self.path.split("?")[0], int(self.headers["Content-Length"])
        self.hub.asked.append(("PUT", path))
        assert "Authorization" not in self.headers, "storage is somebody else's"
        if self.hub.break_put(nbytes):
            self.rfile.read(nbytes // 2)
            self.close_connection = True
            self.connection.close()
            return
        content, oid = self.rfile.read(nbytes), path.rsplit("/", 1)[1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.large[oid] = content
        self.hub.put.append(oid)
        self.send(200, {})

    def answer(self, find: Callable[[str], Any]) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.split("?")[0]
        self.hub.asked.append((self.command, path))
        try:
            for part, refusal in self.hub.refuse.items():
                if part in path:
                    raise Refused(*refusal)
            if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                raise Refused(401, "Invalid username or password.")
            self.body = body
            self.send(200, find(path))
        except Refused as error:
            self.send(error.status, error.answer)

    def send(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def repository(self, name: str) -> Repository:
        if name not in self.hub.repositories:
            raise Refused(404, "Repository not found")
        return self.hub.repositories[name]

    def info(self, path: str) -> Any:
        name = "/".join(path.removeprefix("/api/models/").split("/")[:2])
        repo = self.repository(name)
        siblings = [{"rfilename": file} for file in sorted(repo.files)]
        sha = sha_of(repo)
        return {"id": name, "private": repo.private, "siblings": siblings, "sha": sha}

    def posted(self, path: str) -> Any:
        if path == "/api/repos/create":
            return self.create(json.loads(self.body))
        if path == "/api/validate-yaml":
            return {"warnings": [], "errors": []}
        if path.endswith("/info/lfs/objects/batch"):
            return {"objects": list(map(self.lfs_object, json.loads(self.body)["objects"]))}
        owner, name, action, _ = path.removeprefix("/api/models/").split("/")
        repo = self.repository(f"{owner}/{name}")
        if owner not in self.hub.owners:
            raise Refused(403, "You don't have the required permissions to push to this repo")
        if action == "preupload":
            return {"files": [self.upload(repo, file) for file in json.loads(self.body)["files"]]}
        assert action == "commit", path
        return self.commit(f"{owner}/{name}", repo)

    def create(self, asked: dict[str, Any]) -> Any:
        owner = asked["organization"] or self.hub.owners[0]
        name = f"{owner}/{asked['name']}"
        url = f"{self.hub.url}/{name}"
        if owner not in self.hub.owners:
            words = f'You don\'t have the rights to create a model under the namespace "{owner}"'
            raise Refused(403, words)
        if name in self.hub.repositories:
            raise Refused(409, "You already created this model repo", url=url)
        private = asked.get("private", asked.get("visibility") == "private")
        self.hub.repositories[name] = Repository(bool(private))
        return {"url": url}

    def upload(self, repo: Repository, file: dict[str, Any]) -> Any:
        name = file["path"]
        mode = "lfs" if name.endswith(".safetensors") else "regular"
        ignored = name in self.hub.ignored
        return {"path": name, "uploadMode": mode, "shouldIgnore": ignored, "oid": None}

    def lfs_object(self, file: dict[str, Any]) -> Any:
        if file["oid"] in self.hub.large:
            return file
        href = f"{self.hub.url}/storage/{file['oid']}?X-Amz-Signature=signed-with-a-secret"
        return {**file, "actions": {"upload": {"href": href}}}

    def commit(self, name: str, repo: Repository) -> Any:
        files = dict(repo.files)
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                repo.commits.append(value["summary"])
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            else:
                assert entry["key"] == "deletedFile"
                del files[value["path"]]
        repo.files = files
        sha = sha_of(repo)
        return {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha}


def sha_of(repo: Repository) -> str:
    return hashlib.sha1(repr(repo.commits).encode()).hexdigest()


@contextmanager
def local_hub() -> Iterator[Hub]:
    """Inside, the hub is this one and HF_TOKEN its token; Xet, which it cannot speak, is off."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    constants: dict[str, Any] = {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False}
    try:
        with (
            mock.patch.multiple(huggingface_hub.constants, **constants, HF_HUB_DISABLE_XET=True),
            mock.patch.dict("os.environ", {"HF_TOKEN": TOKEN}),
            mock.patch("huggingface_hub.utils._http.time.sleep"),  # before a retry
        ):
            yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
