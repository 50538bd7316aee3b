"""The end of a run: what was trained, what it is worth, where it lies, and what was planned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from megatrain.errors import number_of
from megatrain.reporting.energy import Economy, compared
from megatrain.reporting.meters import Load
from megatrain.reporting.metrics import StepTime, json_able
from megatrain.reporting.streams import as_printed
from megatrain.reporting.words import human_bytes, human_seconds

# -- words ---------------------------------------------------------------------------------------

# What a share of a step's time is called.
BOUND_WORDS = {
    "compute": "computing",
    "wait_upload": "waiting for weights",
    "wait_update": "waiting for the update",
    "wait_download": "waiting for gradients to leave",
    "wait_nvme": "waiting for NVMe",
    "wait_exchange": "waiting for other GPUs",
    "wait_network": "waiting for other hosts",
    "data": "waiting for data",
    "rollout": "writing answers",
    "reward": "waiting for rewards",
}


def bound_in_words(time: StepTime) -> str:
    """The largest share of a step: `waiting for the update 32%`."""
    name, share = max(time.shares().items(), key=lambda item: item[1])
    return f"{BOUND_WORDS[name]} {share:.0%}"


def time_in_words(time: StepTime) -> str:
    """Every share of at least 1 percent, largest first."""
    shares = sorted(time.shares().items(), key=lambda item: item[1], reverse=True)
    return ", ".join(f"{BOUND_WORDS[name]} {share:.0%}" for name, share in shares if share >= 0.01)


@dataclass(frozen=True)
class Predicted:
    """A figure as the plan predicted it and as it was measured; None where there is none."""

    predicted: float | None = None
    measured: float | None = None

    @property
    def error(self) -> float | None:
        """(measured - predicted) / predicted."""
        if not self.predicted or self.measured is None:
            return None
        return (self.measured - self.predicted) / self.predicted

    def words(self, human: Callable[[float | None], str]) -> str:
        """`2.1 GiB, planned 2.0 GiB (+1.6%)`; `human` writes a figure with its unit."""
        if self.error is None:
            return human(self.measured)
        return f"{human(self.measured)}, planned {human(self.predicted)} ({self.error:+.1%})"


def step_seconds(value: float | None) -> str:
    """The time of a step: `7.6 s`."""
    return "-" if value is None else f"{value:.3g} s"


def print_rows(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    """Print (name, value) rows in a frame."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    console.print(Panel(table, title=title, title_align="left", expand=False))


GUESSED = "; `megatrain doctor` would measure the rates, which are guessed"


