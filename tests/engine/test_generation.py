"""Generation by the whole model: tokens of transformers' own `generate`, and an engine that trains
on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.engine import inference
from megatrain.engine.verify import weights_of
from megatrain.errors import DataError
from megatrain.settings import ALL, Settings
from tests.helpers.compare import differing
from tests.helpers.delays import delay
from tests.helpers.runs import run, state_of
from tests.helpers.support import (
    Batch,
    engine_of,
    full_batches,
    micro_batches,
    plain_model,
    tiny_config,
)

(PROMPT,) = (batch["input_ids"] for batch in full_batches(3, [(1, 9)]))
NEW = 12


def written(engine: Any, most: int = NEW, ends: list[int] | None = None) -> list[int]:
    (answer,) = engine.generate(PROMPT.tolist(), max_new_tokens=most, eos_token_ids=ends or [])
    return answer.ids  # type: ignore[no-any-return]


RESIDENT = ["llama", "qwen3", "gemma2", "mixtral", "falcon-h1", "qwen3-next", "gpt-oss", "opt"]


def own_tokens(folder: Any, prompt: torch.Tensor, **options: Any) -> list[int]:
    """The tokens of transformers' own `generate` on an exported folder."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | options
    found = model.generate(prompt, max_new_tokens=NEW, **settings)
    return found[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("family", RESIDENT)
def test_tokens_are_those_of_the_exported_folder(family, tmp_path, device):
    settings = Settings(resident=2, head_chunk_tokens=7)
    with engine_of(family, settings=settings, device=device) as engine:
        engine.save_pretrained(tmp_path / "out")
        expected = own_tokens(tmp_path / "out", PROMPT)
        with engine.whole(PROMPT.numel() + NEW) as model:
            assert type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        assert written(engine) == expected
        end = expected[3]
        until = expected[: expected.index(end) + 1]
        assert written(engine, NEW, [end]) == until


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama-tied", Settings(groups=2)),
        ("llama-tied", Settings(resident=ALL, retained=1)),
        ("gpt-neox", Settings(resident=ALL, retained=1)),
        ("falcon-h1", Settings(groups=2)),
    ],
)
def test_the_engine_trains_on_as_if_nothing_had_been(family, settings, device):
    dropout = {"hidden_dropout": 0.2} if family == "gpt-neox" else {}
    config, steps = tiny_config(family, **dropout), [micro_batches(seed) for seed in range(2)]
    undisturbed = run(engine_of(config, settings=settings, device=device), steps)
    with engine_of(config, settings=settings, device=device) as engine:
        losses = []
        for batches in steps:
            losses.append(engine.train_step(batches).loss)
            drawn = torch.get_rng_state()
            written(engine, 3)
            assert torch.equal(torch.get_rng_state(), drawn)
        assert losses == undisturbed.losses
        assert differing(undisturbed.state, state_of(engine)) == []


@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3", "falcon-h1", "falcon-rw"])
def test_weights_without_room_are_streamed(monkeypatch, family, caplog):
    """All rows pass a layer while it is there; a family with ALiBi computes each answer anew."""
    prompts = [[3, 4, 5], [6], [7] * 9]
    how: dict[str, Any] = {"n": 2, "temperature": 1.0, "max_new_tokens": 5}
    with engine_of(family) as engine:
        expected = engine.generate(prompts, **how)
        monkeypatch.setattr("megatrain.engine.inference.has_room", lambda *given: False)
        with engine.whole(1) as model:
            assert model is None
        found = engine.generate(prompts, **how)
        assert [one.ids for one in found] == [one.ids for one in expected]
        for a, b in zip(found, expected, strict=True):
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
        assert "each token streams all of them" in caplog.text
        end = expected[0].ids[1]
        ended = engine.generate(prompts, **how, eos_token_ids=[end])[0]
        assert ended.ids == expected[0].ids[: expected[0].ids.index(end) + 1]


