"""GGUF files, for llama.cpp and its users, written from a checkpoint's tensors.

The `gguf` package has the format and the names of tensors. A row of FAMILIES has what readers,
llama.cpp or transformers, cannot guess; a model that no row can describe is refused, for a wrong
key would show only as a worse model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from megatrain.errors import ModelError, logger, system_errors
from megatrain.heartbeat import BYTES_WRITTEN, beat
from megatrain.models.pretrained import end_of_turn
from megatrain.storage.safetensors import TensorSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# -- families -------------------------------------------------------------------------------------


Change = Callable[[torch.Tensor, Any], torch.Tensor]


@dataclass(frozen=True)
class Family:
    """A family of transformers, by its name in GGUF."""

    architecture: str
    # by GGUF's key: a field of the configuration, or a function of the configuration
    keys: Mapping[str, Any]
    # values of the configuration that readers take for granted, or functions that give them
    must: Mapping[str, Any]
    # patterns of GGUF's names of tensors, and how readers want such tensors
    changes: tuple[tuple[str, Change], ...] = ()
    # types of rotary embeddings that files can express
    rope: tuple[str, ...] = ("default", "linear")

    def changed(self, name: str, values: torch.Tensor, config: PretrainedConfig) -> torch.Tensor:
        """Convert a tensor to what readers want; on the meta device, for its shape."""
        for pattern, change in self.changes:
            if re.search(pattern, name):
                values = change(values, config)
        return values


# --- Values of keys ---


def head_dim(config: Any) -> int:
    size: int | None = getattr(config, "head_dim", None)
    return size or int(config.hidden_size // config.num_attention_heads)


def _within_window(config: Any) -> int:
    """The context length, cut to the sliding window that readers do not know."""
    length, window = int(config.max_position_embeddings), config.sliding_window
    if window is None or window >= length:
        return length
    logger.warning(
        f"GGUF files of this family have no sliding window: the context is written as {window:,} "
        "tokens, within which it makes no difference"
    )
    return int(window)


RMS: dict[str, Any] = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": head_dim,
    "attention.value_length": head_dim,
    "attention.layer_norm_rms_epsilon": lambda config: float(config.rms_norm_eps),
}
WINDOWED = {"context_length": _within_window}
OF_MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
MIXED = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


# --- What readers take for granted ---

PLAIN: dict[str, Any] = {"hidden_act": "silu"}
WITHOUT_BIAS = PLAIN | {"attention_bias": False, "mlp_bias": False}
ALL_MIXED = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}


def _gemma_scale(config: Any) -> int:
    """That of attention scores, which readers take from the model's size."""
    of_27b = config.num_hidden_layers == 62
    return config.hidden_size // config.num_attention_heads if of_27b else head_dim(config)


GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "use_bidirectional_attention": lambda c: c.use_bidirectional_attention and None,
    "query_pre_attn_scalar": _gemma_scale,
    "layer_types": lambda c: [
        f"{'sliding' if at % 6 else 'full'}_attention" for at in range(1, c.num_hidden_layers + 1)
    ],
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping")),
}


# --- Changes of tensors ---


