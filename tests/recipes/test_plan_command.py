"""`megatrain plan` for a named shape, and for a machine that one does not have."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.config import Config
from megatrain.config.load import bench_config
from megatrain.engine.resolved import state_bytes, whole_update
from megatrain.machine.datasheets import GPUS
from megatrain.machine.hypothetical import DRIVER_BYTES
from megatrain.optim import AdamW, Muon
from megatrain.recipes import doctor
from megatrain.recipes.describe import facts_of
from megatrain.recipes.doctor import find_machine, planned_machine
from megatrain.recipes.model import shape_model
from megatrain.recipes.setup import plan_run, resolve_run
from megatrain.settings import Settings
from tests.helpers.quantised import TILES, Tensors, config_in, in_tiles, rewrite, state
from tests.helpers.support import engine_of, tiny_config

CARD = ("--gpu-memory", "12GiB", "--gpu-tflops", "60", "--pcie", "25", "--ram", "64GiB")
SHORT = ("train.seq_len=512", "train.tokens_per_step=8192")
ON_CUDA = SimpleNamespace(device=SimpleNamespace(type="cuda"))
# eager: to predict what compiled layers take is most of the time of a first plan
TINY = ("train.seq_len=64", "train.tokens_per_step=256", "compile=false")


@pytest.mark.slow
def test_a_machine_that_one_does_not_have(megatrain):
    def planned(gpu: str) -> Any:
        options = ("--gpu", gpu, "--ram", "128GiB", "--json")
        plan = megatrain("plan qwen2.5-0.5b", *options, *SHORT).json
        assert plan["totals"]["gpu"]["have"] > 0.9 * GPUS[gpu.upper()].mebibytes * 2**20
        return plan

    small, large = planned("RTX 4090"), planned("h200")
    assert small["job"]["precision"] == "bfloat16" and small["job"]["compiled"]
    assert large["timing"]["seconds"] < 0.6 * small["timing"]["seconds"]
    assert large["choices"]["resident"] >= small["choices"]["resident"]


@pytest.mark.slow
def test_a_config_may_be_planned_for_it_too(megatrain):
    plan = megatrain(
        "plan cfg.yaml compile=false --gpu 'RTX 3090' --ram 64GiB --cores 4 --json"
    ).json
    assert plan["budget"]["gpu"] < 24 * 2**30 < plan["budget"]["host"] < 64 * 2**30


def test_a_shape_may_take_the_place_of_a_config_s_model(megatrain, project):
    """Rows and model of examples/recipes are not at hand when a card is chosen."""
    (project / "rows.jsonl").unlink()
    (project / "model").unlink()
    done = megatrain("plan cfg.yaml model.config=tiny --gpu 'RTX 4090' --ram 32GiB")
    assert done.out.startswith("fits: ")


@pytest.mark.slow
def test_it_says_what_the_run_takes(megatrain):
    asked = ("plan tiny --gpu 'RTX 4090' --ram 32GiB train.max_steps=100", *TINY)
    silent = megatrain(*asked).out
    priced = megatrain(*asked, "economy.price_per_hour=3.6", "economy.currency=EUR").out
    for text in (silent, priced):
        assert "run: 100 steps, 25,600 tokens" in text
    assert "cost: " not in silent, "no price is assumed"
    assert "EUR per million tokens" in priced
    assert "assumed; the host's power is not counted" in " ".join(silent.split())
    prices = ("economy.price_per_hour=3.6", "economy.gpu_power_w=360")
    economy = megatrain(*asked, *prices, "--json").json["economy"]
    assert economy["tokens"] == 25_600
    assert economy["cost"] == pytest.approx(3.6 * economy["hours"])
    assert economy["kwh"] == pytest.approx(0.36 * economy["hours"])
    assert economy["cost_per_million_tokens"] == pytest.approx(economy["cost"] / 0.0256)


@pytest.mark.slow
def test_what_does_not_fit_it_is_refused_with_what_would(megatrain):
    streamed = (*SHORT, "memory.resident=0")
    done = megatrain("plan qwen2.5-0.5b --gpu 'RTX 4090' --ram 9GiB", *streamed, code=4)
    verdict, *rest = done.out.splitlines()
    (change,) = [line for line in rest if line.startswith("to change: ")]
    lack = r"does not fit: it needs \d+\.\d\d GiB of host RAM, where \d+\.\d\d GiB can be had"
    assert re.fullmatch(lack, verdict)
    assert change.startswith("to change: set memory.resident: auto, or add ")
    told = " ".join(rest).replace(change, "") + done.err
    assert "does not fit" not in told and "energy" not in told
    as_json = megatrain("plan qwen2.5-0.5b --gpu 'RTX 4090' --ram 9GiB --json", *streamed, code=4)
    assert as_json.json["economy"] is None
    assert as_json.err.startswith(f"error: the run {verdict[:21]}")
    assert as_json.err.endswith(f"; {as_json.json['fix']}\n")


def test_the_verdict_comes_first_then_what_to_change(megatrain):
    asked = ("plan qwen2.5-0.5b --gpu 'RTX 3060' --ram 32GiB train.tokens_per_step=1024", SHORT[0])
    verdict, gpu, host, disk, step, change, *rest = megatrain(*asked).out.splitlines()
    bars = r"{} [█░]{{24}} +\d+% of [\d.]+ [GT]iB: .*, .*"
    for name, line in {"GPU memory": gpu, "host RAM  ": host, "disk space": disk}.items():
        assert re.fullmatch(bars.format(name), line)
    assert re.fullmatch(r"a step     (\w+ \d+%[,;] )+waits for .+", step)
    assert re.fullmatch(
        r"fits: [\d.]+ s a step, [\d,]+ tokens/s; [\d.]+ GiB of [\d.]+ GiB of GPU memory, "
        r"[\d.]+ GiB of [\d.]+ GiB of host RAM",
        verdict,
    )
    assert change.startswith("faster: train.tokens_per_step: ")
    assert any(line.startswith("energy: ") for line in rest[:5])
    assert rest[-1].startswith("--full: ") and "resident state" in megatrain(*asked, "--full").out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"), [("auto", "several times slower"), ("bfloat16", "set")]
)
def test_a_gpu_without_bf16_says_so(megatrain, given, words):
    asked = ("plan tiny --ram 32GiB --json", *TINY, f"precision={given}", "--gpu")
    done = megatrain(*asked, "T4")
    assert done.json["job"]["precision"] == ("float32" if given == "auto" else given)
    assert "NVIDIA T4 has no bf16 units: it" in done.err and words in done.err
    assert "bf16 units" not in megatrain(*asked, "RTX 3060").err


@pytest.mark.slow
def test_a_gpu_that_is_not_listed_is_described(megatrain):
    asked = ("plan qwen2.5-0.5b --json", "--gpu", "RTX 4090 Laptop GPU", *CARD, *SHORT)
    slow, fast = (megatrain(*asked, "--gpu-tflops", tflops) for tflops in ("60", "120"))
    assert slow.json["totals"]["gpu"]["have"] == 12 * 2**30 - DRIVER_BYTES
    assert slow.json["timing"]["tokens_per_s"] < fast.json["timing"]["tokens_per_s"]
    assert "RTX 4090 Laptop GPU is not in the table of GPUs: assumed are 500 GB/s" in slow.err
    listed = megatrain("plan qwen2.5-0.5b --gpu 'RTX 4090'", *CARD[:2], *CARD[-2:], *SHORT)
    assert "assumed are" not in listed.err


@pytest.mark.parametrize("name", ["B200", "RTX 2080 Ti"])
def test_a_gpu_of_the_table_can_be_planned_for(megatrain, name):
    megatrain("plan tiny --ram 32GiB --gpu", name, *TINY)


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_makes_a_machine(name):
    config = Config.model_validate({"model": "m", "data": {"train": "rows.jsonl"}})
    machine = planned_machine(config, gpu=name, ram="64GiB")
    assert machine.hardware.gpu is not None
    assert 0 < machine.hardware.gpu.free_bytes < machine.hardware.gpu.total_bytes
    assert machine.profile.upload > 0


NO_MACHINES = {
    "--gpu 'RTX 4090'": "--gpu and --ram belong together",
    "--ram 64GiB": "--gpu and --ram belong together",
    "--gpu-tflops 60": "--gpu and --ram belong together",
    "--cores 4": "and --cores to them",
    "--ram 64GiB --gpu 'Voodoo 2'": "--gpu: 'Voodoo 2' is not known; choose one of B200, H200 NVL",
    "--ram 64GiB --gpu 'RTX 6000'": "is not known; did you mean RTX PRO 6000 or RTX 6000 Ada?",
    "--ram 64GiB --gpu A6000": "--gpu: 'A6000' is not known; did you mean RTX A6000?",
    "--ram 64GiB --gpu 'RTX 4090 Laptop'": "Or describe it: --gpu-memory 12GiB --gpu-tflops 60 --p",
    "--ram 64GiB --gpu mine --gpu-memory 12GiB --pcie 25": "is not listed needs --gpu-tflops, too",
    "--ram 64GiB --gpu-memory 1 --gpu-tflops 60 --pcie 25": "must be a size of more than 0.59 GiB",
    "--ram 64GiB --gpu-memory 12GiB --gpu-tflops 60 --pcie 0": "--pcie: must be more than 0, not 0",
    "--gpu H200 --ram much": "--ram: must be a size of more than 2 GiB, such as 128GiB, not 'much'",
    "--gpu H200 --ram 1GiB": "--ram: must be a size of more than 2 GiB",
    "--gpu A100 --ram 64GiB precision=fp8": "the A100 has no fp8 units; set precision: bfloat16",
}


@pytest.mark.parametrize(("arguments", "reason"), NO_MACHINES.items())
def test_what_is_no_machine_is_refused(megatrain, arguments, reason):
    assert reason in megatrain(f"plan tiny {arguments}", code=2).err


def test_nothing_to_plan_is_said(megatrain):
    words = "name a config file, a model folder, a hub id or a shape, such as `megatrain plan qwen"
    assert words in megatrain("plan", code=2).err


@pytest.fixture
def own_model(project: Path) -> Path:
    """The project's model as a folder that a test may change."""
    original, folder = (project / "model").resolve(), project / "model"
    folder.unlink()
    shutil.copytree(original, folder)
    return folder


