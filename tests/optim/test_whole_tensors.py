"""Muon against torch.optim's, tensor by tensor: decay, shapes, ties, precision; and any number of
threads alike."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatrain.memory.layout import FlatLayout
from megatrain.optim import Muon, muon
from megatrain.optim.muon import HostWorkspace, InPlace, TensorState
from megatrain.optim.split import split_master
from tests.helpers.compare import differing
from tests.optim.arrays import master_of

SHAPES: dict[str, tuple[int, ...]] = {"w": (24, 40), "tall": (70, 9), "experts": (3, 8, 12)}
SHAPES |= {"norm": (70,), "b.bias": (3, 5), "one": (1,), "row": (1, 6)}
LAYOUT = FlatLayout.pack(
    [(name, shape, name in ("w", "tall", "experts", "row")) for name, shape in SHAPES.items()],
    layer=True,
)
STEPS = 6
SCALE = 0.37
State = dict[str, Tensor]


def arrays_of(optimizer: Muon, split: bool, seed: int = 0) -> State:
    """Flat arrays of a block, its padding zero, and its state too."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.zeros(LAYOUT.numel)
    for view in LAYOUT.views(master).values():
        view.copy_(torch.randn(view.shape, generator=generator) * 0.2)
    weight, remainder = split_master(master)
    arrays = {"weight": weight, "remainder": remainder} if split else {"weight": master}
    return arrays | {
        array.name: torch.zeros(LAYOUT.per(array.per).numel, dtype=array.dtype)
        for array in optimizer.state_arrays
    }


def gradient_of(step: int, dtype: torch.dtype) -> Tensor:
    """A block's, in which a row, a column and an element have none."""
    generator, grad = torch.Generator().manual_seed(100 + step), torch.zeros(LAYOUT.numel)
    for name, view in LAYOUT.views(grad).items():
        view.copy_(torch.randn(view.shape, generator=generator) * 10.0 ** -(step % 4))
        if name == "w":
            view[3], view[:, 5] = 0, 0
        if view.numel() > 1:
            view.view(-1)[0] = 0
    return grad.to(dtype)


def states_of(optimizer: Muon, arrays: Mapping[str, Tensor]) -> list[TensorState]:
    layouts = {array.name: LAYOUT.per(array.per) for array in optimizer.state_arrays}
    flats = {name: layouts.get(name, LAYOUT).flats(array) for name, array in arrays.items()}
    return [
        TensorState(
            spec, {name: flat[spec.name] for name, flat in flats.items() if spec.name in flat}
        )
        for spec in LAYOUT.tensors
    ]


def update(
    optimizer: Muon, arrays: State, grad: Tensor, *, lr: float, step: int, threads: int = 1
) -> None:
    workspace = HostWorkspace(optimizer.scratch([LAYOUT]).host, torch.device("cpu"), 1)
    tensors = states_of(optimizer, {**arrays, "grad": grad})
    with ThreadPoolExecutor(threads) as pool:
        for stage in optimizer.stages(tensors, workspace, lr=lr, step=step, grad_scale=SCALE):
            list(pool.map(lambda piece: piece(), stage))
    workspace.close()


def masters(arrays: State) -> State:
    return {name: view.clone() for name, view in LAYOUT.views(master_of(arrays)).items()}


def torch_muon(
    parameters: Mapping[str, nn.Parameter], optimizer: Muon
) -> list[torch.optim.Optimizer]:
    """Experts one by one; everything that is no hidden matrix by torch's AdamW."""
    made: list[torch.optim.Optimizer] = []
    for spec in LAYOUT.tensors:
        decay = optimizer.weight_decay if spec.decay else 0.0
        if spec.hidden:
            names = ("momentum", "nesterov", "ns_steps", "adjust_lr_fn", "ns_coefficients")
            options: dict[str, Any] = {name: getattr(optimizer, name) for name in names}
            parameter = parameters[spec.name]
            views = [parameter] if len(spec.shape) == 2 else experts_of(parameter)
            made.append(torch.optim.Muon(views, lr=optimizer.lr, weight_decay=decay, **options))
        else:
            rate = optimizer.lr if optimizer.adamw_lr is None else optimizer.adamw_lr
            options = {"lr": rate, "betas": optimizer.betas, "eps": optimizer.eps}
            options["weight_decay"] = decay
            made.append(torch.optim.AdamW([parameters[spec.name]], **options))
    return made


def experts_of(parameter: nn.Parameter) -> list[nn.Parameter]:
    """Views into one tensor, whose gradients are views too."""
    assert parameter.grad is not None
    views = [nn.Parameter(expert) for expert in parameter.data]
    for view, grad in zip(views, parameter.grad, strict=True):
        view.grad = grad
    return views


