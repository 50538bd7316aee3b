"""The engine against a plain PyTorch loop: every kind of family, clipping active, weight decay, a
schedule, padding, unequal micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from megatrain.data.loader import Loader, StepBatch
from megatrain.data.micro_batches import Regime, collate
from megatrain.data.micro_batches import micro_batches as of_rows
from megatrain.data.rows import IdArray, MaskArray, TokenRows
from megatrain.engine.components import fastest_attention
from megatrain.engine.engine import Engine
from megatrain.engine.verify import gradients_of
from megatrain.errors import ConfigError
from megatrain.models.anatomy import decaying
from megatrain.models.family import regimes_of
from megatrain.models.transforms.fp8 import Fp8Linear
from megatrain.models.trials.small import count_targets, plain_gradients, plain_loss
from megatrain.optim import AdamW, Lion, Muon
from megatrain.settings import ALL, Settings
from tests.data.test_loader import documents, fake_rows, row_numbers
from tests.helpers.compare import apart, differing, distance
from tests.helpers.plain import (
    DECAY,
    MAX_NORM,
    PlainLion,
    follow_in_fp32,
    named_gradients,
    plain_optimizer,
    train_plain,
)
from tests.helpers.runs import Trace, cosine, masters_of, run, train_engine
from tests.helpers.support import (
    KINDS,
    RECURRENT,
    VOCABULARY,
    Batch,
    engine_of,
    full_batches,
    micro_batches,
    plain_model,
    tiny_config,
)

STEPS = [micro_batches(seed) for seed in range(6)]
# eager Falcon returns its attention too
EAGER = ("llama", "qwen2-tied", "gpt-neox")
ON_CUDA = [*((family, "eager") for family in EAGER), ("falcon-40b", "sdpa")]
SETTINGS = [
    Settings(),
    Settings(groups=2),
    Settings(resident=2, retained=2),
    Settings(groups=3, resident=ALL, retained=ALL),
]
MUON = Muon(lr=2e-3, weight_decay=DECAY, adamw_lr=1e-3)


def torch_s_muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Hidden is what the model's layers hold as matrices."""
    made: list[torch.optim.Optimizer] = []
    decay = decaying(model)
    for name, parameter in model.named_parameters():
        options: dict[str, Any] = {"weight_decay": DECAY if name in decay else 0.0}
        if ".layers." in name and parameter.ndim == 2:
            made.append(
                torch.optim.Muon([parameter], lr=MUON.lr, adjust_lr_fn="match_rms_adamw", **options)
            )
        else:
            made.append(torch.optim.AdamW([parameter], lr=MUON.adamw_lr or MUON.lr, **options))
    return made


@dataclass(frozen=True)
class Trained:
    """A run beside a plain loop, and by how much its losses and weights may be off: shares."""

    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] | None = None  # default: AdamW
    losses: float = 1e-6
    weights: float = 1e-5

    def __str__(self) -> str:
        return " ".join([self.family, *map(str, self.options)])


LION: dict[str, Any] = {"optimizer": Lion(lr=1e-4, weight_decay=DECAY)}
IN_CHUNKS = {"settings": Settings(head_chunk_tokens=7, layer_chunk_tokens=8)}
UNCLIPPED = Trained("llama-tied", {"max_grad_norm": None})
TRAINED = [
    # tied or not, biases or none
    *map(Trained, ("llama", "qwen2-tied", "falcon-rw", "gpt-neox-tied")),
    *(Trained(family, IN_CHUNKS) for family in ("qwen2-tied", "gemma2", "falcon-7b", "gpt2")),
    # a sign next to zero is a matter of rounding
    Trained("llama", LION, lambda m: [plain_optimizer(m, 1e-4, PlainLion)], 1e-5, 1e-4),
    # Muon iterates in bfloat16
    *(Trained(f, {"optimizer": MUON}, torch_s_muon, 2e-3, 5e-3) for f in ("llama", "qwen2-tied")),
]
CASES: list[Any] = [("cpu", UNCLIPPED)]
CASES += [pytest.param("cpu", trained, marks=pytest.mark.slow) for trained in TRAINED]
CASES += [
    pytest.param("cuda", Trained(family, more), marks=[pytest.mark.slow, pytest.mark.cuda])
    for (family, attention), settings in product(ON_CUDA, SETTINGS)
    for more in [{"attention": attention, "settings": settings}]
]


