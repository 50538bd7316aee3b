"""A page: its data, and that nothing in it can become code."""

from __future__ import annotations

import os

import pytest

from megatrain.errors import StorageError
from megatrain.recipes.report import ASSETS, Curve, chart, page, table, text, write_page
from tests.pages import block, data_of

NASTY = "</script><script>alert(1)</script><!-- <b>&amp; \u2028 \ud800 \u202e \x1b[31m"


def test_texts_stay_texts():
    blocks = [text(NASTY, NASTY), table("t", ["", NASTY], [[NASTY, "b"]])]
    html = page(NASTY, [NASTY], blocks)
    # the data, uPlot and page.js
    assert html.count("<script") == html.count("</script>") == 3
    assert "<b>" not in html and "alert(1)</" not in html
    data = data_of(html)
    assert block(data, "t")["rows"] == [[NASTY, "b"]]
    assert "\\u202e" in data["title"] and "\\x1b" in data["blocks"][0]["text"]


def test_nothing_is_loaded_and_only_its_own_scripts_run():
    html = page("run", ["run"], [])
    assert "default-src 'none'" in html and html.count("'sha256-") == 2
    for name in ("src=", "@import", "fetch(", "XMLHttpRequest", "url("):
        assert name not in html, name
    links = {part.split()[0] for part in html.split("https://")[1:]}
    assert links == {"github.com/leeoniya/uPlot"}, "the comment that uPlot begins with"
    assert "The MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


def test_figures_have_six_digits():
    made = chart("loss", [Curve("loss", [(1, 2.3456789), (2, 1e-7 / 3)])])
    assert made["lines"][0]["x"] == [1, 2]
    assert made["lines"][0]["y"] == [2.34568, 3.33333e-8]


def test_a_page_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "report.html"
    (tmp_path / "elsewhere").write_text("kept")
    path.with_name("report.html.tmp").symlink_to(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    write_page(path, "new")
    assert path.read_text() == "new" and not path.is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "report.html"]


def test_a_page_that_cannot_be_written_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="cannot be written"):
        write_page(tmp_path / "none" / "report.html", "")