NORM = "model.norm.weight"
OTHER_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "another shape": (lambda t: t | {NORM: t[NORM][:8].clone()}, f"{NORM} has shape [8], but"),
    "one too many": (lambda t: t | {"x.y": torch.zeros(2)}, "holds x.y, unknown to a llama model"),
    "one too few": (lambda t: {n: v for n, v in t.items() if n != NORM}, f"lacks {NORM}"),
    "integers": (lambda t: t | {NORM: t[NORM].to(torch.int8)}, f"{NORM} is int8; training needs"),
}


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(("change", "reason"), OTHER_TENSORS.values(), ids=OTHER_TENSORS.keys())
def test_other_tensors_than_the_model_s_are_refused_first(
    megatrain, project, own_model, command, change, reason
):
    rewrite(own_model, change)
    assert reason in (error := megatrain(f"{command} cfg.yaml", code=2).err)
    assert "comparing a small" not in error and not (project / "run" / "plan.json").exists()


@pytest.mark.parametrize("command", ["plan", "train"])
def test_pickles_alone_are_no_weights(megatrain, own_model, command):
    (own_model / "model.safetensors").rename(own_model / "pytorch_model.bin")
    assert "has only pickled weights" in megatrain(f"{command} cfg.yaml", code=2).err


@pytest.mark.slow
def test_a_quantised_folder_is_planned_and_trained_as_the_one_it_was_made_from(
    megatrain, project, own_model
):
    def planned() -> Any:
        plan = megatrain("plan cfg.yaml --json").json
        return [plan[key] for key in ("job", "choices", "disk")]

    expected = planned()
    rewrite(own_model, in_tiles)
    state(own_model, TILES)
    assert planned() == expected
    done = megatrain("train cfg.yaml", "train.max_steps=1", "checkpoint.every=1")
    assert (done.out + done.err).count("its fp8 weights are dequantised when") == 1
    resumed = megatrain("resume run", "train.max_steps=2")
    assert "dequantised" not in resumed.out + resumed.err
    assert "quantization_config" not in config_in(project / "run" / "final")


