"""Workers that encode rows: hostile templates are stopped, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from megatrain.data import encoding, workers
from megatrain.data.encoding import RowOptions
from megatrain.data.samples import RowError
from megatrain.data.template import Scene, Template
from megatrain.data.workers import Team, fenced
from megatrain.errors import DataError, MegaTrainError
from tests.helpers.commands import CHATML, children_of, conversation

TURNS = Scene(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(33) %}{% set ns.x = %s %}"
DOUBLED += "{% endfor %}{{ ns.x }}"
REFUSED = (
    ("{{ 1 / 0 }}", "division by zero"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{% if true %}" * 3000 + "{% endif %}" * 3000, "."),
    ("{% for %}", "Expected"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
)
LATE, LARGE = "takes more than 0.15 s of computing", "takes more than 0.25 GiB of memory"
ENDLESS = {
    "a loop without end": (LOOP, LATE),
    "a power of variables": ("{% set n = 10 %}{{ (n**n) ** (n**n) }}", LATE),
    "a constant without end": ("{{ 9 ** (9**9) }}", LATE),
    "lists in lists": (DOUBLED.replace("'x' * 1000", "[1]").replace("%s", "[ns.x] * 9"), LATE),
    "a constant of a gigabyte": ("{{ 10**3 * ('x' * 10**3) * 10**3 }}", LARGE),
    "a doubled text": (DOUBLED.replace("%s", "ns.x ~ ns.x"), LARGE),
    "a method of a gigabyte": ("{{ 'x'.ljust(1999999999) }}", LARGE),
}
SOMETIMES_LATE = "{% if 'Now' in messages[0].content %}" + LOOP + "{% endif %}" + CHATML


@pytest.fixture(autouse=True)
def encoded_here() -> None:
    """Not here: these are about the workers."""


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ROW_LIMIT_S", 0.15)
    monkeypatch.setattr(workers, "LARGEST_BYTES", 1 << 28)


@pytest.fixture
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ALONE_ITEMS", 0)


def test_a_broken_template_refuses_the_row(make_tokenizer):
    for source, reason in REFUSED:
        template = Template(make_tokenizer(source))
        with pytest.raises(RowError, match=reason):
            fenced(partial(template.render, TURNS))


@pytest.mark.slow
@pytest.mark.parametrize(("source", "reason"), ENDLESS.values(), ids=ENDLESS.keys())
def test_a_hostile_template_is_stopped(make_tokenizer, source, reason, soon, monkeypatch):
    longest_s = 30 if reason == LARGE else 0.15  # a busy machine fills that much memory slowly
    monkeypatch.setattr(workers, "ROW_LIMIT_S", longest_s)
    template, started = Template(make_tokenizer(source)), os.times()
    with pytest.raises(DataError, match=rf"{reason} for one conversation; name another \(data\."):
        fenced(lambda: template.render(TURNS))
    ended = os.times()
    assert ended.children_user + ended.children_system < longest_s + 3 + (
        started.children_user + started.children_system
    )


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_row_that_takes_too_long_is_named(encode, make_tokenizer, monkeypatch, processes):
    monkeypatch.setattr(workers, "ROW_LIMIT_S", 1.0)  # a busy machine's first rows take a while
    monkeypatch.setattr(workers, "ALONE_ITEMS", 1)
    monkeypatch.setattr(encoding, "BATCH_ROWS", 80)
    rows = [conversation(f"Count to {number}.", "1 2") for number in range(300)]
    for number in (200, 250):
        rows[number] = conversation("Now.", "1 2")
    before = set(children_of(os.getpid()))
    with pytest.raises(DataError, match=r"rows.jsonl:201: the chat template takes more than 1 s"):
        encode(rows, RowOptions(64, processes=processes), make_tokenizer(SOMETIMES_LATE))
    assert set(children_of(os.getpid())) <= before


def test_a_row_that_takes_too_much_memory_is_named(encode, make_tokenizer, monkeypatch):
    monkeypatch.setattr(workers, "LARGEST_BYTES", 1 << 28)
    large = "{% if 'Now' in messages[0].content %}{{ 'x'.ljust(1999999999) }}{% endif %}" + CHATML
    rows = [conversation(text, "1") for text in ("a", "Now.", "b")]
    words = r"rows.jsonl:2: the chat template takes more than 0.25 GiB of memory"
    with pytest.raises(DataError, match=words):
        encode(rows, RowOptions(64), make_tokenizer(large))


def test_a_tokenizer_that_computes_without_end_is_stopped(encode, make_tokenizer, monkeypatch):
    monkeypatch.setattr(workers, "ROW_LIMIT_S", 0.3)
    monkeypatch.setattr("megatrain.data.encoding.Encoder.encode", lambda *_: sum(count()))
    with pytest.raises(DataError, match=r"rows.jsonl:1 and the 1 rows behind it: the tokenizer"):
        encode([{"text": "a"}, {"text": "b"}], RowOptions(64), make_tokenizer(None))


def test_rows_of_which_a_tokenizer_panics_are_named(encode, make_tokenizer):
    tokenizer = make_tokenizer(None)
    backtracks = pre_tokenizers.Split(Regex("^(a+)+$"), "isolated")  # a panic of Rust's
    tokenizer.backend_tokenizer.pre_tokenizer = backtracks
    rows = [{"text": text} for text in ("b", f"{'a' * 60}b", "c")]
    with pytest.raises(DataError, match=r"rows.jsonl:1 and the 2 .* fails \(Onig: .* take out"):
        encode(rows, RowOptions(64), tokenizer)
    with pytest.raises(DataError, match=r"it: the tokenizer fails \(Onig: .* for it"):
        fenced(lambda: tokenizer(rows[1]["text"]), ("it: the tokenizer", "for it"))


def test_a_worker_has_no_file_of_ours_and_ends_with_the_work(tmp_path):
    with (tmp_path / "lock").open("w") as ours:
        number = ours.fileno()

        def look() -> tuple[int, bool, str]:
            there = Path(f"/dev/fd/{number}").exists()
            return os.getpid(), there, os.readlink("/proc/self/fd/1")

        pid, there, stdout = fenced(look)
    assert (there, stdout) == (False, os.devnull)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_fault_of_ours_is_raised_with_its_place():
    def fail() -> None:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours") as raised:
        fenced(fail)
    assert "in fail" in raised.value.__notes__[0]


def test_where_children_are_not_waited_for_a_late_one_is_reported_all_the_same(soon):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(DataError, match=LATE):
            fenced(lambda: sum(count()))
        assert fenced(lambda: 3) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


def failing(item: int) -> int:
    if item == 3:
        raise DataError("the fourth")
    return item


def test_a_dead_worker_is_waited_for_once_and_no_other_child_is():
    other, work = subprocess.Popen(["sleep", "60"]), lambda code: os._exit(code)
    with pytest.raises(DataError, match=r"ends its process \(3\)"), Team[int, None](work) as team:
        [*team.map([3] * 4)]
    assert other.poll() is None
    other.kill()
    assert other.wait() == -signal.SIGKILL


def test_results_and_errors_come_in_order(two_at_once):
    done = list[int]()
    with Team(failing, 2) as team:
        assert list(team.map(range(3))) == [0, 1, 2]
        with pytest.raises(DataError, match="the fourth"):
            done.extend(team.map(range(3, 10)))
        assert list(team.map(range(3))) == [0, 1, 2]
    assert done == []


def slowly(item: int) -> int:
    time.sleep(0.05)
    return item


def test_no_worker_is_left_when_the_work_is_given_up_or_one_is_killed(two_at_once):
    before = set(children_of(os.getpid()))

    def new() -> set[int]:
        return set(children_of(os.getpid())) - before

    def give_up() -> None:
        with Team(slowly, 2) as team:
            for done in team.map(count()):
                assert len(new()) == 2
                if done == 3:
                    raise KeyboardInterrupt

    def lose_one() -> None:
        with Team(slowly, 2) as team:
            for _ in team.map(count()):
                os.kill(min(new()), signal.SIGKILL)

    with pytest.raises(KeyboardInterrupt):
        give_up()
    assert not new()
    with pytest.raises(MegaTrainError, match=r"ended from outside.*set data\.processes: 1"):
        lose_one()
    assert not new()


def endless(item: int) -> int:
    return sum(count()) if item > 3 else item


@pytest.mark.parametrize("work", [slowly, endless])
def test_workers_end_with_a_killed_parent_and_heed_no_signal(two_at_once, work, monkeypatch):
    monkeypatch.setattr(workers, "ROW_LIMIT_S", 60)
    parent = os.fork()
    if parent == 0:
        try:
            with Team(work, 2) as team:
                for _ in team.map(count()):
                    pass
        finally:
            os._exit(1)
    wait_until(lambda: len(children_of(parent)) == 2)
    time.sleep(0.2)
    children = children_of(parent)
    for child in children:
        for number in workers.IGNORED_SIGNALS:
            os.kill(child, number)
    time.sleep(0.1)
    assert set(children_of(parent)) == set(children)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    wait_until(lambda: not any(Path(f"/proc/{child}/cwd").exists() for child in children))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
