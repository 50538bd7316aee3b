"""Saved activations of retained layers that wait in host RAM: what they are, that they take no
memory, and that they leave the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatrain.engine.activations import GRAPH, Offload
from megatrain.engine.graphs import SavedTensors, run_for_graph
from megatrain.errors import ModelError
from megatrain.models.recorder import LayerCall
from megatrain.schedule import graphs_of_layers
from megatrain.settings import ALL, Settings
from tests.helpers.runs import train_engine
from tests.helpers.support import engine_of, full_batches

NO_CALL = LayerCall((), {})
STEPS = [full_batches(seed, [(2, 16), (1, 12)]) for seed in range(3)]
HALF = Settings(offload_activations=True, retained=1, retained_on_host=1, head_chunk_tokens=7)
EVERY_GRAPH = replace(HALF, retained=0, retained_on_host=ALL)
pytestmark = pytest.mark.usefixtures("deterministic")


def test_they_are_spread_over_the_layers_that_the_device_does_not_keep() -> None:
    for layers, retained, on_host, expected in [
        (6, 0, 0, "......"),
        (6, 2, 0, "....dd"),
        (6, 0, 3, ".h.h.h"),
        (6, 2, 2, ".h.hdd"),
        (6, 2, 4, "hhhhdd"),
        (6, ALL, ALL, "dddddd"),
        (3, 1, ALL, "hhd"),
    ]:
        letters = {"device": "d", "host": "h", "nowhere": "."}
        found = graphs_of_layers(layers, retained, on_host)
        assert "".join(letters[where] for where in found) == expected


@pytest.mark.parametrize("family", ["llama", "gpt-neox", "mixtral", "gpt2"])
def test_nothing_of_a_graph_but_weights_and_masks_stays_on_the_device_and_nothing_leaves_twice(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    staying: set[int] = set()
    sent: list[list[int]] = []
    pack, save_graph = SavedTensors._pack, Offload.save_graph

    def note_what_stays(saved: SavedTensors, tensor: torch.Tensor) -> Any:
        packed = pack(saved, tensor)
        if isinstance(packed, torch.Tensor) and packed.numel():
            assert packed.untyped_storage().data_ptr() in saved._stays
            staying.add(packed.untyped_storage().data_ptr())
        return packed

    def note_what_leaves(keeper: Offload, tensors: Any, tokens: int) -> Any:
        sent.append([tensor.untyped_storage().data_ptr() for tensor in tensors])
        return save_graph(keeper, tensors, tokens)

    monkeypatch.setattr(SavedTensors, "_pack", note_what_stays)
    monkeypatch.setattr(Offload, "save_graph", note_what_leaves)
    with engine_of(family, settings=EVERY_GRAPH) as engine:
        train_engine(engine, [full_batches(0, [(2, 16)])])
        assert len(sent) == len(engine.skeleton.layers)
    assert staying
    for addresses in sent:
        assert len(addresses) == len(set(addresses)) > 5
        assert staying.isdisjoint(addresses)


def test_a_layer_that_writes_over_its_input_is_refused() -> None:
    def layer(index: int, hidden: torch.Tensor, call: LayerCall) -> torch.Tensor:
        return hidden.mul_(2.0) + 1.0

    with pytest.raises(ModelError, match="a layer writes over its input, which its gradients need"):
        run_for_graph(layer, 0, torch.ones(1, 2, 3), NO_CALL)


def test_a_graph_lets_go_of_its_input() -> None:
    class Keeper:
        compute = type("Compute", (), {"device": torch.device("cpu")})
        tensors: list[torch.Tensor]

        def save_graph(self, tensors: list[torch.Tensor], tokens: int) -> str:
            assert tokens == 2
            self.tensors = [tensor.clone() for tensor in tensors]
            return "sent"

        def restore(self, sent: str) -> list[torch.Tensor]:
            return self.tensors

        def free(self, sent: str) -> None:
            self.tensors = []

    keeper: Any = Keeper()
    weight, hidden = torch.full((3,), 2.0, requires_grad=True), torch.arange(6.0).view(1, 2, 3)
    saved = SavedTensors(keeper, weight, NO_CALL, ())
    graph, output = run_for_graph(
        lambda index, given, call: (given * weight) ** 2, 0, hidden, NO_CALL, saved
    )
    expected = 8 * hidden
    hidden.zero_()  # nobody reads it any more
    output.zero_()
    grad_hidden, grad_weight = graph.gradients([weight], torch.ones(1, 2, 3))
    assert grad_hidden is not None and torch.equal(grad_hidden, expected)
    assert grad_weight is not None and torch.equal(
        grad_weight, (expected / 2 * expected / 8).sum((0, 1))
    )
    assert keeper.tensors == []


def test_a_graph_from_host_ram_is_not_changed_by_what_arrives_beside_it() -> None:
    """Autograd refuses what was written over since it was saved; the ring's next stretches are
    written while a chunk is differentiated."""
    settings = replace(EVERY_GRAPH, layer_chunk_tokens=8)
    with engine_of("llama", settings=settings) as engine:
        transfers = []

        def transfer(*_: Any) -> None:
            transfers.append(engine.parts.checkpoints._up[GRAPH].flat[-1:].add_(0))  # type: ignore[union-attr]

        for layer in engine.skeleton.layers:
            layer.mlp.down_proj.register_forward_hook(transfer)  # type: ignore[union-attr]
        train_engine(engine, [full_batches(0, [(1, 16)])])
    assert len(transfers) > 2 * 3
