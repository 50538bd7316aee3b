"""Finds a pretrained model (folder, GGUF file or hub id); reads its configuration and tokenizer."""

from __future__ import annotations

import copy
import hashlib
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatrain.data.chat import ChatTemplate
from megatrain.data.files import near_path
from megatrain.data.template import use_template
from megatrain.data.workers import fenced
from megatrain.errors import DataError, ModelError, if_forbidden
from megatrain.heartbeat import doing
from megatrain.models.hub import download
from megatrain.models.tokenizer_file import as_published

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# No code, no pickle; README.md says what the license is.
HUB_DESCRIPTION = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "README.md"]
HUB_WEIGHTS = ["*.safetensors"]
# The same weights once more, in other programs' layouts. A pattern's * takes folders, too.
HUB_COPIES = ["*/*.safetensors", "consolidated*.safetensors"]
# What transformers raises on files that it cannot use; struct.error: a GGUF file that ends early.
UNUSABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, ArithmeticError),
    *(RuntimeError, struct.error),
)

# What the files of a model folder describe, besides the weights.
DESCRIBED_IN = {
    "configuration": ("config.json",),
    "tokenizer": (
        *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "*.tiktoken"),
        *("special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    ),
    "chat template": ("chat_template.jinja", "chat_template.json", "additional_chat_templates/*"),
    "generation settings": ("generation_config.json",),
}
GGUF_HEAD_BYTES = 32 << 20  # a GGUF file's description comes before its weights
SHARD_BYTES = 64 << 10  # that are hashed of each end of a shard


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine. For kind "gguf", `gguf_file` names the file in the folder `path`."""

    kind: Literal["folder", "gguf"]
    path: Path
    gguf_file: str | None = None

    @property
    def file(self) -> Path:
        """The GGUF file, or the folder."""
        return self.path / self.gguf_file if self.gguf_file else self.path

    def load(self, auto: Any, trust_remote_code: bool) -> Any:
        """Read the object of transformers' class `auto` from the model's files."""
        gguf = {"gguf_file": self.gguf_file} if self.gguf_file else {}
        for name in (name for names in DESCRIBED_IN.values() for name in names):
            # to `os.path.isfile` a file that cannot be looked at is not there, and transformers
            # makes another tokenizer without it
            with suppress(FileNotFoundError, NotADirectoryError):
                (self.path / name).stat()
        return auto.from_pretrained(self.path, trust_remote_code=trust_remote_code, **gguf)


def digests_of(source: ModelSource) -> dict[str, str]:
    """SHA-256 of the files behind each of `DESCRIBED_IN`, and of names, sizes and both ends of the
    shards of weights, or the hub's commit."""
    files = {what: _matching(source.path, names) for what, names in DESCRIBED_IN.items()}
    if source.kind == "gguf":
        files = {"description": [source.file]}
    of_hub = source.path.parent.name == "snapshots"  # in its cache, by commit
    found = {"commit": source.path.name} if of_hub else {}
    try:
        for what, paths in files.items():
            digest = hashlib.sha256()
            for path in paths:
                with path.open("rb") as file:
                    digest.update(f"{path.name}\0".encode() + file.read(GGUF_HEAD_BYTES))
            found[what] = digest.hexdigest()
        digest = hashlib.sha256()
        for path in () if of_hub else _matching(source.path, HUB_WEIGHTS):
            size = path.stat().st_size
            with path.open("rb") as file:
                digest.update(f"{path.name} {size}\0".encode() + file.read(SHARD_BYTES))
                file.seek(max(0, size - SHARD_BYTES))
                digest.update(file.read())
            found["weights"] = digest.hexdigest()
    except OSError as error:
        raise ModelError(f"{source.file}: cannot be read: {error.strerror}") from error
    return found


def code_of(source: ModelSource) -> dict[str, bytes]:
    """The Python files of a model's folder by name. Raises ModelError."""
    try:
        return {path.name: path.read_bytes() for path in _matching(source.path, ("*.py",))}
    except OSError as error:
        raise ModelError(f"{source.path}: its code cannot be read: {error.strerror}") from error


def _matching(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern) if path.is_file())


