"""Chat templates made to hang, to fill memory or to crash: the row is refused, and soon."""

from __future__ import annotations

import time

import pytest

from megatrain.data import rendering
from megatrain.data.fields import RowError
from megatrain.data.template import Scene, Template

TURNS = Scene(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}%s{% endfor %}{% endfor %}"
TEMPLATES = {
    "a loop without end": (LOOP.replace("%s", ""), "it takes more than 0.5 s"),
    "output without end": (LOOP.replace("%s", "x" * 100), "it takes more than 0.5 s"),
    "a division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "an overflow": ("{{ 10.0 ** 400 }}", "."),
    "a macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    "deep nesting": ("{% if true %}" * 3000 + "{% endif %}" * 3000, "."),
    "much text": ("{{ messages[0].content * 70000000 }}", "more than 64 million characters"),
    "a constant of a gigabyte": ("{{ 10**3 * ('x' * 10**3) * 10**3 }}", "a constant of more than"),
    "a constant without end": ("{{ 9 ** (9**9) }}", "a constant of more than"),
    "no template": ("{% for %}", "Expected"),
    "an attribute of the sandbox": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LONGEST_S", 0.5)
    monkeypatch.setattr(rendering, "_watch", type(rendering._watch)())


@pytest.mark.parametrize(("source", "reason"), TEMPLATES.values(), ids=TEMPLATES.keys())
def test_a_hostile_template_refuses_the_row(make_tokenizer, source, reason):
    tokenizer = make_tokenizer(source)
    started = time.monotonic()
    with pytest.raises(RowError, match=reason):
        Template(tokenizer).render(TURNS)
    assert time.monotonic() - started < 5


def loop_for_ever() -> None:
    while True:
        pass


def test_what_follows_a_late_rendering_is_left_alone():
    for _ in range(3):
        with pytest.raises(rendering.TooLong), rendering.limited():
            loop_for_ever()
        with rendering.limited():
            time.sleep(0.1)
    time.sleep(0.7)


def test_one_that_ends_as_it_is_found_late_raises_nothing_later(monkeypatch):
    """What was to be raised is taken back, as nothing of Python ran in between."""
    told: list[object] = []
    monkeypatch.setattr(rendering, "_raise_in", lambda thread, error: told.append(error))
    with rendering.limited():
        time.sleep(0.8)
    assert told == [rendering.TooLong, None]
