"""The house's rules that a machine can check: floors, circles, names, weights, prose, and what
`import megatrain` costs."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "megatrain"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SOURCES = [*MODULES, *TESTS, *sorted((ROOT / "examples").rglob("*.py"))]
SOURCES += sorted((ROOT / "benchmarks").rglob("*.py"))
ARCHITECTURE = ROOT / "docs" / "architecture.md"

# fmt: off
# A room is a module or a package directly under megatrain, or planner/cost. It imports itself and
# rooms of lower floors.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "cuda", "durable", "heartbeat", "methods", "schedule", "version"),
    ("losses", "machine", "settings", "world"),
    ("data", "memory"),
    ("config", "models", "optim"),
    ("planner/cost", "reporting", "storage"),
    ("planner",),
    ("engine",),
    ("measure",),
    ("recipes",),
    ("cli", "rewards", "__init__", "__main__"),
)
# Code tokens that rooms may have: comments and docstrings do not count. Ceilings only fall; behind
# each stands what it is to come to.
BUDGETS: tuple[tuple[int, tuple[str, ...]], ...] = (
    (68_142, ("engine", "memory", "optim", "schedule")),  # 60_000
    (39_110, ("models",)),  # 31_500
    (44_580, ("data",)),  # 34_000
    (38_173, ("planner", "planner/cost")),  # 32_000
    (72_470, ("recipes",)),  # 32_000
    (26_660, ("storage",)),  # 24_500, GGUF files among it
    (26_148, ("config",)),  # 20_000
    (44_840, ("cli", "losses", "machine", "measure", "reporting", "rewards")),  # 31_000
)
# One GPU's step. These files know nothing of several GPUs, of hosts or of drives.
CORE = (
    "schedule", "engine/streams", "engine/streamer", "engine/step", "engine/activations",
    "engine/gradients", "engine/update", "memory/store", "models/skeleton", "engine/engine",
)
# fmt: on
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
OUTSIDE_THE_CORE = re.compile(r"(?i)(?<![a-z])(ranks?|hosts|nvme|drives?|world)(?![a-z])")
CORE_LINES, CORE_TOKENS = 3_000, 20_000  # 2_800, 20_000
# 42_000, 215, 32_000
PACKAGE_LINES, PACKAGE_FILES, TEST_LINES = 52_310, 222, 49_187
FILE_LINES, FUNCTION_LINES = 600, 60
NAMES_IN_TWO_MODULES = 10  # functions and classes: mostly a command and its recipe
UNNAMED_SINGLE_IMPORTERS = 0
UNCLEAR = {"What", "Whether", "Which", "How", "Of", "Where", "Who", "Whose"}

# Beyond the floors.
READS_CONFIG = {"cli", "recipes", "config", "__init__"}  # elsewhere arguments are plain
NEVER = {("engine", "data"), ("engine", "reporting")}
PLANS_IN_ENGINE = {"constructors.py", "resolved.py"}  # may read a plan
LIGHT = (
    *("__init__", "cli", "config", "errors", "machine", "planner", "rewards", "schedule"),
    "settings",
)
HEAVY = ("torch", "transformers", "numba", "datasets")  # seconds to import: where needed only


def name_of(path: Path) -> str:
    """Dotted name of a module below megatrain, such as planner.cost.shape."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path): path for path in MODULES}


def room_of(name: str) -> str:
    first, *rest = name.split(".")
    return "planner/cost" if first == "planner" and rest[:1] == ["cost"] else first


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Facts:
    """A file, parsed once.

    Attributes:
        imports: (line, dotted name) of all imports: at the top, in functions, for type checkers.
        docstrings: (line, text) of the module's, its classes' and its functions'.
    """

    tree: ast.Module
    lines: int
    imports: tuple[tuple[int, str], ...]
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef, ...]
    docstrings: tuple[tuple[int, str], ...]


@cache
def facts_of(path: Path) -> Facts:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = [*ast.walk(tree)]
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    imports = [(n.lineno, a.name) for n in nodes if isinstance(n, ast.Import) for a in n.names]
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{relative(path)}: imports are absolute"
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    documented: list[ast.AST] = [tree, *functions, *classes]
    docstrings = [
        (getattr(n, "lineno", 1), found)
        for n in documented
        if (found := ast.get_docstring(n))  # type: ignore[arg-type]
    ]
    lines = text.count("\n")
    return Facts(tree, lines, tuple(imports), tuple(functions), tuple(docstrings))


@cache
def tokens_of(path: Path) -> int:
    """Code tokens without comments, docstrings and layout."""
    text, skipped = path.read_text(), {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE}
    skipped |= {tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER}
    starts = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and ast.get_docstring(node) is not None
    }
    begins, ends = (getattr(tokenize, f"FSTRING_{which}", None) for which in ("START", "END"))
    found = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        documents = token.type == tokenize.STRING and token.start[0] in starts
        found += not (token.type in skipped or documents or depth)
        # from Python 3.12 on, an f-string is many tokens: it counts as one, as before
        depth += (token.type == begins) - (token.type == ends)
    return found


