"""`report.html` of runs: what it shows, and when it is written."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from megatrain.errors import StorageError
from megatrain.recipes import loop, report
from megatrain.recipes.report import ASSETS, Reported, drawn, page, show_live, text
from megatrain.recipes.report import report_of as page_of
from megatrain.reporting.metrics import History
from tests.helpers.commands import evaluations_of, steps_of, write_jsonl
from tests.helpers.pages import block, browser, curve, data_of, looked_at
from tests.reporting.one_step import STEP

NEEDS_BROWSER = pytest.mark.skipif(browser() is None, reason="no Chromium or Chrome on PATH")
MARKUP = "<script>document.title = 'broken'</script> & <b>"


def report_of(run_dir: Path) -> dict[str, Any]:
    return data_of((run_dir / "report.html").read_text())


def asked(folder: Path) -> None:
    write_jsonl(folder / "asked.jsonl", [{"prompt": MARKUP}])


@pytest.fixture
def run_dir(trained_once: Any) -> Path:
    """A run that answered a prompt with markup at its evaluations. Tests only read it."""
    keys = ("eval.prompts=asked.jsonl", "eval.max_new_tokens=4", "economy.price_per_hour=2")
    return Path(trained_once(*keys, begin=asked) / "run")


def test_figures_are_those_of_the_metrics(run_dir):
    data, steps = report_of(run_dir), steps_of(run_dir)
    charts = {
        ("loss", "loss"): "loss",
        ("learning rate", "learning rate"): "lr",
        ("gradient norm", "before clipping"): "grad_norm",
        ("tokens/s", "tokens/s"): "tokens_per_s",
        ("TFLOP/s", "TFLOP/s"): "tflops",
        ("host memory", "peak"): "host_bytes",
    }
    for (title, label), name in charts.items():
        expected = {row["step"]: pytest.approx(row[name], rel=1e-5) for row in steps}
        assert curve(data, title, label) == expected, name
    held_out = {row["step"]: row["eval_loss"] for row in evaluations_of(run_dir)}
    assert sorted(held_out) == [0, 5, 10]
    assert curve(data, "loss", "held-out loss") == pytest.approx(held_out, rel=1e-5)
    shares = curve(data, "where the time of a step goes", "computing")
    assert shares == {row["step"]: row["shares"]["compute"] for row in steps}


def test_what_was_planned_sampled_and_spent_is_there(run_dir):
    data, plan = report_of(run_dir), json.loads((run_dir / "plan.json").read_text())
    texts = {one["title"]: one["text"] for one in data["blocks"] if one["kind"] == "text"}
    assert f"resident: 4 blocks ({plan['reasons']['resident']})" in texts["plan of run"]
    limit = curve(data, "host memory", "planned")
    assert limit == dict.fromkeys((1, 10), pytest.approx(plan["totals"]["host"]["need"], rel=1e-5))
    (sample,) = block(data, "samples")["prompts"]
    assert sample["prompt"] == MARKUP
    assert [when for when, _ in sample["answers"]] == ["step 10", "step 5", "step 0"]
    glance = {card["name"]: card["values"][0] for card in data["blocks"][0]["cards"]}
    assert glance["step"] == "10 of 10" and "USD" in glance["cost"]
    assert json.loads((run_dir / "env.json").read_text())["python"] in texts["environment of run"]
    assert "seed: 0" in texts["config of run"]
    assert data["about"] == [f"model ({plan['parameters']:,} parameters) · sft · rows.jsonl"]
    assert glance["next"] == "megatrain generate run --chat"


def test_it_is_written_anew_for_a_folder_that_lacks_some(megatrain, copied):
    for name in ("report.html", "plan.json", "env.json"):
        (copied / name).unlink()
    (copied / "config.resolved.yaml").write_text("model: [")
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert megatrain("report run").out == "run/report.html\n"
    assert max(curve(report_of(copied), "loss", "loss")) == 10
    assert "no such folder" in megatrain("report none", code=2).err
    (copied / "metrics.jsonl").unlink()
    assert "cannot read it" in megatrain("report run", code=7).err


def test_a_figure_that_is_no_number_is_a_gap(megatrain, copied):
    line = (copied / "metrics.jsonl").read_text().splitlines()[1]
    figures = {**json.loads(line), "grad_norm": float("inf"), "lr": float("nan")}
    with (copied / "metrics.jsonl").open("a") as file:
        for step in (11, 12):
            file.write(json.dumps({**figures, "step": step, "loss": step / 12 * 1e999}) + "\n")
    megatrain("report run")
    assert max(curve(report_of(copied), "loss", "loss")) == 10
    assert max(curve(report_of(copied), "tokens/s", "tokens/s")) == 12


def test_several_runs_are_side_by_side(megatrain, copied):
    other = Path(shutil.copytree(copied, copied.parent / "other", symlinks=True))
    resolved = (other / "config.resolved.yaml").read_text()
    (other / "config.resolved.yaml").write_text(resolved.replace("seed: 0", "seed: 7"))
    assert "--output FILE" in megatrain("report run other", code=2).err
    assert megatrain("report run other --output both.html").out == "both.html\n"
    data = data_of(Path("both.html").read_text())
    assert data["runs"] == ["run", "other"]
    for number in (0, 1):
        assert len(curve(data, "loss", "loss", number)) == 10
    assert ["train.seed", "0", "7"] in block(data, "what differs in the configs")["rows"]
    assert all(len(card["values"]) == 2 for card in data["blocks"][0]["cards"])


def test_a_resumed_run_shows_each_step_once(megatrain, killed, finished_project):
    megatrain("resume run")
    again, whole = report_of(killed), report_of(finished_project / "run")
    assert curve(again, "loss", "loss") == curve(whole, "loss", "loss")
    assert curve(again, "loss", "held-out loss") == curve(whole, "loss", "held-out loss")


def test_it_is_there_while_the_run_goes_on(megatrain, project, monkeypatch):
    seen, original = [], loop.train_step

    def train_step(run: Any, *rest: Any) -> None:
        path = project / "run" / "report.html"
        if path.exists():
            seen.append(max(curve(data_of(path.read_text()), "loss", "loss")))
        original(run, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)
    megatrain("train cfg.yaml train.max_steps=4")
    assert seen[0] == 1, "after the first step"
    assert max(curve(report_of(project / "run"), "loss", "loss")) == 4


def test_a_run_that_diverges_leaves_its_report(megatrain, project, monkeypatch):
    original = loop.train_step

    def train_step(run: Any, *rest: Any) -> None:
        if run.step == 3:
            raise RuntimeError
        original(run, *rest)

    monkeypatch.setattr(loop, "train_step", train_step)
    megatrain("train cfg.yaml", code=1)
    assert sorted(curve(report_of(project / "run"), "loss", "loss")) == [1, 2, 3]


def test_that_it_cannot_be_written_is_said_once(megatrain, project, monkeypatch):
    def full(*_: object) -> None:
        raise StorageError("no space")

    monkeypatch.setattr(report, "write_text", full)
    monkeypatch.setattr(report, "EVERY_S", 0.0)
    monkeypatch.setattr(report, "PACE", 0)
    said = megatrain("train cfg.yaml train.max_steps=3").err
    assert said.count("no report is written, training goes on: no space") == 1
    assert not (project / "run" / "report.html").exists()


# -- runs that are made up -------------------------------------------------------------------------

PREFERENCE = {"rewards/chosen": 0.5, "rewards/rejected": -0.5, "rewards/accuracies": 0.75}


def reported(name: str = "run", steps: int = 3, **fields: Any) -> Reported:
    rows = [replace(STEP, step=step + 1, **fields).to_dict() for step in range(steps)]
    return Reported(Path(name), History(rows))


def titles(data: dict[str, Any]) -> list[str]:
    return [one.get("title", "") for one in data["blocks"]]


def test_preference_metrics_share_a_chart_but_for_accuracies():
    run = reported(metrics={**PREFERENCE, "logps/chosen": -9.0})
    run.history.add({"step": 3, "eval_loss": 1.0, "eval_s": 1.0, "eval_rewards/chosen": 0.25})
    data = data_of(page_of([run]))
    assert curve(data, "rewards", "chosen") == {1: 0.5, 2: 0.5, 3: 0.5}
    assert curve(data, "rewards", "rejected") == {1: -0.5, 2: -0.5, 3: -0.5}
    assert curve(data, "rewards", "chosen (held out)") == {3: 0.25}
    assert curve(data, "rewards, accuracy", "accuracy")[1] == 0.75
    assert curve(data, "logps", "chosen")[1] == -9.0


def test_experts_spikes_and_skipped_steps_are_shown():
    run = reported(expert_load_max=1.5, aux_loss=2.0, skipped=True, spike=True)
    data = data_of(page_of([run]))
    assert curve(data, "busiest expert", "tokens over the mean") == {1: 1.5, 2: 1.5, 3: 1.5}
    assert curve(data, "routers' balancing loss", "without its coefficient")[2] == 2.0
    assert set(curve(data, "loss", "spike")) == {1, 2, 3}
    glance = {card["name"]: card["values"] for card in data["blocks"][0]["cards"]}
    assert glance["steps without an update"] == ["3: 1, 2, 3"]


def test_what_a_run_has_not_is_left_out():
    data = data_of(page_of([reported()]))
    assert "energy" not in {card["name"] for card in data["blocks"][0]["cards"]}
    shown = titles(data)
    assert not {"MFU", "GPU memory", "busiest expert", "rewards", "samples"} & set(shown)


@pytest.mark.slow
def test_a_long_run_has_a_small_page():
    fields: dict[str, Any] = {"metrics": PREFERENCE, "mfu": 0.5, "gpu_peak_bytes": 2**30}
    runs = [reported(steps=steps, **fields) for steps in (5_000, 7_500)]
    short, long = (len(page_of([run])) for run in runs)
    assert long < 1.2 * short < 300_000


def test_lines_of_a_long_run_have_their_means():
    run = reported(steps=2000)
    data = data_of(page_of([run]))
    lines = block(data, "loss")["lines"]
    assert [line["style"] for line in lines] == ["faint", "trend"]
    assert set(lines[1]["y"]) == {STEP.loss}
    assert [line["style"] for line in block(data, "learning rate")["lines"]] == ["line"]


# -- in a browser ----------------------------------------------------------------------------------


@NEEDS_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 500], ids=["desktop", "phone"])
def test_a_browser_draws_it_without_a_request(run_dir, tmp_path, scheme, width):
    options = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}[scheme]
    options = [*options, f"--window-size={width},900"]
    drawn, console = looked_at(run_dir / "report.html", tmp_path, *options)
    assert ("rgb(96, 165, 250)" in drawn) == (scheme == "dark"), "the first colour of dark pages"
    assert console == [], "also what the page's policy refuses would be named"
    assert drawn.count("<canvas") == len(
        [one for one in report_of(run_dir)["blocks"] if one["kind"] == "chart"]
    )
    widths = [
        int(found) for found in re.findall(r'<div class="u-wrap" style="width: (\d+)px', drawn)
    ]
    assert len(widths) == drawn.count("<canvas") and max(widths) < min(width, 900)
    assert "&lt;script&gt;document.title" in drawn and "<title>run</title>" in drawn


@NEEDS_BROWSER
def test_a_browser_says_what_the_policy_refuses(run_dir, tmp_path):
    html = (run_dir / "report.html").read_text()
    foreign = "<img src='http://127.0.0.1:9/a.png'><script>document.title = 'run'</script>"
    (tmp_path / "page.html").write_text(html.replace("<main>", f"{foreign}<main>"))
    _, console = looked_at(tmp_path / "page.html", tmp_path)
    assert sum("Content Security Policy" in line for line in console) == 2


# -- a page ----------------------------------------------------------------------------------------


NASTY = "</script><script>alert(1)</script><!-- <b>&amp; \u2028 \ud800 \u202e \x1b[31m"


def test_texts_stay_texts():
    table = {"kind": "table", "title": "t", "head": ["", NASTY], "rows": [[NASTY, "b"]]}
    blocks = [text(NASTY, NASTY), table]
    html = page(NASTY, [NASTY], blocks, [])
    # the data, uPlot and page.js
    assert html.count("<script") == html.count("</script>") == 3
    assert "<b>" not in html and "alert(1)</" not in html
    data = data_of(html)
    assert block(data, "t")["rows"] == [[NASTY, "b"]]
    assert "\\u202e" in data["title"] and "\\x1b" in data["blocks"][0]["text"]


def test_nothing_is_loaded_and_only_its_own_scripts_run():
    html = page("run", ["run"], [], [])
    assert "default-src 'none'" in html and html.count("'sha256-") == 2
    for name in ("src=", "@import", "fetch(", "XMLHttpRequest", "url("):
        assert name not in html, name
    links = {part.split()[0] for part in html.split("https://")[1:]}
    assert links == {"github.com/leeoniya/uPlot"}, "the comment that uPlot begins with"
    assert "The MIT License" in (ASSETS / "uPlot.LICENSE").read_text()


def test_figures_have_six_digits():
    made = drawn("loss", [(1, 2.3456789), (2, 1e-7 / 3)])
    assert (made["x"], made["y"]) == ([1, 2], [2.34568, 3.33333e-8])


def test_a_report_is_shown_while_the_run_goes_on(megatrain, project):
    megatrain("train cfg.yaml train.max_steps=2")
    servers = Queue[ThreadingHTTPServer]()
    thread = Thread(target=show_live, args=([project / "run"], 0, servers.put))
    thread.start()
    server = servers.get(timeout=30)
    there = f"http://127.0.0.1:{server.server_port}"
    try:
        with urlopen(f"{there}/") as answer:
            page = answer.read().decode()
            assert answer.headers["Refresh"] == "5"
        assert "2 of 2" in page
        megatrain("resume run train.max_steps=3")
        with urlopen(f"{there}/") as answer:
            assert "3 of 3" in answer.read().decode()
        strange = Request(f"{there}/", headers={"Host": "elsewhere.example"})
        for refused in (f"{there}/config.yaml", strange):
            with pytest.raises(HTTPError, match="404"):
                urlopen(refused)
        taken = megatrain(f"watch run --port {server.server_port}", code=2)
        assert f"--port {server.server_port}: Address already in use; name another one" in taken.err
    finally:
        server.shutdown()
        thread.join()


def test_resuming_a_finished_run_writes_a_report_that_a_kill_cut_short(megatrain, copied):
    (copied / "report.html").rename(copied / "report.html.tmp")
    megatrain("resume run")
    assert (copied / "report.html").is_file() and not (copied / "report.html.tmp").exists()
