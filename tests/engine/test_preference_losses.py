"""Losses over whole answers are those of TRL's own trainers, however a step is cut."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from examples.images import draw
from megatrain.data.build import load_data
from megatrain.data.encoding import RowOptions
from megatrain.data.images import Sight
from megatrain.data.micro_batches import collate
from megatrain.data.samples import PAIRS
from megatrain.engine.objective import StepResult
from megatrain.engine.verify import gradients_of
from megatrain.errors import ConfigError
from megatrain.losses import Cpo, Dpo, Kto, Orpo, Reward, SequenceLoss
from megatrain.losses.preference import CPO_TYPES, LOSS_TYPES
from tests.helpers.commands import write_jsonl
from tests.helpers.support import engine_of, tiny_config
from tests.helpers.trl_oracle import Verdict, judge, judge_by_trl, of_dpo, trainers

pytest.importorskip("trl")

# (method, keys of TRL's configuration, our loss)
Case = tuple[str, dict[str, Any], SequenceLoss]
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.1}
CASES: dict[str, Case] = {
    **{
        f"dpo-{name}": ("dpo", SMOOTHED | {"loss_type": [name]}, Dpo(loss_type=name, **SMOOTHED))
        for name in LOSS_TYPES
    },
    "dpo-several": (
        "dpo",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.3},
        Dpo(0.3, ("sigmoid", "bco_pair", "sft"), (0.8, 0.2, 1.0)),
    ),
    **{
        f"cpo-{name}": ("cpo", SMOOTHED | {"loss_type": name}, Cpo(loss_type=name, **SMOOTHED))
        for name in CPO_TYPES
    },
    "simpo": (
        "simpo",
        {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
        Cpo(2.0, 0.0, "simpo", simpo_gamma=1.0),
    ),
    "orpo": ("orpo", {"beta": 0.2}, Orpo(0.2)),
    "reward": ("reward", {}, Reward()),
    "reward-centered": ("reward", {"center_rewards_coefficient": 0.3}, Reward(0.3)),
    "reward-margins": ("reward-margins", {}, Reward()),
    "kto": ("kto", {"desirable_weight": 1.3, "beta": 0.2}, Kto(0.2, 1.3)),
}
# of TRL's metrics: of whole logits, or no means over a step
WITHOUT = {"entropy", "num_tokens", "logits/chosen", "logits/rejected", "mean_token_accuracy"}
WITHOUT |= {"min_reward", "max_reward"}
FROZEN = ("*.embed_tokens.*", "*.layers.1.*proj*")


@pytest.fixture(scope="module")
def verdict(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verdict]:
    folder: Path = tmp_path_factory.mktemp("trl")

    def judged(name: str, family: str = "llama", **more: Any) -> Verdict:
        method, keys, _ = CASES[name]
        return judge_by_trl(trainers()[method], family, folder, **keys, **more)

    return judged


def compare(
    theirs: Verdict, result: StepResult, ours: dict[str, Tensor], frozen: Collection[str] = ()
) -> None:
    """Gradients and metrics, but for those that are not had here."""
    assert set(ours) == theirs.gradients.keys() - set(frozen)
    for tensor, gradient in ours.items():
        expected = theirs.gradients[tensor]
        assert float((gradient - expected).norm() / expected.norm()) < 1e-5, tensor
    assert result.metrics.keys() == theirs.metrics.keys() - WITHOUT
    for metric, value in result.metrics.items():
        assert value == pytest.approx(theirs.metrics[metric], rel=1e-5, abs=1e-6), metric


Compared = tuple[str, str, int, tuple[str, ...]]  # case, family, size of micro-batches, frozen
COMPARED: list[Compared] = [(name, "llama", 2, ()) for name in CASES]
COMPARED += [(name, "llama", 2, FROZEN) for name in ("dpo-several", "kto", "reward-centered")]
OTHER_FAMILIES: list[Compared] = [
    ("dpo-ipo", "gemma2", 3, ()),
    ("orpo", "qwen3", 3, ()),
    ("kto", "llama-tied", 3, ()),
    ("reward-centered", "gemma2", 3, ()),
]


@pytest.mark.parametrize(
    ("name", "family", "size", "freeze"),
    [*COMPARED, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_FAMILIES)],
)
def test_loss_gradients_and_metrics_are_those_of_trl(verdict, name, family, size, freeze):
    theirs, (method, _, loss) = verdict(name, family), CASES[name]
    with engine_of(trainers()[method].model(tiny_config(family)), freeze=freeze) as engine:
        frozen = engine.anatomy.frozen
        result = engine.forward_backward(theirs.micro_batches(size=size), loss)
        ours = gradients_of(engine)
    assert (len(frozen) > 1) == bool(freeze)
    assert result.loss == pytest.approx(theirs.loss, rel=1e-6)
    compare(theirs, result, ours, frozen)


@pytest.mark.parametrize("name", ["dpo-sigmoid", "kto"])
def test_a_mixture_s_routers_are_balanced_as_by_trl(verdict, name):
    theirs, loss = verdict(name, "mixtral", router_aux_loss_coef=0.3), CASES[name][2]
    with engine_of("mixtral", router_aux_loss_coef=0.3) as engine:
        result = engine.forward_backward(theirs.micro_batches(size=2), loss)
        ours = gradients_of(engine)
    aux = theirs.metrics.pop("aux_loss")
    assert result.aux_loss == pytest.approx(aux, rel=1e-5)
    assert result.loss == pytest.approx(theirs.loss - 0.3 * aux, rel=1e-5)
    compare(theirs, result, ours)


PICTURED = (
    ({"a.png": ((96, 48), "red")}, "circle", "red square"),
    ({"b.png": ((48, 48), "blue"), "c.png": ((48, 96), "#2a2")}, "green", "7"),
    ({"d.png": ((80, 48), "#ec2")}, "yellow triangle", "it the 3 colour"),
)


@pytest.mark.parametrize("name", ["dpo-sigmoid", "dpo-several"])
def test_pairs_with_images_are_judged_as_by_trl_s_vision_collator(name, tmp_path):
    """Ids and pixels, loss, gradients, the tower's among them, metrics, and the log-probability of
    each answer."""
    draw.model(tmp_path / "model")
    tokenizer, config = (
        kind.from_pretrained(tmp_path / "model") for kind in (AutoTokenizer, AutoConfig)
    )
    sight = Sight.of(tmp_path / "model", tokenizer, config.model_type)
    assert sight is not None
    sight.processor.chat_template = tokenizer.chat_template
    asks = {"type": "text", "text": draw.QUESTIONS[0]}
    rows, opened = list[dict[str, Any]](), list[list[Image.Image]]()
    for pictures, *answers in PICTURED:
        turns = [[{"role": "assistant", "content": answer}] for answer in answers]
        prompt = [{"role": "user", "content": [{"type": "image"}] * len(pictures) + [asks]}]
        names = dict(zip(("chosen", "rejected"), turns, strict=True))
        rows.append({"prompt": prompt, **names, "images": [*pictures]})
        opened.append([Image.new("RGB", *about) for about in pictures.values()])
        for file, image in zip(pictures, opened[-1], strict=True):
            image.save(tmp_path / file)
    how = RowOptions(seq_len=100, sight=sight, kind=PAIRS)
    given = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    found, _ = load_data(given, None, tokenizer, how, seed=0, cache=tmp_path)
    ours = [collate(found, [[2 * i], [2 * i + 1]], 0) for i in range(len(rows))]
    given_trl = [{**row, "images": seen} for row, seen in zip(rows, opened, strict=True)]
    _, keys, loss = CASES[name]
    seen_by_trl = list[dict[str, Tensor]]()

    def as_ours(of_trl: dict[str, Tensor]) -> list[Any]:
        seen_by_trl.append(of_trl)
        return ours

    trainer = replace(trainers()["dpo"], rows=lambda: given_trl, ours=as_ours)
    in_order: dict[str, Any] = {"max_length": None, "train_sampling_strategy": "sequential"}
    theirs = judge(trainer, config, sight.processor, tmp_path, **in_order, **keys)
    for own, other in zip(ours, of_dpo(seen_by_trl[0]), strict=True):
        for name in ("input_ids", "labels"):
            assert torch.equal(own[name], other[name][:, : own[name].shape[1]]), name
    with engine_of(config, image_row=sight.row) as engine:
        sums = [values.sum(1) for values in engine.logprobs(theirs.rows)]
        result = engine.forward_backward(theirs.rows, loss)
        gradients = gradients_of(engine)
    assert theirs.logps is not None
    expected = theirs.logps.view(2, -1).T
    torch.testing.assert_close(torch.stack(sums), expected, rtol=1e-6, atol=1e-6)
    assert result.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert sum("visual" in tensor for tensor in gradients) > 50
    compare(theirs, result, gradients)


def test_a_share_of_wrong_preferences_of_a_half_or_more_is_refused():
    for kind in (Dpo, Cpo):
        for share in (-0.1, 0.5):
            with pytest.raises(ConfigError, match="label_smoothing"):
                kind(label_smoothing=share)
