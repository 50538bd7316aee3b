"""Model folders made to hang, to fill memory or to crash: one sentence, and soon."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.errors import ModelError, StorageError
from megatrain.models.pretrained import read_model_config, resolve_source
from megatrain.models.skeleton import Skeleton
from megatrain.storage.safetensors import read_header
from tests.helpers.support import tiny_config

CPU_SECONDS, MORE_BYTES = 5, 2 << 30


@pytest.fixture(autouse=True)
def within_bounds() -> Iterator[None]:
    """Of processor time, and of address space beyond what is taken."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MORE_BYTES
    _, hard = before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    started = time.process_time()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.process_time() - started < CPU_SECONDS


SIZES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 0}),
    ("llama", {"num_key_value_heads": 0}),
    ("llama", {"head_dim": -2}),
    ("llama", {"hidden_size": -64}),
    ("llama", {"num_hidden_layers": -1}),
    ("llama", {"num_hidden_layers": 0}),
    ("llama", {"vocab_size": 0}),
    ("llama", {"vocab_size": -5}),
    ("llama", {"hidden_act": "nothing"}),
    ("llama", {"rope_parameters": {"rope_type": "none such", "rope_theta": 1e4}}),
    ("gpt2", {"n_head": 0}),
    ("mixtral", {"num_local_experts": 0}),
    ("mixtral", {"num_experts_per_tok": 9}),
]


def test_a_size_that_no_model_has_is_refused(tmp_path):
    for family, changes in SIZES:
        tiny_config(family).save_pretrained(tmp_path)
        file = tmp_path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        with pytest.raises(ModelError) as refused:
            Skeleton(read_model_config(resolve_source(tmp_path)), dtype=torch.float32)
        assert len(str(refused.value).splitlines()) == 1


DIGITS = int("9" * 4000)
HEADERS: dict[str, Any] = {
    "long numbers": {"a": {"dtype": "F32", "shape": [DIGITS] * 500, "data_offsets": [0, 4]}},
    "many dimensions": {"a": {"dtype": "F32", "shape": [2] * 10**5, "data_offsets": [0, 4]}},
    "a long offset": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, DIGITS]}},
    "terabytes": {"a": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
}


def test_numbers_of_a_weight_file_are_checked_before_they_are_used(tmp_path):
    file = tmp_path / "model.safetensors"
    for header in HEADERS.values():
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        with pytest.raises(StorageError, match="malformed safetensors header"):
            read_header(file)
