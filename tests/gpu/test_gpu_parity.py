"""On CUDA: the engine against a plain PyTorch loop on the same device."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from megatrain.engine.context import fastest_attention
from megatrain.engine.engine import Engine
from megatrain.optim import AdamW
from megatrain.settings import ALL, Settings
from tests.support import (
    VOCABULARY,
    Batch,
    cosine,
    count_targets,
    distance,
    engine_of,
    follow_in_fp32,
    full_batches,
    gradients_of,
    gradients_without_recompute,
    masters_of,
    micro_batches,
    plain_gradients,
    plain_model,
    tiny_config,
    train_engine,
    train_plain,
)

STEPS = 20
RATES = cosine(STEPS, 1e-3)
MAX_NORM, DECAY = 0.5, 0.1


def on_cuda(batches: list[Batch]) -> list[Batch]:
    return [{name: value.cuda() for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize(
    "settings",
    [
        Settings(),
        Settings(groups=2),
        Settings(resident=2, retained=2),
        Settings(groups=3, resident=ALL, retained=ALL),
    ],
    ids=["one group", "two groups", "front resident, end retained", "all of it, three groups"],
)
@pytest.mark.parametrize(
    ("family", "attention"),
    [
        ("llama", "eager"),
        ("qwen2-tied", "eager"),
        ("gpt-neox", "eager"),
        ("falcon-40b", "sdpa"),
    ],  # eager Falcon returns its attention too
)
def test_twenty_steps_in_float32_equal_a_plain_loop(family, attention, settings):
    config = tiny_config(family)
    steps = [micro_batches(seed) for seed in range(STEPS)]

    def plain(backwards=False):
        model = plain_model(config, attention=attention, device="cuda")
        return train_plain(
            model, steps, RATES, weight_decay=DECAY, max_norm=MAX_NORM, backwards=backwards
        )

    reference, twin = plain(), plain(backwards=True)
    optimizer = AdamW(weight_decay=DECAY)
    with engine_of(
        config,
        device="cuda",
        attention=attention,
        optimizer=optimizer,
        max_grad_norm=MAX_NORM,
        settings=settings,
    ) as engine:
        ours = train_engine(engine, steps, RATES)
    assert min(reference.norms) > MAX_NORM
    assert ours.losses == pytest.approx(reference.losses, rel=1e-6)
    for name, weight in reference.weights.items():
        bound = max(1e-5, 10 * distance(twin.weights[name], weight))
        assert distance(ours.weights[name], weight) <= bound, name


@pytest.mark.parametrize("pad_left", [False, True], ids=["padded right", "padded left"])
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "falcon-7b"])
def test_gradients_with_fused_attention_equal_autograd_s(family, pad_left):
    config = tiny_config(family)
    batches = micro_batches(1, pad_left=pad_left)
    model = plain_model(config, device="cuda")
    with engine_of(config, device="cuda") as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
        with fastest_attention(engine.device):  # the same order of kernels on both sides
            plain_gradients(model, on_cuda(batches), count_targets(batches))
    largest = max(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (
            float((ours[name] - parameter.grad.cpu()).norm())
            <= 1e-4 * float(parameter.grad.norm()) + 1e-6 * largest
        ), name


@pytest.mark.parametrize("family", ["llama", "falcon-7b", "qwen2-tied"])
def test_bfloat16_gradients_are_as_exact_as_those_of_a_plain_bfloat16_model(family):
    config = tiny_config(family)
    batches = micro_batches(0)
    rounded = plain_model(config, dtype=torch.bfloat16, device="cuda")
    exact = copy.deepcopy(rounded).float()
    for model in (rounded, exact):
        plain_gradients(model, on_cuda(batches), count_targets(batches))
    with engine_of(config, model=rounded, precision="bfloat16", device="cuda") as engine:
        engine.forward_backward(batches)
        ours = gradients_of(engine)
    theirs = dict(rounded.named_parameters())
    largest = max(float(p.grad.norm()) for p in exact.parameters() if p.grad is not None)
    for name, parameter in exact.named_parameters():
        gradient = theirs[name].grad
        assert gradient is not None
        assert parameter.grad is not None
        if (
            float(parameter.grad.norm()) > 1e-3 * largest
        ):  # the key bias's gradient is nothing but rounding
            bound = 2 * distance(gradient.cpu(), parameter.grad.cpu()) + 0.01
            assert distance(ours[name], parameter.grad.cpu()) <= bound, name


def test_bfloat16_follows_a_plain_fp32_loop_fed_with_the_same_gradients():
    with engine_of(tiny_config("llama-tied"), precision="bfloat16", device="cuda") as engine:
        start = {name: master.clone() for name, master in masters_of(engine).items()}
        expected = follow_in_fp32(engine, cosine(10, 1e-3))
        for name, master in masters_of(engine).items():
            assert distance(master, expected[name]) <= 1e-6, name
            assert distance(master - start[name], expected[name] - start[name]) <= 1e-3, name


def test_the_gpu_and_its_cpu_stand_in_agree():
    config = tiny_config("qwen3")
    steps = [micro_batches(seed) for seed in range(5)]
    with engine_of(config) as engine:
        stand_in = train_engine(engine, steps)
    with engine_of(config, device="cuda") as engine:
        ours = train_engine(engine, steps)
    assert ours.losses == pytest.approx(stand_in.losses, rel=1e-5)
    assert ours.norms == pytest.approx(stand_in.norms, rel=1e-4)


def test_dropout_is_replayed_in_recomputation():
    config = tiny_config("gpt-neox", hidden_dropout=0.3, attention_dropout=0.3)
    batches = full_batches(0)
    model = plain_model(config, attention="eager", device="cuda")
    with (
        engine_of(config, device="cuda", attention="eager", seed=11) as engine,
        torch.random.fork_rng(),
    ):
        before = torch.cuda.get_rng_state()
        loss = engine.forward_backward(batches).loss
        ours = gradients_of(engine)
        assert torch.equal(torch.cuda.get_rng_state(), before), (
            "the caller's random state on the GPU changed"
        )
        expected = gradients_without_recompute(model, on_cuda(batches), engine, step=0)
    assert loss == pytest.approx(expected, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if not name.endswith("query_key_value.bias"):
            assert distance(ours[name], parameter.grad.cpu()) < 1e-4, name


def test_evaluation_logits_and_generation_equal_the_model_s_own():
    config = tiny_config("falcon-40b")
    model = plain_model(config, device="cuda").eval()
    ids = full_batches(3, [(1, 9)])[0]["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids.cuda(), use_cache=False).logits
    with engine_of(config, model=model, device="cuda") as engine:
        torch.testing.assert_close(engine.logits(ids), expected, rtol=1e-4, atol=1e-4)
        tokens = model.generate(ids.cuda(), max_new_tokens=5, do_sample=False, eos_token_id=None)  # type: ignore[operator]
        assert engine.generate(ids, 5) == tokens[0, 9:].tolist()


@pytest.mark.filterwarnings(
    "ignore"
)  # torch.compile advises TF32, which these tests forbid, and warns of its own parts
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_with_fast_kernels_learns_a_batch_by_heart(compiled):
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 512,
    }
    config = tiny_config("qwen3", **sizes)
    batches = full_batches(0, [(2, 256), (2, 256)])
    settings = Settings(compile=compiled)
    with Engine.from_config(
        config, precision="bfloat16", device="cuda", optimizer=AdamW(lr=1e-3), settings=settings
    ) as engine:
        losses = [engine.train_step(batches).loss for _ in range(20)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), rel=0.1)
    assert losses[-1] < 0.8 * losses[0], losses
