"""Kernels of packages beside transformers (fla, mamba-ssm, causal-conv1d) and tensors without data.

Stand-ins of the packages raise as Triton does on the meta device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from megatrain.models.meta import blank_call, on_meta
from megatrain.models.skeleton import Skeleton
from megatrain.models.trials.behaviour import observe
from megatrain.planner.cost.compiled import predict_compiled
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.footprint import Footprint, call_peak_bytes
from tests.helpers.kernel_packages import install
from tests.helpers.support import LINEAR, MAMBA, SIZES, tiny_config

DEVICES = ("cpu", "cuda")
LAYERS: Any = {"num_hidden_layers": 2}
HYBRID: Any = LAYERS | {"layer_types": ["linear_attention", "full_attention"]}
STATE_SPACE: Any = {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
CONFIGS = {
    "qwen3_5": transformers.Qwen3_5TextConfig(**SIZES | LINEAR | HYBRID, head_dim=8),
    "qwen3_next": tiny_config("qwen3-next", num_hidden_layers=2),
    "mamba2": transformers.Mamba2Config(**SIZES | LAYERS | STATE_SPACE),
    "falcon_h1": transformers.FalconH1Config(**SIZES | LAYERS | MAMBA, mamba_d_ssm=64),
}


def launched(*args: Any, **kwargs: Any) -> None:
    raise ValueError("Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)")


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """The packages are there."""
    install(monkeypatch, family, lambda *_: launched)


def footprints(skeleton: Skeleton) -> list[Footprint]:
    hidden, calls = skeleton.dry_call(2, 8)
    given = (tuple(hidden.shape), skeleton.dtype)
    pairs = zip(skeleton.layers, calls, strict=True)
    return [call_peak_bytes(*blank_call(layer, *given, call)) for layer, call in pairs]


PLAIN = {name: Skeleton(config) for name, config in CONFIGS.items()}


@pytest.mark.slow
def test_models_are_read_and_their_layers_counted_with_transformers_own_path(family, installed):
    skeleton = Skeleton(CONFIGS[family])
    assert footprints(skeleton) == footprints(PLAIN[family])
    hidden, calls = skeleton.dry_call(2, 8)
    forward, _ = blank_call(skeleton.layers[0], tuple(hidden.shape), torch.bfloat16, calls[0])
    with pytest.raises(ValueError, match="cannot be accessed from Triton"):
        forward()  # the stand-ins are in the way
    with on_meta():
        assert forward().shape == hidden.shape


def test_small_models_are_tried_on_the_cpu_too(family, installed):
    found = observe(CONFIGS[family], PLAIN[family].config._attn_implementation)
    assert found.causal


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2"], indirect=True)
def test_their_plans_are_made_too(family, installed):
    shape, on_gpu = (shape_of(Skeleton(CONFIGS[family]), 8, [8], runs_on=d) for d in DEVICES)
    assert (shape.package_kernels, on_gpu.package_kernels) == (False, True)
    assert min(layer.forward.matmul_flops for layer in shape.cost.layers) > 0
    hidden, calls = PLAIN[family].dry_call(1, 8)
    given = PLAIN[family].layers[0], (1, 8, hidden.shape[-1]), torch.bfloat16, calls[0]
    assert predict_compiled(*given, fused_attention=True, runs_on="cuda") is not None
