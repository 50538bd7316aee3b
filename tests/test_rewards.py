"""Helpers for reward functions: numbers and boxes in texts, and code that is tried out."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from types import ModuleType

import pytest

import megatrain
from megatrain import rewards
from megatrain.rewards import boxed, last_number, matches, math_answer, run_code

NUMBERS = {
    "so it is 1,234.5 or so": 1234.5,
    "x = -5": -5,
    "10-3": 3,  # a difference
    "3+4=7.": 7,
    "1e5 or 2E-3": 2e-3,
    "$1,000,000!": 1e6,
    "(-3)": -3,
    "1,2,3": 3,
    "about .5": 0.5,
    "none": None,
    "9" * 400: None,
}
BOXES = {
    r"so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"\boxed{1} or \boxed {2}": "2",
    r"\boxed{1} and \boxed{2": "1",
    r"\boxed{\{1, 2\}}": r"\{1, 2\}",
    r"\boxed{}": "",
    "boxed{1}": None,
}


def test_answers_are_found_in_texts():
    assert {text: last_number(text) for text in NUMBERS} == NUMBERS
    assert {text: boxed(text) for text in BOXES} == BOXES
    pattern = r"<think>.*</think>\s*<answer>.*</answer>"
    assert matches("\n<think>a\nb</think>\n<answer>4</answer> ", pattern)
    assert not matches("<think>a</think><answer>4</answer> and more", pattern)
    assert megatrain.rewards is rewards


def test_mathematics_is_compared_by_math_verify(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'megatrain\[math\]'"):
        math_answer("4", "4")
    asked = []

    def parse(text: str, parsing_timeout: int | None) -> list[str]:
        asked.append((text, parsing_timeout))
        return [] if text == "$?$" else [text.strip("$")]

    stub = ModuleType("math_verify")
    monkeypatch.setattr(stub, "parse", parse, raising=False)
    verify = lambda wanted, found, timeout_seconds: wanted == found  # noqa: E731
    monkeypatch.setattr(stub, "verify", verify, raising=False)
    monkeypatch.setitem(sys.modules, "math_verify", stub)
    assert math_answer("4", "4") is True and asked == [("$4$", 5), ("4", 5)]
    assert math_answer("4", "$5$") is False and math_answer("4", "?") is None
    thread = threading.Thread(target=math_answer, args=("4", "4"))  # which gets no signals
    thread.start()
    thread.join()
    assert asked[-1] == ("4", None)


@pytest.mark.slow
def test_the_real_math_verify_agrees():
    pytest.importorskip("math_verify")
    for text, answer, equal in (
        (r"it is $\frac{1}{2}$", "0.5", True),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", True),
        ("$x^2+1$", "1+x^2", True),
        ("it is 41", "42", False),
        ("4", "", None),
    ):
        assert math_answer(text, answer) is equal


ADD = "def add(a, b):\n    return a + b\n"
TRIED = {  # source: (tests, share of them that hold)
    ADD: (["assert add(1, 2) == 3", "assert add(1, 1) == 3", "raise SystemExit(0)"], 1 / 3),
    "x = [0]": (["x = 1; assert x", "assert x == [0]"], 1),  # each test begins with the source's
    "import os; os._exit(0)": ("pass", 0),
    "import sys; sys.exit(0)": ("pass", 0),
    "def broken(": ("pass", 0),
    "x = bytearray(1 << 30)": ("pass", 0),
    "open('large', 'wb').write(bytes(1 << 25))": ("pass", 0),
    "open('small', 'wb').write(bytes(9)); print(input)": ("pass", 1),
    "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    "@dataclass\nclass A:\n    x: int": ("assert A(1).x == 1", 1),
    "import os; assert {*os.environ} <= {'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'LC_CTYPE'}": (
        "assert os.listdir() == []",
        1,
    ),
}


def test_code_runs_behind_a_fence(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    for source, (tests, share) in TRIED.items():
        assert run_code(source, tests) == pytest.approx(share), source
    with pytest.raises(ValueError, match="needs a test"):
        run_code(ADD, [])


def test_code_has_no_network_where_namespaces_are_allowed():
    try:
        subprocess.run(["unshare", "--user", "--net", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no namespaces here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        test = f"socket.create_connection({server.getsockname()!r}, 2)"
        socket.create_connection(server.getsockname(), 2).close()
        assert run_code("import socket", ["assert socket.socket()", test]) == 0.5


WRITES = "import time; time.sleep(1); open('%s', 'w')"


def test_code_without_end_is_ended_with_what_it_started(tmp_path):
    mark = tmp_path / "mark"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WRITES % mark!r}])\n"
    began = time.monotonic()
    tests = ["assert 1", "while True: pass", "assert 1"]
    assert run_code(child, tests, timeout_s=0.5) in (0, 1 / 3)  # 0: only root may start it
    assert time.monotonic() - began < 30
    time.sleep(0.7)
    assert not mark.exists()
