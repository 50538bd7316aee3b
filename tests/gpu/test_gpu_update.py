"""On CUDA: the device's update has the bits of the host's."""

from __future__ import annotations

import pytest

from megatrain.optim import AdamW, Lion
from megatrain.optim.optimizer import MOMENTS
from tests.helpers.compare import differing
from tests.optim.arrays import Views, new_views, random_grad

NUMEL = 3 * 4096 + 64


def on_cuda(views: Views) -> Views:
    return {name: view.cuda() for name, view in views.items()}


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("kind", [AdamW, Lion])
@pytest.mark.parametrize(
    ("precision", "grad"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32")],
)
def test_the_update_has_the_bits_of_the_host_s(precision, grad, moments, kind):
    optimizer = kind(moments=moments)
    host = new_views(optimizer, precision, NUMEL)
    device = on_cuda(host)
    for step in range(1, 6):
        host["grad"] = random_grad(grad, NUMEL, step) * (1.0 if step < 4 else 1e-6)
        host["grad"][640:704] = 0  # a group of zeros
        device["grad"] = host["grad"].cuda()
        for views in (host, device):
            optimizer.update(
                views, lr=1e-3, weight_decay=0.1, step=step, grad_scale=0.37, first=(1 << 32) - 100
            )
    assert differing({name: view.cpu() for name, view in device.items()}, host) == []