def _pairs(heads: str) -> Change:
    """Rows of q or k, where a reader's rotary embeddings turn neighbours, not halves of a head."""

    def change(values: torch.Tensor, config: Any) -> torch.Tensor:
        number: int = getattr(config, heads)
        halves = values.view(number, 2, values.shape[0] // number // 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    return change


LLAMA = (
    (r"\.attn_q\.", _pairs("num_attention_heads")),
    (r"\.attn_k\.", _pairs("num_key_value_heads")),
)
NORMS_PLUS_ONE = ((r"norm\.weight$", lambda values, _: values + 1),)
LLAMA_ROPE = ("default", "linear", "llama3")
FAMILIES = {
    "llama": Family("llama", RMS, WITHOUT_BIAS, LLAMA, LLAMA_ROPE),
    "mistral": Family("llama", RMS | WINDOWED, PLAIN, LLAMA, LLAMA_ROPE),
    "mixtral": Family("llama", RMS | WINDOWED | OF_MIXTRAL, PLAIN, LLAMA, LLAMA_ROPE),
    "qwen2": Family("qwen2", RMS, PLAIN | {"use_sliding_window": False}),
    "qwen3": Family("qwen3", RMS, WITHOUT_BIAS | {"use_sliding_window": False}),
    "qwen3_moe": Family(
        "qwen3moe", RMS | MIXED, WITHOUT_BIAS | ALL_MIXED | {"norm_topk_prob": True}
    ),
    "gemma3_text": Family(
        "gemma3", RMS | {"attention.sliding_window": "sliding_window"}, GEMMA, NORMS_PLUS_ONE
    ),
}


def family_of(config: PretrainedConfig) -> Family:
    """Raises ModelError for a model that cannot be written."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"a model of type {config.model_type} cannot be written as a GGUF file; known are "
            f"{known}; export a Hugging Face folder, which llama.cpp converts itself"
        )
    for name, wanted in family.must.items():
        value = wanted(config) if callable(wanted) else wanted
        if (found := getattr(config, name, value)) != value:
            raise _beyond_gguf(config, f"{name}: {found}")
    if problem := rope_problem(config, family.rope):
        raise _beyond_gguf(config, problem)
    return family


def _beyond_gguf(config: PretrainedConfig, what: str) -> ModelError:
    return ModelError(
        f"a {config.model_type} model with {what} cannot be written as a GGUF file; export a "
        "Hugging Face folder"
    )


def keys_of(family: Family, config: PretrainedConfig) -> dict[str, Any]:
    """The keys that describe a model in a file, without the architecture's prefix. Raises
    ModelError for what it cannot leave out."""
    said = {
        key: value(config) if callable(value) else getattr(config, value)
        for key, value in family.keys.items()
    }
    for key, value in said.items():
        if value is None:
            raise _beyond_gguf(config, f"no {key.rpartition('.')[2]}")
    return said | rope_keys(config)


# Of each type of scaling, what a file can say besides the base.
SAYS = {
    "default": set[str](),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_problem(config: PretrainedConfig, types: tuple[str, ...]) -> str | None:
    """The part of a model's rotary embeddings that no file can express; None if there is none."""
    rope, of_windows = _ropes(config)
    kind = rope.get("rope_type", "default")
    if kind not in types or of_windows.get("rope_type", "default") != "default":
        return f"rotary embeddings of type {kind}"
    if rope.get("partial_rotary_factor", 1) != 1:
        return "partial rotary embeddings"
    unsaid = {name for name, value in rope.items() if value is not None} - SAYS[kind] - ALWAYS
    return f"{', '.join(sorted(unsaid))} of rotary embeddings" if unsaid else None


def rope_keys(config: PretrainedConfig) -> dict[str, Any]:
    rope, local = _ropes(config)
    base = float(rope["rope_theta"])
    keys: dict[str, Any] = {"rope.dimension_count": head_dim(config), "rope.freq_base": base}
    if local:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    if rope.get("rope_type") == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    return keys


def rope_tensors(config: PretrainedConfig) -> list[TensorSource]:
    """By how much scaling slows each frequency, float32 [rotated / 2], if it does."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope, _ = _ropes(config)
    if rope.get("rope_type") != "llama3":
        return []
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    values = 1 / (rope["rope_theta"] ** steps) / scaled
    whole = partial(iter, [values])
    return [TensorSource("rope_freqs.weight", values.dtype, tuple(values.shape), whole)]


def _ropes(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters of layers without a sliding window, and of those with one if they differ."""
    given = config.rope_parameters
    return given.get("full_attention", given), given.get("sliding_attention", {})


# -- files -----------------------------------------------------------------------------------------

FILE = "model.gguf"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
# The format's names of a dtype, and of a file whose matrices have it.
NAMES = {
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.float32: ("F32", "ALL_F32"),
}
EXPERT = re.compile(r"\.experts\.(\d+)\.")


class Tensor(NamedTuple):
    """A tensor of the file: one source, or one for each of a mixture's experts."""

    name: str
    sources: list[TensorSource]
    shape: tuple[int, ...]  # in the file
    dtype: torch.dtype


def write_gguf(
    path: Path,
    name: str,
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    sources: Sequence[TensorSource],
    dtype: torch.dtype,
) -> None:
    """Write a model, called `name`, as one GGUF file, tensor by tensor.

    Args:
        sources: all tensors, under their names in transformers.
        dtype: of matrices; one of DTYPES. Vectors, such as norms, are float32, as readers want.

    Raises:
        ModelError: the family, the tokenizer or a tensor cannot be written.
        StorageError: the disk is full or fails.
    """
    import gguf
    import numpy as np

    family = family_of(config)
    keys = keys_of(family, config)
    tensors = _tensors(family, config, sources, dtype)
    writer: Any = gguf.GGUFWriter(path, family.architecture)
    size = sum(math.prod(source.shape) for source in sources)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(gguf.size_label(size, 0, 0, 0))
    writer.add_file_type(getattr(gguf.LlamaFileType, NAMES[dtype][1]))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        add[type(value)](f"{family.architecture}.{key}", value)
    add_tokenizer(writer, tokenizer, config.vocab_size)
    for tensor in tensors:
        kind = getattr(gguf.GGMLQuantizationType, NAMES[tensor.dtype][0])
        shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.dtype.itemsize)  # as bytes
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), kind)
    with system_errors(path, "write it"):
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                values = family.changed(tensor.name, _values(tensor), config).contiguous()
                writer.write_tensor_data(values.view(torch.uint8).numpy())
                beat(BYTES_WRITTEN, values.nbytes)
        finally:
            writer.close()


