"""`report.html` of a run folder: written while the run goes on, and again by `megatrain report`.

One HTML file (assets/page.html), which needs no network: a list of blocks as JSON, which
assets/page.js draws. Its charts are drawn by uPlot (assets/uPlot.LICENSE), unchanged.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from megatrain.config.document import plain, read_yaml
from megatrain.config.resuming import ENVIRONMENT_FILE, RESOLVED_FILE, flatten
from megatrain.errors import ConfigError, logger, printable, without_secrets
from megatrain.machine.launcher import HERE
from megatrain.methods import METHODS
from megatrain.recipes.rl.advantages import OF_METHODS
from megatrain.recipes.rl.journal import judged_before
from megatrain.reporting.energy import Economy, Prices, described
from megatrain.reporting.metrics import METRICS_FILE, SAMPLES_FILE, History, Point, read_metrics
from megatrain.reporting.summary import BOUND_WORDS, Predicted, step_seconds, time_in_words
from megatrain.reporting.words import human_bytes, human_parameters, human_seconds
from megatrain.storage.run_folder import FINAL, write_text
from megatrain.version import VERSION

REPORT_FILE = "report.html"
ASSETS = Path(__file__).parent / "assets"
DIGITS = 6  # of a figure
REFRESHED_EVERY_S = 5

Block = dict[str, Any]


def drawn(label: str, points: Sequence[Point], run: int = 0, style: str = "line") -> Block:
    """A line of a chart. run: number of the run that it is of. style: line, faint, trend (the mean
    of a faint one), marked (with its points), points alone, or limit."""
    values = [float(f"{value:.{DIGITS}g}") for _, value in points]
    return {"label": label, "run": run, "style": style, "x": [at for at, _ in points], "y": values}


def chart(title: str, lines: Sequence[Block], unit: str = "", stacked: bool = False) -> Block:
    """Lines over steps. unit: bytes, share, or none. stacked: they have the same steps."""
    return {"kind": "chart", "title": title, "unit": unit, "stacked": stacked, "lines": [*lines]}


def text(title: str, content: str) -> Block:
    """A text that is folded up until somebody opens it."""
    return {"kind": "text", "title": title, "text": printable(without_secrets(content))}


def page(title: str, runs: Sequence[str], blocks: Sequence[Block], about: Sequence[str]) -> str:
    """The HTML. runs: their names; one is not named beside its figures. about: a line for each."""
    written = f"megatrain {VERSION}, {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}"
    shown: Block = {"title": printable(title), "written": written}
    shown |= {"about": [*map(printable, about)], "runs": [*runs], "blocks": [*blocks]}
    # `<` is written so that no text can end the script it is in
    data = json.dumps(shown, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [_asset("uPlot.iife.min.js"), _asset("page.js")]
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    allowed = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {hashes}"
    code = "".join(f"<script>{script}</script>\n" for script in scripts)
    return Template(_asset("page.html")).substitute(
        allowed=allowed,
        title=html.escape(printable(title)),
        styles=_asset("uPlot.min.css") + _asset("page.css"),
        data=data,
        code=code,
    )


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


PLAN_FILE = "plan.json"
# While a run goes on, the page is written again after PACE times the seconds that writing it took,
# and after EVERY_S at the earliest.
PACE, EVERY_S = 100, 5.0
ANSWERS = 3  # to a prompt: the first and the newest
PROMPTS = 20
ROWS = 64  # answers of a rollout, of whole groups
LONGEST = 4000  # characters of a sample
# (title, unit, {name in metrics.jsonl: label}, the plan's tier). Other figures have charts of their
# own, or share one with those of the same name before the slash.
CHARTS: tuple[tuple[str, str, Mapping[str, str], str], ...] = (
    ("loss", "", {"loss": "loss", "eval_loss": "held-out loss", "spike": "spike"}, ""),
    ("learning rate", "", {"lr": "learning rate"}, ""),
    ("gradient norm", "", {"grad_norm": "before clipping"}, ""),
    ("tokens/s", "", {"tokens_per_s": "tokens/s"}, ""),
    ("TFLOP/s", "", {"tflops": "TFLOP/s"}, ""),
    ("MFU", "share", {"mfu": "MFU"}, ""),
    ("GPU memory", "bytes", {"gpu_peak_bytes": "peak"}, "gpu"),
    ("host memory", "bytes", {"host_bytes": "peak"}, "host"),
    ("routers' balancing loss", "", {"aux_loss": "without its coefficient"}, ""),
    ("busiest expert", "", {"expert_load_max": "tokens over the mean"}, ""),
)
# Shares, which would be flat beside other figures of their name.
SHARES = {"accuracies": "accuracy", "clipped_ratio": "clipped ratio"}
SMOOTH = ("lr", "gpu_peak_bytes", "host_bytes")  # need no trend


class Reported:
    """A run as its folder describes it. What cannot be read is empty, but for its metrics."""

    def __init__(self, folder: Path, history: History | None = None, name: str = "") -> None:
        """history: by default that of metrics.jsonl; name: the folder's. Raises StorageError."""
        self.name = printable(name or folder.resolve().name)
        self.history = History(read_metrics(folder)) if history is None else history
        self.plan = _object(_read(folder / PLAN_FILE))
        self.environment = _object(_read(folder / ENVIRONMENT_FILE))
        self.config_text, config = _read(folder / RESOLVED_FILE), None
        with suppress(ConfigError):  # the text is shown as it is
            config = plain(read_yaml(self.config_text, RESOLVED_FILE))
        self.config: dict[str, Any] = config if isinstance(config, dict) else {}
        self.samples = [*filter(None, map(_object, _read(folder / SAMPLES_FILE).splitlines()))]
        self.following = _following(folder, self.config)  # the command to type next
        # the step that the newest rollout began with, and its groups
        self.rollout = judged_before(folder, self.history.step)

    def planned(self, tier: str, steps: int = 0) -> int | None:
        """Bytes of a tier at the plan's peak, with those of a save beside so many steps."""
        need = self.plan.get("totals", {}).get(tier, {}).get("need")
        every = self.section("checkpoint").get("every")
        copied = tier == "host" and self.plan.get("saves_beside") and every and every < steps
        copy = self.plan.get("disk", {}).get("checkpoint 1", 0) if copied else 0
        return need + copy if isinstance(need, int) else None

    def section(self, name: str) -> dict[str, Any]:
        found = self.config.get(name)
        return found if isinstance(found, dict) else {}


