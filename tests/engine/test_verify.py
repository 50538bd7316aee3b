"""The self-check passes what is right, and names what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from examples.images import draw
from megatrain.data.images import Sight
from megatrain.engine import constructors
from megatrain.engine import verify as checking
from megatrain.engine.batches import MicroBatch
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


PLAIN_LAYER, PLAIN_HEAD = LlamaDecoderLayer.forward, Skeleton.head


def sideways() -> Any:
    """Layers that hand something on behind the model's back, as ZAYA's hand on their routers'
    states; these do so where no probe looks."""
    handed_on: dict[torch.Size, Tensor] = {}

    def forward(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        real = not hidden.is_meta  # else only its shape is wanted
        if real and layer.self_attn.layer_idx:
            hidden = hidden + 0.1 * handed_on[hidden.shape]
        output: Tensor = PLAIN_LAYER(layer, hidden, *args, **kwargs)
        if real:
            handed_on[hidden.shape] = output.flip(-1)
        return output

    return forward


def raising(error: Exception) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def save_changed(engine: Engine, folder: Any) -> None:
    with engine.store.lease(2, ["weight"], changes=True) as arrays:
        arrays["weight"][0] += 1e-6
    save_pretrained(engine, folder)


EMBEDDING = "model.embed_tokens.weight is off by "
NOTHING, STRANGE = ModelError("nothing known"), TypeError("no such thing")
# what is replaced, by what, the stage that fails then, and the reason
FAULTS: dict[str, tuple[Any, str, Any, str, str]] = {
    "a path aside": (LlamaDecoderLayer, "forward", sideways(), "gradients", EMBEDDING),
    "runs in plain PyTorch alone": (
        Skeleton, "layer_again", raising(RuntimeError("sizes do not match")),
        "running", "RuntimeError: sizes do not match",
    ),
    "logits": (Skeleton, "head", lambda *given: PLAIN_HEAD(*given) * 1.01, "loss", ""),
    "no logits": (Skeleton, "head", lambda *given: PLAIN_HEAD(*given) * torch.nan, "loss", "nan"),
    "an update": (Engine, "_rate", lambda made, _: 1.1 * made.optimizer.lr, "steps", EMBEDDING),
    "a folder": (checking, "save_pretrained", save_changed, "saving", "model.layers.1."),
    "unknown": (constructors, "load_weights", raising(NOTHING), "loading", "nothing known"),
    "not read": (constructors, "load_weights", raising(STRANGE), "loading", "TypeError: no such"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_what_is_wrong_is_found_at_its_stage(monkeypatch, what):
    owner, name, wrong, stage, reason = FAULTS[what]
    monkeypatch.setattr(owner, name, wrong)
    found = checked()
    assert (found.state, found.stage) == ("failed", stage)
    assert found.reason.startswith(reason)
    assert found.computes_wrongly == (stage != "loading")  # which says so itself


TOWER = Qwen3VLVisionModel.forward


def recalls(tower: Any, *given: Any, **named: Any) -> Any:
    """A tower whose second run is another, as the engine's is in a backward pass."""
    found = TOWER(tower, *given, **named)
    tower.runs = getattr(tower, "runs", 0) + (not found.pooler_output.is_meta)
    found.pooler_output = found.pooler_output * (1 + 0.01 * tower.runs)
    return found


def test_a_model_that_sees_is_checked_on_an_image_or_says_that_it_was_not(monkeypatch, tmp_path):
    draw.model(tmp_path)
    tokenizer, config = (kind.from_pretrained(tmp_path) for kind in (AutoTokenizer, AutoConfig))
    sight = Sight.of(tmp_path, tokenizer, config.model_type)
    assert sight is not None
    # as in releases: features of late blocks of the tower are added between the first layers
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 9, [5, 7]
    skeleton = Skeleton(config, image_row=sight.row)
    assert verify(skeleton) == Verdict("passed", images=True)
    with monkeypatch.context() as patch:
        patch.setattr(Qwen3VLVisionModel, "forward", recalls)
        found = verify(skeleton)
        assert found.computes_wrongly, found
        assert verify(Skeleton(config)) == Verdict("passed")
    with monkeypatch.context() as patch:
        patch.setattr(MicroBatch, "keep_side_gradient", lambda *_: None)
        assert verify(skeleton).computes_wrongly
    monkeypatch.setattr(Qwen3VLVisionModel, "forward", raising(ValueError("too small an image")))
    blind = verify(skeleton)
    assert (blind.state, blind.images) == ("passed", False)
    assert blind.reason.startswith("on text alone (") and "too small an image" in blind.reason


def test_what_cannot_be_shrunk_or_run_in_plain_pytorch_is_not_checked(monkeypatch):
    skeleton = Skeleton(tiny_config("llama", **OWN))
    for owner, name, reason in (
        (checking, "plain_gradients", "no kernel for this"),
        (type(skeleton.config), "from_dict", "these numbers do not fit each other"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, raising(ValueError(reason)))
            found = verify(skeleton)
        assert found.state == "not checked"
        assert reason in found.reason