@dataclass(frozen=True)
class RunSummary:
    """The result of `megatrain train` and `resume`, which they print last."""

    run_dir: Path
    steps: int
    tokens: int
    seconds: float
    eval_loss_before: float | None = None  # held out; None without an evaluation set
    eval_loss_after: float | None = None
    best_step: int | None = None  # of the best evaluation, whose checkpoint is kept
    best_metric: str = "eval_loss"  # by which it is the best
    best_value: float | None = None
    final_dir: Path | None = None  # loads in transformers and vLLM; None for a stopped run
    prompt: str | None = None
    answer: str | None = None  # of the trained model to `prompt`
    host: Predicted = Predicted()  # peak bytes
    gpu: Predicted = Predicted()
    step_s: Predicted = Predicted()
    rates_guessed: bool = False  # those that the plan was made of
    time: StepTime | None = None  # summed over the steps
    rows: str = ""  # of a set that is streamed, how many were trained on, in words
    economy: Economy | None = None  # of the steps
    planned_economy: Economy | None = None
    eval_s: float = 0.0  # between the steps
    save_s: float = 0.0
    advice: str = ""  # the setting most worth changing, or that there is none; empty without a step
    skipped: int = 0
    spikes: int = 0
    resumable: bool = True  # false: stopped before there was a checkpoint
    exit_code: int = 0  # 0 done, 75 stopped by a signal, 130 by Ctrl-C; what was trained is saved

    def to_dict(self) -> dict[str, Any]:
        economies = {"economy": self.economy, "planned_economy": self.planned_economy}
        given = {name: None if it is None else it.to_dict() for name, it in economies.items()}
        return {**json_able(asdict(self)), **given}

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """In a notebook, what `megatrain train` prints at its end."""
        printer.text(as_printed(self.render))

    def render(self, console: Console) -> None:
        """Print the summary, and how to go on after a stop."""
        print_rows(console, "stopped" if self.final_dir is None else "done", self._rows())
        if self.answer is not None:
            console.print(Text("prompt  ", style="dim") + Text(self.prompt or "", style="bold"))
            console.print(Text("answer  ", style="dim") + Text(self.answer))
        if self.final_dir is None:
            again = f"megatrain resume {self.run_dir}" if self.resumable else "start it again"
            console.print(Text(f"to go on: {again}"))

    def _best(self) -> str:
        """The best evaluation; empty if there was none."""
        if self.best_value is None:
            return ""
        where = self.run_dir / f"checkpoint-{self.best_step}"
        return f"best {self.best_value:.4f} at step {self.best_step} in {where}"

    def _rows(self) -> list[tuple[str, str]]:
        rate = self.tokens / self.seconds if self.seconds > 0 else 0.0
        took = f"in {human_seconds(self.seconds)} ({rate:,.0f} tokens/s)"
        trained = f"{number_of(self.steps, 'step')}, {self.tokens:,} tokens {took}"
        nothing = "nothing more: the run had come to its end before"
        if self.final_dir is None:
            nothing = "nothing: it was stopped before its first step"
        rows = [("trained", trained if self.steps else nothing)]
        if self.rows:
            rows.append(("rows", self.rows))
        if self.eval_loss_before is not None and self.eval_loss_after is not None:
            losses = f"{self.eval_loss_before:.4f} before, {self.eval_loss_after:.4f} after"
            best = f", {self._best()}" if self._best() and self.best_metric == "eval_loss" else ""
            rows.append(("held-out loss", losses + best))
        if self._best() and self.best_metric != "eval_loss":
            rows.append((self.best_metric, self._best()))
        if self.step_s.measured is not None:
            rows.append(("step", self.step_s.words(step_seconds) + GUESSED * self.rates_guessed))
        if self.time is not None:
            outside = f"{human_seconds(self.eval_s)} evaluating and {human_seconds(self.save_s)}"
            rows.append(("time", f"{time_in_words(self.time)}; besides, {outside} saving"))
        rows += compared(self.economy, self.planned_economy)
        if self.advice:
            rows.append(("advice", self.advice))
        for name, peak in (("host memory", self.host), ("GPU memory", self.gpu)):
            if peak.measured is not None:
                rows.append((name, peak.words(human_bytes)))
        if self.skipped:
            why = "steps without an update (non-finite gradient, or no targets)"
            rows.append(("skipped", f"{self.skipped:,} {why}"))
        if self.spikes:
            why = "steps with a loss or norm far above the median"
            rows.append(("spikes", f"{self.spikes:,} {why}"))
        rows.append(("run", str(self.run_dir)))
        if self.final_dir is not None:
            rows.append(("model", str(self.final_dir)))
        return rows


# -- advice --------------------------------------------------------------------------------------

WORTH_NAMING = 0.05  # share of a step below which no wait is named
LATE = 2.0  # measured over planned step, from where the plan was not made for this machine
COMPARED_S = 1.0  # a shorter step is mostly what plans leave out, such as calls from Python
# Layers below this share of the GPU's peak wait for kernel launches, or for memory between kernels.
LAUNCH_BOUND_MFU = 0.25
FORWARD_SHARE = 0.3  # of a step's computation: the host's update hides behind the forward pass
TOKENS_ROUNDED_TO = 1024


@dataclass(frozen=True)
class Facts:
    """Facts about a run, besides its times, that the advice uses."""

    cuda: bool
    compiled: bool
    tokens_per_step: int
    groups: int
    layers: int
    recomputed: int  # of the layers
    streams: bool  # some block's weights are on the host
    update_threads: int
    idle_threads: int  # cores that the update could have, and has not
    planned_s: float | None = None  # of a step
    second_backward: int = 0  # layers whose gradients are computed twice
    asked: frozenset[str] = frozenset()  # config keys the user set where the planner would choose


