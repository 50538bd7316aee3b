"""Finding rows: files, folders, splits, data sets saved, given or of the hub, and lists."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest

from megatrain.data.sources import Part, open_source
from megatrain.errors import DataError


def values(given: Any, split: str | None = None) -> list[Any]:
    return [row.value for row in open_source(given, split).read()]


def texts(given: Any, split: str | None = None) -> str:
    return "".join(row["text"] for row in values(given, split))


def rows_of(letters: str) -> list[dict[str, str]]:
    return [{"text": letter} for letter in letters]


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.json").write_text('[{"n": 1}]')
    (tmp_path / ".hidden.jsonl").write_text('{"n": 3}\n')
    (tmp_path / "notes.md").write_text("not data")
    assert values(tmp_path) == [{"n": 1}, {"n": 2}]


def test_missing_and_unknown_files_are_refused(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    (tmp_path / "x.pkl").write_text("")
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("trian.jsonl", r"no such file .did you mean .*train\.jsonl"),
        ("x.pkl", "unknown type"),
        ("empty", "no data files"),
    ):
        with pytest.raises(DataError, match=words):
            open_source(tmp_path / name)


def test_identity_follows_the_file(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    before = open_source(file).identity
    assert open_source(file).identity == before
    file.write_text("{}\n{}\n")
    assert open_source(file).identity != before


def test_hub_rows_and_failures(monkeypatch):
    load = Mock(return_value=datasets.Dataset.from_list(rows_of("ab")))
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert texts("org/name:main:test") == "ab"
    load.assert_called_once_with("org/name", "main", split="test")
    load.side_effect = ConnectionError("Couldn't reach the Hub\nlong story")
    words = r"org/name: neither a local file nor .*: Couldn't reach the Hub$"
    with pytest.raises(DataError, match=words):
        open_source("org/name")
    with pytest.raises(DataError, match="expected a file, a folder, or a data set"):
        open_source("a:b:c:d")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("local data needs no network"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """`one` holds a Dataset, `both` and `only` a DatasetDict."""
    train, test = (datasets.Dataset.from_list(rows_of(letters)) for letters in ("abcde", "xy"))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "both")
    datasets.DatasetDict(validation=test).save_to_disk(tmp_path / "only")
    return tmp_path


@pytest.mark.usefixtures("no_network")
def test_saved_data_sets(saved):
    for name, split, expected in [
        ("one", None, "abcde"),
        ("one", "train", "abcde"),
        ("one", "train[:2]", "ab"),
        ("both", None, "abcde"),
        ("both", "test", "xy"),
        ("both:test", None, "xy"),
        ("both:test", "test", "xy"),
        ("both/test", None, "xy"),
        ("both", "train[-40%:]+test", "dexy"),
        ("both:train[1:2]", None, "b"),
        ("only", None, "xy"),
        ("only", "validation", "xy"),
    ]:
        assert texts(f"{saved}/{name}", split) == expected
        places = [row.where for row in open_source(f"{saved}/{name}", split).read()]
        assert places == [f"{saved}/{name} row {number}" for number in range(1, len(expected) + 1)]


def test_splits_that_a_saved_set_lacks_are_refused(saved):
    for name, split, reason in [
        ("one", "test", r"one: split 'test': Unknown split \"test\". Should be one of \['train'\]"),
        ("both", "valid", r"both: split 'valid': Unknown split"),
        ("only", "train", r"only: split 'train': Unknown .* Should be one of \['validation'\]"),
        ("both", "train[:", r"both: split 'train\[:': Unrecognized instruction format"),
        ("both:test", "train", r"data\.split says 'train'; name the split once"),
        ("both:x:test", None, "has splits only, no configurations"),
    ]:
        with pytest.raises(DataError, match=reason):
            open_source(f"{saved}/{name}", split)


@pytest.mark.parametrize("broken", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
@pytest.mark.parametrize("contents", [b"{", None, b""])
def test_broken_saved_sets_are_refused_in_one_sentence(saved, broken, contents):
    file = saved / "both" / "train" / broken
    file.write_bytes(contents) if contents is not None else file.unlink()
    with pytest.raises(DataError) as caught:
        values(saved / "both")
    assert str(caught.value).startswith(f"{saved}/both: broken folder of save_to_disk: ")
    assert "\n" not in str(caught.value)


def test_a_saved_set_whose_rows_are_cut_short_is_refused(saved):
    file = saved / "one" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:-150])
    with pytest.raises(DataError, match=rf"^{saved}/one: broken [^\n]*$"):
        values(saved / "one")


def test_the_identity_of_saved_sets_follows_their_rows(saved):
    def identity(split: str) -> str:
        return open_source(saved / "both", split).identity

    before = identity("train"), identity("test")
    assert before == (identity("train"), identity("test"))
    assert len({*before, identity("train[:2]"), identity("train[:3]")}) == 4
    changed = datasets.Dataset.from_list(rows_of("abcdf"))
    datasets.DatasetDict(train=changed).save_to_disk(saved / "both")
    assert identity("train") not in before


@pytest.fixture
def split_files(tmp_path: Path) -> Path:
    for name in ("train.jsonl", "data/train-00001.jsonl", "test_set.jsonl", "other.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name[0]}) + "\n")
    return tmp_path


def test_files_of_a_split(split_files):
    for name, split, expected in [
        ("", None, "dt"),
        ("", "train", "dt"),
        ("", "test", "t"),
        (":train", None, "dt"),
        ("/other.jsonl", "train", "o"),
        ("/train.jsonl", "train", "t"),
    ]:
        assert texts(f"{split_files}{name}", split) == expected


def notes(given: Any, split: str | None = None) -> list[str]:
    return list(open_source(given, split).notes)


def test_what_is_read_of_a_folder_is_said(split_files):
    (split_files / "notes.md").write_text("about the data")
    assert notes(split_files) == [
        f"{split_files}: 1 files that hold no rows are not read: notes.md",
        f"{split_files}: split 'train' of train, test, 2 of 4 files",
    ]


def test_names_of_splits_are_read_in_whatever_letters(tmp_path):
    for name in ("Train-1", "TRAIN-2", "Test", "dev"):
        (tmp_path / f"{name}.txt").write_text(name)
    said = f"{tmp_path}: split 'train' of train, test, validation, 2 of 4 files"
    assert (texts(tmp_path), notes(tmp_path)) == ("TRAIN-2Train-1", [said])
    assert texts(f"{tmp_path}:test") == "Test"
    assert texts(tmp_path, "validation") == "dev"


def test_names_of_folders_go_before_those_of_files(tmp_path):
    for name in ("Train/about-tests.txt", "dev/train.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    (tmp_path / "mytest.txt").write_text("no split's")
    assert texts(tmp_path) == "Train/about-tests.txt"
    assert texts(tmp_path, "validation") == "dev/train.txt"


def test_files_that_name_no_split_are_train(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name[0]}) + "\n")
    assert texts(tmp_path, "train") == texts(tmp_path) == "ab"
    assert notes(tmp_path) == []
    (tmp_path / "test.jsonl").write_text('{"text": "t"}\n')
    for split in ("train", None):
        with pytest.raises(DataError, match="no file of split 'train'; its splits are test"):
            open_source(tmp_path, split)
    assert texts(tmp_path, "test") == "t"


@pytest.mark.parametrize("split", ["test", "train[:1]"])
def test_files_that_have_no_splits_refuse_one(tmp_path, split):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(DataError, match="has no splits"):
        open_source(tmp_path, split)
    with pytest.raises(DataError, match=r"a\.jsonl: a file has no split "):
        open_source(tmp_path / "a.jsonl", split)


def test_files_without_the_split_are_refused(split_files):
    for name, split, splits in [
        ("", "validation", "train, test"),
        ("", "train[:1]", "train, test"),
        ("/data", "test", "train"),
    ]:
        words = rf"no file of split '.*'; its splits are {splits}; name one"
        with pytest.raises(DataError, match=words):
            open_source(f"{split_files}{name}", split)


CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: data/test-*}
- config_name: small
  data_files: [{split: train, path: data/small.parquet}]
---
"""


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("card", ["", CARD], ids=["by name", "by card"])
def test_a_folder_in_the_layout_of_the_hub_has_splits(tmp_path, card):
    (tmp_path / "data").mkdir()
    for name, count in {"train-0": 60, "train-1": 40, "test-0": 20, "small": 5}.items():
        rows = datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in range(count)])
        rows.to_parquet(tmp_path / "data" / f"{name}.parquet")
    (tmp_path / "README.md").write_text(card)
    for split, count in ((None, 100), ("train", 100), ("test", 20)):
        found = values(tmp_path, split)
        assert len(found) == count
        assert all(row["text"].startswith(split or "train") for row in found)
    assert "split 'train' of train, test, 2 of 4 files" in notes(tmp_path)[-1]
    if card:
        assert len(values(f"{tmp_path}:small:train")) == 5