@pytest.mark.cuda
def test_a_gpu_holds_the_weights_beside_what_it_has_already(monkeypatch):
    with engine_of("llama", device="cuda") as engine:
        weights = 4 * sum(layout.numel for layout in engine.store.layouts)
        room = weights + 40 * 4 * 32 * (2 * 3 + inference.HIDDEN_STATES) + inference.RESERVE_BYTES
        for free, fits in ((room + 4096, True), (room - 4096, False)):
            monkeypatch.setattr(inference, "free_bytes", lambda device, free=free: free)
            with engine.whole(40) as model:
                assert (model is not None) == fits


def test_what_the_model_s_own_settings_say_does_not_count():
    with engine_of(tiny_config("llama", eos_token_id=None)) as engine:
        expected = written(engine)
        own: Any = engine.skeleton.model
        own.generation_config.update(repetition_penalty=50.0, do_sample=True, max_new_tokens=1)
        assert written(engine) == expected
        assert own.generation_config.repetition_penalty == 50.0


def test_the_whole_model_is_that_after_the_last_update():
    with delay(engine_of("llama"), ["update"], 0.02, 0.02) as engine:
        engine.train_step(full_batches(0))
        with engine.whole(20) as model:
            assert model is not None
            found = {name: weight.clone() for name, weight in model.named_parameters()}
        assert differing(found, weights_of(engine)) == []


def plain_logprobs(model: Any, batch: Batch) -> Tensor:
    """Log-probabilities [batch, tokens], of whole logits."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    labels = batch["labels"][:, 1:]
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    found = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[:, :, None]).squeeze(2)
    values = torch.zeros(batch["labels"].shape)
    values[:, 1:] = found.where(labels != -100, 0.0)
    return values


SETTINGS = [Settings(head_chunk_tokens=4), Settings(resident=ALL, groups=3, head_chunk_tokens=100)]


# -- log-probabilities -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings", "pad_left"),
    [
        ("llama", SETTINGS[1], True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("llama", SETTINGS[0], False),
                ("gemma2", SETTINGS[0], True),
                ("mixtral", SETTINGS[1], False),
                ("falcon-h1", SETTINGS[0], True),
                ("gpt2", SETTINGS[1], False),
            )
        ),
    ],
)
def test_log_probabilities_are_those_of_the_whole_logits(family, pad_left, settings, device):
    config = tiny_config(family)
    model, batches = plain_model(config).eval(), micro_batches(3, pad_left=pad_left)
    with engine_of(config, weights=model, settings=settings, device=device) as engine:
        values = engine.logprobs(batches)
        loss, targets = engine.evaluate(batches).loss, engine.evaluate(batches).target_tokens
    for batch, found in zip(batches, values, strict=True):
        assert (found.dtype, found.device.type) == (torch.float32, "cpu")
        torch.testing.assert_close(found, plain_logprobs(model, batch), rtol=1e-4, atol=1e-4)
    assert -sum(float(found.sum()) for found in values) / targets == pytest.approx(loss, rel=1e-6)


def test_rows_without_targets_are_zeros():
    (batch,) = full_batches(5, [(2, 4)])
    labels = torch.full_like(batch["labels"], -100)
    labels[0, 0] = 5  # nothing predicts a row's first token
    with engine_of("llama") as engine:
        (values,) = engine.logprobs([batch | {"labels": labels}])
        assert engine.logprobs([]) == []
        with pytest.raises(DataError, match="input_ids and labels"):
            engine.logprobs([{"input_ids": batch["input_ids"]}])
    assert not values.any()


def test_a_position_may_have_several_tokens_and_a_last_one_its_next():
    config = tiny_config("qwen3")
    model: Any = plain_model(config).eval()
    batches = full_batches(3, [(2, config.max_position_embeddings), (1, 5)])
    targets = [
        (torch.tensor([63, 127, 127, 127, 4]), torch.tensor([5, 6, 7, 8, 9])),
        (torch.tensor([4]), torch.tensor([11])),
    ]
    with engine_of(config, weights=model) as engine:
        found = engine.score([{"input_ids": batch["input_ids"]} for batch in batches], targets)
    for batch, (index, tokens), (values, likeliest) in zip(batches, targets, found, strict=True):
        with torch.no_grad():
            logits = model(batch["input_ids"]).logits.flatten(0, 1)[index]
        expected = logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(likeliest, logits.argmax(-1) == tokens)
