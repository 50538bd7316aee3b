"""Reading files, folders and data sets of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.sources import TEXT_PIECE_BYTES, open_source, parse_hub_spec
from megatrain.errors import DataError


def values(path: Path | str) -> list[Any]:
    return [row.value for row in open_source(path).read()]


def places(path: Path | str) -> list[str]:
    return [row.where.rsplit("/", 1)[-1] for row in open_source(path).read()]


def test_jsonl_lines_are_counted_over_blank_ones(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "c"}')
    assert values(file) == [{"text": "a\u2028b"}, {"text": "c"}]
    assert places(file) == ["a.jsonl:1", "a.jsonl:4"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [(b'{"a": ', "broken JSON at column"), (b"\xff\xfe", "not UTF-8"), (b"[" * 100_000, "JSON"), (b"1" * 10_000, "unreadable JSON")],
)
def test_a_broken_line_is_one_bad_row(tmp_path: Path, line: bytes, problem: str):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n" + line + b"\n{}\n")
    rows = list(open_source(file).read())
    assert [row.problem is None for row in rows] == [True, False, True]
    assert problem in str(rows[1].problem)
    assert rows[1].where == f"{file}:2"


@pytest.mark.parametrize("text", ['[{"a": 1}, {"a": 2}]', '{"data": [{"a": 1}, {"a": 2}]}', '{"a": 1}\n{"a": 2}\n'])
def test_json_in_its_three_shapes(tmp_path: Path, text: str):
    file = tmp_path / "a.json"
    file.write_text(text)
    assert values(file) == [{"a": 1}, {"a": 2}]


def test_one_json_object_is_one_row(tmp_path: Path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"text": "x"}, indent=2))
    assert values(file) == [{"text": "x"}]


@pytest.mark.parametrize("text", ["[1, 2", '"x"', "", "\ud800", "[" * 100_000])
def test_broken_json_file_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "a.json"
    file.write_text(text, errors="surrogatepass")
    with pytest.raises(DataError, match=r"a\.json"):
        values(file)


def test_text_pieces_join_to_the_file(tmp_path: Path):
    file = tmp_path / "a.txt"
    text = "".join(f"line {n}\n\n" for n in range(3000))
    file.write_text(text)
    rows = list(open_source(file).read())
    assert "".join(row.value["text"] for row in rows) == text  # type: ignore[index]
    assert [row.begins for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.ends for row in rows] == [False] * (len(rows) - 1) + [True]
    assert len(rows) == -(-len(text) // TEXT_PIECE_BYTES)
    assert rows[1].where == f"{file}:{rows[0].value['text'].count(chr(10)) + 1}"  # type: ignore[index]


def test_csv_and_parquet(tmp_path: Path):
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    (tmp_path / "a.csv").write_text('instruction,input,output\n"two\nlines",,yes\na,b,c\n')
    assert values(tmp_path / "a.csv") == [{"instruction": "two\nlines", "output": "yes"}, {"instruction": "a", "input": "b", "output": "c"}]
    assert places(tmp_path / "a.csv") == ["a.csv:3", "a.csv:4"]
    rows = [{"messages": [{"role": "user", "content": "é"}]}] * 3
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert values(tmp_path / "a.parquet") == rows
    assert places(tmp_path / "a.parquet")[2] == "a.parquet row 3"
    (tmp_path / "b.parquet").write_bytes(b"PAR1nonsense")
    with pytest.raises(DataError, match="broken Parquet"):
        values(tmp_path / "b.parquet")
    (tmp_path / "b.csv").write_text("a,b\n1,2,3\n")
    assert [row.problem for row in open_source(tmp_path / "b.csv").read()] == ["more fields than the header has"]


def test_a_folder_is_its_files_in_order(tmp_path: Path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.json").write_text('[{"n": 1}]')
    (tmp_path / ".hidden.jsonl").write_text('{"n": 3}\n')
    (tmp_path / "notes.md").write_text("not data")
    assert values(tmp_path) == [{"n": 1}, {"n": 2}]


def test_missing_and_unknown_files_are_refused(tmp_path: Path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"no such file; did you mean .*train\.jsonl"):
        open_source(tmp_path / "trian.jsonl")
    (tmp_path / "x.pkl").write_text("")
    with pytest.raises(DataError, match="unknown type"):
        open_source(tmp_path / "x.pkl")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data files"):
        open_source(tmp_path / "empty")


def test_identity_follows_the_file(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    before = open_source(file).identity
    assert open_source(file).identity == before
    file.write_text("{}\n{}\n")
    assert open_source(file).identity != before


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name:test", ("org/name", None, "test")),
        ("org/name:main:train[:1%]", ("org/name", "main", "train[:1%]")),
        ("org/name:train[10:20]", ("org/name", None, "train[10:20]")),
    ],
)
def test_hub_specs(spec: str, parsed: tuple[str, str | None, str | None]):
    assert parse_hub_spec(spec) == parsed


def test_hub_rows_and_failures(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[Any] = []

    def load(name: str, config: str | None, split: str) -> datasets.Dataset:
        asked.append((name, config, split))
        return datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert values("org/name:main:test") == [{"text": "a"}, {"text": "b"}]
    assert asked == [("org/name", "main", "test")]

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"org/name: neither a local file nor .*: Couldn't reach the Hub$"):
        open_source("org/name")
    with pytest.raises(DataError, match="expected a file, a folder, or a data set"):
        open_source("a:b:c:d")
