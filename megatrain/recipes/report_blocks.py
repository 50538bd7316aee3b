"""What a report of runs shows, as blocks of a page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatrain.errors import printable
from megatrain.planner.picture import decisions, phases, tiers
from megatrain.recipes.reported import Reported
from megatrain.reporting.energy import Economy, Prices, described
from megatrain.reporting.page import Block, Curve, cards, chart, table, text
from megatrain.reporting.summary import Predicted, step_seconds
from megatrain.reporting.words import BOUND_WORDS, human_bytes, human_seconds, time_in_words

ANSWERS = 4  # to a prompt: the first and the newest; of several runs, the newest of each
PROMPTS = 20
LONGEST = 4000  # characters of a sample
# Charts by what they draw, in this order; {name of the figure: its label}. Any other figure has a
# chart of its own, or with those of the same name before the slash.
CHARTS: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("loss", "", {"loss": "loss", "eval_loss": "held-out loss", "spike": "spike"}),
    ("learning rate", "", {"lr": "learning rate"}),
    ("gradient norm", "", {"grad_norm": "before clipping"}),
    ("tokens/s", "", {"tokens_per_s": "tokens/s"}),
    ("TFLOP/s", "", {"tflops": "TFLOP/s"}),
    ("MFU", "share", {"mfu": "MFU"}),
    ("GPU memory", "bytes", {"gpu_peak_bytes": "peak"}),
    ("host memory", "bytes", {"host_bytes": "peak"}),
    ("routers' balancing loss", "", {"aux_loss": "without its coefficient"}),
    ("busiest expert", "", {"expert_load_max": "tokens over the mean"}),
)
PLANNED = {"GPU memory": "gpu", "host memory": "host"}  # tiers
STYLES = {"spike": "points"}
SMOOTH = ("lr", "gpu_peak_bytes", "host_bytes")  # by themselves


# -- at a glance -----------------------------------------------------------------------------------


def _step(run: Reported) -> str:
    of = f" of {steps:,}" if (steps := run.plan.get("steps")) else ""
    return f"{run.history.step:,}{of}"


def _loss(run: Reported) -> str:
    loss = run.history.newest.get("loss")
    return "" if loss is None else f"{loss:.4f}"


def _held_out(run: Reported) -> str:
    losses = run.values("eval_loss")
    if not losses:
        return ""
    return f"{losses[0]:.4f} before, {losses[-1]:.4f} now, best {min(losses):.4f}"


def _tokens(run: Reported) -> str:
    total, seconds = run.history.totals["tokens"], run.history.totals["step_s"]
    rate = f" ({total / seconds:,.0f} tokens/s)" if seconds else ""
    return f"{total:,}{rate} in {human_seconds(seconds)} of steps" if total else ""


def _seconds(run: Reported) -> str:
    planned = run.plan.get("timing", {}).get("seconds")
    median = run.history.median_s
    return "" if median is None else Predicted(planned, median).words(step_seconds)


def _memory(name: str, tier: str) -> Callable[[Reported], str]:
    def words(run: Reported) -> str:
        peak = run.peak(name)
        return "" if peak is None else Predicted(run.planned(tier), peak).words(human_bytes)

    return words


def _economy(name: str) -> Callable[[Reported], str]:
    def words(run: Reported) -> str:
        given, totals = run.asked("economy"), run.history.totals
        prices = Prices(
            given.get("price_per_hour"),
            given.get("price_per_kwh"),
            str(given.get("currency", "USD")),
        )
        counted = "GPU and host, as far as measured or given"
        joules = totals.get("energy_j")
        economy = Economy(totals["tokens"], totals["step_s"], joules, prices, counted)
        return dict(described(economy, whole=True)).get(name, "")

    return words


def _skipped(run: Reported) -> str:
    steps, count = run.history.skipped, run.history.totals["skipped"]
    more = ", ..." if count > len(steps) else ""
    return f"{count:,}: {', '.join(map(str, steps))}{more}" if steps else ""


GLANCE: dict[str, Callable[[Reported], str]] = {
    "step": _step,
    "loss": _loss,
    "held-out loss": _held_out,
    "tokens": _tokens,
    "a step": _seconds,
    "time": lambda run: time_in_words(run.history.step_time),
    "GPU memory": _memory("gpu_peak_bytes", "gpu"),
    "host memory": _memory("host_bytes", "host"),
    "cost": _economy("cost"),
    "energy": _economy("energy"),
    "steps without an update": _skipped,
    "advice": lambda run: str(run.history.newest.get("advice", "")),
}


# -- charts ----------------------------------------------------------------------------------------


def charts(runs: Sequence[Reported]) -> Iterator[Block]:
    """Every figure of metrics.jsonl over steps."""
    known = {name for _, _, names in CHARTS for name in names}
    others: dict[str, dict[str, str]] = {}
    for run in runs:
        for name in run.history.lines:
            if name not in known:
                group, label = _group_of(name)
                others.setdefault(group, {})[name] = label
    for title, unit, names in (*CHARTS, *((group, "", others[group]) for group in others)):
        curves = [curve for number, run in enumerate(runs) for curve in _curves(run, number, names)]
        if curves:
            tier = PLANNED.get(title, "")
            yield chart(title, [*curves, *_limits(runs, curves, tier)], unit)
    yield from _shares(runs)


def _group_of(name: str) -> tuple[str, str]:
    """(title of the chart, label in it): `rewards/chosen` is `chosen` of `rewards`."""
    held_out = name.startswith("eval_")
    group, _, label = name.removeprefix("eval_").partition("/")
    if label == "accuracies":  # a share, which would be flat beside other figures
        group, label = f"{group}, accuracy", "accuracy"
    return group, (label or group) + (" (held out)" if held_out else "")


def _curves(run: Reported, number: int, names: Mapping[str, str]) -> Iterator[Curve]:
    for name, label in names.items():
        if name in run.history.lines:
            line = run.history.lines[name]
            style = "marked" if name.startswith("eval_") else STYLES.get(name, "line")
            each, means = ([], []) if name in SMOOTH or style != "line" else line.trend()
            yield Curve(label, line.points(), number, "faint" if means else style)
            if means:
                yield Curve(f"{label}, mean of {each:,}", means, number, "trend")


def _limits(runs: Sequence[Reported], curves: Sequence[Curve], tier: str) -> Iterator[Curve]:
    """The plan's peak beside what was measured."""
    for curve in curves:
        if need := runs[curve.run].planned(tier):
            ends = sorted({curve.points[0][0], curve.points[-1][0]})
            yield Curve("planned", [(step, need) for step in ends], curve.run, "limit")


