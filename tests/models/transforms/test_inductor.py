"""Compiled layers: what graphs keep, which attention they have, and what a failure says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from megatrain.errors import ConfigError
from megatrain.models.transforms.compiled import Inductor, compile_when_run
from megatrain.settings import Settings
from tests.helpers.support import engine_of, full_batches, tiny_config

ROWS, TOKENS, HIDDEN, WIDTH = 2, 16, 32, 64


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = hidden + self.down(nn.functional.relu(self.up(hidden)) * 3)
        return output


def kept_and_gradients(layer: nn.Module, hidden: Tensor) -> tuple[int, list[Tensor]]:
    """Bytes that autograd keeps beyond the weights and the layer's input."""
    given = {tensor.data_ptr() for tensor in (hidden, *layer.parameters())}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        output = layer(hidden)
    grads = torch.autograd.grad(output, [hidden, *layer.parameters()], torch.ones_like(output))
    return sum(tensor.nbytes for tensor in kept if tensor.data_ptr() not in given), list(grads)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_inductor_keeps_as_little_for_this_layer_alone() -> None:
    torch.manual_seed(0)
    cheap, full = Mlp().bfloat16(), Mlp().bfloat16()
    full.load_state_dict(cheap.state_dict())
    hidden = torch.randn(1, TOKENS, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    cheap.compile(backend=Inductor(cheap=True))
    full.compile()
    bytes_kept, gradients = kept_and_gradients(cheap, hidden)
    bytes_of_full, expected = kept_and_gradients(full, hidden)
    assert bytes_kept == 2 * TOKENS * WIDTH
    assert bytes_of_full == 3 * TOKENS * WIDTH
    assert all(map(torch.equal, gradients, expected))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_a_compiler_that_fails_is_named_and_how_to_do_without(monkeypatch, tmp_path):
    from torch._inductor import config as inductor

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is compiled yet
    with (
        inductor.patch({"cpp.cxx": (None, "/bin/false")}),
        engine_of(tiny_config("llama", hidden_size=48), settings=Settings(compile=True)) as engine,
        pytest.raises(
            ConfigError,
            match=r"compile: torch.compile could not .*No working C\+\+ compiler.*"
            r"; set compile: false",
        ),
    ):
        engine.train_step(full_batches(0))


class Attention(nn.Module):
    """With nothing else that code is generated for: that takes seconds."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_graphs_are_found_again_only_with_the_attention_that_they_have() -> None:
    """In another process, which has what is on disk, and in one that has them in memory too."""
    orders = {False: [SDPBackend.FLASH_ATTENTION], True: [SDPBackend.MATH]}
    torch._dynamo.reset()
    with fresh_cache():
        for process, asked in (("another", (False, True, False)), ("one", (True, False))):
            for lengths_vary in asked:
                if process == "another":
                    torch._dynamo.reset()  # what is left is on disk
                with sdpa_kernel(orders[lengths_vary]):
                    assert runs_flash(compiled_layer(lengths_vary=lengths_vary)) is not lengths_vary


def compiled_layer(*, lengths_vary: bool) -> Callable[[], None]:
    """Forward and backward of a layer."""
    (run,) = compile_when_run([Attention()], lengths_vary, cheap=False)
    shape = (3, ROWS, 4, TOKENS, HIDDEN // 4)
    return lambda: run(*torch.ones(shape, requires_grad=True).unbind()).sum().backward()


def runs_flash(work: Callable[[], None]) -> bool:
    """Whether `work`, done once more, takes its attention from PyTorch's flash kernel."""
    work()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        work()
    return any("flash_attention" in event.key for event in seen.key_averages())
