"""What `make docs` adds to docs/: pages from elsewhere, the Python reference, and links to both.

mkdocs calls the functions named `on_...` (mkdocs.yml, `hooks`). Nothing else here needs it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import api_reference

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
    files.append(File.generated(config, REFERENCE, content=api_reference.page()))
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