def resolve_source(
    source: str | Path, revision: str | None = None, *, weights: bool = True
) -> ModelSource:
    """Find the model that `source` names: a local folder or GGUF file, else a hub id to download.
    From the hub come configuration, tokenizer and, unless `weights` is false, safetensors files
    only. `revision` is a hub branch, tag or commit. Raises ModelError if there is no such model, or
    the hub cannot be reached."""
    if not isinstance(source, str | Path):
        raise ModelError(f"{source!r}: names no model; give a folder, a GGUF file or a hub id")
    path, name = Path(expanduser(source)), str(source)
    with if_forbidden(ModelError, path):
        if path.is_dir():
            return _resolve_folder(path)
        if path.is_file():
            if path.suffix.lower() != ".gguf":
                raise ModelError(
                    f"{path}: is a file; name the folder that holds the model's config.json, "
                    "or a .gguf file"
                )
            return ModelSource("gguf", path.parent, path.name)
        if not HUB_ID.fullmatch(name) or name.lower().endswith(".gguf"):
            raise ModelError(f"{name}: no such file or folder{near_path(path)}; check the path")
        near = near_path(path)
    files = [*HUB_DESCRIPTION, *(HUB_WEIGHTS if weights else [])]
    return ModelSource("folder", download(name, revision, files, near, but=HUB_COPIES))


def cached_source(name: str, revision: str | None = None) -> ModelSource | None:
    """This machine's copy of a hub id's description, of the newest known commit, or None."""
    from huggingface_hub import snapshot_download

    if not HUB_ID.fullmatch(name):
        return None
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=HUB_DESCRIPTION, local_files_only=True
        )
    except (OSError, ValueError):
        return None
    return ModelSource("folder", Path(folder))


def _resolve_folder(folder: Path) -> ModelSource:
    next(folder.iterdir(), None)  # globs find nothing where a folder may not be listed
    if (folder / "config.json").is_file():
        return ModelSource("folder", folder)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource("gguf", folder, ggufs[0].name)
    reason = "has no config.json; name a folder that holds a Hugging Face model"
    if ggufs:
        reason = f"holds {len(ggufs)} GGUF files; name one of them, {ggufs[0].name} for example"
    elif (folder / "last").exists():
        reason = f"is a run folder; name one of its checkpoints, {folder / 'last'} for example"
    elif (folder / "adapter_config.json").is_file():
        reason = "is an adapter, not a model; merge it into its base model first"
    raise ModelError(f"{folder}: {reason}")


@contextmanager
def reading_once(source: ModelSource) -> Iterator[None]:
    """Inside, a GGUF file's description, which takes seconds, is read once, and so is the table of
    its tensors' names: transformers reads the one for each object that it makes, the other for each
    module."""
    if source.kind != "gguf":
        yield
        return
    gguf: Any = import_module("gguf")
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader, gguf.get_tensor_name_map = map(cache, before)
    try:
        with doing(f"reading {source.file.name}"):
            yield
    finally:
        gguf.GGUFReader, gguf.get_tensor_name_map = before


