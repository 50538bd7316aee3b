"""Recurrent layers beside attention: documents in one sequence are apart where kernels are told of
them, and only there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from megatrain.engine.resolved import Machine, compiles, packs
from megatrain.machine.hardware import read_hardware
from megatrain.machine.profile import known_or_typical
from megatrain.models.recorder import boundaries_of
from megatrain.models.skeleton import Skeleton
from megatrain.settings import Settings
from tests.engine.test_shared_sequences import check
from tests.kernel_packages import deaf, install, separating
from tests.support import LINEAR, SIZES, tiny_config

CPU = torch.device("cpu")
LAYERS: Any = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
ROPE: Any = {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 1.0}
TEXT: Any = SIZES | LINEAR | LAYERS | {"head_dim": 8, "rope_parameters": ROPE}
CONFIGS: dict[str, Any] = {
    "qwen3_next": tiny_config("qwen3-next", num_hidden_layers=4),
    "qwen3_5": transformers.Qwen3_5TextConfig(**TEXT),
}
SHARE = 1e-4  # of a gradient; a state that crosses documents moves it by a tenth and more


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_kernels_hear_where_documents_begin():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10]])
    found = {name: tensor.tolist() for name, tensor in boundaries_of(positions).items()}
    numbers = [[0, 0, 0, 1, 1, 2], [3] * 6]
    assert found == {"cu_seq_lens_q": [0, 3, 5, 6, 12], "seq_idx": numbers}


@pytest.mark.slow
@pytest.mark.parametrize("retained", [0, 2])
def test_rows_in_one_sequence_have_the_gradients_of_rows_apart(family, monkeypatch, retained):
    install(monkeypatch, family, separating)
    skeleton = Skeleton(CONFIGS[family])
    assert skeleton.separates_documents(CPU)
    assert skeleton.masked == [False, True] * 2
    settings = Settings(head_chunk_tokens=7, retained=retained)
    check(CONFIGS[family], [7, 5, 4, 3, 2], 13, SHARE, settings=settings)


def absent(name: str, plain: Callable[..., Any]) -> None:
    """No package is there."""


def half_there(name: str, plain: Callable[..., Any]) -> Callable[..., Any] | None:
    return None if name.startswith("causal") else separating(name, plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernels", "why"),
    [
        (absent, "^$"),  # nobody is to be told
        (half_there, "sequences apart without|logits move"),
        (deaf, "kernels let logits move"),
    ],
)
def test_kernels_that_do_not_hear_it_are_noticed(family, monkeypatch, kernels, why):
    install(monkeypatch, family, kernels)
    skeleton = Skeleton(CONFIGS[family])
    assert not skeleton.separates_documents(CPU)
    assert re.search(why, str(skeleton.why_together(CPU)))
    with pytest.raises(AssertionError):  # documents leak
        check(CONFIGS[family], [7, 5, 4, 3, 2], 13, SHARE)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would be tried there")
def test_examples_are_padded_aloud_where_kernels_cannot_be_tried(family, monkeypatch, caplog):
    install(monkeypatch, family, separating)
    with caplog.at_level("WARNING", "megatrain"):
        assert not packs(Skeleton(CONFIGS[family]), "auto", 128, torch.device("cuda"))
    (record,) = caplog.records
    assert re.search("padded, not packed: a qwen3.* model .* \\(.*CUDA", record.message)


@pytest.mark.parametrize(("kernels", "whole"), [(absent, True), (separating, False)])
def test_auto_compiles_layers_without_kernels(family, monkeypatch, kernels, whole):
    install(monkeypatch, family, kernels)
    skeleton, hardware = Skeleton(CONFIGS[family]), read_hardware(".", "cpu")
    machine = Machine(
        torch.device("cuda"), "float32", hardware, known_or_typical(hardware), compiles=True
    )
    assert compiles(skeleton, machine, "auto", lengths_vary=False) == (whole or "loss")
    assert compiles(skeleton, machine, True, lengths_vary=False) is True