MUONS = [
    Muon(lr=1e-3),
    Muon(
        lr=0.02,
        adamw_lr=3e-4,
        weight_decay=0.1,
        adjust_lr_fn="original",
        momentum=0.9,
        nesterov=False,
    ),
    Muon(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3, ns_steps=3),
]


@pytest.mark.parametrize("split", [False, True], ids=["float32", "split"])
@pytest.mark.parametrize("optimizer", MUONS, ids=lambda o: f"lr={o.lr}")
def test_muon_is_torch_s_and_adamw_for_the_rest(optimizer, split):
    arrays = arrays_of(optimizer, split)
    start = masters(arrays)
    parameters = {name: nn.Parameter(master.clone()) for name, master in start.items()}
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    theirs = torch_muon(parameters, optimizer)
    for step in range(1, STEPS + 1):
        grad = gradient_of(step, arrays["weight"].dtype)
        for name, view in LAYOUT.views(grad).items():
            held = parameters[name].grad
            assert held is not None
            held.copy_(view.float() * SCALE)
        for each in theirs:
            each.step()
        update(optimizer, arrays, grad, lr=optimizer.lr, step=step)
        for name, ours in masters(arrays).items():
            moved, expected = ours - start[name], parameters[name].detach() - start[name]
            hidden = next(spec for spec in LAYOUT.tensors if spec.name == name).hidden
            bound = 0.02 if hidden else 2e-5  # the iteration runs in bfloat16
            allowed = bound * float(expected.norm()) + 1e-7 * float(start[name].norm())
            assert float((moved - expected).norm()) <= allowed, (name, step)


def test_orthogonal_matrices_have_singular_values_near_one():
    matrices = torch.randn(4, 30, 50, generator=torch.Generator().manual_seed(0))
    for given in (matrices, matrices.mT.contiguous()):
        values = torch.linalg.svdvals(Muon().orthogonal(given.bfloat16()).float())
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3


def test_any_number_of_threads_gives_the_same_bits_and_padding_stays_zero(monkeypatch):
    optimizer = MUONS[2]
    monkeypatch.setattr(muon, "HOST_PIECE", 64)
    results = []
    for threads in (1, 2, 7):
        arrays = arrays_of(optimizer, split=True)
        for step in (1, 2, 3):
            grad = gradient_of(step, torch.bfloat16)
            update(optimizer, arrays, grad, lr=optimizer.lr, step=step, threads=threads)
        results.append(arrays)
    assert all(differing(results[0], other) == [] for other in results[1:])
    for name, array in results[0].items():
        layout = next((LAYOUT.per(a.per) for a in optimizer.state_arrays if a.name == name), LAYOUT)
        assert all(not array[start:stop].any() for start, stop in layout.gaps()), name


@pytest.mark.parametrize("split", [False, True], ids=["float32", "split"])
def test_the_device_s_form_is_the_host_s(split, monkeypatch):
    """torch's operations, which a GPU runs, in pieces of their own size, on fp32 gradients."""
    optimizer = MUONS[2]
    ours, host = arrays_of(optimizer, split), arrays_of(optimizer, split)
    start = masters(host)
    monkeypatch.setattr(muon, "DEVICE_PIECE", 100)
    for step in (1, 2, 3):
        grad = gradient_of(step, torch.float32)
        update(optimizer, host, grad, lr=optimizer.lr, step=step)  # rounds it itself
        run_as_on_device(optimizer, ours, grad, step)
    for name, expected in masters(host).items():
        moved, wanted = masters(ours)[name] - start[name], expected - start[name]
        assert float((moved - wanted).norm()) <= 0.005 * float(wanted.norm()) + 1e-7, name


def run_as_on_device(optimizer: Muon, arrays: State, grad: Tensor, step: int) -> None:
    for tensor in states_of(optimizer, {**arrays, "grad": grad}):
        if not tensor.spec.hidden:
            place, rates = InPlace(grad.device), {"lr": optimizer.lr, "grad_scale": SCALE}
            stages: Any = optimizer.stages([tensor], place, step=step, **rates)
            for piece in itertools.chain.from_iterable(stages):
                piece()
        else:
            work = muon._Update(optimizer, tensor, InPlace(grad.device), optimizer.lr, SCALE)
            work.on_host, work.grad = False, tensor.flats["grad"][: tensor.spec.numel]
            for piece in work.pieces:
                work.direct(piece)
            InPlace(grad.device).replace(optimizer.orthogonal, work.parts())
            for piece in work.pieces:
                work.apply(piece)


def test_an_update_takes_the_directions_of_the_largest_block_beside_the_state():
    large = FlatLayout.pack(
        [("w", (4096, 4096), True), ("v", (64, 64), True), ("norm", (4096,), False)], layer=True
    )
    small = FlatLayout.pack([("w", (512, 512), True)], layer=True)
    assert Muon().scratch([small, large, small]).host == 2 * (4096 * 4096 + 64 * 64)