H100S = ("plan tiny --gpu H100 --ram 64GiB", *TINY)


def test_several_gpus_and_what_other_numbers_would_give(megatrain):
    done = megatrain(*H100S, "--gpus", "2", "economy.price_per_hour=8", "--json")
    plan = done.json
    assert (plan["job"]["ranks"], plan["ranks"]["gpus"], plan["ranks"]["hosts"]) == (2, 2, 1)
    assert plan["ranks"]["tokens_of_the_fullest"] == 128 and plan["ranks_assumed"]
    assert plan["totals"]["host"]["need"] == 2 * plan["ranks"]["host_bytes"]
    one, two, four = plan["on_gpus"]  # four rows have no work for eight
    assert [row["gpus"] for row in (one, two, four)] == [1, 2, 4]
    assert two["tokens_per_s"] == plan["timing"]["tokens_per_s"]
    assert two["cost_per_million"] == pytest.approx(plan["economy"]["cost_per_million_tokens"])
    # half the price for half the GPUs
    assert one["cost_per_million"] == pytest.approx(4 / 3600 / one["tokens_per_s"] * 1e6)
    alone = megatrain(*H100S, "--json").json
    assert alone["on_gpus"] == [] and not alone["ranks_assumed"]
    assert alone["timing"]["seconds"] == one["seconds"]
    shared = megatrain(*H100S, "--gpus", "2", "train.context_parallel=2", "--json").json
    assert [row["gpus"] for row in shared["on_gpus"]] == [2, 4, 8], "one shares no sequence"


