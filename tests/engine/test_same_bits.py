"""Dials change no bit: when updates run, where state, sums and activations live, and how often
gradients are computed. How a batch is cut changes only the order of sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
from torch import Tensor

from megatrain.engine.codecs import CODECS
from megatrain.engine.verify import gradients_of
from megatrain.memory.layout import GROUP
from megatrain.models.trials.small import count_targets
from megatrain.optim import AdamW, Lion, Muon, Optimizer
from megatrain.settings import ALL, Settings
from tests.helpers.compare import apart, differing
from tests.helpers.runs import Trace, assert_same, run, train_serially
from tests.helpers.support import (
    Batch,
    engine_of,
    full_batches,
    micro_batches,
    tiny_config,
    without_targets,
)

LEFT = [[*micro_batches(0, pad_left=True), *micro_batches(1)] for _ in range(2)]
STEPS = {
    "cpu": [micro_batches(seed) for seed in range(2)],
    "cuda": [full_batches(seed, [(2, 8), (1, 8), (2, 8)]) for seed in range(3)],
    "even": [full_batches(seed, [(2, 16)] * 3) for seed in range(3)],
    "padded left, some without targets": [LEFT[0], [*without_targets(LEFT[1][:1]), *LEFT[1][1:]]],
}
WIDE = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}
CONFIGS = {
    "dropout": tiny_config("gpt-neox", hidden_dropout=0.2, attention_dropout=0.2),
    "wide": tiny_config("llama", **WIDE),
    "wide, tied": tiny_config("qwen2-tied", **WIDE),
}
FP32, BF16, FP8 = ({"precision": name} for name in ("float32", "bfloat16", "fp8"))
FREE, NEVER_CLIPS = {"max_grad_norm": None}, {"max_grad_norm": 1e9}
MUON = {"optimizer": Muon(lr=2e-3, weight_decay=0.1, adamw_lr=1e-3)}
OPTIMIZERS: list[Optimizer] = [
    AdamW(lr=1e-3, weight_decay=0.1, moments="bfloat16"),
    AdamW(lr=1e-3, weight_decay=0.1, moments="int8"),
    Lion(lr=1e-4, weight_decay=0.1),
    Lion(lr=1e-4, weight_decay=0.1, moments="bfloat16"),
    Lion(lr=1e-4, weight_decay=0.1, moments="int8"),
]
PLAIN = Settings(head_chunk_tokens=7)
pytestmark = pytest.mark.usefixtures("deterministic")


def dials(**given: Any) -> Settings:
    return replace(PLAIN, **given)


OFFLOAD, TWICE, CHUNKS = (
    dials(offload_activations=True),
    dials(second_backward=True),
    dials(layer_chunk_tokens=8),  # of micro-batches of 18, 39 and 6 tokens
)
GRAPHS = replace(OFFLOAD, retained=1, retained_on_host=1)
HALF_RESIDENT = replace(TWICE, resident=3, offload_activations=True)


@dataclass(frozen=True)
class Row:
    """A run, and what of the run that it equals is different: settings, and further options."""

    model: str
    settings: Settings
    than: Settings = PLAIN
    options: Mapping[str, Any] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)
    losses: float = 0.0  # relative difference that is allowed
    steps: str = ""  # default: those of the device

    def __str__(self) -> str:
        changed = [f"{f.name}={v}" for f in fields(Settings)
                   if (v := getattr(self.settings, f.name)) != getattr(PLAIN, f.name)]  # fmt: skip
        return " ".join([self.model, *changed, *map(str, self.options.values())])


# several of each kind with each precision and each clip
PLACED = [
    Row("mistral-sliding", settings, options=precision | clip, losses=1e-6)
    for settings, precision, clip in zip(
        [
            dials(resident=1),
            dials(resident=3, retained=1),
            dials(retained=ALL),
            dials(resident=ALL, retained=ALL),
            dials(groups=2),
            dials(groups=8, sums_on_device=ALL),
            dials(groups=2, resident=2, retained=2),
            dials(groups=3, resident=1, sums_on_device=3),
            dials(groups=8, resident=ALL, retained=ALL),
            OFFLOAD,
            dials(groups=2, resident=2, retained=1, offload_activations=True),
        ],
        cycle((FP32, BF16)),
        cycle((FREE, FREE, {}, {})),
        strict=False,
    )
]
UNCLIPPED = [
    Row("qwen2-tied", settings, settings, {**FREE, **precision}, NEVER_CLIPS)
    for settings in (PLAIN, dials(groups=2))
    for precision in (FP32, BF16)
]
COMPUTED_TWICE = [
    Row("llama", TWICE),
    Row("qwen2-tied", TWICE, PLAIN, BF16 | NEVER_CLIPS),
    Row("qwen2-tied", replace(TWICE, offload_activations=True), OFFLOAD, BF16),
    Row("llama", replace(TWICE, resident=1), dials(resident=1), BF16),
    Row("qwen2-tied", HALF_RESIDENT, replace(HALF_RESIDENT, second_backward=False), NEVER_CLIPS),
    Row("qwen2-tied", replace(TWICE, resident=ALL), dials(resident=ALL), BF16),
    Row("llama", replace(TWICE, update_threads=1), PLAIN, BF16),
    Row("llama", dials(second_backward=1)),
    Row("qwen2-tied", replace(HALF_RESIDENT, second_backward=1), HALF_RESIDENT, BF16),
]
OF_CODECS = [
    Row("llama", replace(OFFLOAD, activations=name), dials(activations=name), BF16)
    for name in CODECS
]
QUICK = [
    *(
        Row(model, dials(**where))
        for model in ("qwen2-tied", "dropout")
        for where in ({"resident": 1}, {"resident": ALL, "retained": ALL})
    ),
    Row("dropout", dials(groups=2), losses=1e-6),
    Row("qwen2-tied", PLAIN, PLAIN, {**FREE, **BF16, **MUON}, NEVER_CLIPS),
    # layers that are not recomputed have no use for a codec
    Row("llama", dials(retained=ALL, activations="int4"), dials(retained=ALL), BF16),
    Row(
        "llama",
        replace(OFFLOAD, retained_on_host=ALL, activations="int4"),
        replace(OFFLOAD, retained_on_host=ALL),
        BF16,
    ),
    Row(
        "llama",
        replace(TWICE, offload_activations=True),
        OFFLOAD,
        steps="padded left, some without targets",
    ),
]
KEPT: dict[str, Any] = {"retained": ALL, "retained_on_host": 0}
ON_HOST = [
    Row(model, settings, replace(settings, **KEPT), precision)
    for model, precision, settings in (
        ("llama", BF16, GRAPHS),
        ("llama", FP32, replace(OFFLOAD, retained_on_host=ALL)),
        ("gemma2", FP32, replace(GRAPHS, groups=2)),
        ("gpt2", BF16, replace(GRAPHS, resident=2)),
        ("gpt-neox", BF16, GRAPHS),
        ("mixtral", BF16, replace(GRAPHS, retained_on_host=2)),
    )
]
SLOW = [
    *COMPUTED_TWICE,
    Row("dropout", TWICE),
    Row("dropout", replace(TWICE, offload_activations=True), OFFLOAD),
    Row("llama", replace(TWICE, compile=True), dials(compile=True), steps="even"),
    *ON_HOST,
    *OF_CODECS,
    *(
        Row(
            model,
            replace(settings, activations="int4", offload_activations=True),
            replace(settings, activations="int4"),
            precision,
        )
        for model, precision, settings in (
            ("llama", FP32, dials(groups=2)),
            ("gemma2", BF16, dials(retained=1, resident=2)),
            ("gpt2", FP32, PLAIN),
        )
    ),
    *(
        Row("llama", replace(CHUNKS, **more), CHUNKS, precision)
        for precision, more in (
            (BF16, {"offload_activations": True}),
            (FP8, {"retained": ALL}),
            (BF16, {"offload_activations": True, "retained_on_host": 2}),
            (FP8, {"offload_activations": True, "retained_on_host": 2}),
            (BF16, {"resident": ALL}),
        )
    ),
    *(
        Row("llama", dials(**more), PLAIN, BF16 | MUON, {}, 1e-6)
        for more in (
            {"groups": 3},
            {"groups": 3, "sums_on_device": 2},
            {"resident": 2},
            {"resident": ALL, "groups": 3},
            {"update_threads": 5},
            {"offload_activations": True},
        )
    ),
    *(Row("qwen2-tied", dials(resident=2), PLAIN, BF16 | {"optimizer": o}) for o in OPTIMIZERS),
]
ATTENTION = [  # padded batches have masks, and compute it again
    Row(model, replace(than, keep_attention=kept), than, precision)
    for model, kept, than, precision in (
        ("llama", ALL, PLAIN, BF16),
        ("llama", 1, dials(groups=2, retained=1), FP32),
        ("qwen2-tied", 2, replace(OFFLOAD, groups=3), BF16),
        ("llama", ALL, replace(TWICE, offload_activations=True), BF16),
        ("qwen2-tied", ALL, TWICE, FP32),
        ("gpt2", ALL, GRAPHS, BF16),
        ("mixtral", ALL, OFFLOAD, BF16),
    )
]
MOST = replace(GRAPHS, retained_on_host=2)
CHEAPLY = replace(MOST, compile=True, cheap_retention=True)
ON_CUDA = [
    *(replace(row, model="llama") for row in PLACED),
    *UNCLIPPED,
    *COMPUTED_TWICE,
    *OF_CODECS,
    *(
        Row("wide", replace(than, keep_attention=ALL), than, precision, steps=steps)
        for precision in (BF16, FP8)
        for than in (PLAIN, OFFLOAD, replace(TWICE, compile=True), replace(OFFLOAD, compile=True))
        for steps in ("cuda", "even")
    ),
    *(
        Row("wide", settings, replace(settings, **KEPT), precision, steps="even")
        for precision in (BF16, FP8)
        for settings in (MOST, replace(MOST, compile=True), CHEAPLY)
    ),
    Row("wide", TWICE, PLAIN, FP8),
    Row("wide", replace(TWICE, compile=True), dials(compile=True)),
    Row("wide, tied", replace(TWICE, compile=True), dials(compile=True), BF16),
    Row("wide", dials(second_backward=2, compile=True), dials(compile=True)),
]


def rows() -> list[Any]:
    of_compilers = pytest.mark.filterwarnings("ignore")
    marked: list[tuple[Row, str, list[Any]]]
    marked = [(row, "cpu", []) for row in (*PLACED, *UNCLIPPED, *QUICK, *ATTENTION)]
    marked += [(row, "cpu", [pytest.mark.slow]) for row in SLOW]
    marked += [(row, "cuda", [pytest.mark.cuda]) for row in ON_CUDA]
    return [
        pytest.param(row, device, marks=[*marks, *[of_compilers] * row.settings.compile])
        for row, device, marks in marked
    ]


@cache
def ended(model: str, settings: Settings, steps: str, **options: Any) -> Trace:
    engine = engine_of(CONFIGS.get(model, model), settings=settings, **options)
    return run(engine, STEPS[steps])


@pytest.mark.parametrize(("row", "device"), rows(), ids=str)
def test_dials_change_no_bit(row, device, request, monkeypatch):
    monkeypatch.setattr("megatrain.memory.slab.SLAB_BYTES", 1)  # each piece has its own
    if row.settings.compile and device == "cpu":
        request.getfixturevalue("no_code_is_generated")
    of_row = row.model, row.steps or device
    options = {"device": device, **row.options}
    found = ended.__wrapped__(of_row[0], row.settings, of_row[1], **options)
    expected = ended(of_row[0], row.than, of_row[1], **{**options, **row.other})
    assert_same(found, expected, losses=row.losses)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_the_deferred_update_equals_the_serial_one(family, precision, device):
    with engine_of(family, precision=precision, device=device) as engine:
        serial = train_serially(engine, STEPS[device])
    assert_same(serial, ended(family, PLAIN, device, precision=precision, device=device))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda made: f"{made.name}-{made.moments}")
def test_nor_does_the_cut_of_any_optimizer_s_update_into_pieces(optimizer, monkeypatch):
    options = {"precision": "bfloat16", "optimizer": optimizer}
    expected = ended("qwen2-tied", PLAIN, "cpu", device="cpu", **options)
    monkeypatch.setattr("megatrain.engine.update.CHUNK_ELEMENTS", 1024)
    monkeypatch.setattr("megatrain.engine.update.CHUNK_MINIMUM", 1024)
    with engine_of("qwen2-tied", **options) as engine:
        for name, block in expected.state:
            per = GROUP if engine.store.arrays[name].per == "group" else 1
            assert len(expected.state[name, block]) == engine.store.layouts[block].numel // per
        assert_same(train_serially(engine, STEPS["cpu"]), expected)


# -- how a batch is cut ----------------------------------------------------------------------------


ONE = STEPS["cpu"][0]


def backward(
    batches: list[Batch], family: str = "qwen2-tied", **options: Any
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one step."""
    with engine_of(family, **options) as engine:
        return engine.forward_backward(batches).loss, gradients_of(engine)


