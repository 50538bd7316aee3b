"""Constants are computed with, never changed, and come out as they went in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.glm4_moe import modeling_glm4_moe as glm4

from megatrain.engine.engine import Engine
from megatrain.engine.verify import Verdict, verify
from megatrain.errors import ModelError
from megatrain.models.skeleton import Skeleton
from megatrain.settings import Settings
from megatrain.storage.checkpoint import load_checkpoint, save_checkpoint
from megatrain.storage.export import export
from tests.helpers.compare import differing
from tests.helpers.support import (
    CONSTANT,
    engine_of,
    known,
    micro_batches,
    plain_model,
    tiny_config,
)

# biases of routers, alone, beside an indexer's matrices and beside a recurrence, and by
# another name; parameters of an activation; scales of layers; tables that the family computes
KINDS = {
    "glm4-moe", "deepseek-v32", "nemotron-h", "lfm2-moe", "apertus", "gemma4-moe", "minimax",
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "settings": Settings(head_chunk_tokens=7)}


def values_of(engine: Engine) -> dict[str, Tensor]:
    return {name: engine.constants[name].detach().clone() for name in engine.constants}


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(KINDS.intersection(known(CONSTANT))))
def test_they_are_computed_with_as_in_plain_pytorch_and_the_folder_comes_out_again(family):
    assert verify(Skeleton(tiny_config(family), dtype=torch.float32)) == Verdict("passed")


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "fp8"])
def test_steps_leave_them_alone(precision, device):
    with engine_of("deepseek-v32", precision=precision, device=device) as engine:
        assert engine.anatomy.parameters + 5 * 3 + 2 < sum(
            tensor.numel() for _, tensor in engine.iter_weights()
        )
        before = values_of(engine)
        for step in range(2):
            engine.train_step(micro_batches(step))
        engine.logits(torch.ones(1, 9, dtype=torch.long))
        assert differing(values_of(engine), before) == []


# -- the self-check catches what is admitted wrongly -----------------------------------------------


def test_a_buffer_that_only_real_training_writes_fails(monkeypatch):
    """As a router's that balances its experts; this one does so where no probe looks."""
    forward = glm4.Glm4MoeTopkRouter.forward

    def balancing(router: Any, hidden: Tensor) -> Any:
        if router.training and not hidden.is_meta:
            with torch.no_grad():
                router.e_score_correction_bias += 1e-3
        return forward(router, hidden)

    monkeypatch.setattr(glm4.Glm4MoeTopkRouter, "forward", balancing)
    found = verify(Skeleton(tiny_config("glm4-moe", vocab_size=83), dtype=torch.float32))
    assert (found.state, found.stage) == ("failed", "steps")
    assert found.reason.endswith("e_score_correction_bias is changed by steps, and is taken for a "
                                 "constant")  # fmt: skip


# -- saved and read again --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_goes_on_with_them_and_exports_leave_them_alone(tmp_path):
    """The folder's are float32, of which the device has half: saves have them whole."""
    model: Any = plain_model(tiny_config("deepseek-v32"))
    model.save_pretrained(tmp_path / "in")
    given = load_file(tmp_path / "in/model.safetensors")
    with Engine.from_pretrained(tmp_path / "in", precision="bfloat16", **OPTIONS) as engine:
        constants, expected = dict(engine.constants.of_block(2)), values_of(engine)
        engine.train_step(micro_batches(0))
        checkpoint = save_checkpoint(tmp_path / "run", 1, engine, None, {})
    config = tiny_config("deepseek-v32")
    with Engine.from_config(config, precision="bfloat16", **OPTIONS) as other:
        assert differing(values_of(other), expected) != []
        load_checkpoint(checkpoint, other)
        assert differing(values_of(other), expected) == []
        other.save_pretrained(tmp_path / "again")
    assert constants
    for dtype in (None, "bfloat16", "float32"):
        export(tmp_path / "run", tmp_path / str(dtype), dtype)
    for name in ("run/checkpoint-1", "again", "None", "bfloat16", "float32"):
        written = load_file(tmp_path / name / "model.safetensors")
        assert written.keys() == given.keys()
        found = {constant: written[constant] for constant in constants}
        assert differing(found, {constant: given[constant] for constant in constants}) == []
        weight = written["model.embed_tokens.weight"]
        assert weight.dtype == (torch.float32 if name == "float32" else torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda tensor: None,
            "lacks model.layers.1.mlp.gate.e_score_correction_bias, which a deep",
        ),
        (lambda tensor: tensor[:2], r"has shape \[2\], but config.json asks for \[4\]"),
        (lambda tensor: tensor.long(), "is int64; training needs the unquantised model"),
        (lambda tensor: tensor / 0, "holds NaN, infinity or a value"),
    ],
)
def test_a_folder_whose_constants_are_not_those_of_its_config_is_refused(tmp_path, change, reason):
    model: Any = plain_model(tiny_config("deepseek-v3"))
    model.save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    save_file(tensors if changed is None else {**tensors, name: changed}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=reason):
        Engine.from_pretrained(tmp_path, precision="float32", **OPTIONS)
