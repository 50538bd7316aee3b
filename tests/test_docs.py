"""The pages: links and named files exist, generated pages are fresh, the README stays short."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatrain
from benchmarks import (
    command_reference,
    config_reference,
    docs_site,
    families,
    what_fits,
    write_page,
)
from megatrain.config import load_config
from tests.test_house import FLOORS

ROOT = Path(__file__).parent.parent
DECISIONS = ROOT / "docs" / "decisions"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
WIDTH = 120
ARCHITECTURE = ROOT / "docs" / "architecture.md"
NAMED_CODE = re.compile(r"`(?!megatrain/|tests/|benchmarks/)([\w/]+\.py)(?:: ([\w.]+))?`")
FOLDERS = "megatrain|tests|benchmarks|docs|examples"
NAMED_FILE = re.compile(rf"`((?:{FOLDERS})/[\w./-]+\.(?:py|md|json))`")


def prose(page: Path) -> Iterator[str]:
    """The page's lines outside code blocks."""
    code = False
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            code = not code
        elif not code:
            yield line


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = (line.lstrip("#").strip().lower() for line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Relative links of a page to a file or heading that does not exist."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", "\n".join(prose(page))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken


def missing_files(page: Path) -> list[str]:
    """Files of the repository that a page names in backticks and that do not exist."""
    return [name for name in NAMED_FILE.findall(page.read_text()) if not (ROOT / name).exists()]


def missing_code(text: str) -> list[str]:
    """Modules, classes, functions and methods of megatrain that `text` names as `file.py: name`."""
    return [
        f"{path}: {name}" for path, name in NAMED_CODE.findall(text) if name not in defined_in(path)
    ]


def defined_in(path: str) -> set[str]:
    """Names of a file's functions, classes, methods and constants; "" for the file itself."""
    file = ROOT / "megatrain" / path
    if not file.is_file():
        return set()
    names = {""}
    for node in ast.parse(file.read_text()).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (part for part in node.body if isinstance(part, ast.FunctionDef))
            names |= {f"{node.name}.{part.name}" for part in inner}
    return names


def test_code_that_the_page_of_the_architecture_names_exists():
    text = ARCHITECTURE.read_text()
    assert text.count("`") == 2 * len(re.findall(r"`[^`\n]+`", text)), (
        "a name goes over a line's end"
    )
    assert len(NAMED_CODE.findall(text)) > 50
    assert missing_code(text) == []
    assert missing_code("`errors.py` `schedule.py: uploads` `engine/engine.py: Engine.step`") == []
    wrong = "`none.py: a` `schedule.py: none` `engine/engine.py: Engine.none`"
    assert len(missing_code(wrong)) == 3
    for room in (part for rooms in FLOORS for part in rooms):
        assert f"`{room}`" in text or f"`{room}/`" in text, room


def test_links_lead_somewhere():
    assert {page: broken for page in PAGES if (broken := broken_links(page))} == {}


def test_files_that_a_page_names_exist():
    assert {page: missing for page in PAGES if (missing := missing_files(page))} == {}


def test_lines_are_short():
    lines = [(page, line) for page in PAGES for line in prose(page)]
    table_or_picture = ("|", "![")
    text = [(page, line) for page, line in lines if not line.startswith(table_or_picture)]
    assert [(page, line) for page, line in text if len(line) > WIDTH] == []


def test_what_is_broken_is_found(tmp_path):
    page = tmp_path / "page.md"
    good = "[a](page.md#a-heading-its-own) [b](https://example.org/none) `megatrain/errors.py`"
    page.write_text(f"# A heading, it's own\n\n{good}\n")
    assert broken_links(page) == missing_files(page) == []
    page.write_text("# A heading\n\n[a](none.md) [b](#another) `megatrain/none.py`\n")
    assert broken_links(page) == ["none.md", "#another"]
    assert missing_files(page) == ["megatrain/none.py"]


def test_generated_pages_are_fresh():
    found = json.loads(families.RESULTS.read_text())
    assert families.PAGE.read_text() == families.page(found), "run python -m benchmarks.families"
    for writer in (config_reference, command_reference):
        assert writer.PAGE.read_text() == writer.page(), f"run python -m {writer.__name__}"
    assert "| `memory.nvme_blocks` | integer >= 0 or `auto` |" in config_reference.page()


def test_every_environment_variable_that_is_read_is_described():
    reading = re.compile(r"environ(?:\.get\(|\.setdefault\(|\[)\"([A-Z_]+)\"")
    sources = (ROOT / "megatrain").rglob("*.py")
    read = {name for path in sources for name in reading.findall(path.read_text())}
    told = set(command_reference.ENVIRONMENT) | {"XDG_CACHE_HOME"}
    assert read - told - {"HF_DATASETS_DISABLE_PROGRESS_BARS"} == set()


# -- the site ------------------------------------------------------------------------------------


def test_the_site_s_menu_has_every_page():
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    shown = sorted(re.findall(r"[\w/-]+\.md", menu))
    written = [
        str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents
    ]
    one_by_one = re.compile(r"decisions/\d")  # which their own index lists
    pages = [page for page in written if not one_by_one.match(page)]
    assert shown == sorted([*pages, *docs_site.ELSEWHERE, docs_site.REFERENCE])


@pytest.mark.parametrize(
    ("page", "written", "shown"),
    [
        ("index.md", "[a\nb](docs/config.md#train)", "[a\nb](config.md#train)"),
        ("index.md", "![a](docs/step.svg) [b](docs/decisions/README.md)",
         "![a](step.svg) [b](decisions/README.md)"),
        ("methods.md", "[a](../examples/adaptation/README.md)", "[a](examples/adaptation.md)"),
        ("index.md", "[a](examples/adaptation)", "[a](examples/adaptation.md)"),
        ("examples/adaptation.md", "[a](../../docs/rows.md)", "[a](../rows.md)"),
        ("performance.md", "[`a`](../benchmarks/results)", "`a` (`benchmarks/results`)"),
        ("contributing.md", "[pyproject.toml](pyproject.toml)", "pyproject.toml"),
        ("rows.md", "[a](none.md) [b](#c) [c](https://example.org/d)",
         "[a](none.md) [b](#c) [c](https://example.org/d)"),
    ],
)  # fmt: skip
def test_links_lead_to_where_the_site_has_their_files(page, written, shown):
    assert docs_site.linked(written, page) == shown


def test_lists_and_tables_get_the_empty_line_that_markdown_in_python_wants():
    text = "so:\n- a\n  more\n- b\n\n<!-- t -->\n| c |\n|---|\n```\nd\n- e\n```\n"
    wider = "so:\n\n- a\n  more\n- b\n\n<!-- t -->\n\n| c |\n|---|\n```\nd\n- e\n```\n"
    assert docs_site.with_room(text) == wider


@pytest.mark.parametrize(
    ("html", "asks"),
    [
        ('<script src="https://example.org/a.js">', True),
        ('<link rel="preconnect" href="//example.org">', True),
        ('<img alt="a" src="step.svg"><a href="https://example.org">', False),
    ],
)
def test_what_a_browser_would_fetch_from_elsewhere_is_found(html, asks):
    assert bool(docs_site.FETCHED.search(html)) == asks


def test_the_python_reference_has_every_public_name():
    page = docs_site.reference()
    assert page == docs_site.reference() and " at 0x" not in page
    headings = {line.split()[1] for line in page.splitlines() if re.match("#+ mt", line)}
    assert {f"mt.{name}" for name in megatrain.__all__} <= headings
    assert {"mt.Engine.train_step", "mt.losses.Dpo", "mt.errors.PlanError"} <= headings
    assert "tokens_per_step, seq_len, loss: " in page


def test_a_page_of_plans_has_a_place_for_its_tables():
    for page, names in ((what_fits.PAGE, ["tables"]), (what_fits.MY_GPU, [*what_fits.CARDS])):
        text, tables = page.read_text(), {name: [f"table of {name}"] for name in names}
        written = write_page.filled(text, tables)
        assert written[:99] == text[:99] and all(f"table of {name}\n" in written for name in names)


def test_the_index_lists_every_decision_by_its_title():
    index = (DECISIONS / "README.md").read_text()
    notes = sorted(DECISIONS.glob("[0-9]*.md"))
    numbers = [note.name[:4] for note in notes]
    assert numbers == sorted(set(numbers)), "no number twice"
    for note in notes:
        title = note.read_text().splitlines()[0].removeprefix(f"# {note.name[:4]}: ")
        assert f"| [{note.name[:4]}]({note.name}) | {title} |" in index


def test_every_decision_has_a_question_and_a_choice():
    for note in DECISIONS.glob("[0-9]*.md"):
        text = note.read_text()
        assert "**Question.**" in text, note
        assert "**Choice.**" in text, note


def test_decisions_are_few_and_cited_and_those_that_are_cited_exist():
    numbers = {note.name[:4] for note in DECISIONS.glob("[0-9]*.md")}
    cited = set()
    for folder in ("megatrain", "benchmarks", "tests", "pyproject.toml", "docs/architecture.md"):
        place = ROOT / folder
        for file in [place] if place.is_file() else place.rglob("*.py"):
            found = re.findall(r"decisions?(?: \[?|/)(\d{4})", file.read_text(), re.IGNORECASE)
            assert set(found) <= numbers, file
            cited |= set(found)
    assert numbers - cited == set()
    assert len(numbers) <= 46


def test_the_readme_is_short_and_its_config_loads(tmp_path):
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 150
    (config,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(config.splitlines()) <= 11
    (tmp_path / "my.yaml").write_text(config)
    assert load_config(tmp_path / "my.yaml").train.tokens_per_step == 1024
