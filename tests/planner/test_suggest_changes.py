"""The table of what a user may ask for instead."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from megatrain.planner.job import Job, StepTokens
from megatrain.planner.suggest import EXACT, REMEDIES, faster_jobs, smaller_jobs
from tests.planned import JOB_7B, MOMENTS_BYTES

JOBS = {
    "plain": JOB_7B,
    "float32": replace(JOB_7B, precision="float32", compiled=False),
    "set by hand": replace(JOB_7B, resident=3, groups=2),
    "nothing left": replace(
        JOB_7B, clipping=False, tokens_per_step=1024, state_bytes=MOMENTS_BYTES[0][1]
    ),
}


@pytest.mark.parametrize("remedy", REMEDIES, ids=lambda remedy: remedy.cost)
@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_a_setting_changes_fields_that_a_job_has(remedy, job):
    names = {field.name for field in fields(Job)}
    for settings in (remedy.smaller(job), remedy.faster(job)):
        for words, changed in settings.items():
            assert ": " in words
            assert changed.keys() <= names
            assert replace(job, **changed) != job


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_each_change_is_another_job_named_once(job):
    for changes in (list(smaller_jobs(job)), list(faster_jobs(job, on_gpu=True))):
        assert len({change.words for change in changes}) == len(changes)
        assert all(change.job != job for change in changes)


def test_what_is_known_of_a_steps_rows_is_not_of_another_steps():
    tokens = StepTokens(2048, 70_000, 68_000.0, 40, 38.5)
    known = replace(JOB_7B, lengths_vary=True, step_tokens=(tokens,))
    for job in (known, replace(known, rows_per_step=64)):
        jobs = [change.job for change in (*smaller_jobs(job), *faster_jobs(job, on_gpu=True))]
        others = [other for other in jobs if other.tokens_per_step != job.tokens_per_step]
        assert others
        assert all(other.step_tokens == () for other in others)


def test_what_costs_least_comes_first():
    words = [change.words for change in smaller_jobs(JOBS["set by hand"])]
    given_back = ["memory.resident: auto", "memory.resident: auto and train.groups: auto"]
    assert words[:3] == [*given_back, "train.tokens_per_step: 32768"]
    least = (
        "train.tokens_per_step: 8192 and optimizer.moments: int8 and memory.activations: int8 "
        "and train.max_grad_norm: null"
    )
    assert words[-3:] == [least, *(f"{first} and {least}" for first in given_back)]
    costs = [change.cost for change in faster_jobs(JOBS["set by hand"], on_gpu=True)]
    assert costs[:3] == [EXACT, EXACT, "changes the batch"]
    assert costs[-1] == "does not clip"


def test_a_cpu_is_not_offered_what_only_a_gpu_does_fast():
    words = {change.words for change in faster_jobs(JOBS["plain"], on_gpu=False)}
    assert words.isdisjoint({"precision: fp8", "compile: true"})
