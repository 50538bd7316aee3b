"""tokenizer.json as it was published.

transformers may put the pipeline of a class that tokenizer_config.json, or the type of the model,
names over the file's: https://github.com/huggingface/transformers/issues/45488
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from megatrain.data.workers import fenced
from megatrain.errors import ModelError, logger

TOKENIZER_FILE = "tokenizer.json"
# What pipelines read differently: each text as it is, and between added tokens.
PROBES = (
    *("the River runs to the SEA, don't it? I'LL  see.", " two  spaces ", "   ", "\ttab\t\tstop "),
    *("line\nline\n\n\nend\r\n \n", "1 12 123 1234 123456789 3.14 0x1F", "if (x == 1) { y[0]; }"),
    *("naïve café nai\u0308ve cafe\u0301", "straße ﬁne ①２ ｆｕｌｌ\u3000ÅΩ", "!!!???--- ~@$ // #"),
    *("日本語。中文，没有 한국어", "ไทยไม่มี हिन्दी में Привет עברית", "👩‍👩‍👧 𐍈 a\u00a0b\u200bc\u00ad"),
)
_files: WeakKeyDictionary[Any, tuple[bytes, int]] = WeakKeyDictionary()


def as_published(loaded: Any, folder: Path, without_class: Callable[[], Any]) -> Any:
    """A folder's tokenizer as it was loaded if it reads text as tokenizer.json says, else one
    without a class of its own, and a warning. Raises ModelError where that reads otherwise, too,
    DataError for one that never ends, and what the tokenizers package raises of a broken file."""
    from tokenizers import Tokenizer

    file = folder / TOKENIZER_FILE
    if not loaded.is_fast or not file.is_file():
        return loaded
    data, about = file.read_bytes(), (f"{file}: the tokenizer", "for a few words; use another")
    published = Tokenizer.from_buffer(data)

    def reads_alike(made: Any) -> bool:
        return fenced(lambda: _is_alike(made.backend_tokenizer, published), about)

    if not reads_alike(loaded):
        name = f"{file}: transformers' {type(loaded).__name__} (tokenizer_class) reads text"
        loaded = without_class()
        if not reads_alike(loaded):
            raise ModelError(f"{name} otherwise, and so does its general class; remove the file")
        logger.warning(f"{name} otherwise than this file, which is used")
    _files[loaded] = data, published.get_vocab_size()
    return loaded


def _is_alike(made: Any, published: Any) -> bool:
    """True if both have one pipeline, and make the same ids of every probe."""
    added = [str(token) for token in published.get_added_tokens_decoder().values()]
    between = [f"{one}{text} {one} x{one}" for one, text in zip(added, PROBES * 20, strict=False)]
    found = []
    for each in (made, published):
        steps = [step.__getstate__() for step in (each.normalizer, each.pre_tokenizer) if step]
        # which changes no id
        steps = [step.replace(b'"trim_offsets":false', b'"trim_offsets":true') for step in steps]
        flags = [getattr(each.model, name, None) for name in ("ignore_merges", "byte_fallback")]
        ids = [each.encode(text, add_special_tokens=False).ids for text in (*PROBES, *between)]
        found.append((steps, flags, ids))
    return found[0] == found[1]


def published_file(tokenizer: Any) -> bytes | None:
    """The tokenizer.json that a tokenizer was read from, unless tokens were added to it since."""
    data, size = _files.get(tokenizer, (None, 0))
    return data if data and tokenizer.backend_tokenizer.get_vocab_size() == size else None