def _tensors(
    family: Family, config: PretrainedConfig, sources: Sequence[TensorSource], dtype: torch.dtype
) -> list[Tensor]:
    """All tensors of a file, a mixture's experts under one name. Raises ModelError for one without
    a name in GGUF."""
    import gguf

    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    found = {source.name: {0: source} for source in rope_tensors(config)}
    for source in sources:
        expert = EXPERT.search(source.name)
        own = EXPERT.sub(".experts.", source.name)
        # a model saved without its head has names without the prefix
        called = (names.get_name(each, (".weight", ".bias")) for each in (own, f"model.{own}"))
        known = next(filter(None, called), None)
        number = int(expert[1]) if expert else 0
        if known is None or number in found.get(known, {}):
            raise _beyond_gguf(config, f"a tensor {source.name}")
        found.setdefault(known, {})[number] = source
    tensors = []
    for name, by_number in found.items():
        parts = [by_number[at] for at in sorted(by_number)]
        experts = (len(parts),) if EXPERT.search(parts[0].name) else ()
        whole = torch.empty((*experts, *parts[0].shape), device="meta")
        shape = tuple(family.changed(name, whole, config).shape)
        exact = len(shape) < 2 or "ffn_gate_inp" in name  # which readers want in float32
        tensors.append(Tensor(name, parts, shape, torch.float32 if exact else dtype))
    return tensors


def _values(tensor: Tensor) -> torch.Tensor:
    """The values as transformers has them. Raises ModelError for values beyond float16."""
    parts = []
    for part in tensor.sources:
        whole = torch.cat([piece.flatten().cpu() for piece in part.pieces()]).view(part.shape)
        values = whole.to(tensor.dtype)
        if tensor.dtype == torch.float16 and bool((values.isinf() & ~whole.isinf()).any()):
            raise ModelError(
                f"{part.name}: has values beyond those of float16; export it as bfloat16"
            )
        parts.append(values)
    return torch.stack(parts) if EXPERT.search(tensor.sources[0].name) else parts[0]


# -- tokenizers -----------------------------------------------------------------------------------

SPACE = "▁"  # how sentencepiece writes one
# Gemma's; when it splits there are none left
AT_SPACES: dict[str, Any] = {"type": "Split", "pattern": {"String": " "}, "invert": False}
AT_SPACES |= {"behavior": "MergedWithPrevious"}
BYTES = re.compile("<0x[0-9A-F]{2}>")  # and those that are in no token

# How readers split text, by the name that GGUF has for it: the tokenizer's own patterns, and
# whether a word that is a token is taken whole, whatever the merges say.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2, DIGITS = "ByteLevel's own", "single digits, then ByteLevel's own"
SPLITS = {
    (GPT2, False): "gpt-2",
    (DIGITS, False): "smollm",
    (_WORDS.replace("NUMBERS", ""), False): "qwen2",
    (_WORDS.replace("NUMBERS", "{1,3}"), True): "llama-bpe",
    (_CASED, True): "tekken",
}


def add_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    """Add a tokenizer's keys to a GGUF writer; `rows`: of the embedding. Raises ModelError."""
    from gguf import TokenType

    backend = getattr(tokenizer, "backend_tokenizer", None)
    described = {} if backend is None else json.loads(backend.to_str())
    model: dict[str, Any] = described.get("model") or {}
    if model.get("type") != "BPE" or model.get("dropout") or not described:
        raise _refused("it is no byte-pair encoding")
    if any(model.get(name) for name in ("continuing_subword_prefix", "end_of_word_suffix")):
        raise _refused("its pieces have prefixes or suffixes")
    known = tokenizer.get_vocab()
    if max(known.values()) >= rows:
        raise _refused(f"it has tokens beyond the {rows:,} rows of the embedding")
    merges = [one.split(" ") if isinstance(one, str) else list(one) for one in model["merges"]]
    if any(" " in half for halves in merges for half in halves):
        raise _refused("its merges contain spaces")
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(known, described, rows)
    for token, text in enumerate(tokens if sentencepiece else ()):
        if text in (model.get("unk_token"), tokenizer.unk_token):
            types[token] = TokenType.UNKNOWN
        elif BYTES.fullmatch(text):
            types[token] = TokenType.BYTE
    space = sentencepiece and _adds_space(described)
    split = "default" if sentencepiece else _split_of(described)
    bos, eos = _adds(tokenizer)
    writer.add_tokenizer_model("llama" if sentencepiece else "gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if sentencepiece:
        writer.add_token_scores(_scores(tokens, merges))
    else:
        writer.add_token_merges([" ".join(halves) for halves in merges])
    ids = {name: getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "unk", "pad")}
    turn = end_of_turn(tokenizer)
    if turn is not None and turn != tokenizer.eos_token:
        ids["eot"] = tokenizer.convert_tokens_to_ids(turn)
    for name, token in ids.items():
        if token is not None:
            getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_bos_token(bos)
    writer.add_add_eos_token(eos)
    writer.add_add_space_prefix(space)
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template:
        writer.add_chat_template(template)