def _shares(runs: Sequence[Reported]) -> Iterator[Block]:
    """Where the time of steps goes: of one run all parts, of several how busy each computes."""
    found = [run.history.shares.points() for run in runs]
    if len(runs) > 1:
        curves = [Curve("computing", points, number) for number, points in enumerate(found)]
        yield chart("share of a step that computes", [c for c in curves if c.points], "share")
        return
    used = [name for name in BOUND_WORDS if any(point[2].get(name) for point in found[0])]
    curves = [
        Curve(BOUND_WORDS[name], [(point[0], point[2].get(name, 0.0)) for point in found[0]])
        for name in used
    ]
    if curves:
        yield chart("where the time of a step goes", curves, "share", stacked=True)


# -- the rest --------------------------------------------------------------------------------------


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


def _asked(prompt: object) -> str:
    """A prompt, or turns, as text."""
    if isinstance(prompt, list):
        turns = [turn for turn in prompt if isinstance(turn, dict)]
        prompt = "\n".join(f"{turn.get('role')}: {turn.get('content')}" for turn in turns)
    return _shortened(prompt)


def _shortened(words: object) -> str:
    full = printable(str(words))
    return full if len(full) <= LONGEST else f"{full[:LONGEST]} ..."


def differences(runs: Sequence[Reported]) -> Iterator[Block]:
    """The keys in which configs differ."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = [[key, *(one.get(key, "") for one in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if rows:
        yield table("what differs in the configs", ["", *(run.name for run in runs)], rows)


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _shortened(value)


def plans(runs: Sequence[Reported]) -> Iterator[Block]:
    """What was planned, beside the measured peaks."""
    planned = [run for run in runs if run.plan]
    for run in planned:
        peaks = {"gpu": run.peak("gpu_peak_bytes"), "host": run.peak("host_bytes")}
        measured = {tier: int(peak) for tier, peak in peaks.items() if peak is not None}
        block = tiers(run.plan, measured)
        yield block if len(runs) == 1 else {**block, "title": f"{block['title']}: {run.name}"}
    if planned:
        yield decisions([run.plan for run in planned], [run.name for run in planned])
    if len(runs) == 1 and planned:
        yield phases(planned[0].plan)


def environment(runs: Sequence[Reported]) -> Iterator[Block]:
    found = []
    for run in runs:
        given = dict(_flat({name: run.environment.get(name) for name in ("python", "platform")}))
        packages, hardware = (run.environment.get(name) or {} for name in ("packages", "hardware"))
        gpu = hardware.get("gpu") or {}
        given |= {"GPU": str(gpu.get("name", "none")), "cores": str(hardware.get("physical_cores"))}
        given["RAM"] = human_bytes(hardware.get("host_total_bytes"))
        found.append(given | dict(_flat(packages)))
    names = list(dict.fromkeys(name for one in found for name in one))
    rows = [[name, *(one.get(name, "") for one in found)] for name in names]
    yield table("environment", ["", *(run.name for run in runs)], rows)


def blocks_of(runs: Sequence[Reported]) -> Iterator[Block]:
    """The whole report, of one run or of several side by side."""
    yield cards([(name, [words(run) for run in runs]) for name, words in GLANCE.items()])
    yield from charts(runs)
    if len(runs) > 1:
        yield from differences(runs)
    yield from samples(runs)
    yield from plans(runs)
    yield from environment(runs)
    for run in runs:
        if run.config_text:
            yield text(f"config of {run.name}", run.config_text)
