"""Reading data files: JSON, text, CSV, Parquet and Arrow, whole and broken."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import socket
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from huggingface_hub import constants
from pyarrow import ipc, parquet

from megatrain.data import files
from megatrain.data.files import TABLE_ROWS, TEXT_PIECE_BYTES
from megatrain.data.sources import open_source
from megatrain.errors import DataError


def values(path: Path | str) -> list[Any]:
    return [row.value for row in open_source(path).read()]


def places(path: Path | str) -> list[str]:
    return [row.where.rsplit("/", 1)[-1] for row in open_source(path).read()]


def test_jsonl_lines_are_counted_over_blank_ones(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "c"}')
    assert values(file) == [{"text": "a\u2028b"}, {"text": "c"}]
    assert places(file) == ["a.jsonl:1", "a.jsonl:4"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"a": ', "broken JSON at column"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "JSON"),
        (b"1" * 10_000, "unreadable JSON"),
        (b'{"a": [{"b": 1, "b": 2}]}', "unreadable JSON: the key 'b' is twice in one object"),
    ],
)
def test_a_broken_line_is_one_bad_row(tmp_path, line, problem):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"{}\n" + line + b"\n{}\n")
    rows = list(open_source(file).read())
    assert [row.problem is None for row in rows] == [True, False, True]
    assert problem in str(rows[1].problem)
    assert rows[1].where == f"{file}:2"


TWO = '[{"a": 1}, {"a": 2}]'
JSON_ROWS = {
    TWO: [{"a": 1}, {"a": 2}],
    f'{{"data": {TWO}}}': [{"a": 1}, {"a": 2}],
    '{"a": 1}\n{"a": 2}\n': [{"a": 1}, {"a": 2}],
    '{\n  "text": "x"\n}': [{"text": "x"}],
    '{"version": 1, "data": [{"a": 1}], "test": []}': [{"a": 1}],
}
JSON_BROKEN = {
    **dict.fromkeys(["[1, 2", '"x"', "", "\ud800", "[" * 100_000], r"a\.json"),
    f'{{"data": {TWO}, "test": {TWO}}}': r"has several lists \(data, test\)",
}


def test_a_json_file_in_its_shapes(tmp_path):
    file = tmp_path / "a.json"
    for text, rows in JSON_ROWS.items():
        file.write_text(text)
        assert values(file) == rows
    for text, words in JSON_BROKEN.items():
        file.write_text(text, errors="surrogatepass")
        with pytest.raises(DataError, match=words):
            values(file)


def test_text_pieces_join_to_the_file(tmp_path):
    file = tmp_path / "a.txt"
    text = "".join(f"line {n}\n\n" for n in range(3000))
    file.write_text(text)
    rows = list(open_source(file).read())
    assert "".join(row.value["text"] for row in rows) == text  # type: ignore[index]
    assert [row.begins for row in rows] == [True] + [False] * (len(rows) - 1)
    assert [row.ends for row in rows] == [False] * (len(rows) - 1) + [True]
    assert len(rows) == -(-len(text) // TEXT_PIECE_BYTES)
    assert rows[1].where == f"{file}:{rows[0].value['text'].count(chr(10)) + 1}"  # type: ignore[index]
    file.write_text("x" * TEXT_PIECE_BYTES + "\n\n\n")
    assert len(values(file)) == 1, "no piece is blank"


def test_csv_rows_are_texts(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text('instruction,input,output\n"two\nlines",,yes\na,b,c\n')
    first, second = values(file)
    assert first == {"instruction": "two\nlines", "output": "yes"}
    assert second == {"instruction": "a", "input": "b", "output": "c"}
    assert places(file) == ["a.csv:3", "a.csv:4"]
    file.write_text("prompt,completion\n001,1e5\nNA,None\nTrue,2024-01-01\n")
    cells = [cell for row in values(file) for cell in row.values()]
    assert cells == ["001", "1e5", "NA", "None", "True", "2024-01-01"]


def test_what_a_csv_has_too_much_is_not_dropped(tmp_path):
    (tmp_path / "a.csv").write_text("a,b\n1,2,3\n4,5\n")
    problems = [row.problem for row in open_source(tmp_path / "a.csv").read()]
    assert problems == ["more fields than the header has", None]
    (tmp_path / "a.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(DataError, match=r"a\.csv:1: the header has the column 'a' twice; keep one"):
        values(tmp_path / "a.csv")


def write_parquet(rows: arrow.Table, path: Path) -> None:
    parquet.write_table(rows, path)


def write_arrow_file(rows: arrow.Table, path: Path) -> None:
    with ipc.new_file(path, rows.schema) as file:
        file.write_table(rows)


def write_arrow_stream(rows: arrow.Table, path: Path) -> None:
    with ipc.new_stream(path, rows.schema) as file:
        file.write_table(rows)


TABLES = {"a.parquet": write_parquet, "b.arrow": write_arrow_file, "c.arrow": write_arrow_stream}


@pytest.mark.parametrize(("name", "write"), TABLES.items(), ids=TABLES)
def test_tables(tmp_path, name, write):
    said, count = [{"role": "user", "content": "é"}], 2 * TABLE_ROWS + 1
    rows = [{"messages": said, "n": n} for n in range(count)]
    write(arrow.Table.from_pylist(rows), tmp_path / name)
    assert values(tmp_path / name) == rows
    assert places(tmp_path / name)[-1] == f"{name} row {count}"


@pytest.mark.parametrize(("name", "write"), TABLES.items(), ids=TABLES)
def test_a_table_that_is_cut_short_is_refused_in_one_sentence(tmp_path, name, write):
    file = tmp_path / name
    write(arrow.Table.from_pylist([{"text": "x" * 100}] * 100), file)
    whole = file.read_bytes()
    for size in (0, 3, 10, len(whole) // 2, len(whole) - 100):
        file.write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"^{file}: (broken|cannot be read).*[^\n]$") as caught:
            values(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "write"), TABLES.items(), ids=TABLES)
def test_flipped_bytes_of_a_table_are_rows_or_a_sentence(tmp_path, name, write):
    file, draw, sentences = tmp_path / name, random.Random(0), []
    write(arrow.Table.from_pylist([{"messages": [{"content": "é" * n}]} for n in range(50)]), file)
    whole = file.read_bytes()
    for _ in range(200):
        data = bytearray(whole)
        data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
        try:
            values(file)
        except DataError as error:
            sentences.append(str(error))
    assert len(sentences) > 50
    assert all(words.startswith(f"{file}: ") and "\n" not in words for words in sentences)


@pytest.mark.parametrize(
    ("name", "contents", "problem"),
    [
        ("a.csv", b'a,b\n"open,1\n', "broken CSV: unexpected end of data"),
        ("a.csv", b"a,b\n\xff,1\n", "not UTF-8"),
        ("a.parquet", b"PAR1nonsense", "broken Parquet after row 0: Parquet magic bytes"),
        ("a.arrow", b"ARROW1nonsense", "broken Arrow after row 0: "),
        ("a.arrow", b"a long text that is no table at all", "broken Arrow after row 0: "),
    ],
)
def test_broken_files_are_refused_in_one_sentence(tmp_path, name, contents, problem):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError) as caught:
        values(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: {problem}")
    assert "\n" not in str(caught.value)


def test_a_line_without_end_is_refused_before_it_is_all_read(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_BYTES", 1 << 20)
    for name in ("a.jsonl.gz", "a.txt.gz", "a.csv.gz", "a.tsv"):
        file, text = tmp_path / name, "text\n" if name[2] in "ct" else '{"text": "a"}\n'
        line = '"%s"' if "json" in name else "%s"
        contents = (text + line % ("a" * (1 << 25))).encode()
        file.write_bytes(gzip.compress(contents, 1) if name.endswith(".gz") else contents)
        tracemalloc.start()
        with pytest.raises(DataError, match=rf"^{file}:2: a line of over 1 MiB; a row's text"):
            values(file)
        assert tracemalloc.get_traced_memory()[1] < 12 << 20, name
        tracemalloc.stop()


def test_what_is_read_whole_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LINE_BYTES", 1 << 20)
    monkeypatch.setattr(files, "UNPACKED_BYTES", 0)
    table = arrow.table({"text": ["a", "b" * (2 << 20), "c"]})
    parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(b'[{"text": "a"}]'))
    (tmp_path / "a.json").write_text('[{"text": "a"}]')
    with pytest.raises(DataError, match=r"a\.parquet row 2: over 1 MiB; a row's text must be"):
        values(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.json\.gz: over 0 GiB unpacked; unpack it first"):
        values(tmp_path / "a.json.gz")
    assert values(tmp_path / "a.json") == [{"text": "a"}]


TYPES = ("jsonl", "ndjson", "json", "csv", "tsv", "parquet", "arrow", "txt", "md")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_has_the_same_rows(tmp_path, kind, packed):
    file, rows = tmp_path / f"a.{kind}", [{"text": "one, two"}, {"text": 'é "three"'}]
    if kind in ("txt", "md"):
        rows = rows[:1]
        file.write_text(rows[0]["text"])
    elif kind in ("csv", "tsv"):
        with file.open("w", newline="", encoding="utf-8") as lines:
            writer = csv.DictWriter(lines, ["text"], delimiter="\t" if kind == "tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif kind in ("parquet", "arrow"):
        write = write_parquet if kind == "parquet" else write_arrow_file
        write(arrow.Table.from_pylist(rows), file)
    else:
        whole, lines = json.dumps(rows), "\n".join(map(json.dumps, rows))
        file.write_text(whole if kind == "json" else lines)
    if packed:
        whole_file, file = file, tmp_path / f"a.{kind}.gz"
        file.write_bytes(gzip.compress(whole_file.read_bytes()))
    assert values(file) == rows
    if packed:
        file.write_bytes(file.read_bytes()[:-10])
        with pytest.raises(DataError, match=rf"^{file}: broken gzip file"):
            values(file)


# -- What a text names as data ---------------------------------------------------------------------


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
    words = r"^data: no such file or folder \(did you mean date\?\); and the hub does not answer"
    with pytest.raises(DataError, match=words):
        files.check_source("data")
    assert time.monotonic() - started < 5
    with pytest.raises(
        DataError, match=r"^owner/name: no such file or folder \(nor is there a folder "
    ):
        files.check_source("owner/name")
    assert time.monotonic() - started < 5
    for place in ("datasets/owner___name", "hub/datasets--owner--other-name"):
        (tmp_path / place).mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    files.check_source("owner/Name:test")
    files.check_source("owner/other-name")
    with pytest.raises(DataError, match=r"no such: no such file .* no data set of the hub"):
        files.check_source("no such")
