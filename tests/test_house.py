"""The house's rules that a machine can check: which room may import which, how long things are, and what `import megatrain` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [path for folder in ("megatrain", "tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

FILE_LINES = 400
FUNCTION_LINES = 60

# fmt: off
# A room is a module or a package directly under megatrain. It imports rooms of its own floor or below, never of a floor above.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "config"),
    ("models", "memory", "optim", "cuda", "hardware", "machine", "retention", "activations", "nvme_tier"),
    (
        "engine", "measure", "losses", "data", "checkpoint", "restore", "export", "manifest", "run_folder",
        "planner", "planner_bytes", "planner_job", "planner_search", "planner_view", "planner_words", "simulation", "timing",
        "planner_changes", "planner_help", "economy", "energy",
        "advice", "metrics", "meters", "tracing", "flops", "report", "summary",
    ),
    ("recipes",),
    ("cli",),
    ("__init__", "__main__"),  # the door: it may name everything
)
# fmt: on
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What the floors alone do not say.
READS_CONFIG = {"cli", "recipes", "planner", "planner_view", "data", "__init__", "__main__"}  # elsewhere arguments are plain
NEVER = {
    ("memory", "models"),  # stores know no modules
    ("engine", "data"),  # the engine knows no data format
    ("engine", "report"),
    ("optim", "models"),
    ("errors", "config"),
}
HEAVY = ("torch", "transformers", "numba", "datasets")  # seconds to import, so that only a command that needs them may pay


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path, *, when_loaded: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything that `path` imports: at its top, inside functions and for type checkers, or only when loaded."""
    tree = ast.parse(path.read_text())
    for node in tree.body if when_loaded else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            if node.module == "megatrain":
                yield from ((node.lineno, f"megatrain.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def rooms_imported_by(path: Path, *, when_loaded: bool = False) -> Iterator[tuple[int, str]]:
    for line, name in imports_of(path, when_loaded=when_loaded):
        if name.startswith("megatrain."):
            yield line, name.split(".")[1]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_has_a_floor(path):
    assert room_of(path) in FLOOR_OF, f"{relative(path)}: give it a floor in {relative(Path(__file__))}"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_imports_go_down_only(path):
    room = room_of(path)
    for line, other in rooms_imported_by(path):
        if room == "__init__" or other == room or not other.isidentifier():
            continue
        assert other in FLOOR_OF, f"{relative(path)}:{line}: megatrain.{other} does not exist"
        assert FLOOR_OF[other] <= FLOOR_OF[room], f"{relative(path)}:{line}: {room} must not import {other}, which is above it"
        assert (room, other) not in NEVER, f"{relative(path)}:{line}: {room} must not know {other}"
        if other == "config":
            assert room in READS_CONFIG, f"{relative(path)}:{line}: config stops at the edge: give {room} plain arguments"


def test_rooms_of_one_floor_do_not_load_each_other_in_a_circle():
    needs: dict[str, set[str]] = {room: set() for room in FLOOR_OF}
    for path in MODULES:
        if room_of(path) != "__init__":
            needs[room_of(path)] |= {other for _, other in rooms_imported_by(path, when_loaded=True)} - {room_of(path)}
    while needs:
        free = [room for room, others in needs.items() if not others & needs.keys()]
        assert free, f"these rooms load each other in a circle: {sorted(needs)}"
        for room in free:
            del needs[room]


def test_the_planner_knows_no_device():
    assert not [name for _, name in imports_of(PACKAGE / "planner.py") if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= FILE_LINES, f"{relative(path)}: more than {FILE_LINES} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= FUNCTION_LINES, f"{relative(path)}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_module_says_what_it_is(path):
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), f"{relative(path)}: begin with a docstring"


def test_test_files_have_names_of_their_own():
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py")
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("module", ["megatrain", "megatrain.errors", "megatrain.config", "megatrain.cli"])
def test_what_answers_help_is_light(module):
    check = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]", f"import {module} also imports {result.stdout.strip()}"