def _refused(why: str) -> ModelError:
    return ModelError(
        f"the tokenizer cannot be written into a GGUF file: {why}; export a Hugging Face folder"
    )


def _tokens(
    known: dict[str, int], described: dict[str, Any], rows: int
) -> tuple[list[str], list[int]]:
    """Texts and types by id; a row without a token is named by its id, as [PAD7]."""
    from gguf import TokenType

    tokens, types = [f"[PAD{row}]" for row in range(rows)], [int(TokenType.UNUSED)] * rows
    for text, token in known.items():
        tokens[token], types[token] = text, TokenType.NORMAL
    for added in described["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    return tokens, types


def _split_of(described: dict[str, Any]) -> str:
    """GGUF's name for how text is split before merges. Raises ModelError."""
    normalizer, ignores = described["normalizer"], bool(described["model"].get("ignore_merges"))
    found = described["pre_tokenizer"] or {}
    steps = found.get("pretokenizers", [found])
    kinds = [step.get("type") for step in steps]
    plain = kinds[-1:] == ["ByteLevel"] and not steps[-1]["add_prefix_space"]
    own = plain and steps[-1]["use_regex"]
    pattern = None
    if kinds == ["ByteLevel"] and own:
        pattern = GPT2
    elif kinds == ["Digits", "ByteLevel"] and own and steps[0]["individual_digits"]:
        pattern = DIGITS
    elif kinds == ["Split", "ByteLevel"] and plain and not own and not steps[0]["invert"]:
        pattern = steps[0]["pattern"].get("Regex") if steps[0]["behavior"] == "Isolated" else None
    name = SPLITS.get((pattern or "", ignores))
    # readers do not normalise; NFC, as of Qwen's tokenizers, changes only decomposed accents
    if name is None or (normalizer and normalizer != {"type": "NFC"}):
        known = ", ".join(SPLITS.values())
        raise _refused(f"it splits or normalises text as none of {known} does")
    return name


def _adds_space(described: dict[str, Any]) -> bool:
    """True if sentencepiece puts a space before a text. Raises ModelError."""
    normalizer, splits = described["normalizer"] or {}, described["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    prepends = {"type": "Prepend", "prepend": SPACE}
    if splits in (None, AT_SPACES) and steps in ([replaces], [prepends, replaces]):
        return prepends in steps
    spaces = splits or {}
    whole = spaces.get("type") == "Metaspace" and spaces.get("replacement") == SPACE
    if not steps and whole and not spaces.get("split"):
        return bool(spaces["prepend_scheme"] != "never")
    raise _refused("it treats spaces as no sentencepiece does")


def _scores(tokens: list[str], merges: list[list[str]]) -> list[float]:
    """Scores by which sentencepiece merges in the order of `merges`. Raises ModelError. It takes
    the pair whose piece has the best score, so merges into one piece stand together."""
    order: dict[str, int] = {}
    last = None
    for first, second in merges:
        piece = first + second
        if piece != last and piece in order:
            raise _refused("the order of its merges is none of scores")
        order.setdefault(piece, len(order))
        last = piece
    return [-float(order.get(text, len(order))) for text in tokens]


def _adds(tokenizer: PreTrainedTokenizerBase) -> tuple[bool, bool]:
    """(puts a first token before texts, puts a last one behind). Raises ModelError for others."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for bos, eos in product((False, True), repeat=2):
        if whole == [*[tokenizer.bos_token_id] * bos, *bare, *[tokenizer.eos_token_id] * eos]:
            return bos, eos
    raise _refused("it puts other tokens around texts than one at each end")
