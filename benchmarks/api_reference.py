"""The reference of the Python interface, from the docstrings of what `megatrain` exports.

    python -m benchmarks.api_reference

prints it; `make docs` makes it a page of the site.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import megatrain

INTRODUCTION = """# Python

```python
import megatrain as mt
```

Names are loaded on first use. A loop of one's own is shown
[at the start](index.md#a-loop-of-your-own); keys of the config, which most functions take as
keywords, are [here](config.md).
"""
WIDTH = 88
# Values whose methods are the engine's business.
VALUES = ("AdamW", "Lion", "Muon")
OBJECT = re.compile(r"<(?:function )?(?:[\w.]+\.)?(\w+)( object)? at 0x\w+>")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):\n")
# `name, name: what it is`, where a docstring lists arguments; indented lines go on with it
ITEM = re.compile(r"(?!Args)(\*{0,2}[A-Za-z_][\w.]*(?:, (?:[\w*]+|\.\.\.))*): ")
NAMED = r"`\1`: "
STARTS = re.compile(ITEM.pattern + "|[A-Z]")


def main() -> None:
    print(page())


def page() -> str:
    """Functions, then classes with their methods, then the modules' contents."""
    found = {name: getattr(megatrain, name) for name in megatrain.__all__}
    modules = {name: one for name, one in found.items() if isinstance(one, ModuleType)}
    parts = [INTRODUCTION]
    for name, one in sorted(found.items(), key=lambda pair: inspect.isclass(pair[1])):
        if name not in modules:
            parts += entry(f"mt.{name}", one, 2)
    for name, module in modules.items():
        parts += [f"## mt.{name}\n", told(module)]
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
    if inspect.isfunction(one) or inspect.ismethod(one) or "__init__" in written_in(one):
        yield f"```python\n{signature(called, one)}\n```\n"
    yield told(one)
    if inspect.isclass(one) and called not in VALUES:
        for inner, method in methods(one):
            yield from entry(f"{name}.{inner}", method, level + 1)


def written_in(kind: type) -> Mapping[str, Any]:
    """What a class defines itself, its dataclass decorator included; nothing of an error."""
    return {} if issubclass(kind, Exception) else vars(kind)


def methods(kind: type) -> Iterator[tuple[str, Any]]:
    """(name, function) of public methods with a docstring; those of public bases are told there."""
    seen: set[str] = set()
    for base in kind.__mro__:
        if base is not kind and base.__module__.startswith("megatrain.losses"):
            continue
        for name, one in vars(base).items():
            function = getattr(one, "__func__", one)
            ours = str(getattr(function, "__module__", "")).startswith("megatrain")
            if ours and name not in seen and inspect.isfunction(function) and function.__doc__:
                seen.add(name)
                if not name.startswith("_"):
                    yield name, getattr(kind, name)


def signature(name: str, one: Any) -> str:
    """`name(...) -> ...`, an argument a line where it is long."""
    found = inspect.signature(one)
    given = [p for p in found.parameters.values() if p.name not in ("self", "cls")]
    kinds = [p.kind for p in given]
    words = [argument(p) for p in given]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        words.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    known = found.return_annotation is not found.empty and not inspect.isclass(one)
    end = f") -> {annotation(found.return_annotation)}" if known else ")"
    line = f"{name}({', '.join(words)}{end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), end])


STARS: Mapping[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


def argument(one: inspect.Parameter) -> str:
    stars = STARS.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {annotation(one.annotation)}"
    if one.default is one.empty:
        return f"{stars}{one.name}{kind}"
    made = OBJECT.sub(lambda of: of[1] + ("()" if of[2] else ""), repr(one.default))
    default = made.replace("<factory>", "...")
    return f"{one.name}{kind or ''}{' = ' if kind else '='}{default}"


def annotation(kind: Any) -> str:
    """As it is written: annotations are texts where a module postpones them."""
    return kind if isinstance(kind, str) else inspect.formatannotation(kind)


def told(one: Any) -> str:
    """The docstring as Markdown: its sections as lists."""
    text = inspect.getdoc(one) or ""
    return "\n".join(f"{paragraph(part)}\n" for part in text.split("\n\n"))


def paragraph(part: str) -> str:
    found = SECTION.match(part)
    body = textwrap.dedent(part[found.end() :]) if found else part
    items = re.split(r"\n(?! )", body)
    if any(ITEM.match(item) for item in items) and all(map(STARTS.match, items)):
        body = "\n".join(f"- {ITEM.sub(NAMED, safe(flat(item)), count=1)}" for item in items)
    else:
        body = safe(body)
    return f"{found[1]}:\n\n{body}" if found else body


def flat(text: str) -> str:
    return " ".join(text.split())


def safe(text: str) -> str:
    """No HTML outside of code."""
    return re.sub(r"(`[^`]*`)|<", lambda found: found[1] or "&lt;", text)


if __name__ == "__main__":
    main()