def test_choices_that_a_resumed_run_keeps_were_not_asked_for():
    config = bench_config("tiny", [*TINY, "train.groups=2", "device=cpu"])
    plan = plan_run(config, resolve_run(config, shape_model(config), find_machine(config)))
    asked, resumed = (facts_of(config, plan, kept).asked for kept in (False, True))
    assert "train.groups" in asked and "train.groups" not in resumed


def test_it_says_what_is_of_a_rank_and_what_is_assumed(megatrain):
    text = megatrain(*H100S, *["--gpus", "2", "--hosts", "2", "--network", "400", "--full"]).out
    assert text.startswith("fits on 2 GPUs of each of 2 hosts: ")
    assert "several hosts: planned from bytes and the network's rate alone" in text
    assert "2 GPUs at work together: their rates are assumed, not measured; `megatrain" in text
    for words in ("of GPU memory of each", "bytes by tier and array of a rank"):
        assert words in text
    assert "numbers of GPUs of each of 2 hosts" in " ".join(text.split())
    assert "totals of a host, with 2 ranks" in text
    assert re.search("ranks +. 2 x 2 ", text)


NOT_SO_MANY = {
    "--gpus 5": "a step of 4 rows has work for at most 4 GPUs, not for 5: take at most 4",
    "--gpus 2 --hosts 2": "--hosts needs --network, too",
    "--gpus 2 --network 100": "--network: Gbit/s of each host, more than 0, for two --hosts",
    "--gpus 2 --hosts 2 --network 0": "--network: Gbit/s of each host, more than 0",
}


def test_rows_of_a_step_are_raised_by_the_key_that_is_set(megatrain):
    rows = ("train.rows_per_step=2", "train.tokens_per_step=null", *TINY[::2])
    error = megatrain("plan tiny --gpu H100 --ram 64GiB --gpus 3", *rows, code=4).err
    assert "take at most 2 (on one host gpus: 2), or raise train.rows_per_step to 3" in error


@pytest.mark.parametrize(("flags", "words"), NOT_SO_MANY.items())
def test_gpus_that_have_nothing_to_do_are_refused(megatrain, flags, words):
    assert words in megatrain(*H100S, *flags.split(), code=4 if "rows" in words else 2).err


def test_more_gpus_than_there_are_need_a_description(megatrain, monkeypatch):
    monkeypatch.setattr(doctor, "find_machine", lambda config: ON_CUDA)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    told = megatrain("plan tiny --gpus 2", *TINY, code=2).err
    assert "--gpus: 2, but this machine shows 1; describe another one with --gpu and --ram" in told


# -- plan whole tensors ----------------------------------------------------------------------------


def test_the_plan_s_bytes_are_the_store_s():
    optimizer = Muon()
    with engine_of(tiny_config("qwen2-tied"), optimizer=optimizer, settings=Settings()) as engine:
        blocks, whole = engine.anatomy.blocks, whole_update(engine.optimizer, engine.skeleton)
        assert whole is not None
        for name, sizes in whole.state_bytes:
            stored = tuple(engine.store.array(name, block.index).nbytes for block in blocks)
            assert sizes == stored
        assert {*dict(whole.state_bytes)} == {array.name for array in optimizer.state_arrays}
        assert whole.host_scratch == optimizer.scratch([block.layout for block in blocks]).host
        assert state_bytes(optimizer, engine.skeleton) == ()
        assert whole_update(AdamW(), engine.skeleton) is None
        assert [flops > 0 for flops in whole.product_flops] == [0 < b < 4 for b in range(5)]


@pytest.mark.slow
def test_what_each_optimizer_holds_and_takes(megatrain):
    asked = ("plan qwen2.5-0.5b --gpu H200 --ram 200GiB --json memory.resident=0", *SHORT)
    adamw, muon = (megatrain(*asked, f"optimizer.name={name}").json for name in ("adamw", "muon"))
    assert muon["host"]["exp_avg"] == pytest.approx(4 * adamw["parameters"], rel=0.01)
    # the embedding, which is the head
    assert muon["host"]["exp_avg_sq"] == pytest.approx(4 * 151936 * 896, rel=0.01)
    for tier in ("host", "device"):
        assert "update's scratch" in muon[tier] and "update's scratch" not in adamw[tier]
    assert muon["timing"]["seconds"] > adamw["timing"]["seconds"]


def test_several_gpus_refuse_an_optimizer_of_whole_matrices(megatrain):
    line = "plan qwen2.5-0.5b --gpu H200 --ram 200GiB --gpus 2"
    refused = megatrain(line, "optimizer.name=muon", *SHORT, code=2).err
    assert "optimizer.name: muon needs whole matrices" in refused
    assert "use adamw or lion, or one GPU" in refused
