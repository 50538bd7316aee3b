"""Reward models: which token has the score, the head that a language model's folder lacks, and what
transformers makes of what is saved."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatrain.engine.engine import Engine
from megatrain.engine.verify import weights_of
from megatrain.errors import ConfigError, DataError, ModelError
from megatrain.losses import Dpo, Reward, find_ends
from megatrain.models.pretrained import as_classifier, read_model_config, resolve_source
from megatrain.optim import AdamW
from megatrain.settings import Settings
from tests.helpers.support import PAD, VOCABULARY, Batch, engine_of, plain_model, tiny_config

# with a head of their own to leave out or none, with short names, of experts, without a final norm
FAMILIES = ["llama-tied", "gpt-neox", "gpt2", "mixtral", "opt-projected"]
SETTINGS = Settings(update_threads=1)
LENGTHS = [5, 9, 7, 2]


def reward_config(family: str) -> Any:
    return as_classifier(tiny_config(family), PAD)


def padded(pads: int = PAD, seed: int = 0) -> Batch:
    """Two pairs of unequal lengths."""
    width, generator = max(LENGTHS), torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), width), generator=generator)
    real = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    ids = ids.masked_fill(~real, pads)
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": real.long()}


def scores_of(engine: Engine, batch: Batch) -> Tensor:
    """The scores of its examples, each pair's from what an evaluation says of it."""
    found = []
    for first in range(0, len(batch["input_ids"]), 2):
        of_pair = {name: values[first : first + 2] for name, values in batch.items()}
        about = engine.evaluate([of_pair], Reward()).metrics
        found += [about["mean_reward"] + sign * about["margin"] / 2 for sign in (1, -1)]
    return torch.tensor(found)


# -- the token that has the score ------------------------------------------------------------------


POSITIONS = [0, 1, 0, 1, 2, 0, 1, 2]
PACKED = {"row_of": [0, 0, 1, 1, 1, 1, 1, 1], "position_ids": POSITIONS}


def test_the_last_token_that_is_no_padding_has_the_score():
    for ids, pad, more, expected in [
        ([[5, 6, 0, 0], [7, 8, 9, 4]], PAD, {}, [1, 7]),
        ([[0, 0, 5, 6], [7, 8, 9, 4]], PAD, {}, [3, 7]),  # padded on the left
        ([[5, 6, 2, 2]], 2, {}, [1]),  # as in transformers: tokens of the padding end no answer
        ([[2, 2, 2, 2]], 2, {}, [0]),
        ([[5, 6, 7, 8, 9, 0, 0, 0]], PAD, PACKED, [1, 4]),
        ([[5, 6, 7, 8, 9, 0, 0, 0]], 3, PACKED, [1, 4]),  # positions that begin anew tell it
    ]:
        rows = torch.tensor(ids)
        batch = {name: torch.tensor([values]) for name, values in more.items()}
        assert (
            find_ends({"input_ids": rows, "labels": rows, **batch}, pad).index.tolist() == expected
        )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_transformers_on_a_padded_batch(family):
    config, batch = reward_config(family), padded()
    model = plain_model(config).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        expected = model(**inputs).logits[:, 0]
    with engine_of(config) as engine:
        found = scores_of(engine, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# -- the head of a new reward model ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_but_the_head_is_the_language_model_s_and_transformers_loads_what_is_saved(
    family, tmp_path, caplog
):
    given, out, batch = tmp_path / "language model", tmp_path / "out", padded()
    language_model: Any = plain_model(tiny_config(family))
    language_model.save_pretrained(given)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(given).state_dict()
    source = resolve_source(given)
    config = as_classifier(read_model_config(source), PAD)
    options: dict[str, Any] = {"precision": "float32", "device": "cpu", "settings": SETTINGS}
    with (
        caplog.at_level(logging.INFO, "megatrain"),
        Engine.from_config(config, optimizer=AdamW(lr=1e-2), **options) as engine,
    ):
        engine.load_weights(source)
        ours = weights_of(engine)
        for _ in range(2):
            engine.train_step([batch], Reward())
        engine.save_pretrained(out)
        scores = scores_of(engine, batch)
    (head,) = (name for name in ours if name not in theirs)
    assert f"has no {head}, which is drawn at random" in caplog.text
    assert head.rpartition(".")[0] in ("score", "classifier")
    assert float(ours.pop(head).std()) == pytest.approx(0.02, rel=0.4), "initializer_range"
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    loading: Any = transformers.AutoModelForSequenceClassification
    model, about = loading.from_pretrained(out, output_loading_info=True)
    assert not any(about[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        of_transformers = model.eval()(**inputs).logits
    assert of_transformers.shape[1] == 1
    torch.testing.assert_close(scores, of_transformers[:, 0], rtol=1e-5, atol=1e-6)


def test_a_reward_model_s_folder_without_its_head_is_not_completed(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "model"
    model: Any = plain_model(reward_config("llama"))
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if n != "score.weight"},
              folder / "model.safetensors", {"format": "pt"})  # fmt: skip
    with pytest.raises(ModelError, match=r"lacks score\.weight"):
        Engine.from_pretrained(folder, precision="float32", device="cpu", settings=SETTINGS)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "loss", "reason"),
    [
        ("llama", Reward(), "Reward needs scores, which a model for sequence classification gives"),
        ("scores", Dpo(), "Dpo needs log-probabilities of tokens, which a language model gives"),
    ],
)
def test_a_loss_needs_its_own_head(family, loss, reason):
    config = reward_config("llama") if family == "scores" else tiny_config(family)
    batch = padded() | {"row_reference": torch.zeros(len(LENGTHS), dtype=torch.float64)}
    with engine_of(config) as engine, pytest.raises(ConfigError, match=reason):
        engine.forward_backward([batch], loss)


def test_a_reward_model_has_no_log_probabilities_and_writes_nothing():
    with engine_of(reward_config("llama")) as engine:
        assert engine.evaluate([padded()], Reward()).target_tokens == len(LENGTHS)
        with pytest.raises(ConfigError, match="this model gives scores"):
            engine.logprobs([padded()])
        with pytest.raises(ConfigError, match="a reward model gives scores and writes no text"):
            engine.generate(padded()["input_ids"][:1].tolist())


def test_examples_without_tokens_are_refused():
    batch = padded() | {"row_of": torch.tensor([0, 1, 2, 5])[:, None].expand(4, max(LENGTHS))}
    with engine_of(reward_config("llama")) as engine, pytest.raises(DataError, match="leaves out"):
        engine.forward_backward([batch], Reward())
