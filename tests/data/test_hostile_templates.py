"""Chat templates made to hang, to fill memory or to crash: the row is refused, or all ends soon."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.data import encoding, forking, rendering, workers
from megatrain.data.build import DataOptions
from megatrain.data.fields import RowError
from megatrain.data.rendering import Fence, TooMuch, fenced, limited
from megatrain.data.template import Scene, Template
from megatrain.errors import DataError, MegaTrainError
from megatrain.models.stops import ends_of_turns
from tests.commands import CHATML, children_of, conversation

TURNS = Scene(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}%s{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(x='x' * 1000) %}{% for i in range(33) %}{% set ns.x = %s %}"
DOUBLED += "{% endfor %}{{ ns.x }}"
REFUSED = {
    "a division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "an overflow": ("{{ 10.0 ** 400 }}", "."),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "deep nesting": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "."),
    "much text": ("{{ messages[0].content * 70000000 }}", "more than 64 million characters"),
    "no template": ("{% for %}", "Expected"),
    "an attribute of the sandbox": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}
LATE, LARGE = "takes more than 0.15 s of computing", "takes more than 0.25 GiB of memory"
ENDLESS = {
    "a loop without end": (LOOP.replace("%s", ""), LATE),
    "output without end": (LOOP.replace("%s", "x" * 100), LATE),
    "a power of variables": ("{% set n = 10 %}{{ (n**n) ** (n**n) }}", LATE),
    "a constant without end": ("{{ 9 ** (9**9) }}", LATE),
    "a constant of a gigabyte": ("{{ 10**3 * ('x' * 10**3) * 10**3 }}", LARGE),
    "a number of a gigabyte": ("{{ '%0999999999d' % 5 }}", LARGE),
    "a doubled text": (DOUBLED.replace("%s", "ns.x ~ ns.x"), LARGE),
    "a doubled sum": (DOUBLED.replace("%s", "ns.x + ns.x"), LARGE),
    "lists in lists": (DOUBLED.replace("'x' * 1000", "[1]").replace("%s", "[ns.x] * 9"), LATE),
    "a filter of a gigabyte": ("{{ 'x' | center(1999999999) }}", LARGE),
    "a method of a gigabyte": ("{{ 'x'.ljust(1999999999) }}", LARGE),
}
SOMETIMES_LATE = (
    "{% if 'Now' in messages[0].content %}" + LOOP.replace("%s", "") + "{% endif %}" + CHATML
)


@pytest.fixture(autouse=True)
def rendered_here() -> None:
    """Not here: these are about the process that renders."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LONGEST_S", 0.15)
    monkeypatch.setattr(rendering, "EARNED_S", 0.05)
    monkeypatch.setattr(rendering, "LARGEST_BYTES", 1 << 28)


