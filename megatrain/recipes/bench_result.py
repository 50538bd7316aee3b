"""The result of a benchmark: figures named as in metrics.jsonl, beside the plan's."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from rich.console import Console

from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import Predicted, print_rows, step_seconds
from megatrain.reporting.words import human_bytes, human_parameters, human_seconds, time_in_words


@dataclass(frozen=True)
class BenchStep:
    """One measured step. retries: of the GPU's allocator (`meters.allocator_retries`)."""

    seconds: float
    loss: float
    grad_norm: float | None
    time: StepTime
    retries: int


@dataclass(frozen=True)
class BenchResult:
    """Rates are those of the median step."""

    model: str
    parameters: int
    active_parameters: int  # that act on a token: fewer in a mixture of experts
    layers: int
    tokens: int  # of a step, all of them real
    step_s: Predicted  # measured: the median
    tokens_per_s: float
    tflops: float  # of each rank: 6 x active parameters x tokens / seconds
    mfu: float | None  # of each; None where the device's peak is unknown
    gpu_busy: float | None  # share of the step in which kernels run; None: not measured
    time: StepTime  # where the seconds of all measured steps went, on the first rank
    host: Predicted  # a whole host
    gpu: Predicted  # that of which most is taken
    memory: dict[str, int | None]  # peaks as counted, in bytes
    advice: str
    choices: str
    ranks: int  # that made the steps
    setup_s: float  # to allocate, pin and draw the weights
    warmup_steps: tuple[BenchStep, ...]
    steps: tuple[BenchStep, ...]
    plan: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    exit_code: ClassVar[int] = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `step_s` is the measured figure, predictions stand under `predicted`."""
        figures = asdict(self)
        for name in ("host", "gpu", "memory"):
            del figures[name]
        planned = {"step_s": self.step_s, "host_bytes": self.host, "gpu_peak_bytes": self.gpu}
        return {
            **figures,
            "step_s": self.step_s.measured,
            "shares": self.time.shares(),
            **self.memory,
            "predicted": {name: figure.predicted for name, figure in planned.items()},
            "error": {name: figure.error for name, figure in planned.items()},
        }

    def render(self, console: Console) -> None:
        """Print the figures and the advice."""
        print_rows(console, self.model, self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        seconds = [step.seconds for step in self.steps]
        spread = f"median of {len(seconds)}, {min(seconds):.3g} to {max(seconds):.3g}"
        each = f" each of {self.ranks} GPUs" if self.ranks > 1 else ""
        rates = f"{self.tflops:,.3g} TFLOP/s{each}, {self.tokens_per_s:,.0f} tokens/s"
        peak = "" if self.mfu is None else f", {self.mfu:.0%} of the GPU's peak"
        busy = "" if self.gpu_busy is None else f"; kernels run {self.gpu_busy:.1%} of it"
        parameters = human_parameters(self.parameters, self.active_parameters)
        first, last = (*self.warmup_steps, *self.steps)[0], self.steps[-1]
        rows = [
            ("model", f"{parameters}, {self.layers} layers"),
            ("run", f"{self.tokens:,} tokens per step, {self.choices}"),
            ("step", f"{self.step_s.words(step_seconds)}; {spread}"),
            ("loss", f"{first.loss:.4f} in the first step, {last.loss:.4f} in the last"),
            ("rate", rates + peak),
            ("time", time_in_words(self.time) + busy),
            ("planned", phases_in_words(self.plan["timing"])),
            ("host memory", self.host.words(human_bytes)),
        ]
        if self.gpu.measured is not None:
            rows.append(("GPU memory", self.gpu.words(human_bytes) + self._retries()))
        return [*rows, ("start-up", human_seconds(self.setup_s)), ("advice", self.advice)]

    def _retries(self) -> str:
        retries = sum(step.retries for step in self.steps)
        return f"; {retries} times it was full, and cached memory was given back" if retries else ""


def phases_in_words(timing: dict[str, Any]) -> str:
    """A step's phases and what bounds each: `forward 1.58 s (update), head 0.52 s (compute)`."""
    phases, bounds = timing["phases"].items(), timing["bound_by"]
    return ", ".join(f"{name} {s:.3g} s ({bounds[name]})" for name, s in phases if s)