@pytest.mark.parametrize(("device", "trained"), CASES, ids=str)
def test_six_steps_equal_a_plain_loop(device, trained):
    config, options = tiny_config(trained.family), {"device": device, **trained.options}
    clips = "max_grad_norm" not in options
    rates = cosine(len(STEPS), options.get("optimizer", AdamW(lr=1e-3)).lr)

    def by_torch(backwards: bool) -> Trace:
        model = plain_model(config, attention=options.get("attention", "auto"), device=device)
        made = trained.optimizers(model) if trained.optimizers else ()
        limit = MAX_NORM if clips else float("inf")
        return train_plain(model, STEPS, rates, made, max_norm=limit, backwards=backwards)

    plain, twin = by_torch(False), by_torch(True)
    with engine_of(config, **options) as engine:
        ours = train_engine(engine, STEPS, rates)
    assert not clips or min(plain.norms) > MAX_NORM, "clipping must have been active in every step"
    assert ours.losses == pytest.approx(plain.losses, rel=trained.losses)
    assert ours.norms == pytest.approx(
        plain.norms, rel=trained.losses * (10 if device == "cpu" else 100)
    )
    assert ours.weights.keys() == plain.weights.keys()
    for name, weight in plain.weights.items():
        moved = 0.0 if trained.optimizers else 10 * distance(twin.weights[name], weight)
        assert distance(ours.weights[name], weight) <= max(trained.weights, moved), name


def assert_gradients_equal_autograd(
    family: str,
    batches: list[Batch],
    device: str = "cpu",
    share: float = 1e-5,
    attention: str = "auto",
) -> None:
    model = plain_model(tiny_config(family), device=device, attention=attention)
    with engine_of(family, weights=model, device=device, attention=attention) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
        with fastest_attention(engine.device):  # the same order of kernels on both sides
            plain_gradients(model, batches)
    assert apart(ours, named_gradients(model), share, of_largest=1e-6) == []


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "auto") for family in (*KINDS, "bamba", *RECURRENT)),
        ("falcon-7b", "eager"),
    ],
)
def test_gradients_equal_autograd_with_padding_on_either_side(family, attention):
    batches = [*micro_batches(1), *micro_batches(2, pad_left=True)]
    assert_gradients_equal_autograd(family, batches, attention=attention)


@pytest.mark.cuda
@pytest.mark.parametrize("pad_left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "falcon-7b"])
def test_gradients_with_fused_attention_equal_autograd_s(family, pad_left):
    batches = micro_batches(1, pad_left=pad_left)
    assert_gradients_equal_autograd(family, batches, "cuda", share=1e-4)


def packed(documents: Sequence[int], pad: int = 0) -> Batch:
    """One row of documents of these lengths, told apart by their positions alone, and padding."""
    tokens = sum(documents) + pad
    (batch,) = full_batches(3, [(1, tokens)])
    batch["position_ids"] = torch.cat([torch.arange(n) for n in (*documents, pad)])[None]
    if pad:
        batch["attention_mask"] = (torch.arange(tokens) < tokens - pad).long()[None]
        batch["labels"][0, -pad:] = -100
    return batch


@pytest.mark.parametrize("pad", [0, 3], ids=["full", "padded"])
@pytest.mark.parametrize("family", ["mistral-sliding", "opt"])
def test_packed_rows_are_read_as_transformers_reads_them(family, pad):
    """It keeps documents apart by their positions, but only where there is no mask."""
    assert_gradients_equal_autograd(family, [packed([5, 4, 3], pad)])


def test_evaluation_is_the_plain_mean_over_targets_and_changes_nothing():
    config = tiny_config("falcon-40b", hidden_dropout=0.5)  # evaluation mode has no dropout
    batches, model = micro_batches(3), plain_model(config).eval()
    with torch.no_grad():
        expected = sum(float(plain_loss(model, batch)) for batch in batches)
    with engine_of(config, weights=model) as engine:
        before = {name: weight.clone() for name, weight in engine.iter_weights()}
        result = engine.evaluate(batches)
        assert result.loss == pytest.approx(expected / count_targets(batches), rel=1e-6)
        assert result.target_tokens == count_targets(batches)
        assert differing(before, dict(engine.iter_weights())) == []


def test_logits_and_greedy_generation_equal_the_model_s_own(device):
    config = tiny_config("falcon-40b")
    model: Any = plain_model(config, device=device).eval()
    (prompt,) = (batch["input_ids"] for batch in full_batches(3, [(1, 9)]))
    with torch.no_grad():
        logits = model(input_ids=prompt.to(device), use_cache=False).logits
        rows = model.generate(
            prompt.to(device), max_new_tokens=8, do_sample=False, eos_token_id=None
        )
    expected = rows[0, 9:].tolist()
    with engine_of(config, weights=model, device=device) as engine:
        torch.testing.assert_close(engine.logits(prompt), logits, rtol=1e-4, atol=1e-4)
        assert [a.ids for a in engine.generate(prompt.tolist(), max_new_tokens=8)] == [expected]
        until = expected[: expected.index(expected[2]) + 1]
        ended = engine.generate(prompt.tolist(), max_new_tokens=8, eos_token_ids=[expected[2]])
        assert ended[0].ids == until


# -- bfloat16 with fp32 master weights -----------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2-tied", Settings()), ("falcon-40b", Settings(groups=2, sums_on_device=ALL))],
    ids=["tied", "groups"],
)
def test_bfloat16_follows_a_plain_fp32_loop_fed_with_the_same_gradients(family, settings, device):
    options = {"precision": "bfloat16", "settings": settings, "device": device}
    with engine_of(family, optimizer=AdamW(weight_decay=DECAY), **options) as engine:
        start = {name: master.clone() for name, master in masters_of(engine).items()}
        expected = follow_in_fp32(engine, cosine(6, 1e-3))
        for name, master in masters_of(engine).items():
            assert distance(master, expected[name]) <= 1e-6, name
            assert distance(master - start[name], expected[name] - start[name]) <= 1e-3, name


