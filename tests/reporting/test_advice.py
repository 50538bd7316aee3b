"""The advice: every cause has a sentence that names a setting; a run that computes has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatrain.reporting.metrics import StepTime
from megatrain.reporting.summary import Facts, advise

H200 = Facts(
    cuda=True,
    compiled=True,
    tokens_per_step=16_384,
    groups=1,
    layers=28,
    recomputed=28,
    streams=True,
    update_threads=14,
    idle_threads=0,
)


def asked(*keys: str, **facts: Any) -> Facts:
    """A run on an H200 with these keys set by hand."""
    return replace(H200, asked=frozenset(keys), **facts)


CAPPED = asked("memory.gpu")
CPU: Any = {"cuda": False, "compiled": False, "update_threads": 1}
COMPUTING = StepTime(compute=9.8, wait_upload=0.2)
UPLOADING = StepTime(compute=8.0, wait_upload=2.0)
UPDATING = StepTime(compute=6.0, wait_update=3.6, wait_upload=0.4)
READING = StepTime(compute=5.0, data=5.0)
DOWNLOADING = StepTime(compute=9.0, wait_download=1.0)
ON_DRIVE = StepTime(compute=9.0, wait_nvme=1.0)
IDLE_CORES = asked(update_threads=2, idle_threads=12)
TWICE = asked("memory.second_backward", "memory.host", second_backward=True)
HOST = frozenset({"memory.host"})
NOTHING = "nothing is worth changing"
RAISE = "raise train.tokens_per_step"

# name: (time, facts, words of the sentence); a row for each sentence, and its neighbours
CASES: dict[str, tuple[StepTime, Facts, str]] = {
    "slow rows": (READING, H200, "put the rows on a local disk"),
    "idle cores": (UPDATING, IDLE_CORES, "raise threads from 2 to 14"),
    "capped, bound by the update": (UPDATING, CAPPED, "raise memory.gpu: blocks that stay"),
    "streamed by request": (UPLOADING, asked("memory.resident"), "set memory.resident: auto"),
    "all resident": (UPLOADING, replace(CAPPED, streams=False), RAISE),
    "capped, bound by uploads": (UPLOADING, CAPPED, "raise memory.gpu: blocks that stay"),
    "too many groups": (UPLOADING, asked("train.groups", groups=4), "lower train.groups from 4"),
    "bound by the update": (UPDATING, H200, f"{RAISE} to about 49,152"),
    "only the first group hides": (UPDATING, asked(groups=2), f"{RAISE} to about 81,920"),
    "bound by uploads": (UPLOADING, H200, f"{RAISE} to about 20,480"),
    "bound by downloads": (DOWNLOADING, H200, f"{RAISE} to about 18,432"),
    "bound by the drive": (ON_DRIVE, H200, "name folders on more drives in memory.nvme"),
    "recomputing under a cap": (COMPUTING, CAPPED, "for lack of it 28 of 28 layers are computed"),
    "recomputing by request": (COMPUTING, asked("train.retained"), "set train.retained: auto: 28"),
    "recomputing for want of memory": (COMPUTING, H200, NOTHING),
    "gradients twice by request": (COMPUTING, TWICE, "set memory.second_backward: auto"),
    "twice under a cap": (COMPUTING, replace(TWICE, asked=HOST), "raise memory.host"),
    "twice for want of memory": (COMPUTING, asked(second_backward=True), NOTHING),
}
OF_RATES = [  # time, facts, model FLOPs utilisation, words
    (UPDATING, replace(CAPPED, **CPU), None, RAISE),  # nothing is uploaded to a CPU
    (COMPUTING, asked(compiled=False), 0.1, "set compile: true, or raise train.micro_batch_tokens"),
    (COMPUTING, H200, 0.1, f"{NOTHING}: the GPU computes 98% of the time"),
    (COMPUTING, replace(CAPPED, recomputed=0), 0.6, NOTHING),
    (COMPUTING, asked(**CPU), None, f"{NOTHING}: the CPU computes 98% of the time"),
]


def test_the_advice_fits_the_cause():
    for time, facts, words in CASES.values():
        assert words in advise(time, facts, 0.4)


def test_the_advice_fits_the_rate_of_the_matmuls():
    for time, facts, mfu, words in OF_RATES:
        assert words in advise(time, facts, mfu)


def test_there_is_advice_whatever_the_times():
    for time in [StepTime(), StepTime(wait_update=1.0), StepTime(compute=1e-9, data=1.0)]:
        sentence = advise(time, H200)
        assert sentence
        assert "\n" not in sentence


def test_a_small_wait_is_not_worth_a_word():
    assert advise(StepTime(compute=96.0, wait_update=4.0), H200, 0.4).startswith("nothing")
    assert not advise(StepTime(compute=94.0, wait_update=6.0), H200, 0.4).startswith("nothing")
