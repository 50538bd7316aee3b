"""Codecs of activation checkpoints: how near they come back, that every size works, and that what
is not finite stays so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.engine import codecs
from megatrain.engine.codecs import CODECS, SMALLEST_SCALE, GroupScaled
from megatrain.engine.verify import gradients_of
from megatrain.schedule import FORMS, kept_row_bytes
from megatrain.settings import Settings
from tests.helpers.compare import distance
from tests.helpers.support import engine_of, full_batches

SHAPES = [(2, 4, 576), (3, 5, 100), (1, 1, 1), (1, 7, 64)]
DTYPES = [torch.bfloat16, torch.float32]


def hidden_states(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """As a model's: some channels are far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(shape, generator=generator)
    hidden[..., ::37] *= 50
    return hidden.to(dtype)


def kept(name: str, hidden: Tensor) -> Tensor:
    flat = torch.full((CODECS[name].nbytes(hidden.numel()),), 0xAB, dtype=torch.uint8)
    CODECS[name].encode(hidden, flat)
    return CODECS[name].decode(flat, hidden.shape, hidden.dtype)


def in_groups(name: str, values: Tensor) -> Tensor:
    """[groups, elements], zeros at the end."""
    group = FORMS[name].group
    return torch.nn.functional.pad(values.flatten().double(), (0, -values.numel() % group)).view(
        -1, group
    )


def hadamard(size: int) -> Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@pytest.mark.parametrize(("name", "share"), [("int8", 0.516), ("int6", 0.391), ("int4", 0.281)])
def test_sizes_against_bfloat16(name: str, share: float) -> None:
    assert CODECS[name].nbytes(2048) / (2048 * 2) == pytest.approx(share, abs=0.001)
    assert kept_row_bytes(name, 2048, 2) == CODECS[name].nbytes(2048)
    assert 7 * kept_row_bytes(name, 100, 2) >= CODECS[name].nbytes(7 * 100)  # groups cross rows
    assert kept_row_bytes("none", 100, 2) == 200


def test_every_element_comes_back_within_its_group_s_bound() -> None:
    """Half a step of each code; rotated back, a group's errors add up as squares to the same."""
    for name in CODECS:
        for shape in SHAPES:
            for dtype in DTYPES:
                hidden, codec = hidden_states(shape, dtype), CODECS[name]
                assert isinstance(codec, GroupScaled)
                back = kept(name, hidden)
                assert (back.shape, back.dtype) == (hidden.shape, hidden.dtype)
                given, error = (
                    in_groups(name, hidden),
                    in_groups(name, back.double() - hidden.double()),
                )
                # of the result, and of the sums
                rounded = given.abs().amax(1) * (2**-7 if dtype == torch.bfloat16 else 2**-20)
                largest = (
                    (given @ hadamard(given.shape[1]) / math.sqrt(given.shape[1])).abs().amax(1)
                )
                step = largest / codec.largest * (1 + 2**-7)
                assert (error.norm(dim=1) <= (step / 2 + rounded) * math.sqrt(given.shape[1])).all()


def test_extreme_values() -> None:
    for name in CODECS:
        for value in [0.0, 1e-45, 1e-40, -1e-33, 1e-25, 1.0, -3e37]:
            for dtype in DTYPES:
                hidden = torch.full((1, 3, 100), value, dtype=dtype)
                back = kept(name, hidden).double()
                assert back.isfinite().all()
                bound = max(abs(value) * 0.08, FORMS[name].group * SMALLEST_SCALE)
                assert (back - hidden.double()).abs().max() <= bound


def test_what_is_not_finite_stays_so_and_spoils_its_group_alone() -> None:
    for name in CODECS:
        for value in [math.inf, -math.inf, math.nan]:
            for dtype in DTYPES:
                hidden = hidden_states((1, 4, 128), dtype)
                hidden[0, 2, 5] = value
                back, group = kept(name, hidden), FORMS[name].group
                assert not back[0, 2, :group].isfinite().any()
                assert back.isfinite().sum() == hidden.numel() - group


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_more_elements_than_kernels_count_are_taken_in_pieces(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, codec = hidden_states(shape, torch.bfloat16), CODECS[name]
    whole, pieces = (torch.zeros(codec.nbytes(hidden.numel()), dtype=torch.uint8) for _ in range(2))
    codec.encode(hidden, whole)
    back = codec.decode(whole, hidden.shape, hidden.dtype)
    taken, encode = [], GroupScaled._encode

    def count(self: GroupScaled, values: Tensor, *places: Tensor) -> None:
        taken.append(values.numel())
        encode(self, values, *places)

    monkeypatch.setattr(GroupScaled, "_encode", count)
    monkeypatch.setattr(codecs, "AT_ONCE", 128)
    codec.encode(hidden, pieces)
    assert max(taken) <= 128
    assert sum(taken) == hidden.numel()
    assert torch.equal(pieces, whole)
    assert torch.equal(codec.decode(whole, hidden.shape, hidden.dtype), back)


FAR = {"int8": 0.1, "int6": 0.3, "int4": 1.0}  # of a tiny model's gradient, by its norm


def gradients(**dials: Any) -> tuple[float, Tensor]:
    with engine_of("llama", settings=Settings(**dials)) as engine:
        loss = engine.forward_backward(full_batches(0, [(2, 16), (1, 12)])).loss
        return loss, torch.cat([gradient.flatten() for gradient in gradients_of(engine).values()])


def test_a_step_s_loss_is_exact_and_gradients_are_near() -> None:
    loss, exact = gradients()
    for name in CODECS:
        with_codec, near = gradients(activations=name)
        assert with_codec == loss
        assert 0 < distance(near, exact) < FAR[name]
