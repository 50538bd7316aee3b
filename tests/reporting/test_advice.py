"""The advice: every cause has a sentence that names a setting; a run that computes has none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatrain.reporting.advice import Facts, advise
from megatrain.reporting.metrics import StepTime

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
CAPPED = replace(H200, asked=frozenset({"memory.gpu"}))
CPU = replace(H200, cuda=False, compiled=False, update_threads=1)
COMPUTING = StepTime(compute=9.8, wait_upload=0.2)
UPLOADING = StepTime(compute=8.0, wait_upload=2.0)
UPDATING = StepTime(compute=6.0, wait_update=3.6, wait_upload=0.4)

# (name, time, facts, mfu, words of the sentence): a row for each sentence, and its neighbours
CASES = [
    ("slow rows", StepTime(compute=5.0, data=5.0), H200, 0.4, "put the rows on a local disk"),
    (
        "idle cores",
        UPDATING,
        replace(H200, update_threads=2, idle_threads=12),
        0.4,
        "raise threads from 2 to 14",
    ),
    ("capped, bound by the update", UPDATING, CAPPED, 0.4, "raise memory.gpu: blocks that stay"),
    (
        "streamed by request",
        UPLOADING,
        replace(H200, asked=frozenset({"memory.resident"})),
        0.4,
        "set memory.resident: auto",
    ),
    ("all resident", UPLOADING, replace(CAPPED, streams=False), 0.4, "raise train.tokens_per_step"),
    ("capped, bound by uploads", UPLOADING, CAPPED, 0.4, "raise memory.gpu: blocks that stay"),
    (
        "too many groups",
        UPLOADING,
        replace(H200, groups=4, asked=frozenset({"train.groups"})),
        0.4,
        "lower train.groups from 4",
    ),
    ("bound by the update", UPDATING, H200, 0.4, "raise train.tokens_per_step to about 49,152"),
    (
        "only the first group hides",
        UPDATING,
        replace(H200, groups=2),
        0.4,
        "raise train.tokens_per_step to about 81,920",
    ),
    ("bound by uploads", UPLOADING, H200, 0.4, "raise train.tokens_per_step to about 20,480"),
    (
        "bound by downloads",
        StepTime(compute=9.0, wait_download=1.0),
        H200,
        0.4,
        "raise train.tokens_per_step to about 18,432",
    ),
    (
        "nothing is uploaded to a CPU",
        UPDATING,
        replace(CPU, asked=CAPPED.asked),
        None,
        "raise train.tokens_per_step",
    ),
    (
        "bound by the drive",
        StepTime(compute=9.0, wait_nvme=1.0),
        H200,
        0.4,
        "name folders on more drives in memory.nvme",
    ),
    (
        "small kernels",
        COMPUTING,
        replace(H200, compiled=False),
        0.1,
        "set compile: true, or raise train.micro_batch_tokens",
    ),
    (
        "small kernels, compiled",
        COMPUTING,
        H200,
        0.1,
        "nothing is worth changing: the GPU computes 98% of the time",
    ),
    (
        "recomputing under a cap",
        COMPUTING,
        CAPPED,
        0.4,
        "for lack of it 28 of 28 layers are computed twice",
    ),
    (
        "recomputing by request",
        COMPUTING,
        replace(H200, asked=frozenset({"train.retained"})),
        0.4,
        "set train.retained: auto: 28 of 28",
    ),
    ("recomputing for want of memory", COMPUTING, H200, 0.4, "nothing is worth changing"),
    (
        "gradients twice by request",
        COMPUTING,
        replace(
            H200, second_backward=True, asked=frozenset({"memory.second_backward", "memory.host"})
        ),
        0.4,
        "set memory.second_backward: auto",
    ),
    (
        "twice under a cap",
        COMPUTING,
        replace(H200, second_backward=True, asked=frozenset({"memory.host"})),
        0.4,
        "raise memory.host",
    ),
    (
        "twice for want of memory",
        COMPUTING,
        replace(H200, second_backward=True),
        0.4,
        "nothing is worth changing",
    ),
    ("all retained", COMPUTING, replace(CAPPED, recomputed=0), 0.6, "nothing is worth changing"),
    (
        "a CPU that computes",
        COMPUTING,
        CPU,
        None,
        "nothing is worth changing: the CPU computes 98% of the time",
    ),
]


@pytest.mark.parametrize(
    ("time", "facts", "mfu", "words"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_advice_fits_the_cause(time, facts, mfu, words):
    assert words in advise(time, facts, mfu)


@pytest.mark.parametrize(
    "time", [StepTime(), StepTime(wait_update=1.0), StepTime(compute=1e-9, data=1.0)]
)
def test_there_is_advice_whatever_the_times(time):
    sentence = advise(time, H200)
    assert sentence
    assert "\n" not in sentence


def test_a_small_wait_is_not_worth_a_word():
    assert advise(StepTime(compute=96.0, wait_update=4.0), H200, 0.4).startswith("nothing")
    assert not advise(StepTime(compute=94.0, wait_update=6.0), H200, 0.4).startswith("nothing")
