"""The reference of the Python interface, from the docstrings of what `megatrain` exports.

    python -m benchmarks.api_reference

prints it; `make docs` makes it a page of the site.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
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
ADDRESS = re.compile(r" at 0x\w+")


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


if __name__ == "__main__":
    main()
