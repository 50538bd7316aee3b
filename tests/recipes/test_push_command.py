"""megatrain push: what arrives at a hub on this machine, and what is said where nothing can."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import megatrain as mt
from megatrain.errors import ConfigError
from megatrain.storage.hashed_file import write_bytes
from megatrain.storage.manifest import Manifest, describe_files, read_manifest
from megatrain.storage.passthrough import as_stored
from megatrain.storage.safetensors import open_shards, plan_shards
from megatrain.storage.sharded_write import write_model
from tests.helpers.files import flip
from tests.helpers.hub_stub import TOKEN, Hub, local_hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>'")  # of the hub's library
LOG_IN = "run `hf auth login`, or set HF_TOKEN"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with local_hub() as hub:
        yield hub


@pytest.fixture(autouse=True)
def nobody_learns_the_token(capfd: pytest.CaptureFixture[str], project: Path) -> Iterator[None]:
    yield
    logs = "".join(path.read_text() for path in project.rglob("*.log"))
    said = "".join(capfd.readouterr()) + logs
    assert TOKEN not in said and "signed-with-a-secret" not in said


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != "MANIFEST.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


@pytest.mark.slow
def test_what_arrives_is_final_byte_for_byte(megatrain, finished, hub):
    done = megatrain("push run me/model")
    assert done.out == f"{hub.url}/me/model\n"
    repo = hub.repositories["me/model"]
    assert repo.files == contents(finished / "final")
    assert {"README.md", "model.safetensors", "chat_template.jinja"} < repo.files.keys()
    assert not repo.private
    assert len(repo.commits) == 1
    assert TOKEN not in done.out + done.err


def test_a_run_uploads_while_it_goes_on_and_at_its_end(megatrain, project, hub):
    keys = ("checkpoint.push_to=me/live", "checkpoint.push_every=2", "train.max_steps=4")
    said = megatrain("train cfg.yaml checkpoint.keep=1 data.eval=null", *keys).err
    repo = hub.repositories["me/live"]
    assert repo.private and len(repo.commits) in (2, 3), "one may come while another is under way"
    assert repo.files == contents(project / "run/final")
    assert "run/checkpoint-2 is uploaded to" in said and "run/final is uploaded to" in said
    assert not (project / "run/uploading").exists()
    hub.refuse["/api/models/me/live/commit"] = (500, "Broken")
    lost = megatrain("train cfg.yaml output=second data.eval=null", *keys).err
    assert "warning: second/final is not uploaded: me/live: the upload failed" in lost
    theirs = [key.replace("me/live", "theirs/live") for key in keys]
    assert (
        "theirs/live: the hub refuses it"
        in megatrain("train cfg.yaml output=no", *theirs, code=2).err
    )


def test_private_arrives_with_the_repository(megatrain, finished, hub):
    for owner in ["", "my-org/"]:
        done = megatrain(f"push run {owner}model --private --json").json
        name = f"{owner or 'me/'}model"
        assert hub.repositories[name].private
        assert done["url"] == f"{hub.url}/{name}"
        assert done["private"] is True
        assert sorted(done["files"]) == sorted(hub.repositories[name].files)
        assert done.keys() == {"url", "commit", "files", "bytes", "private", "removed"}
        assert done["bytes"] == sum(map(len, hub.repositories[name].files.values()))


def test_private_is_refused_for_a_repository_that_is_public(megatrain, finished, hub):
    megatrain("push run me/model")
    hub.asked.clear()
    error = megatrain("push run me/model --private", code=2).err
    assert "is there and public" in error and "/me/model/settings" in error
    assert not any("commit" in path or "storage" in path for _, path in hub.asked)


def test_pushed_again_only_what_changed_is_sent(megatrain, copied, hub):
    megatrain("push run me/model")
    card = copied / "final" / "README.md"
    card.write_text("---\ntags: [mine]\n---\nmine\n")
    done = megatrain("push run me/model")
    assert "README.md: was edited; it is uploaded as it is" in done.err
    assert hub.repositories["me/model"].files["README.md"] == card.read_bytes()
    assert len(hub.put) == 1
    card.unlink()
    said = megatrain("push run me/other").err
    assert "README.md: is gone; the model is uploaded without a card" in said
    assert hub.repositories["me/other"].files == contents(copied / "final")


def test_what_else_lies_there_is_named_and_stays(megatrain, copied, hub):
    final = copied / "final"
    (final / ".env").write_text("SECRET=1")
    (final / "notes").mkdir()
    (final / "notes" / "mine.txt").write_text("mine")
    said = megatrain("push run me/model").err
    for name in (".env", "notes/mine.txt"):
        assert f"{name}: is no part of the model; it is not uploaded" in said
    assert hub.repositories["me/model"].files.keys() == contents(final).keys() - {
        ".env",
        "notes/mine.txt",
    }


def test_optimizer_state_is_never_uploaded(megatrain, project, trained_once, hub):
    whole = trained_once("train.max_steps=1", "checkpoint.final=full")
    run = Path(shutil.copytree(whole / "run", project / "run", symlinks=True))
    said = megatrain("push run me/model").err
    for name in ("optimizer", "state.json"):
        assert said.count(f"{name}: is no part of the model") == 1
    arrived = hub.repositories["me/model"].files
    assert {"config.json", "model.safetensors", "tokenizer.json"} < arrived.keys()
    assert not any("optimizer" in name or "state" in name for name in arrived)
    (run / "final" / "MANIFEST.json").unlink()
    said = megatrain("push run me/model", code=7).err
    assert "final: has no MANIFEST.json" in said and "`megatrain resume run` writes it" in said


def test_a_changed_file_stops_it_before_anything_is_sent(megatrain, copied, hub):
    name = "tokenizer.json"
    flip(copied / "final" / name)
    said = megatrain("push run me/model", code=7).err
    assert f"final/{name}: does not match its checksum" in said
    assert hub.asked == []
    megatrain("push run me/model --no-verify")
    assert hub.repositories["me/model"].files == contents(copied / "final")


def test_a_file_that_would_be_read_and_does_not_belong_stops_it(megatrain, copied, hub):
    for name in ("model-00009-of-00009.safetensors", "tokenizer.model", "code.py"):
        path = copied / "final" / name
        path.write_text("x")
        assert f"{name}: does not belong" in megatrain("push run me/model", code=7).err
        path.unlink()
    assert hub.asked == []


def test_weights_of_a_model_before_do_not_stay_beside_it(megatrain, finished, hub):
    megatrain("push run me/model")
    repo = hub.repositories["me/model"]
    mine = {"notes.md": b"mine", "onnx/model.safetensors": b"another", "code.py": b"code"}
    stale = ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "vocab.json")
    repo.files |= mine | dict.fromkeys(stale, b"old")
    done = megatrain("push run me/model --json")
    assert repo.files == contents(finished / "final") | mine
    assert sorted(stale) == sorted(done.json["removed"])
    for name in stale:
        assert f"{name}: was removed from {hub.url}/me/model" in done.err


@pytest.fixture
def sharded(copied: Path) -> Path:
    """A run whose final model has several shards."""
    final = copied / "final"
    sources = [as_stored(tensor) for tensor in open_shards(final).values()]
    write_model(final, plan_shards(sources, shard_bytes=20000), {"format": "pt", "step": "10"})
    (final / "model.safetensors").unlink()
    before = read_manifest(final)
    files = {file.name: file for file in describe_files(final, contents(final))}
    write_bytes(final / "MANIFEST.json", Manifest(10, before.sequence, files).encode())
    return copied


def shards_of(run: Path) -> list[Path]:
    return sorted((run / "final").glob("model-*.safetensors"))


def test_an_upload_that_failed_goes_on_without_what_arrived(megatrain, sharded, hub):
    shards = shards_of(sharded)
    largest = max(path.stat().st_size for path in shards)
    hub.break_put = largest.__eq__
    said = megatrain("push run me/model", code=7).err
    assert "the upload failed" in said and "what has arrived is not sent again" in said
    assert hub.repositories["me/model"].files == {}, "one commit, at the end"
    there = set(hub.put)
    assert there
    hub.break_put = lambda nbytes: False
    megatrain("push run me/model")
    assert hub.repositories["me/model"].files == contents(sharded / "final")
    assert len(hub.put) == len(set(hub.put)) == len(shards)


REFUSALS = {
    "create": (401, "Invalid username or password.", 2, ("the token may write", LOG_IN)),
    "preupload": (403, "Forbidden: read only token.", 2, ("the token may write there", LOG_IN)),
    "commit": (409, "Conflict: main has moved.", 7, ("the upload failed", "run the command again")),
    "info/lfs": (403, "Storage is full", 2, ("the hub refuses it (Storage is full); check",)),
    "validate-yaml": (400, "Bad", 2, ("the hub refuses it (Invalid metadata in README.md",)),
    "repos/create": (402, "Pay.", 2, ("the hub refuses it (Pay); check the name",)),
    "/api/models/me/model": (500, "Oops", 7, ("the upload failed", "Oops")),
}


@pytest.mark.slow
@pytest.mark.parametrize("part", REFUSALS)
def test_what_the_hub_refuses_is_one_sentence(megatrain, finished, hub, part):
    status, words, code, expected = REFUSALS[part]
    hub.refuse[part] = status, words
    said = megatrain("push run me/model", code=code).err
    assert said.startswith("error: me/model: ") and said.count("\n") == 1
    assert [one for one in expected if one not in said] == []
    assert words.rstrip(".") in said or part == "validate-yaml"
    assert hub.repositories.get("me/model") is None or not hub.repositories["me/model"].files


def test_a_token_that_can_be_none_is_not_sent(megatrain, finished, hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(Path.cwd() / "none"))
    for token in ("", f"{TOKEN}\x01", f"{TOKEN} x", f"{TOKEN}é"):
        monkeypatch.setenv("HF_TOKEN", token)
        assert LOG_IN in megatrain("push run me/model --debug", code=2).err
    assert hub.asked == []


def test_a_name_that_can_be_none_is_refused(megatrain, finished, hub):
    for name in ["", "a/b/c", "my model", "me/model.git", "-x/y"]:
        said = megatrain("push", "run", "--", name, code=2).err
        assert f"{name!r}: cannot be a name on the hub" in said
        assert hub.asked == []


def test_a_run_that_has_not_finished_is_told_how_to(megatrain, killed, hub):
    said = megatrain("push run me/model", code=2).err
    assert "run: has no final/" in said and "`megatrain resume run` finishes" in said
    assert "nothing: no such folder" in megatrain("push nothing me/model", code=2).err
    assert hub.asked == []


def test_a_hub_that_cannot_be_reached(megatrain, finished, hub):
    with pytest.MonkeyPatch.context() as patch:  # undone before the hub's own
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        said = megatrain("push run me/model", code=7).err
        assert "http://127.0.0.1:9 cannot be reached; check the network" in said
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert "HF_HUB_OFFLINE" in megatrain("push run me/model", code=2).err


def test_what_the_repository_ignores_is_not_said_to_be_there(megatrain, finished, hub):
    hub.ignored = ("model.safetensors",)
    said = megatrain("push run me/model", code=7).err
    assert "the hub left out model.safetensors" in said and ".gitignore" in said


def test_in_python(finished, hub):
    done = mt.push(finished, "me/model", private=True)
    assert (done.url, done.private) == (f"{hub.url}/me/model", True)
    with pytest.raises(ConfigError, match="cannot be a name"):
        mt.push(finished, "me//model")
