"""`megatrain plan` for a named shape, and for a machine that one does not have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.config import Config
from megatrain.machine.datasheets import GPUS
from megatrain.machine.hypothetical import DRIVER_BYTES
from megatrain.recipes.another_machine import another_machine
from tests.commands import Command

CARD = ("--gpu-memory", "12GiB", "--gpu-tflops", "60", "--pcie", "25", "--ram", "64GiB")
SHORT = ("train.seq_len=512", "train.tokens_per_step=8192")


def test_a_machine_that_one_does_not_have(megatrain: Command) -> None:
    found = {}
    for gpu, ram in (("RTX 4090", "128GiB"), ("h200", "128GiB"), ("RTX 4090", "8GiB")):
        done = megatrain("plan", "qwen2.5-0.5b", "--gpu", gpu, "--ram", ram, "--json", *SHORT)
        found[gpu, ram] = plan = json.loads(done.out)
        assert done.code == (0 if plan["fits"] else 4)
        assert plan["totals"]["gpu"]["have"] > 0.9 * dict(GPUS)[gpu.upper()].mebibytes * 2**20
    small, large = found["RTX 4090", "128GiB"], found["h200", "128GiB"]
    assert small["job"]["precision"] == "bfloat16" and small["job"]["compiled"]
    assert large["timing"]["seconds"] < 0.6 * small["timing"]["seconds"]
    assert large["choices"]["resident"] >= small["choices"]["resident"]


def test_a_config_may_be_planned_for_it_too(megatrain: Command) -> None:
    done = megatrain(
        "plan", "cfg.yaml", "--gpu", "RTX 3090", "--ram", "64GiB", "--cores", "4", "--json"
    )
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    assert plan["budget"]["gpu"] < 24 * 2**30 < plan["budget"]["host"] < 64 * 2**30


def test_a_config_may_have_any_name(megatrain: Command, project: Path) -> None:
    (project / "mine.conf").write_text((project / "cfg.yaml").read_text())
    named, usual = (
        json.loads(megatrain("plan", name, "--json").out) for name in ("mine.conf", "cfg.yaml")
    )
    assert named["job"] == usual["job"]


def test_it_says_what_the_run_takes(megatrain: Command) -> None:
    asked = (
        "plan",
        "tiny",
        "--gpu",
        "RTX 4090",
        "--ram",
        "32GiB",
        "train.seq_len=64",
        "train.tokens_per_step=256",
        "train.max_steps=100",
    )
    silent, priced = (
        megatrain(*asked, *more)
        for more in ((), ("economy.price_per_hour=3.6", "economy.currency=EUR"))
    )
    assert (
        "run: 100 steps, 25,600 tokens" in silent.out
        and "run: 100 steps, 25,600 tokens" in priced.out
    )
    assert "cost: " not in silent.out, "no price is assumed"
    assert "EUR per million tokens" in priced.out
    assert "assumed; the host's power is not counted" in " ".join(silent.out.split())
    economy = json.loads(
        megatrain(*asked, "economy.price_per_hour=3.6", "economy.gpu_power_w=360", "--json").out
    )["economy"]
    assert economy["tokens"] == 25_600
    assert economy["cost"] == pytest.approx(3.6 * economy["hours"])
    assert economy["kwh"] == pytest.approx(0.36 * economy["hours"])
    assert economy["cost_per_million_tokens"] == pytest.approx(economy["cost"] / 0.0256)


def test_what_does_not_fit_it_is_refused_with_what_would(megatrain: Command) -> None:
    done = megatrain("plan", "qwen2.5-7b", "--gpu", "RTX 4090", "--ram", "66GiB", *SHORT)
    assert done.code == 4
    assert "set optimizer.moments: bfloat16" in done.err


def test_a_gpu_that_is_not_listed_is_described(megatrain: Command) -> None:
    name = ("--gpu", "RTX 4090 Laptop GPU", "--json")
    slow, fast = (
        megatrain("plan", "qwen2.5-0.5b", *name, *CARD, "--gpu-tflops", tflops, *SHORT)
        for tflops in ("60", "120")
    )
    assert (slow.code, fast.code) == (0, 0), slow.err
    plan = slow.json
    assert plan["totals"]["gpu"]["have"] == 12 * 2**30 - DRIVER_BYTES
    assert plan["timing"]["tokens_per_s"] < fast.json["timing"]["tokens_per_s"]
    assert "RTX 4090 Laptop GPU is not in the table of GPUs: assumed are 500 GB/s" in slow.err
    listed = megatrain("plan", "qwen2.5-0.5b", "--gpu", "RTX 4090", *CARD[:2], *CARD[-2:], *SHORT)
    assert listed.code == 0 and "assumed are" not in listed.err


@pytest.mark.parametrize("name", [GPUS[0][0], GPUS[len(GPUS) // 2][0], GPUS[-1][0]])
def test_a_gpu_of_the_table_can_be_planned_for(megatrain: Command, name: str) -> None:
    assert (
        megatrain(
            "plan",
            "tiny",
            "--gpu",
            name,
            "--ram",
            "32GiB",
            "train.seq_len=64",
            "train.tokens_per_step=256",
        ).code
        == 0
    )


@pytest.mark.parametrize("name", [name for name, _ in GPUS])
def test_every_gpu_of_the_table_makes_a_machine(name: str) -> None:
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
    machine = another_machine(config, name, "64GiB")
    assert machine.hardware.gpu is not None
    assert 0 < machine.hardware.gpu.free_bytes < machine.hardware.gpu.total_bytes
    assert machine.profile.upload > 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--gpu", "RTX 4090"), "gpu and ram belong together"),
        (("--ram", "64GiB"), "gpu and ram belong together"),
        (("--cores", "4"), "and cores to them"),
        (
            ("--gpu", "Voodoo 2", "--ram", "64GiB"),
            "--gpu: 'Voodoo 2' is not known; choose one of B200, H200 NVL, H200, H100 PCIe",
        ),
        (
            ("--gpu", "RTX 4070", "--ram", "64GiB"),
            "--gpu: 'RTX 4070' is not known; did you mean RTX 4070 Ti SUPER?",
        ),
        (
            ("--gpu", "A6000", "--ram", "64GiB"),
            "--gpu: 'A6000' is not known; did you mean RTX A6000?",
        ),
        (
            ("--gpu", "RTX 4090 Laptop", "--ram", "64GiB"),
            "Or describe it: --gpu-memory 12GiB --gpu-tflops 60 --pcie 25",
        ),
        (
            ("--gpu", "mine", "--gpu-memory", "12GiB", "--pcie", "25", "--ram", "64GiB"),
            "a GPU that is not listed needs --gpu-tflops, too",
        ),
        (("--gpu-tflops", "60"), "gpu and ram belong together"),
        (("--gpu-memory", "1", *CARD[2:]), "--gpu-memory: must be a size of more than 0.59 GiB"),
        ((*CARD, "--pcie", "0"), "--pcie: must be more than 0, not 0"),
        (
            ("--gpu", "H200", "--ram", "much"),
            "--ram: must be a size of more than 2 GiB, such as 128GiB, not 'much'",
        ),
        (("--gpu", "H200", "--ram", "1GiB"), "--ram: must be a size of more than 2 GiB"),
        (
            ("--gpu", "A100", "--ram", "64GiB", "precision=fp8"),
            "the A100 has no fp8 units; set precision: bfloat16",
        ),
    ],
)
def test_what_is_no_machine_is_refused(
    megatrain: Command, arguments: tuple[str, ...], reason: str
) -> None:
    done = megatrain("plan", "tiny", *arguments)
    assert done.code == 2
    assert reason in done.err


def test_nothing_to_plan_is_said(megatrain: Command) -> None:
    assert (
        "name a config file, a model folder, a hub id or a shape, such as `megatrain plan qwen2.5-7b`"
        in megatrain("plan").err
    )
