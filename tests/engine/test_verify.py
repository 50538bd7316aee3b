"""The self-check passes what is right, and names what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from megatrain.engine import constructors
from megatrain.engine import verify as checking
from megatrain.engine.engine import Engine
from megatrain.engine.verify import Verdict, verify
from megatrain.errors import ModelError
from megatrain.models.skeleton import Skeleton
from megatrain.storage.export import save_pretrained
from tests.helpers.support import tiny_config

# Of no other test: what is found about a model is found once in a process.
OWN = {"vocab_size": 89}


def checked(family: str = "llama") -> Verdict:
    return verify(Skeleton(tiny_config(family, **OWN)))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2-tied", "mixtral", "bamba"])
def test_families_that_compute_as_in_plain_pytorch_pass(family):
    assert checked(family) == Verdict("passed")


def test_the_caller_s_random_state_and_threads_stay():
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    checked()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_layers_that_hand_something_on_behind_the_model_s_back_fail(monkeypatch):
    """As ZAYA's hand on their routers' states; these do so where no probe looks."""
    plain = LlamaDecoderLayer.forward
    handed_on: dict[torch.Size, Tensor] = {}

    def sideways(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if hidden.is_meta:  # only its shape is wanted
            shaped: Tensor = plain(layer, hidden, *args, **kwargs)
            return shaped
        if layer.self_attn.layer_idx:
            hidden = hidden + 0.1 * handed_on[hidden.shape]
        output: Tensor = plain(layer, hidden, *args, **kwargs)
        handed_on[hidden.shape] = output.flip(-1)
        return output

    monkeypatch.setattr(LlamaDecoderLayer, "forward", sideways)
    found = checked()
    assert (found.state, found.stage) == ("failed", "gradients")
    assert found.reason.startswith("model.embed_tokens.weight is off by ")
    assert found.computes_wrongly


def test_what_runs_in_plain_pytorch_alone_fails(monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("sizes do not match")

    monkeypatch.setattr(Skeleton, "layer_again", fail)
    assert checked() == Verdict("failed", "running", "RuntimeError: sizes do not match")


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_other_logits_fail(monkeypatch, factor):
    head = Skeleton.head
    monkeypatch.setattr(Skeleton, "head", lambda *given: head(*given) * factor)
    found = checked()
    assert (found.state, found.stage) == ("failed", "loss")


def test_another_update_fails(monkeypatch):
    monkeypatch.setattr(Engine, "_rate", lambda engine, _: 1.1 * engine.optimizer.lr)
    found = checked()
    assert (found.state, found.stage) == ("failed", "steps")
    assert "model.embed_tokens.weight is off by " in found.reason


def test_a_folder_that_is_written_otherwise_fails(monkeypatch):
    def save_changed(engine: Engine, folder: Any) -> None:
        with engine.store.lease(2, ["weight"], changes=True) as arrays:
            arrays["weight"][0] += 1e-6
        save_pretrained(engine, folder)

    monkeypatch.setattr(checking, "save_pretrained", save_changed)
    found = checked()
    assert (found.state, found.stage) == ("failed", "saving")
    assert found.reason.startswith("model.layers.1.")


@pytest.mark.parametrize("error", [ModelError("nothing known"), TypeError("no such thing")])
def test_a_folder_that_is_not_loaded_is_left_to_loading(monkeypatch, error):
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(constructors, "load_weights", refuse)
    found = checked()
    assert (found.state, found.stage) == ("failed", "loading")
    assert str(error) in found.reason
    assert not found.computes_wrongly


def test_what_cannot_be_shrunk_is_not_checked(monkeypatch):
    skeleton = Skeleton(tiny_config("llama", **OWN))

    def refuse(*_: Any, **__: Any) -> Any:
        raise ValueError("these numbers do not fit each other")

    monkeypatch.setattr(type(skeleton.config), "from_dict", refuse)
    found = verify(skeleton)
    assert found.state == "not checked"
    assert "these numbers do not fit each other" in found.reason


def test_what_plain_pytorch_cannot_run_is_not_checked(monkeypatch):
    skeleton = Skeleton(tiny_config("llama", **OWN))

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(checking, "plain_gradients", fail)
    found = verify(skeleton)
    assert found.state == "not checked"
    assert "no kernel for this" in found.reason