@pytest.mark.parametrize("family", ["llama", "falcon-7b", "qwen2-tied"])
def test_bfloat16_gradients_are_as_exact_as_those_of_a_plain_bfloat16_model(family, device):
    batches = micro_batches(0)
    rounded = plain_model(tiny_config(family), dtype=torch.bfloat16, device=device)
    exact = copy.deepcopy(rounded).float()
    for model in (rounded, exact):
        plain_gradients(model, batches)
    with engine_of(family, weights=rounded, precision="bfloat16", device=device) as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    theirs, truth = named_gradients(rounded), named_gradients(exact)
    for name, gradient in truth.items():
        assert distance(ours[name], gradient) <= 2 * distance(theirs[name], gradient) + 0.01, name


# -- fp8 ---------------------------------------------------------------------------------------

EVEN = [full_batches(seed, [(2, 16), (2, 16)]) for seed in range(4)]
WIDE = {"num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128}


def wide(precision: str = "fp8", settings: Settings | None = None) -> Engine:
    return engine_of(tiny_config("llama", **WIDE), precision=precision, settings=settings)


def outputs(engine: Engine) -> list[set[str]]:
    """The way each layer's matmuls make their outputs."""
    return [
        {module.policy.output for module in layer.modules() if isinstance(module, Fp8Linear)}
        for layer in engine.skeleton.layers
    ]


@pytest.mark.slow
def test_losses_are_near_those_of_bfloat16_and_not_the_same():
    with wide("bfloat16") as engine, wide() as in_fp8:
        assert outputs(engine) == [set()] * 4
        # attention's projections are bf16 everywhere, but not their gradients
        ends, inner = {"bfloat16"}, {"bfloat16", "fp8_fast"}
        assert outputs(in_fp8) == [ends, inner, inner, ends]
        plain, fp8 = run(engine, EVEN), run(in_fp8, EVEN)
    assert fp8.losses == pytest.approx(plain.losses, rel=0.02)
    assert fp8.losses != plain.losses


def test_recomputation_leaves_out_an_fp8_product_that_nobody_needs():
    with wide() as engine:
        assert engine.skeleton._skippable == [("mlp.down_proj",)] * 4


def test_a_model_without_a_layer_for_it_is_refused():
    with pytest.raises(ConfigError, match="fp8 suits no layer of this GPT2LMHeadModel; set prec"):
        engine_of("gpt2", precision="fp8")


LIMIT, SEQ_LEN, ALL_AT_ONCE = 16, 40, 10**6
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 8.0, 16.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": LIMIT, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
MODELS = {
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE | FACTORS, "original_max_position_embeddings": LIMIT},
        Regime(LIMIT),
    ),
    "dynamic": (
        "llama",
        {"rope_parameters": DYNAMIC, "max_position_embeddings": LIMIT},
        Regime(LIMIT, exact=True),
    ),
}