def read_model_config(source: ModelSource, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's configuration, without its choices of implementations and its quantisation.
    Raises ModelError if it cannot be used, or needs code from the folder, or the quantisation
    cannot be undone."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = source.file if source.kind == "gguf" else source.path / "config.json"
    try:
        config: PretrainedConfig = source.load(AutoConfig, trust_remote_code)
    except (*UNUSABLE, StrictDataclassError) as error:
        if source.kind == "folder":
            quantisation_in(source.path)  # it may be why
        raise ModelError(f"{file}: {_explain(error)}") from error
    named: Any = config.architectures  # transformers takes whatever is there
    if not isinstance(named, list | None) or not all(isinstance(n, str) for n in named or ()):
        raise ModelError(
            f"{file}: architectures is {named!r}; a list of names of classes is wanted"
        )
    quantisation_of(config.to_dict(), file)  # refuses what cannot be dequantised
    forget_quantisation(config)
    # A configuration may name a kernel repository to download and run; that is the user's to choose
    config._attn_implementation = config._experts_implementation = None
    if is_classifier(config) and (text := config.get_text_config()).pad_token_id is None:
        text.pad_token_id = 0  # heads want one; what is padding the tokenizer says
    return config


def _explain(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "needs Python code from the model's folder; read that code, and if you trust it set "
            "trust_remote_code (of eval and generate: --trust-remote-code)"
        )
    return f"cannot be used: {text[:400] or type(error).__name__}"


def load_tokenizer(
    source: ModelSource, trust_remote_code: bool = False, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a pad token: its own, or else its end-of-sequence token.
    chat_template: a name or file of one to use instead of its own. Raises ModelError if it cannot
    be used, or needs code from the folder, and DataError for a chat template that cannot."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer: PreTrainedTokenizerBase = source.load(AutoTokenizer, trust_remote_code)
        if source.kind == "folder":
            without_class = partial(source.load, PreTrainedTokenizerFast, trust_remote_code)
            tokenizer = as_published(tokenizer, source.path, without_class)
    except Exception as error:
        # of a file that it cannot parse, tokenizers raises plain Exception
        if type(error) is not Exception and not isinstance(error, UNUSABLE):
            raise
        raise ModelError(f"{source.file}: the tokenizer {_explain(error)}") from error
    if not isinstance(tokenizer.model_max_length, int | float):
        longest = f"model_max_length is {tokenizer.model_max_length!r}"
        raise ModelError(f"{source.file}: the tokenizer's {longest}; a number is wanted")
    if chat_template is not None:
        use_template(tokenizer, chat_template)
    turn = end_of_turn(tokenizer)
    if source.kind == "gguf" and turn is not None:  # whose own may be wrong
        tokenizer.eos_token = turn
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_generation_config(source: ModelSource) -> GenerationConfig | None:
    """generation_config.json of the folder, if it has one. Raises ModelError."""
    from transformers import GenerationConfig

    if source.kind == "gguf" or not (source.path / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(source.path)
    except UNUSABLE as error:
        raise ModelError(f"{source.path / 'generation_config.json'}: {_explain(error)}") from error


def load_config_and_tokenizer(
    source: ModelSource, trust_remote_code: bool = False, chat_template: str | None = None
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, GenerationConfig | None]:
    """Configuration, tokenizer and generation settings, which agree on special tokens."""
    from transformers import GenerationConfig

    with reading_once(source):
        config = read_model_config(source, trust_remote_code)
        tokenizer = load_tokenizer(source, trust_remote_code, chat_template)
    generation = load_generation_config(source)
    if source.kind == "gguf":
        ids = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
        names = "bos_token_id", "eos_token_id", "pad_token_id"
        known = {name: token for name, token in zip(names, ids, strict=True) if token is not None}
        config.update(known)
        generation = GenerationConfig(**known)  # type: ignore[no-untyped-call]
    return config, tokenizer, generation


# -- quantisation that is undone while weights are read --------------------------------------------

METHODS = ("mxfp4", "fp8")  # `storage/dequantise.py` reads them
KEY = "quantization_config"
TILE = (128, 128)  # where config.json has none


@dataclass(frozen=True)
class Quantisation:
    """One of METHODS. tile: the rows and columns that share an fp8 scale; None: all of a tensor."""

    method: str
    tile: tuple[int, int] | None


def quantisation_of(stated: Mapping[str, Any], file: Path) -> Quantisation | None:
    """The quantisation that a configuration, or a part of it, declares, if any. Raises ModelError
    for another method than METHODS; `file` is named."""
    found = None
    for part in (stated, *(value for value in stated.values() if isinstance(value, dict))):
        for key in filter(part.get, (KEY, "compression_config")):
            settings = part[key]
            if not isinstance(settings, dict):
                settings = {"quant_method": settings}
            method = settings.get("quant_method", "an unknown method")
            if key != KEY or method not in METHODS:
                raise ModelError(
                    f"{file}: the weights are quantised ({method}), which cannot be undone here; "
                    "name the unquantised model in bf16, fp16 or fp32 that they were made from"
                )
            one = Quantisation(method, _tile(settings, file) if method == "fp8" else None)
            if found not in (None, one):
                raise ModelError(f"{file}: states two quantisations; remove the one that is wrong")
            found = one
    return found


def _tile(settings: Mapping[str, Any], file: Path) -> tuple[int, int] | None:
    stated = settings.get("weight_block_size", TILE)
    if stated is None:
        return None
    match stated:
        case [int(rows), int(columns)] if min(rows, columns) > 0:
            return rows, columns
    raise ModelError(f"{file}: weight_block_size is {stated!r}; it must be two numbers, or null")


def quantisation_in(folder: Path) -> Quantisation | None:
    """As `quantisation_of`, of a folder's config.json. Raises ModelError."""
    file = folder / "config.json"
    try:
        stated = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file}: cannot be read ({error}); download it again") from error
    return quantisation_of(stated, file) if isinstance(stated, dict) else None


def forget_quantisation(config: Any) -> None:
    """Remove it from a transformers configuration, whose model is trained without."""
    from transformers import PretrainedConfig

    for part in (config, *vars(config).values()):
        if isinstance(part, PretrainedConfig):
            vars(part).pop(KEY, None)
        elif isinstance(part, dict):  # of a configuration that has no class for it
            part.pop(KEY, None)


# -- tokens that end answers, in training and in generation ----------------------------------------

# What templates were found to end turns with: each is asked in a process of its own.
_known: dict[str, tuple[str, ...]] = {}


def ends_of_turns(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that end an assistant's turns in the chat template, the usual one first."""
    if not tokenizer.chat_template:
        return ()
    special = sorted(map(str, tokenizer.added_tokens_decoder.values()))
    asked = str((tokenizer.chat_template, tokenizer.special_tokens_map, special))
    if asked not in _known:
        try:
            template = ChatTemplate(tokenizer)
        except DataError:  # none of several is the default
            return ()
        _known[asked] = fenced(lambda: template.stops)
    return _known[asked]


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The token that ends an assistant's turn in the chat template, if there is one."""
    return next(iter(ends_of_turns(tokenizer)), None)


def stop_ids(settings: GenerationConfig | PretrainedConfig | None) -> list[int]:
    """The end-of-sequence ids of generation settings, or of a configuration where these lack."""
    ids: Any = getattr(settings, "eos_token_id", None)
    return [token for token in (ids if isinstance(ids, list) else [ids]) if token is not None]


def with_stops(
    config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    generation: GenerationConfig | None,
) -> tuple[GenerationConfig | None, list[str]]:
    """(generation settings that stop at what ends an answer, the tokens that they lacked).
    generation: None for a model that has none, for which transformers takes the configuration's."""
    from transformers import GenerationConfig

    if is_classifier(config):
        return None, []
    known = stop_ids(generation or config)
    tokens = dict.fromkeys(filter(None, (tokenizer.eos_token, *ends_of_turns(tokenizer))))
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in tokens}
    lacking = [token for token, number in ids.items() if number not in (None, *known)]
    if not lacking:
        return generation, []
    settings: Any = copy.deepcopy(generation) or GenerationConfig.from_model_config(config)
    all_ids = [*known, *(ids[token] for token in lacking)]
    settings.eos_token_id = all_ids if len(all_ids) > 1 else all_ids[0]
    return settings, lacking


def about_added(tokens: list[str]) -> str:
    """The sentence about tokens that generation settings lacked; empty for none."""
    named = " and ".join(tokens)
    return named and f"{named} ends answers here: generation_config.json, which lacked it, gets it"


# -- reward models ---------------------------------------------------------------------------------

# Transformers' classes for sequence classification, with one label: the head gives a score instead
# of logits. The score of a sequence is that of its last token that is no padding; what follows the
# last layer mixes no tokens, so every token has one.
ENDING = "ForSequenceClassification"


def is_classifier(config: Any) -> bool:
    """True if a configuration names a class for sequence classification."""
    return bool(config.architectures) and str(config.architectures[0]).endswith(ENDING)


def as_classifier(config: Any, pad_id: int) -> Any:
    """The configuration of a language model's reward model, or of the same one. pad_id: of the
    tokenizer; transformers takes the last token that is another. Raises ModelError where
    transformers has no such class, or if it has several labels."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    found = copy.deepcopy(config)
    if not is_classifier(config):
        if config.model_type not in CLASSES:
            raise ModelError(
                f"model type {config.model_type!r} has no class for sequence classification in "
                "transformers, so there is no reward model of it; choose another model"
            )
        found.architectures, found.num_labels = [CLASSES[config.model_type]], 1
    if found.num_labels != 1:
        raise ModelError(
            f"{found.architectures[0]} has {found.num_labels} labels; a reward model has one"
        )
    found.get_text_config().pad_token_id = pad_id
    return found


def as_language_model(config: Any) -> Any:
    """A reward model's configuration as its language model's; others as they are."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if not is_classifier(config):
        return config
    found = copy.deepcopy(config)
    name = CAUSAL.get(config.model_type)
    found.architectures = [name] if name else None
    return found
