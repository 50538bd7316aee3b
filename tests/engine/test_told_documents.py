"""Recurrent layers beside attention: documents in one sequence are apart where kernels are told of
them, and only there."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from megatrain.data.micro_batches import collate
from megatrain.engine.resolved import Machine, compiles, packs
from megatrain.engine.verify import gradients_of
from megatrain.machine.hardware import read_hardware
from megatrain.machine.profile import known_or_typical
from megatrain.models.recorder import boundaries_of, documents_of
from megatrain.models.skeleton import Skeleton
from megatrain.settings import Settings
from tests.data.test_loader import fake_rows
from tests.helpers.compare import apart
from tests.helpers.kernel_packages import deaf, install, separating
from tests.helpers.support import KINDS, LINEAR, RECURRENT, SIZES, engine_of, tiny_config

SEQUENCES = [[0, 1], [2, 3, 4]]
# These count positions otherwise, or make masks of their own: their rows would see each other.
TOGETHER = {"opt-projected", "falcon-7b", "falcon-rw", "falcon-40b"}
TOGETHER |= {"bloom", *RECURRENT}  # these have masks that say otherwise


def check(model: Any, lengths: list[int], seq_len: int, share: float, **options: Any) -> None:
    """That loss and gradients are those of rows apart; two of them share one sequence."""
    rows, found = fake_rows(torch.tensor(lengths).numpy()), []
    separate = collate(rows, [[row] for row in range(5)], pad_id=0)
    together = collate(rows, SEQUENCES, pad_id=0, pack_to=seq_len)
    for batch in (separate, together):
        with engine_of(model, **options) as engine:
            loss = engine.forward_backward([batch]).loss
            found.append((loss, {n: g.float() for n, g in gradients_of(engine).items()}))
    (expected_loss, expected), (loss, gradients) = found
    assert loss == pytest.approx(expected_loss, rel=share / 10)
    assert apart(gradients, expected, share) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", [*KINDS, *RECURRENT])
def test_rows_apart_and_together_have_the_same_gradients(family):
    if Skeleton(tiny_config(family)).separates_documents(CPU):
        check(family, [7, 5, 4, 3, 2], 13, 1e-5)
    else:
        assert family in TOGETHER


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("precision", "share"), [("float32", 1e-5), ("bfloat16", 0.05)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-neox"])
def test_with_whichever_attention_kernel_takes_a_mask_too(family, precision, share, compiled):
    settings = Settings(head_chunk_tokens=64, compile=compiled, retained=1)
    config = tiny_config(family, max_position_embeddings=128)
    options = {"precision": precision, "settings": settings, "device": "cuda"}
    check(config, [70, 50, 40, 30, 20], 128, share, **options)


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


def test_documents_begin_where_positions_do_and_kernels_hear_it():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 9, 10]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0] * 6]
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
        "float32",
        hardware,
        known_or_typical(hardware),
        compiles=True,
        device=torch.device("cuda"),
    )
    assert compiles(skeleton, machine, "auto", lengths_vary=False) == (whole or "loss")
    assert compiles(skeleton, machine, True, lengths_vary=False) is True