@pytest.mark.parametrize("sizes", [(3, 3), (1, 5), (1,) * 6], ids=str)
def test_the_size_of_micro_batches_changes_only_summation_order(sizes):
    (whole,) = micro_batches(0, [(6, 11)])
    cut: list[Batch] = [
        dict(zip(whole, parts, strict=True))
        for parts in zip(*(t.split(list(sizes)) for t in whole.values()), strict=True)
    ]
    (loss, expected), (found, ours) = backward([whole], "llama"), backward(cut, "llama")
    assert found == pytest.approx(loss, rel=1e-6)
    assert apart(ours, expected, of_largest=0.0) == []


@pytest.mark.parametrize("groups", [1, 3])
def test_a_micro_batch_without_targets_adds_nothing(groups):
    settings = Settings(groups=groups, head_chunk_tokens=7)
    empty = without_targets(micro_batches(1)[:1])
    loss, expected = backward(ONE, settings=settings)
    found, ours = backward([*ONE, *empty], settings=settings)
    assert found == loss
    assert differing(ours, expected) == []


def test_the_loss_is_divided_by_all_targets_of_the_step_and_not_by_micro_batch():
    few, many = full_batches(0, [(1, 3), (4, 12)])
    with engine_of("llama", optimizer=AdamW(lr=0.0)) as engine:
        losses = [engine.evaluate([batch]).loss for batch in (few, many)]
        counts = [count_targets([batch]) for batch in (few, many)]
        assert abs(losses[0] - losses[1]) > 0.01
        expected = (losses[0] * counts[0] + losses[1] * counts[1]) / sum(counts)
        result = engine.forward_backward([few, many])
        assert result.loss == pytest.approx(expected, rel=1e-6)
        assert result.target_tokens == sum(counts)
