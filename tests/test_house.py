"""The house's rules that a machine can check: which room may import which, how long things are, and
what `import megatrain` costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = [
    path
    for folder in ("megatrain", "tests", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

FILE_LINES = 600
FUNCTION_LINES = 60

# fmt: off
# A room is a module or a package directly under megatrain, or planner/cost. It imports itself and
# rooms of lower floors.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "cuda", "durable", "heartbeat", "methods", "schedule", "version"),
    ("losses",),
    ("world",),
    ("settings", "data", "machine", "memory"),
    ("config", "models", "optim"),
    ("planner/cost", "reporting", "storage"),
    ("planner",),
    ("engine",),
    ("measure",),
    ("recipes",),
    ("cli", "__init__", "__main__"),
)
# fmt: on
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# What the floors alone do not say.
READS_CONFIG = {"cli", "recipes", "config", "__init__"}  # elsewhere arguments are plain
NEVER = {
    ("engine", "data"),  # the engine knows no data format
    ("engine", "reporting"),
}
# of the engine, what may read a plan
PLANS_IN_ENGINE = {"build.py", "constructors.py", "resolved.py"}
# rooms that load nothing heavy
LIGHT = ("__init__", "cli", "config", "errors", "machine", "planner", "schedule", "settings")
# seconds to import, so that only a command that needs them may pay
HEAVY = ("torch", "transformers", "numba", "datasets")


def room_of(name: str) -> str:
    """The room of a module by its dotted name below megatrain, such as planner.cost.shape."""
    first, *rest = name.split(".")
    return "planner/cost" if first == "planner" and rest[:1] == ["cost"] else first


def name_of(path: Path) -> str:
    """A module's dotted name below megatrain; a package's own ends in `__init__`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@dataclass(frozen=True)
class Facts:
    """What a file's code says, which is read once.

    Attributes:
        imports: (line, dotted name) of everything that is imported: at the top, inside functions
            and for type checkers; `when_loaded`: at the top alone.
        functions: (name, first line, number of lines).
    """

    said: bool  # what the file is
    lines: int
    imports: tuple[tuple[int, str], ...]
    when_loaded: tuple[tuple[int, str], ...]
    functions: tuple[tuple[str, int, int], ...]


@cache
def facts_of(path: Path) -> Facts:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    functions = []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            functions.append((node.name, node.lineno, node.end_lineno - node.lineno + 1))
    return Facts(
        said=not tree.body or ast.get_docstring(tree) is not None,
        lines=len(text.splitlines()),
        imports=tuple(imports_in(nodes, path)),
        when_loaded=tuple(imports_in(tree.body, path)),
        functions=tuple(functions),
    )


def imports_in(nodes: Iterable[ast.AST], path: Path) -> Iterator[tuple[int, str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            assert node.module is not None
            package = PACKAGE.parent.joinpath(*node.module.split("."))
            if package.is_dir():  # then a name is a module, or of the package's own file
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def modules_imported_by(path: Path, *, when_loaded: bool = False) -> Iterator[tuple[int, str]]:
    """(line, dotted name below megatrain) of our own modules, or of names in them."""
    facts = facts_of(path)
    for line, name in facts.when_loaded if when_loaded else facts.imports:
        if name.startswith("megatrain."):
            yield line, name.removeprefix("megatrain.")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_has_a_floor():
    for path in MODULES:
        assert room_of(name_of(path)) in FLOOR_OF, (
            f"{relative(path)}: give it a floor in {relative(Path(__file__))}"
        )


def test_imports_go_down_only():
    for path in MODULES:
        check_imports(path)


def check_imports(path: Path) -> None:
    room = room_of(name_of(path))
    for line, name in modules_imported_by(path):
        other = room_of(name)
        if room == "__init__" or other == room or not other.removeprefix("planner/").isidentifier():
            continue
        assert other in FLOOR_OF, f"{relative(path)}:{line}: megatrain.{name} does not exist"
        if (room, other) != ("__main__", "cli"):
            assert FLOOR_OF[other] < FLOOR_OF[room], (
                f"{relative(path)}:{line}: {room} must not import {other}, which is not below it"
            )
        assert (room, other) not in NEVER, f"{relative(path)}:{line}: {room} must not know {other}"
        if room == "engine" and other.startswith("planner"):
            assert path.name in PLANS_IN_ENGINE, (
                f"{relative(path)}:{line}: of the engine only {PLANS_IN_ENGINE} may read a plan"
            )
        if other == "config":
            assert room in READS_CONFIG, (
                f"{relative(path)}:{line}: config stops at the edge: give {room} plain arguments"
            )


def test_files_do_not_load_each_other_in_a_circle():
    names = {name_of(path).removesuffix(".__init__"): path for path in MODULES}
    needs: dict[str, set[str]] = {}
    for name, path in names.items():
        found = {other for _, other in modules_imported_by(path, when_loaded=True)}
        needs[name] = {
            other if other in names else other.rpartition(".")[0] for other in found
        } & names.keys() - {name}
    assert needs["engine.step"]
    while needs:
        free = [name for name, others in needs.items() if not others & needs.keys()]
        assert free, f"these files load each other in a circle: {sorted(needs)}"
        for name in free:
            del needs[name]


def test_the_planner_knows_no_device():
    for path in PACKAGE.joinpath("planner").glob("*.py"):
        names = [name.split(".")[0] for _, name in facts_of(path).imports]
        assert "torch" not in names, relative(path)


def test_files_and_functions_are_short():
    for path in SOURCES:
        facts = facts_of(path)
        assert facts.lines <= FILE_LINES, f"{relative(path)}: more than {FILE_LINES} lines"
        for name, line, length in facts.functions:
            assert length <= FUNCTION_LINES, f"{relative(path)}:{line}: {name} has {length} lines"


def test_no_function_is_written_twice():
    found: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if sum(isinstance(part, ast.stmt) for one in body for part in ast.walk(one)) >= 3:
                    code = ast.dump(ast.Module(body, []))
                    found.setdefault(code, []).append(f"{relative(path)}:{node.lineno}")
    assert [places for places in found.values() if len(places) > 1] == []


def test_every_module_says_what_it_is():
    for path in MODULES:
        assert facts_of(path).said, f"{relative(path)}: begin with a docstring"


def test_test_files_have_names_of_their_own():
    names = Counter(
        path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_light_rooms_load_nothing_heavy():
    code = ["import sys"]
    for room in LIGHT:
        names = ["megatrain." + name_of(path) for path in MODULES if room_of(name_of(path)) == room]
        assert names, room
        code.append(f"import {', '.join(name.removesuffix('.__init__') for name in names)}")
        code.append(f"assert not {{*{HEAVY!r}}} & sys.modules.keys(), 'megatrain.{room}'")
    check = [sys.executable, "-c", "\n".join(code)]
    result = subprocess.run(check, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
