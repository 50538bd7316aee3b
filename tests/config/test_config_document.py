"""Reading YAML: the rules for plain values, lines, and broken files."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain.config.document import plain, read_text, read_yaml, write_yaml
from megatrain.errors import ConfigError

TEXTS = ["1:30", "no", "on", "2024-01-01", "1.2.3", "e5", "7B", "0b11", "0o17", "-0x10", "1__0"]
TEXTS += ["<<", "="]
NUMBERS = ["1e-5", "1E+3", ".5", "3.", "-.inf", ".5e3", "1_000.5", "65_536", "-7", "0x10", "010"]
VALUES = [1e-5, 1000.0, 0.5, 3.0, -math.inf, 500.0, 1000.5, 65536, -7, 16, 10]
OTHER_PLAIN = {
    "True": True,
    "false": False,
    "~": None,
    "": None,
    "null": None,
    "'1e-5'": "1e-5",
    "!!str 5": "5",
    "%YAML 1.1\n--- 010": 10,
    "%YAML 1.1\n--- yes": "yes",
    "[1,\t2]": [1, 2],
    "{a: &x 1, b: &x 2, c: *x}": {"a": 1, "b": 2, "c": 2},
    "[1, a, {b: null}]": [1, "a", {"b": None}],
}


def test_plain_values():
    numbers = dict(zip(NUMBERS, VALUES, strict=True))
    for text, value in (dict(zip(TEXTS, TEXTS, strict=True)) | numbers | OTHER_PLAIN).items():
        found = plain(read_yaml(text, "x"))
        assert found == value and type(found) is type(value), text


LIKE_OTHERS = ("1e5", "12e34", "no", "null", "1:30", "", "0x1", "~", "true", ".5e3", "a: b")
OTHERS = (1e-5, -0.0, 1e22, None, True, "ü\n", "word " * 40, ["a", {"b": []}], {"z": 1, "a": {}})


def test_what_is_written_is_read_back():
    for value in [*LIKE_OTHERS, "2024-01-01", *OTHERS]:
        found = plain(read_yaml(write_yaml({"key": value}), "x"))
        assert found == {"key": value}
        assert repr(found) == repr({"key": value})  # types and the order of keys too


def test_what_is_written_is_easy_to_read():
    train = {"seq_len": None, "learning_rate": 1e-05}
    text = f"model: {'a' * 200}\ntrain:\n  seq_len: null\n  learning_rate: 1e-05\nnvme:\n- x\n- y\n"
    assert write_yaml({"model": "a" * 200, "train": train, "nvme": ["x", "y"]}) == text


def test_keys_know_their_lines():
    tree = read_yaml("a: 1\n\nb:\n  # a note\n  c: 2\n  d: {e: 3}\n", "cfg.yaml")
    assert tree.value["a"].place == "cfg.yaml:1"
    assert tree.value["b"].value["c"].place == "cfg.yaml:5"
    assert tree.value["b"].value["d"].value["e"].place == "cfg.yaml:6"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\nb: 2\na: 3\n", "cfg.yaml:3: a: set twice, first at cfg.yaml:1; keep one"),
        ("s:\n  a: 1\n  a: 1\n", "cfg.yaml:3: a: set twice"),
        ("a: [1, 2\nb: 3\n", "cfg.yaml:2: not valid YAML"),
        ("a: 1\n\tb: 2\n", "cfg.yaml:2: not valid YAML"),
        ("a: b: c\n", "cfg.yaml:1: not valid YAML"),
        ("a: 1\n---\nb: 2\n", "cfg.yaml:2: not valid YAML"),
        ("a: *nowhere\n", "cfg.yaml:1: not valid YAML"),
        ("a: \0\n", "cfg.yaml: not valid YAML"),
        ("  a: 1\n b: 2\n", "cfg.yaml:2: not valid YAML: expected '<document start>', but found"),
        ("[a, b]: 1\n", "cfg.yaml:1: a key must be a single word"),
        ("a: 1\n: 2\n", "cfg.yaml:2: a key must be a single word"),
        ("a: &loop [*loop]\n", "nested more than"),
        ("a: &loop {b: *loop}\n", "nested more than"),
        ("a: 1\nb: " + "[" * 100_000, "cfg.yaml:2: nested more than"),
        ("a: !!str [1]\n", "cfg.yaml:1: a list or mapping cannot be read"),
        ("a: !!python/object/apply:os.system [ls]\n", "cfg.yaml:1: "),
        ("a: !!int abc\n", "cfg.yaml:1: 'abc' cannot be read"),
        ("a: !!binary abc\n", "cfg.yaml:1: 'abc' cannot be read"),
        ("a: !custom abc\n", "cfg.yaml:1: 'abc' cannot be read"),
    ],
)
def test_broken_documents_name_the_line(text, reason):
    with pytest.raises(ConfigError) as caught:
        read_yaml(text, "cfg.yaml")
    assert reason in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe4\n")
    for path, words in (
        (Path("nowhere.yaml"), r"nowhere\.yaml: no such file; write one with `megatrain init"),
        (tmp_path, "is a folder"),
        (latin, "not UTF-8"),
        (latin / "below", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_text(path)


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "windows.yaml").write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert plain(read_yaml(read_text(tmp_path / "windows.yaml"), "x")) == {"a": 1, "b": 2}


def test_the_parser_is_only_loaded_to_read_or_write():
    check = "import megatrain.cli, megatrain.config, sys; sys.exit('ruamel.yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
