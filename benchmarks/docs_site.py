"""What `make docs` adds to docs/: pages from elsewhere, the Python reference, and links to both.

mkdocs calls the functions named `on_...` (mkdocs.yml, `hooks`). Nothing else here needs it.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import megatrain

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
# Pages of the site that are not in docs/, and the file of the repository that each one is.
ELSEWHERE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "examples/adaptation.md": "examples/adaptation/README.md",
}
REFERENCE = "api.md"
WIDE = ("comparison.md",)  # whose tables need the room of the menu
LINK = re.compile(r"\[((?:[^\]\[`]|`[^`]*`)+)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")
BLOCK = re.compile(r"[-*] |\d+\. |\|")
# What a browser fetches by itself when it opens a page.
FETCHED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^>]*>")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    for page, source in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    files.append(File.generated(config, REFERENCE, content=reference()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page as the site wants it."""
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["navigation", "toc"]
    return with_room(linked(markdown, page.file.src_uri))


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that a browser could not show without a network. Raises PluginError."""
    from mkdocs.exceptions import PluginError

    fetched = FETCHED.search(output)
    if fetched:
        raise PluginError(f"{page.file.src_uri} asks the network: {fetched[0]}")
    return output


def linked(markdown: str, page: str) -> str:
    """Lead the links of a page to where their files are on the site; name those that are not."""
    folder = posixpath.dirname(ELSEWHERE.get(page, f"docs/{page}"))

    def lead(link: re.Match[str]) -> str:
        words, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        found = site_path(path)
        if found is not None:
            return f"[{words}]({posixpath.relpath(found, posixpath.dirname(page) or '.')}{anchor})"
        if not (ROOT / path).exists():
            return link[0]  # mkdocs says so
        return words if path in words else f"{words} (`{path}`)"

    return LINK.sub(lead, markdown)


def site_path(path: str) -> str | None:
    """The page or picture of the site that a file or folder of the repository is."""
    pages = {source: page for page, source in ELSEWHERE.items()}
    for name in (path, f"{path}/README.md"):
        if name in pages:
            return pages[name]
        if name.startswith("docs/") and (ROOT / name).is_file():
            return name.removeprefix("docs/")
    return None


def with_room(markdown: str) -> str:
    """An empty line before each list or table that follows a line of text.

    GitHub needs none there; Python-Markdown does.
    """
    lines, code, before = [], False, ""
    for line in markdown.splitlines():
        if line.startswith("```"):
            code = not code
        goes_on = not before or before.startswith(" ") or BLOCK.match(before)
        if BLOCK.match(line) and not code and not goes_on:
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines) + "\n"


# -- the Python reference, from the docstrings of what `megatrain` exports ------------------------

INTRODUCTION = """# Python

```python
import megatrain as mt
```

Names are loaded on first use. A loop of one's own is shown
[at the start](index.md#a-loop-of-your-own); keys of the config, which most functions take as
keywords, are [here](config.md).
"""
ADDRESS = re.compile(r" at 0x\w+")


def reference() -> str:
    """Functions, then classes with their methods, then the modules' contents."""
    found = {name: getattr(megatrain, name) for name in megatrain.__all__}
    modules = {name: one for name, one in found.items() if isinstance(one, ModuleType)}
    parts = [INTRODUCTION]
    for name, one in sorted(found.items(), key=lambda pair: inspect.isclass(pair[1])):
        if name not in modules:
            parts += entry(f"mt.{name}", one, 2)
    for name, module in modules.items():
        parts += [f"## mt.{name}\n", text_of(module)]
        for inner, one in public(module):
            parts += entry(f"mt.{name}.{inner}", one, 3)
    return "\n".join(parts)


def public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Classes and functions that a module offers, in its file's order; of errors the classes."""
    wanted = inspect.isclass if module is megatrain.errors else callable
    for name, one in vars(module).items():
        ours = str(getattr(one, "__module__", "")).startswith(module.__name__)
        if ours and not name.startswith("_") and wanted(one) and hasattr(one, "__qualname__"):
            yield name, one


def entry(name: str, one: Any, level: int) -> Iterator[str]:
    """A heading, the signature and the docstring; of a class, its public methods, too."""
    yield f"{'#' * level} {name}\n"
    called = name.rpartition(".")[2]
    if not (inspect.isclass(one) and issubclass(one, Exception)) and callable(one):
        yield f"```python\n{called}{signature(one)}\n```\n"
    yield text_of(one)
    if inspect.isclass(one):
        for inner, method in inspect.getmembers(one, callable):
            ours = str(getattr(method, "__module__", "")).startswith("megatrain")
            if (
                ours
                and not inner.startswith("_")
                and not inspect.isclass(method)
                and method.__doc__
            ):
                yield from entry(f"{name}.{inner}", method, level + 1)


def signature(one: Any) -> str:
    """The signature without addresses; one that cannot be read is left out."""
    try:
        return ADDRESS.sub("", str(inspect.signature(one)))
    except ValueError:
        return "(...)"


def text_of(one: Any) -> str:
    """The docstring, as it stands in the code."""
    return f"```text\n{inspect.getdoc(one) or ''}\n```\n"