def test_a_glob_is_its_files(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "x.md").write_text("said")
    assert texts(f"{tmp_path}/*.jsonl") == "abc"
    assert texts(f"{tmp_path}/[ab].json?") == "ab"
    assert texts(f"{tmp_path}/*.md") == "said"
    with pytest.raises(DataError, match="no file matches"):
        open_source(f"{tmp_path}/*.csv")


def test_a_list_is_its_sources_one_after_the_other(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}) + "\n")
    parts = [Part(f"{tmp_path}/b.jsonl"), Part(f"{tmp_path}/*.jsonl"), Part(f"{tmp_path}/a.jsonl")]
    assert texts(parts) == "baba"
    assert len({open_source(parts[:n]).identity for n in (1, 2, 3)}) == 3
    assert [row.part for row in open_source(parts).read()] == [0, 1, 1, 2]


def test_rows_may_be_given(tmp_path):
    rows = rows_of("abc")
    given = datasets.Dataset.from_list(rows)
    assert values(rows) == values(tuple(rows)) == values(given) == rows
    assert texts(given, "train[1:]") == "bc"
    assert texts(datasets.DatasetDict(train=given, test=given.select([0])), "test") == "a"
    assert [row.where for row in open_source(rows).read()][2] == "list row 3"
    assert [row.where for row in open_source(given).read()][2] == "Dataset row 3"


def test_given_rows_are_python_values_whatever_their_format():
    rows = [{"messages": [{"role": "user", "content": "a"}], "n": 1}]
    given = datasets.Dataset.from_list(rows)
    assert values(given.with_format("numpy")) == rows
    upper = given.with_transform(lambda batch: {"text": [np.str_("seen")]})
    assert values(upper) == [{"text": "seen"}]


def test_the_identity_of_given_rows_follows_them():
    one, two = rows_of("abc"), rows_of("abd")
    for make in (list, datasets.Dataset.from_list):
        assert open_source(make(one)).identity == open_source(make(one)).identity
        assert open_source(make(one)).identity != open_source(make(two)).identity


def test_other_things_are_refused():
    given: Any
    for given in [5, None, {"text": "a"}, iter([]), np.zeros(3), b"rows.jsonl"]:
        words = rf"expected a file, .* or a list of rows, not {type(given).__name__}"
        with pytest.raises(DataError, match=words):
            open_source(given)


def test_a_list_has_no_splits():
    with pytest.raises(DataError, match=r"a list of rows has no splits; remove data\.split: test"):
        open_source(rows_of("a"), "test")
