"""The predicted step of a mixture of experts: grouped matmuls, by the rows that an expert gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.machine.hardware import GIB
from megatrain.machine.profile import MachineProfile, Rates, typical
from megatrain.planner.job import Job
from megatrain.planner.plan import Plan, make_plan
from tests.planned import EXPERTS, H200, JOB_7B, MIXTURE, QWEN_7B
from tests.planner.test_timing import STREAMED, block_tasks, predict


def test_speed_counts_the_parameters_that_act_on_a_token():
    found = predict(STREAMED, JOB_7B, MIXTURE, typical(H200))
    active = QWEN_7B.parameters - 28 * EXPERTS * 15 // 16
    assert found.tflops == pytest.approx(6 * active * found.tokens_per_s / 1e12)


@pytest.mark.parametrize(("chunk", "times"), [(None, 1), (512, 4)])
def test_experts_are_all_read_and_their_gradients_all_written_for_every_micro_batch(chunk, times):
    fast = replace(typical(H200), matmul=((1, 1e30),), grouped=((1, 1e30),), launch=0.0)
    choices = replace(STREAMED, micro_batch_tokens=2048, layer_chunk_tokens=chunk, retained=28)
    job = replace(JOB_7B, tokens_per_step=2048)
    mixture, dense = (block_tasks(choices, job, of, fast)[1] for of in (MIXTURE, QWEN_7B))
    moved = times * 2 * EXPERTS / fast.memory  # the weights; in backward as much again is written
    assert mixture.forward - dense.forward == pytest.approx(moved, rel=1e-6)
    assert mixture.backward - dense.backward == pytest.approx(2 * moved, rel=1e-6)


def test_with_many_tokens_for_each_expert_moving_them_hides_behind_their_products():
    choices = replace(STREAMED, micro_batch_tokens=16_384, retained=28)
    whole = replace(MIXTURE.cost.layers[0], expert_parameters=0, expert_flops=0)
    unmoved = replace(MIXTURE, cost=replace(MIXTURE.cost, layers=(whole,) * 28))
    alike = replace(typical(H200), grouped=typical(H200).matmul[-1:])
    found, expected = (block_tasks(choices, JOB_7B, of, alike)[1] for of in (MIXTURE, unmoved))
    assert found.forward == pytest.approx(expected.forward, rel=1e-9)
    assert found.backward == pytest.approx(expected.backward, rel=1e-9)


GROUPED = ((128, 1e14), (512, 2.5e14), (2048, 4e14))
FLOPS_OF_EXPERTS = 2 * EXPERTS // 16 * JOB_7B.tokens_per_step  # of a layer's forward


def seconds_of_experts(
    machine: MachineProfile, micro_batch: int, chunk: int | None = None, job: Job = JOB_7B
) -> float:
    """Of a layer's forward, where matrices move in no time."""
    choices = replace(
        STREAMED, micro_batch_tokens=micro_batch, layer_chunk_tokens=chunk, retained=28
    )
    no_flops = replace(MIXTURE.cost.layers[0], expert_flops=0)
    forward = replace(
        no_flops.forward, matmul_flops=no_flops.forward.matmul_flops - 2 * EXPERTS // 16
    )
    without = replace(MIXTURE.cost, layers=(replace(no_flops, forward=forward),) * 28)
    fast = replace(machine, memory=1e30, launch=0.0)
    found, others = (
        block_tasks(choices, job, shape, fast)[1].forward
        for shape in (MIXTURE, replace(MIXTURE, cost=without))
    )
    return found - others


@pytest.mark.parametrize(
    ("micro_batch", "chunk", "rate"),
    [
        (16_384, None, 3.25e14),  # 1,024 rows for each of 16 experts
        (4096, None, 1.75e14),
        (16_384, 4096, 1.75e14),
        (2048, None, 1e14),
        (1024, None, 1e14),  # fewer rows than were measured
        (65_536, None, 4e14),  # more
    ],
)
def test_experts_reach_the_rate_of_grouped_matmuls_with_their_rows(micro_batch, chunk, rate):
    machine = replace(typical(H200), grouped=GROUPED)
    found = seconds_of_experts(machine, micro_batch, chunk)
    assert found == pytest.approx(FLOPS_OF_EXPERTS / rate, rel=1e-6)


def test_a_dense_model_does_not_care_for_grouped_matmuls():
    machines = typical(H200), replace(typical(H200), grouped=((1, 1.0),))
    seconds = [predict(STREAMED, JOB_7B, QWEN_7B, machine).seconds for machine in machines]
    assert seconds[0] == seconds[1]


def test_in_float32_experts_are_lone_matmuls_of_their_rows():
    machine = replace(typical(H200), matmul_fp32=((512, 1e13), (1536, 3e13), (16_384, 9e13)))
    job = replace(JOB_7B, precision="float32")
    found = seconds_of_experts(machine, 16_384, job=job)
    assert found == pytest.approx(FLOPS_OF_EXPERTS / 2e13, rel=1e-6)


def test_on_a_cpu_experts_keep_the_rate_of_other_matmuls():
    cpu = typical(replace(H200, gpu=None))
    lone = 0.91 * cpu.matmul[-1][1]
    found = seconds_of_experts(cpu, 2048)
    assert found == pytest.approx(FLOPS_OF_EXPERTS / lone, rel=1e-6)


def planned(grouped: Rates, **asked: Any) -> Plan:
    """Of one to 16 micro-batches, without clipping, where little else is open."""
    few_dials = {"groups": 1, "offload_activations": False, **asked}
    job = replace(JOB_7B, tokens_per_step=16_384, clipping=False, **few_dials)
    machine = replace(typical(H200), grouped=grouped)
    return make_plan(job, MIXTURE, H200, machine, gpu_limit=59 * GIB)


EVEN, STEEP = ((128, 6e14), (2048, 6e14)), ((128, 1e14), (512, 2.5e14), (2048, 6e14))


def test_larger_micro_batches_are_chosen_where_experts_need_the_rows():
    even, usual, steep = (planned(rates) for rates in (EVEN, typical(H200).grouped, STEEP))
    tokens = [plan.choices.micro_batch_tokens for plan in (even, usual, steep)]
    assert tokens == [4096, 8192, 16_384]
    # and they pay: with the others' choice the step is longer
    assert steep.timing.seconds < 0.99 * planned(STEEP, micro_batch_tokens=4096).timing.seconds
    assert even.timing.seconds <= planned(EVEN, micro_batch_tokens=16_384).timing.seconds
