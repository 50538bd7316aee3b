"""`data.packing`: where examples share sequences, and where that is refused."""

from __future__ import annotations

import pytest
import torch

from megatrain.config import load_config
from megatrain.engine.resolved import packs
from megatrain.models.skeleton import Skeleton
from tests.support import RECURRENT, tiny_config


@pytest.mark.parametrize(
    ("family", "packing", "seq_len", "packed"),
    [
        ("llama", None, 2048, True),  # the default is auto
        ("llama", "auto", 4096, True),
        ("llama", "auto", 4097, False),
        ("llama", "true", 4097, True),
        ("llama", "false", 2048, False),
        ("opt", "auto", 2048, False),  # its rows would see each other
        ("falcon-h1", "auto", 2048, False),
    ],
)
def test_auto_packs_short_sequences_on_a_gpu(project, family, packing, seq_len, packed):
    asked = [f"data.packing={packing}"] if packing else []
    config = load_config("cfg.yaml", [f"train.seq_len={seq_len}", *asked])
    skeleton = Skeleton(tiny_config(family))
    assert (
        packs(skeleton, config.data.packing, config.train.seq_len, torch.device("cuda")) == packed
    )


@pytest.mark.parametrize("family", RECURRENT)
def test_packing_is_refused_where_rows_would_see_each_other(megatrain, project, tokenizer, family):
    tiny_config(family, vocab_size=len(tokenizer)).save_pretrained(project / "other")
    tokenizer.save_pretrained(project / "other")
    done = megatrain("plan cfg.yaml model=other sample_packing=true", code=2)
    kind = family.replace("-", "_")
    assert f"a {kind} model does not keep examples apart that are packed into one" in done.err
    assert "set data.packing: false" in done.err