def advise(
    time: StepTime,
    facts: Facts,
    mfu: float | None = None,
    load: Load | None = None,
    step_s: float | None = None,
) -> str:
    """One sentence: the setting most worth changing and why, or that there is none.

    Args:
        time: of one step or of several; of steady ones, for the first of a process compiles.
        mfu: model FLOP utilisation of those steps, 0 to 1; None where the peak is unknown.
        load: of the processors meanwhile; None if nobody looked.
        step_s: seconds of the median step; None: not compared with the plan's.
    """
    waits = {name: share for name, share in time.shares().items() if name != "compute"}
    wait = max(waits, key=lambda name: waits[name])
    held_up = waits[wait] >= WORTH_NAMING
    if load is not None and load.contended and (held_up or not facts.cuda):
        return f"{load.words}: stop them, or expect longer steps than planned"
    if held_up:
        return _against_waiting(wait, time, facts)
    took, planned_s = step_s or 0.0, facts.planned_s or math.inf
    if advice := _against_computing(facts, mfu):
        return advice
    if took >= LATE * planned_s and took >= COMPARED_S:
        slow = f"a step takes {took / planned_s:.1f} times as long as planned, and no setting"
        remedy = "measure this machine with `megatrain doctor`, or report it with plan.json"
        return f"{slow} explains it: {remedy}"
    device = "GPU" if facts.cuda else "CPU"
    busy = time.shares()["compute"]
    return f"nothing is worth changing: the {device} computes {busy:.0%} of the time"


# In both functions what costs the user nothing comes first.


def _against_waiting(wait: str, time: StepTime, facts: Facts) -> str:
    if wait == "data":
        return "put the rows on a local disk: they are read more slowly than they are used"
    if wait == "rollout":
        return "raise rollout.generation_batch_size: more answers are written at a time"
    if wait == "reward":
        return "raise rewards.processes, or make the reward functions faster"
    if wait == "wait_update" and facts.idle_threads > 0:
        threads = facts.update_threads
        return f"raise threads from {threads} to {threads + facts.idle_threads}: cores are idle"
    resident = "blocks that stay on the GPU need no upload and no update by the host"
    if facts.cuda and facts.streams and wait in ("wait_update", "wait_upload"):
        if "memory.resident" in facts.asked:
            return f"set memory.resident: auto: {resident}"
        if "memory.gpu" in facts.asked:
            return f"raise memory.gpu: {resident}"
    if wait == "wait_upload" and facts.groups > 1 and "train.groups" in facts.asked:
        why = "every group sends the weights over the bus again"
        return f"lower train.groups from {facts.groups}: {why}"
    # The update and its traffic with NVMe hide behind the first group's forward pass alone.
    behind = FORWARD_SHARE / facts.groups if wait in ("wait_update", "wait_nvme") else 1.0
    shares = time.shares()
    tokens = facts.tokens_per_step * (1 + shares[wait] / max(shares["compute"] * behind, 0.01))
    tokens = math.ceil(tokens / TOKENS_ROUNDED_TO) * TOKENS_ROUNDED_TO
    why = "so that there is enough to compute meanwhile"
    more = f"raise train.tokens_per_step to about {tokens:,}, {why}"
    return f"name folders on more drives in memory.nvme, or {more}" if wait == "wait_nvme" else more


def _against_computing(facts: Facts, mfu: float | None) -> str | None:
    gradients = f"gradients of {number_of(min(facts.second_backward, facts.layers), 'layer')}"
    if facts.second_backward and "memory.second_backward" in facts.asked:
        return f"set memory.second_backward: auto: {gradients} are computed twice"
    if facts.second_backward and "memory.host" in facts.asked:
        return f"raise memory.host: for lack of it {gradients} are computed twice"
    if facts.cuda and not facts.compiled and mfu is not None and mfu < LAUNCH_BOUND_MFU:
        why = f"with kernels so small the GPU reaches {mfu:.0%} of its peak"
        return f"set compile: true, or raise train.micro_batch_tokens: {why}"
    twice = f"{facts.recomputed} of {facts.layers} layers are computed twice"
    if facts.recomputed > 0 and "train.retained" in facts.asked:
        return f"set train.retained: auto: {twice}"
    if facts.cuda and facts.recomputed > 0 and "memory.gpu" in facts.asked:
        return f"raise memory.gpu: for lack of it {twice}"
    return None