def imported_by(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name of the module) of our own that a file imports."""
    for line, name in facts_of(path).imports:
        if name.startswith("megatrain."):
            inner = name.removeprefix("megatrain.")
            while inner not in NAMES:
                assert "." in inner, f"{relative(path)}:{line}: {name} does not exist"
                inner = inner.rpartition(".")[0]
            yield line, inner


@cache
def needs() -> dict[str, set[str]]:
    """Imports among modules, also those inside functions and for type checkers."""
    return {
        name: {other for _, other in imported_by(path)} - {name, "__init__"}
        for name, path in NAMES.items()
        if name != "__init__"
    }


# -- floors and circles ---------------------------------------------------------------------------


def test_every_module_has_a_floor():
    assert {room_of(name) for name in NAMES} - set(FLOOR_OF) == set()


def test_imports_go_down_only():
    for name, path in NAMES.items():
        for line, other_name in imported_by(path):
            room, other, place = room_of(name), room_of(other_name), f"{relative(path)}:{line}"
            if room in (other, "__init__") or (room, other) == ("__main__", "cli"):
                continue
            assert FLOOR_OF[other] < FLOOR_OF[room], f"{place}: {other} is not below {room}"
            assert (room, other) not in NEVER, f"{place}: {room} must not know {other}"
            if room == "engine" and other.startswith("planner"):
                assert path.name in PLANS_IN_ENGINE, f"{place}: {PLANS_IN_ENGINE} may read a plan"
            assert other != "config" or room in READS_CONFIG, f"{place}: config stops at the edge"


def test_there_is_no_circle_of_imports():
    left = {name: set(others) for name, others in needs().items()}
    assert left["engine.step"]
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        assert free, f"a circle, or what leads to one: {sorted(left)}"
        for name in free:
            del left[name]


def test_the_planner_knows_no_device():
    for path in PACKAGE.joinpath("planner").glob("*.py"):
        assert "torch" not in {name.split(".")[0] for _, name in facts_of(path).imports}, path


def test_a_module_with_one_importer_is_a_concept_that_the_page_names():
    importers = Counter(other for others in needs().values() for other in others)
    page = ARCHITECTURE.read_text()
    unnamed = [
        relative(NAMES[name])
        for name, count in importers.items()
        if count == 1 and NAMES[name].name != "__init__.py"
        if f"`{NAMES[name].relative_to(PACKAGE)}" not in page
    ]
    assert len(unnamed) <= UNNAMED_SINGLE_IMPORTERS, f"merge or name as a concept: {unnamed}"


# -- names and prose ------------------------------------------------------------------------------


def test_public_names_live_in_one_module():
    homes = defaultdict(set)
    for name, path in NAMES.items():
        for node in facts_of(path).tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(name)
    two = {name: sorted(modules) for name, modules in homes.items() if len(modules) > 1}
    assert len(two) <= NAMES_IN_TWO_MODULES, two


def test_no_function_is_written_twice():
    found = defaultdict(list)
    for path in MODULES:
        for function in facts_of(path).functions:
            body = function.body[ast.get_docstring(function) is not None :]
            if sum(isinstance(part, ast.stmt) for one in body for part in ast.walk(one)) >= 3:
                code = ast.dump(ast.Module(body, []))
                found[code].append(f"{relative(path)}:{function.lineno}")
    assert [places for places in found.values() if len(places) > 1] == []


def test_docstrings_begin_with_a_verb_or_a_noun():
    unclear = [
        f"{relative(path)}:{line}: {text.splitlines()[0]}"
        for path in MODULES
        for line, text in facts_of(path).docstrings
        if re.split(r"\W", text, maxsplit=1)[0] in UNCLEAR
    ]
    assert unclear == []


def test_every_module_says_what_it_is():
    for path in MODULES:
        tree = facts_of(path).tree
        assert not tree.body or ast.get_docstring(tree), f"{relative(path)}: begin with a docstring"


def test_test_files_have_names_of_their_own():
    names = Counter(path.name for path in TESTS if path.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in names.items() if count > 1] == []


# -- weights --------------------------------------------------------------------------------------


def test_the_package_and_its_tests_keep_their_weight():
    assert sum(facts_of(path).lines for path in MODULES) <= PACKAGE_LINES
    assert len(MODULES) <= PACKAGE_FILES
    assert sum(facts_of(path).lines for path in TESTS) <= TEST_LINES


@pytest.mark.parametrize(("budget", "rooms"), BUDGETS, ids=lambda value: str(value)[:20])
def test_rooms_keep_their_budget_of_tokens(budget, rooms):
    found = sum(tokens_of(path) for name, path in NAMES.items() if room_of(name) in rooms)
    assert 0 < found <= budget


def test_the_core_is_small_and_knows_one_gpu():
    paths = [PACKAGE / f"{name}.py" for name in CORE]
    assert sum(facts_of(path).lines for path in paths) <= CORE_LINES
    assert sum(map(tokens_of, paths)) <= CORE_TOKENS
    for path in paths:
        if path.stem in ("store", "engine"):  # which still hold shares, drives and a world
            continue
        found = OUTSIDE_THE_CORE.search(path.read_text())
        assert found is None, f"{path.name}: {found[0]}"


def test_files_and_functions_are_short():
    for path in SOURCES:
        facts = facts_of(path)
        assert facts.lines <= FILE_LINES, f"{relative(path)}: more than {FILE_LINES} lines"
        for one in facts.functions:
            length = (one.end_lineno or one.lineno) - one.lineno + 1
            assert length <= FUNCTION_LINES, f"{relative(path)}: {one.name} has {length} lines"


def test_light_rooms_load_nothing_heavy():
    code = ["import sys"]
    for room in LIGHT:
        names = ["megatrain." + name for name in NAMES if room_of(name) == room]
        assert names, room
        code.append(f"import {', '.join(name.removesuffix('.__init__') for name in names)}")
        code.append(f"assert not {{*{HEAVY!r}}} & sys.modules.keys(), 'megatrain.{room}'")
    check = [sys.executable, "-c", "\n".join(code)]
    result = subprocess.run(check, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