def _following(folder: Path, config: Mapping[str, Any]) -> str:
    """The command that a user types next: to try the model, or to finish it."""
    name = shlex.quote(str(folder))
    if not (folder / FINAL).is_dir():
        return f"megatrain resume {name}, if it has stopped"
    method = METHODS.get(str(config.get("method")))
    scores = method is not None and method.scores
    return f"megatrain export {name} OUT" if scores else f"megatrain generate {name} --chat"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# -- writing ---------------------------------------------------------------------------------------


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of these run folders; by default into the only one. Raises MegaTrainError."""
    if output is None and len(folders) > 1:
        raise ConfigError("command line: name the page of several runs: --output FILE")
    path = output or folders[0] / REPORT_FILE
    write_text(path, report_on(folders))
    return path


def report_on(folders: Sequence[Path]) -> str:
    """The page of these run folders. Raises MegaTrainError."""
    # some have the same last name
    return report_of([Reported(run, name=str(run) * (len(folders) > 1)) for run in folders])


def show_live(
    folders: Sequence[Path], port: int = 0, begun: Callable[[ThreadingHTTPServer], object] = print
) -> None:
    """Show the page of these run folders to browsers of this machine alone, made anew whenever a
    run has gone on, until Ctrl-C.

    Args:
        port: 0 takes a free one.
        begun: is told the server, once it answers.

    Raises ConfigError where the port is taken.
    """
    made: dict[tuple[int, ...], bytes] = {}  # the newest page, by sizes of metrics.jsonl

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # as http.server names it
            own = [f"{host}:{server.server_port}" for host in (HERE, "localhost")]
            if self.path != "/" or self.headers.get("Host") not in own:  # or by another's script
                self.send_error(404)
                return
            files = [folder / METRICS_FILE for folder in folders]
            now = tuple(file.stat().st_size if file.exists() else 0 for file in files)
            if now not in made:
                page_now = report_on(folders).encode()
                made.clear()
                made[now] = page_now
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Refresh", str(REFRESHED_EVERY_S))
            self.end_headers()
            self.wfile.write(made[now])

        def log_message(self, *_: object) -> None:
            """Say nothing of each request."""

    try:
        server = ThreadingHTTPServer((HERE, port), Page)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; name another one") from None
    with server, suppress(KeyboardInterrupt):
        begun(server)
        server.serve_forever()


def report_of(runs: Sequence[Reported]) -> str:
    """The page of one run, or of several side by side."""
    names = [run.name for run in runs]
    return page(", ".join(names), names, [*blocks_of(runs)], [*map(about, runs)])


class LiveReport:
    """The page of a run that goes on. A failure to write it is logged once. folder: None where
    another rank writes it."""

    def __init__(self, folder: Path | None) -> None:
        """Read the steps that the run has taken before. Raises StorageError."""
        self._folder = folder
        self._history = History(read_metrics(folder) if folder else ())
        self._next = 0.0  # time.monotonic() from which it is worth writing again
        self._failed = False

    def add(self, row: dict[str, Any]) -> None:
        """Take in a new line of metrics.jsonl."""
        self._history.add(row)

    def write(self, last: bool = False) -> None:
        """Write the page, unless the last time is so recent that this would slow the run. last:
        write it in any case."""
        began = time.monotonic()
        if self._folder is None or (began < self._next and not last):
            return
        try:
            reported = Reported(self._folder, self._history)
            write_text(self._folder / REPORT_FILE, report_of([reported]))
        except Exception as error:  # noqa: BLE001  no picture is worth a run
            if not self._failed:
                reason = " ".join(str(error).split()) or type(error).__name__
                logger.warning(f"no report is written, training goes on: {reason}")
            self._failed = True
        now = time.monotonic()
        self._next = now + max(EVERY_S, PACE * (now - began))


# -- blocks ----------------------------------------------------------------------------------------


def blocks_of(runs: Sequence[Reported]) -> Iterator[Block]:
    """The blocks of a report, the most telling first."""
    glances = [glance(run) for run in runs]
    cards = {name: [one[name] for one in glances] for name in glances[0]}
    shown = [{"name": name, "values": values} for name, values in cards.items() if any(values)]
    yield {"kind": "cards", "cards": shown}
    if len(runs) > 1:
        yield from differences(runs)
    yield from samples(runs)
    for run in runs:
        yield from answer_table(run, f", {run.name}" if len(runs) > 1 else "")
    yield from charts(runs)
    for run in runs:
        if reasons := run.plan.get("reasons"):
            values = run.plan.get("values", {})
            rows = (f"{name}: {values.get(name, '')} ({why})" for name, why in reasons.items())
            yield text(f"plan of {run.name}", "\n".join(rows))
        if run.config_text:
            yield text(f"config of {run.name}", run.config_text)
        if run.environment:
            yield text(f"environment of {run.name}", json.dumps(run.environment, indent=1))


def about(run: Reported) -> str:
    """Model, method and data in a line, by the names of their files."""
    model, data = run.section("model"), run.section("data").get("train")
    sources = data if isinstance(data, list) else [data]
    names = [str(one.get("path") if isinstance(one, dict) else one) for one in sources if one]
    named, counts = model.get("path") or model.get("config") or "", run.plan.get("parameters")
    active = run.plan.get("active_parameters")
    size = ""
    if isinstance(counts, int) and isinstance(active, int):
        size = f" ({human_parameters(counts, active)})"
    short = [Path(one).name if Path(one).is_absolute() else one for one in (named, *names)]
    parts = [short[0] + size, run.config.get("method"), ", ".join(short[1:])]
    return " · ".join(str(part) for part in parts if part)


def glance(run: Reported) -> dict[str, str]:
    """Figures of the cards, by name; empty where there is none."""
    history, totals, newest = run.history, run.history.totals, run.history.newest
    steps, median = run.plan.get("steps"), history.median_s
    tokens, seconds = totals["tokens"], totals["step_s"]
    loss, planned_s = newest.get("loss"), run.plan.get("timing", {}).get("seconds")
    rate = f"{tokens:,} ({tokens / seconds:,.0f} tokens/s)" if seconds else ""
    found = {
        "held-out reward": "",
        "held-out loss": "",
        "loss": "" if loss is None else f"{loss:.4f}",
        "step": f"{history.step:,}" + (f" of {steps:,}" if steps else ""),
        "tokens": f"{rate} in {human_seconds(seconds)} of steps" if rate else "",
        "a step": "" if median is None else Predicted(planned_s, median).words(step_seconds),
    }
    for name, best in (("loss", min), ("reward", max)):
        if values := history.values(f"eval_{name}"):
            shown = f"{values[0]:.4f} before, {values[-1]:.4f} now, best {best(values):.4f}"
            found[f"held-out {name}"] = shown
    for name, field, tier in (
        ("GPU memory", "gpu_peak_bytes", "gpu"),
        ("host memory", "host_bytes", "host"),
    ):
        peak = max(history.values(field), default=None)
        planned = Predicted(run.planned(tier, history.step), peak)
        found[name] = "" if peak is None else planned.words(human_bytes)
    given = run.section("economy")
    prices = Prices(
        given.get("price_per_hour"), given.get("price_per_kwh"), str(given.get("currency", "USD"))
    )
    counted = "GPU and host, as far as measured or given"
    economy = Economy(tokens, seconds, totals.get("energy_j"), prices, counted)
    worth = dict(described(economy, whole=True))
    found |= {name: worth.get(name, "") for name in ("cost", "energy")}
    more = ", ..." if totals["skipped"] > len(history.skipped) else ""
    named = f"{totals['skipped']:,}: {', '.join(map(str, history.skipped))}{more}"
    found |= {
        "time": time_in_words(history.step_time),
        "steps without an update": named if history.skipped else "",
        "advice": str(newest.get("advice", "")),
        "next": run.following,
    }
    return found


def charts(runs: Sequence[Reported]) -> Iterator[Block]:
    """Every figure of metrics.jsonl over steps, and of one run where the time of steps goes."""
    known = {name for _, _, names, _ in CHARTS for name in names}
    others: dict[str, dict[str, str]] = {}
    for name in (name for run in runs for name in run.history.lines if name not in known):
        group, label = _group_of(name)
        others.setdefault(group, {})[name] = label
    own = [(group, "", names, "") for group, names in others.items()]
    own.sort(key=lambda one: one[0] != "reward")
    first = 1 if "reward" in others else 0
    for title, unit, names, tier in (*own[:first], *CHARTS, *own[first:]):
        each = (_curves(run, number, names, tier) for number, run in enumerate(runs))
        if curves := [*chain.from_iterable(each)]:
            yield chart(title, curves, unit)
    lines = runs[0].history.shares if len(runs) == 1 else {}
    some = ((name, words) for name, words in BOUND_WORDS.items() if name in lines)
    shares = [
        drawn(words, lines[name].sampled()) for name, words in some if any(lines[name].values)
    ]
    if shares:
        yield chart("where the time of a step goes", shares, "share", stacked=True)


def _group_of(name: str) -> tuple[str, str]:
    """(title of the chart, label in it): `rewards/chosen` is `chosen` of `rewards`, and
    `rewards/right/mean` is of the chart that `reward` is in."""
    held_out = name.startswith("eval_")
    group, _, label = name.removeprefix("eval_").partition("/")
    if label in SHARES:
        group, label = f"{group}, {SHARES[label]}", SHARES[label]
    elif label.endswith("_terminated_length"):
        group = f"{group} that ended"
    elif "/" in label:
        inner, _, kind = label.rpartition("/")
        of_function = {"mean": "reward", "std": "reward_std"}.get(kind, group)
        group, label = (of_function, inner) if group == "rewards" else (inner, kind)
    return group, (label or group) + (" (held out)" if held_out else "")


def _curves(run: Reported, number: int, names: Mapping[str, str], tier: str) -> Iterator[Block]:
    for name in (name for name in names if name in run.history.lines):
        line, label = run.history.lines[name], names[name]
        style = "points" if name == "spike" else "marked" if name.startswith("eval_") else "line"
        points = line.points()
        each, means = ([], []) if name in SMOOTH or style != "line" else line.trend()
        yield drawn(label, points, number, "faint" if means else style)
        if means:
            yield drawn(f"{label}, mean of {each:,}", means, number, "trend")
        if need := run.planned(tier):
            ends = sorted({points[0][0], points[-1][0]})
            yield drawn("planned", [(step, need) for step in ends], number, "limit")


def samples(runs: Sequence[Reported]) -> Iterator[Block]:
    """Prompts of `eval.prompts` with the answers of all runs, the newest first."""
    prompts: dict[str, list[tuple[str, str]]] = {}
    for run in runs:
        answers: dict[str, dict[Any, str]] = {}  # the last one of each step
        for row in run.samples:
            asked = _asked(row.get("prompt"))
            answers.setdefault(asked, {})[row.get("step")] = _shortened(row.get("answer"))
        for asked, given in answers.items():
            every = [(f"step {step}", answer) for step, answer in reversed(given.items())]
            kept = every if len(every) <= ANSWERS else [*every[: ANSWERS - 1], every[-1]]
            if len(runs) > 1:
                kept = [(f"{run.name}, {when}", answer) for when, answer in every[:1]]
            prompts.setdefault(asked, []).extend(kept)
    shown = [{"prompt": asked, "answers": given} for asked, given in prompts.items()]
    if shown:
        yield {"kind": "samples", "title": "samples", "prompts": shown[:PROMPTS]}


def answer_table(run: Reported, name: str = "") -> Iterator[Block]:
    """Answers of the newest rollout with their rewards, from its journal. name: for the title."""
    step, groups = run.rollout
    if not groups:
        return
    rewards = np.concatenate([np.array(one["rewards"], float).T for one in groups])
    given, weights = (run.section("rewards").get(key) for key in ("functions", "reward_weights"))
    listed = given if isinstance(given, list) else [given]
    judge = run.section("tools").get("environment_factory")
    if judge and len(listed) < rewards.shape[1]:  # which rewards, too
        listed, weights = [*listed, judge], weights and [*weights, 1.0]
    named = [str(one).rpartition(":")[2] for one in listed]
    if len(named) != rewards.shape[1]:
        named, weights = [f"reward {number + 1}" for number in range(rewards.shape[1])], None
    count = len(groups[0]["completions"])
    method = str(run.config.get("method"))
    if method not in OF_METHODS:
        return
    found = OF_METHODS[method](rewards, named, weights, count, **run.section(method))
    most = max(1, ROWS // count)
    rows = [
        ["" if at % count else _asked(one["prompt"]), _asked(answer)]
        for one in groups[:most]
        for at, answer in enumerate(one["completions"])
    ]
    figures = [
        [*("–" if np.isnan(value) else f"{value:.4g}" for value in each), f"{value:.3f}"]
        for each, value in zip(rewards, found.values, strict=True)
    ]
    some = f", {most} of {len(groups)} prompts" if len(groups) > most else ""
    title = f"answers that step {step + 1} learnt from{some}{name}"
    head = ["prompt", "answer", *named, "advantage"]
    cells = [[*row, *each] for row, each in zip(rows, figures, strict=False)]
    yield {"kind": "table", "title": title, "head": head, "rows": cells}


def _asked(prompt: object) -> str:
    """A prompt, or turns, as text."""
    if isinstance(prompt, list):
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        called = [" ".join(str(one["function"]) for one in t.get("tool_calls", ())) for t in turns]
        told = zip(turns, called, strict=True)
        prompt = "\n".join(f"{t.get('role')}: {t.get('content')}{calls}" for t, calls in told)
    return _shortened(prompt)


def _shortened(words: object) -> str:
    full = printable(without_secrets(str(words)))
    return full if len(full) <= LONGEST else f"{full[:LONGEST]} ..."


def differences(runs: Sequence[Reported]) -> Iterator[Block]:
    """The keys in which configs differ."""
    flat = [{key: _shortened(one) for key, one in flatten(run.config).items()} for run in runs]
    keys = dict.fromkeys(key for one in flat for key in one)
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        head = ["", *(run.name for run in runs)]
        yield {"kind": "table", "title": "what differs in the configs", "head": head, "rows": rows}
