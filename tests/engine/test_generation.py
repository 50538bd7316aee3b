"""Generation by the whole model: tokens of transformers' own `generate`, and an engine that trains
on as if nothing had been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megatrain.engine import inference
from megatrain.settings import ALL, Settings
from tests.compare import differing
from tests.runs import run, state_of
from tests.support import engine_of, full_batches, micro_batches, tiny_config

(PROMPT,) = (batch["input_ids"] for batch in full_batches(3, [(1, 9)]))
NEW = 12
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
        assert engine.generate(PROMPT, NEW) == expected
        assert engine.generate_streamed(PROMPT, NEW) == expected
        end = expected[3]
        until = expected[: expected.index(end) + 1]
        assert engine.generate(PROMPT, NEW, [end]) == until


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
            engine.generate(PROMPT, 3)
            assert torch.equal(torch.get_rng_state(), drawn)
        assert losses == undisturbed.losses
        assert differing(undisturbed.state, state_of(engine)) == []


def test_weights_without_room_are_streamed(monkeypatch):
    with engine_of("llama") as engine:
        expected = engine.generate(PROMPT, 4)
        monkeypatch.setattr("megatrain.engine.inference.has_room", lambda *given: False)
        with engine.whole(1) as model:
            assert model is None
        assert engine.generate(PROMPT, 4) == expected


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
        expected = engine.generate(PROMPT, NEW)
        own: Any = engine.skeleton.model
        own.generation_config.update(repetition_penalty=50.0, do_sample=True, max_new_tokens=1)
        assert engine.generate(PROMPT, NEW) == expected == engine.generate_streamed(PROMPT, NEW)
        assert own.generation_config.repetition_penalty == 50.0