@pytest.mark.parametrize(("source", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_broken_template_refuses_the_row(make_tokenizer, source, reason, monkeypatch):
    monkeypatch.setattr(rendering, "LONGEST_S", 30)  # a busy machine unwinds recursion slowly
    monkeypatch.setattr(rendering, "LARGEST_BYTES", 1 << 30)
    template = Template(make_tokenizer(source))
    with pytest.raises(RowError, match=reason):
        fenced(lambda: template.render(TURNS))


@pytest.mark.parametrize(("source", "reason"), ENDLESS.values(), ids=ENDLESS.keys())
def test_a_hostile_template_is_stopped(make_tokenizer, source, reason, monkeypatch):
    longest_s = 30 if reason == LARGE else 0.15  # a busy machine fills that much memory slowly
    monkeypatch.setattr(rendering, "LONGEST_S", longest_s)
    template, started = Template(make_tokenizer(source)), os.times()
    with pytest.raises(TooMuch, match=rf"{reason} for one conversation; name another \(data\."):
        fenced(lambda: template.render(TURNS))
    ended = os.times()
    assert ended.children_user + ended.children_system < longest_s + 3 + (
        started.children_user + started.children_system
    )


def test_so_it_is_for_whoever_asks_what_ends_its_answers(make_tokenizer):
    for name in ("a loop without end", "a method of a gigabyte"):
        source, reason = ENDLESS[name]
        with pytest.raises(TooMuch, match=reason):
            ends_of_turns(make_tokenizer(source))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_row_that_takes_too_long_ends_it_all(
    encode, make_tokenizer, monkeypatch, processes
):
    monkeypatch.setattr(rendering, "LONGEST_S", 1.0)  # a busy machine's first rows take a while
    monkeypatch.setattr(workers, "ALONE_BATCHES", 1)
    monkeypatch.setattr(encoding, "BATCH_ROWS", 80)
    rows = [conversation(f"Count to {number}.", "1 2") for number in range(300)]
    for number in (200, 250):
        rows[number] = conversation("Now.", "1 2")
    started, before = time.process_time(), children_of(os.getpid())
    with pytest.raises(DataError, match=r"rows.jsonl:201: the chat template takes more than 1 s"):
        encode(rows, DataOptions(64, processes=processes), make_tokenizer(SOMETIMES_LATE))
    assert children_of(os.getpid()) == before
    assert time.process_time() - started < 5


def test_renderings_may_take_so_much_on_average(monkeypatch):
    """Each is within its limit, all together are not."""
    monkeypatch.setattr(rendering, "EARNED_S", 0.02)

    def render() -> None:
        for _ in range(100):
            with limited():
                end = time.process_time() + 0.1
                while time.process_time() < end:
                    pass

    with pytest.raises(TooMuch):
        fenced(render)


def test_the_process_has_no_file_of_ours_and_ends_with_the_work(tmp_path):
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


def whose(_: object) -> tuple[int, int]:
    return os.getpid(), os.getppid()


def asked(fence: Fence[object, tuple[int, int]]) -> tuple[int, int]:
    """Numbers of the process of the fence, and of its parent."""
    fence.put([pickle.dumps(None)])
    (found,) = fence.take()
    assert not isinstance(found, DataError)
    return found


def test_a_fork_has_a_process_of_its_own_and_leaves_ours_alone():
    before = children_of(os.getpid())
    with Fence(whose) as fence:
        ours = asked(fence)
        if (fork := os.fork()) == 0:
            with fence:
                theirs = asked(fence)
            os._exit(0 if theirs[1] == os.getpid() and theirs[0] != ours[0] else 1)
        assert os.waitpid(fork, 0)[1] == 0
        assert asked(fence) == ours == (ours[0], os.getpid())
    assert children_of(os.getpid()) == before


def test_what_a_caller_did_not_take_is_taken_for_nothing_else():
    with Fence(whose) as fence:
        before = asked(fence)
        fence.put([pickle.dumps(None)] * 2)  # and gives up
        assert asked(fence) != before


def test_a_process_that_is_ended_from_outside_is_no_fault_of_the_template():
    with Fence(whose) as fence:
        child, _ = asked(fence)
        os.kill(child, signal.SIGKILL)
        with pytest.raises(MegaTrainError, match="renders chat templates, was ended from outside"):
            asked(fence)


def test_where_children_are_not_waited_for_a_late_one_is_told_all_the_same(make_tokenizer):
    template = Template(make_tokenizer(LOOP.replace("%s", "")))
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(TooMuch, match=LATE):
            fenced(lambda: template.render(TURNS))
        assert fenced(lambda: 3) == 3
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("processes", [1, 2])
def test_no_process_outlives_a_command_that_is_killed(
    encode, make_tokenizer, monkeypatch, processes
):
    """Neither a process that renders without end, nor one that it renders for."""
    monkeypatch.setattr(rendering, "LONGEST_S", 60)
    monkeypatch.setattr(workers, "ALONE_BATCHES", processes - 1)
    monkeypatch.setattr(encoding, "BATCH_ROWS", 2)
    rows = [conversation(text, "1") for text in ("a", "b", "Now.", "Now.", "Now.", "Now.")]
    tokenizer = make_tokenizer(SOMETIMES_LATE)
    command = os.fork()
    if command == 0:
        try:
            encode(rows, DataOptions(64, processes=processes), tokenizer)
        finally:
            os._exit(1)
    expected = 1 if processes == 1 else 5  # ours, and two that tokenise with one each
    wait_until(lambda: len(all_below(command)) == expected)
    below = all_below(command)
    for child in below:
        for number in forking.IGNORED:
            os.kill(child, number)
    time.sleep(0.1)
    assert all_below(command) == below
    os.kill(command, signal.SIGKILL)
    os.waitpid(command, 0)
    wait_until(lambda: not any(Path(f"/proc/{child}/cwd").exists() for child in below))


def all_below(parent: int) -> list[int]:
    """Numbers of the children of a process, and of theirs."""
    children = children_of(parent)
    return [*children, *(one for child in children for one in all_below(child))]


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