class RandomRows(TokenRows):
    """If a row's tokens are alike, positions make no difference."""

    def side(self, index: int, side: int) -> tuple[IdArray, MaskArray]:
        ids, mask = super().side(index, side)
        return np.random.default_rng(index).integers(3, VOCABULARY, len(ids)).astype(np.int32), mask


LENGTHS = np.array([5, 40, 16, 17, 30, 16, 30, 9, 3, 24])
NUMBERED, ROWS = fake_rows(LENGTHS), fake_rows(LENGTHS, make=RandomRows)
WAYS: dict[str, dict[str, Any]] = {
    "apart": {"micro_batch_tokens": SEQ_LEN},
    "together": {"micro_batch_tokens": ALL_AT_ONCE},
    "packed": {"micro_batch_tokens": SEQ_LEN, "pack_to": SEQ_LEN},
    "packed together": {"micro_batch_tokens": ALL_AT_ONCE, "pack_to": 2 * SEQ_LEN},
}


def config_of(kind: str) -> Any:
    family, changes, _ = MODELS[kind]
    return tiny_config(family, **changes)


# -- rows that give a model other rotary factors ---------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_lengths_at_which_factors_change_are_known(kind):
    assert regimes_of(config_of(kind)) == (MODELS[kind][2],)
    assert regimes_of(tiny_config("llama")) == ()


def step_of(kind: str, rows: TokenRows = ROWS, **way: Any) -> StepBatch:
    regimes = regimes_of(config_of(kind))
    loader = Loader(rows, pad_id=0, seed=0, rows_per_step=len(rows), regimes=regimes, **way)
    (batch,) = loader
    (known,) = loader.step_tokens([loader.micro_batch_tokens])
    assert known[1] == sum(part["input_ids"].numel() for part in batch.micro_batches)
    assert known[3] == len(batch.micro_batches)
    return batch


def test_no_row_is_beside_one_of_another_kind():
    for kind in MODELS:
        for way in WAYS:
            (regime,), batch = regimes_of(config_of(kind)), step_of(kind, NUMBERED, **WAYS[way])
            lengths = LENGTHS.tolist()
            for part in batch.micro_batches:
                alone = StepBatch([part], (), 0.0, batch.after)
                rows = documents(alone) if "position_ids" in part else row_numbers(alone)
                assert len({regime.of(lengths[row]) for row in rows}) == 1
                longest = max(lengths[row] for row in rows)
                if "position_ids" in part:  # of the padding, too
                    assert int(part["position_ids"].max()) < max(longest, LIMIT)
            assert sum(batch.lengths) == sum(lengths)


def one_by_one(kind: str) -> tuple[float, int]:
    """By transformers, each row in a model that has seen no other."""
    total, rows = 0.0, [collate(ROWS, [[row]], pad_id=0) for row in range(len(ROWS))]
    for row in rows:
        with torch.no_grad():
            total += float(plain_loss(plain_model(config_of(kind)), row))
    targets = int(count_targets(rows))
    return total / targets, targets


def trained(kind: str, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    with engine_of(config_of(kind)) as engine:
        loss = engine.forward_backward(batches).loss
        return loss, {name: grad.float() for name, grad in gradients_of(engine).items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_rows_alone_together_padded_and_packed_have_the_same_loss(kind):
    expected, targets = one_by_one(kind)
    gradients: dict[str, torch.Tensor] = {}
    for way in WAYS.values():
        loss, found = trained(kind, step_of(kind, **way).micro_batches)
        assert loss == pytest.approx(expected, rel=2e-7)
        gradients = gradients or found
        assert apart(found, gradients, 1e-5) == []
    regimes = regimes_of(config_of(kind))
    with engine_of(config_of(kind)) as engine:
        for way in WAYS.values():
            held = of_rows(ROWS, np.arange(len(ROWS)), pad_id=0, regimes=regimes, **way)
            result = engine.evaluate(list(held))
            assert result.loss == pytest.approx(expected, rel=2e-7)
            assert result.target_tokens == targets
