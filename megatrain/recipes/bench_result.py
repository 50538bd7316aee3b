"""What a benchmark found: figures under the names of `metrics.jsonl`, beside what the plan predicted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import Predicted, print_rows, step_seconds
from megatrain.reporting.words import human_bytes, human_seconds, time_in_words


@dataclass(frozen=True)
class BenchStep:
    """One measured step."""

    seconds: float
    loss: float
    grad_norm: float | None
    time: StepTime


@dataclass(frozen=True)
class BenchResult:
    """Rates are those of the median step."""

    model: str
    parameters: int
    layers: int
    tokens: int  # of a step, all of them real
    step_s: Predicted  # measured: the median
    tokens_per_s: float
    tflops: float  # 6 x parameters x tokens / seconds
    mfu: float | None  # None where the device's peak is unknown
    gpu_busy: (
        float | None
    )  # share of the step in which the GPU runs kernels, by its own clock; None on the CPU, and of long steps
    time: StepTime  # where the seconds of all measured steps went
    host: Predicted
    gpu: Predicted
    memory: dict[str, int | None]  # peaks as counted, in bytes
    advice: str
    choices: str
    setup_s: float  # to allocate, pin and draw the weights
    warmup_steps: tuple[BenchStep, ...]
    steps: tuple[BenchStep, ...]
    plan: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """JSON-able. `step_s` is the measured figure, predictions stand under `predicted`."""
        predicted = {
            "step_s": self.step_s.predicted,
            "host_bytes": self.host.predicted,
            "gpu_peak_bytes": self.gpu.predicted,
        }
        errors = {
            "step_s": self.step_s.error,
            "host_bytes": self.host.error,
            "gpu_peak_bytes": self.gpu.error,
        }
        figures = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("host", "gpu", "memory")
        }
        measured = {"step_s": self.step_s.measured, "shares": self.time.shares(), **self.memory}
        return {**figures, **measured, "predicted": predicted, "error": errors}

    def render(self, console: Console) -> None:
        """Print the figures and the advice."""
        print_rows(console, self.model, self._rows())

    def _rows(self) -> list[tuple[str, str]]:
        seconds = [step.seconds for step in self.steps]
        spread = f"median of {len(seconds)}, {min(seconds):.3g} to {max(seconds):.3g}"
        rates = f"{self.tflops:,.3g} TFLOP/s, {self.tokens_per_s:,.0f} tokens/s"
        rows = [
            ("model", f"{self.parameters:,} parameters, {self.layers} layers"),
            ("run", f"{self.tokens:,} tokens per step, {self.choices}"),
            ("step", f"{self.step_s.words(step_seconds)}; {spread}"),
            (
                "loss",
                f"{(*self.warmup_steps, *self.steps)[0].loss:.4f} in the first step, {self.steps[-1].loss:.4f} in the last",
            ),
            ("rate", rates if self.mfu is None else f"{rates}, {self.mfu:.0%} of the GPU's peak"),
            (
                "time",
                time_in_words(self.time)
                + ("" if self.gpu_busy is None else f"; kernels run {self.gpu_busy:.1%} of it"),
            ),
            ("planned", phases_in_words(self.plan["timing"])),
            ("host memory", self.host.words(human_bytes)),
        ]
        if self.gpu.measured is not None:
            rows.append(("GPU memory", self.gpu.words(human_bytes)))
        return [*rows, ("start-up", human_seconds(self.setup_s)), ("advice", self.advice)]


def phases_in_words(timing: dict[str, Any]) -> str:
    """The planned step's phases and what bounds each: `forward 1.58 s (update), head 0.52 s (compute)`."""
    bounds = timing["bound_by"]
    return ", ".join(
        f"{phase} {seconds:.3g} s ({bounds[phase]})"
        for phase, seconds in timing["phases"].items()
        if seconds
    )
