"""On CUDA: codecs have the bits of their plain form and run near the memory's speed."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine import codecs
from megatrain.engine.codecs import CODECS
from tests.engine.test_codecs import DTYPES, SHAPES, hidden_states


def both(name: str, hidden: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(bytes, what comes back of them) on the CPU and on CUDA."""
    found = []
    for given in (hidden, hidden.cuda()):
        flat = torch.zeros(
            CODECS[name].nbytes(hidden.numel()), dtype=torch.uint8, device=given.device
        )
        CODECS[name].encode(given, flat)
        found.append((flat.cpu(), CODECS[name].decode(flat, hidden.shape, hidden.dtype).cpu()))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (3, 333, 577), (2, 1024, 2048)], ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_bits_are_those_of_the_plain_form(
    name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    (flat, back), (cuda_flat, cuda_back) = both(name, hidden_states(shape, dtype))
    assert torch.equal(flat, cuda_flat)
    assert torch.equal(back, cuda_back)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_extreme_values_too(name: str, dtype: torch.dtype) -> None:
    hidden = hidden_states((1, 64, 128), dtype)
    finite = [0.0, 1e-45, 1e-40, 1e-33, -1e-30, 1e-25, 3e37]
    for row, value in enumerate([*finite, float("inf"), float("-inf"), float("nan")]):
        hidden[0, row] = value
        hidden[0, 20 + row, 3] = value
    (flat, back), (cuda_flat, cuda_back) = both(name, hidden)
    assert torch.equal(flat, cuda_flat)
    nan = 12.0  # which has many patterns
    assert torch.equal(back.nan_to_num(nan=nan), cuda_back.nan_to_num(nan=nan))


@pytest.mark.parametrize("name", CODECS)
def test_in_pieces_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = hidden_states((3, 333, 577), torch.bfloat16)
    flat = torch.zeros(CODECS[name].nbytes(hidden.numel()), dtype=torch.uint8)
    CODECS[name].encode(hidden, flat)
    monkeypatch.setattr(codecs, "AT_ONCE", 1 << 10)
    _, (cuda_flat, cuda_back) = both(name, hidden)
    assert torch.equal(flat, cuda_flat)
    assert torch.equal(CODECS[name].decode(flat, hidden.shape, hidden.dtype), cuda_back)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_more_elements_than_32_bits_count(name: str) -> None:
    group, codec = 64, CODECS[name]
    hidden = torch.zeros(2**31 + 5 * group + 3, dtype=torch.bfloat16, device="cuda")  # 4 GiB
    ends = hidden_states((1, 1, 4 * group), torch.bfloat16).cuda().flatten()
    hidden[: len(ends)] = hidden[2**31 :][: len(ends)] = ends
    flat = torch.empty(codec.nbytes(hidden.numel()), dtype=torch.uint8, device="cuda")
    codec.encode(hidden, flat)
    back = codec.decode(flat, hidden.shape, hidden.dtype)
    assert torch.equal(back[: len(ends)], back[2**31 :][: len(ends)])
    assert (back[: len(ends)] - ends).abs().max() < 0.1 * ends.abs().max()
    assert int(back.count_nonzero()) <= 2 * len(ends)
