"""The model of a run as its files describe it, or as a named shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from megatrain.config import Config
from megatrain.data.formats import renamed
from megatrain.data.images import Sight
from megatrain.data.samples import PROMPTS, names_images
from megatrain.data.sources import Part, open_source
from megatrain.data.template import find_template
from megatrain.errors import ConfigError, DataError, ModelError, if_forbidden
from megatrain.methods import METHODS
from megatrain.models import pretrained
from megatrain.models.constants import parts_of
from megatrain.models.shapes import named_shape, set_depth
from megatrain.models.skeleton import Skeleton
from megatrain.storage.manifest import check_description
from megatrain.storage.passthrough import processor_files
from megatrain.storage.safetensors import open_shards
from megatrain.storage.weights import check_headers

TEMPLATE = "data.chat_template"
# random tokens need none
NO_TOKENIZER: Any = SimpleNamespace(pad_token_id=None, eos_token_id=None)


@dataclass(frozen=True)
class Model:
    """A model as its files describe it: everything but the weights. `digests`: of those files
    (models/pretrained.py), where a run began. `code`: its own Python files, where they are trusted,
    and those of its processor of images; every save has them, too."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    generation: GenerationConfig | None
    digests: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, bytes] = field(default_factory=dict)
    sight: Sight | None = None  # reads images, where rows have some

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def pad_id(self) -> int:
        """The token that fills rows; any will do: no real token sees it, and it has no target."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        return next((token for token in ids if token is not None), 0)

    @property
    def about_stops(self) -> str:
        """A notice of stop tokens that saved generation settings get; empty for none."""
        _, added = pretrained.with_stops(self.config, self.tokenizer, self.generation)
        return pretrained.about_added(added)


def read_model(config: Config) -> Model:
    """Configuration and tokenizer of the config's model. Raises ModelError, ConfigError, and
    DataError for a template of the model's own."""
    model, template = config.model, config.data.chat_template
    given = model.source, model.revision, model.trust_remote_code
    try:
        found = describe_model(*given, template)
    except DataError as error:
        if template is None:
            raise
        raise ConfigError(f"{config.where('data.chat_template')}: {error}") from error
    return sighted(found, config, pretrained.resolve_source(*given[:2], weights=False).path)


def sighted(model: Model, config: Config, folder: Path) -> Model:
    """The model with its processor of images, which is in `folder`, where the config asks for it.
    Raises ConfigError."""
    wanted, where = config.model.images, config.where("model.images")
    sees = bool(parts_of(model.config)) and METHODS[config.method].kind != PROMPTS
    if wanted is True and not sees:
        reason = f"{folder} is for text, or method {config.method} reads no images"
        raise ConfigError(f"{where}: {reason}; set model.images: false")
    if wanted is True or (wanted == "auto" and sees and shows_images(config)):
        return seeing(model, folder, where)
    return model


def seeing(model: Model, folder: Path, where: str) -> Model:
    """The model with its processor of images, which is in `folder`. Raises ConfigError where there
    is none, and names `where` it was asked for."""
    sight = Sight.of(folder, model.tokenizer, model.config.model_type)
    if sight is None:
        raise ConfigError(
            f"{where}: {folder} has no processor of images; name a model that sees, with its "
            "preprocessor_config.json"
        )
    return replace(model, sight=sight, code={**model.code, **processor_files(folder)})


FIRST_ROWS = 64


def shows_images(config: Config) -> bool:
    """True if one of the first rows has an image."""
    try:
        source = open_source(parts_in(config, config.data.train), config.data.split, True)
        rows = (renamed(row.value, config.data.columns or {}) for row in source.read())
        return any(map(names_images, islice(rows, FIRST_ROWS)))
    except DataError:  # said where rows are read; those of a run that goes on may be in the cache
        return False


def parts_in(config: Config, given: Any) -> list[Part]:
    """A config's sources as `open_source` takes them."""
    return [Part(**dict(one), rows=config.rows.get(one.path)) for one in given]


def suited(model: Model, config: Config) -> Model:
    """The model with the head that the config's method trains. Raises ModelError where there is
    none, and for a reward model under another method."""
    if METHODS[config.method].scores:
        headed = pretrained.as_classifier(model.config, model.pad_id)
        return replace(model, config=headed, generation=None)
    check_writes(model, config.model.source, f"set method: reward instead of {config.method}, or ")
    return model


def check_writes(model: Model, named: str, remedy: str = "") -> None:
    """Raise ModelError for a reward model. remedy: another than to name a language model."""
    if pretrained.is_classifier(model.config):
        raise ModelError(
            f"{named}: is a reward model, which gives scores and writes no text; {remedy}name a "
            "language model"
        )


def describe_model(
    source: str | Path,
    revision: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> Model:
    """Configuration and tokenizer of a folder, a GGUF file or a hub id, without the weights.
    chat_template: as in `load_tokenizer`. Raises ModelError, StorageError, and DataError for the
    template."""
    found = pretrained.resolve_source(source, revision, weights=False)
    check_description(found.path, trust_remote_code)
    read = pretrained.load_config_and_tokenizer(found, trust_remote_code, chat_template)
    code = pretrained.code_of(found) if trust_remote_code and found.kind == "folder" else {}
    return Model(*read, pretrained.digests_of(found) | digest_of_template(chat_template), code)


def digest_of_template(name: str | None) -> dict[str, str]:
    """SHA-256 of `data.chat_template`, if it is set. Raises DataError if it cannot be read."""
    text = None if name is None else find_template(name)
    return {TEMPLATE: hashlib.sha256(text.encode()).hexdigest()} if text is not None else {}


def check_weights(source: str | Path, *, needed: bool = True) -> None:
    """Check that a local folder holds the weights that its index names, before anything takes long.
    needed: false allows a folder without any. Raises ModelError and StorageError."""
    folder = Path(expanduser(source))
    if not folder.is_dir() or pretrained.resolve_source(folder).kind == "gguf":
        return
    if needed or any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        open_shards(folder)


def check_tensors(skeleton: Skeleton, source: str) -> None:
    """Check that the weights of a local folder are the model's, before anything takes long. Raises
    ModelError and StorageError."""
    folder = Path(expanduser(source))
    headless = skeleton.anatomy.labels is not None  # its head may be drawn
    if headless or not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return
    check_headers(skeleton.anatomy, skeleton.constants, pretrained.resolve_source(folder))


def changed_source(config: Config, then: Mapping[str, str]) -> list[str]:
    """Describe changes in the files that the run's model and chat template came from. A hub's model
    is looked up in this machine's cache only. then: digests when the run began."""
    found, path, now = [], Path(config.model.source), dict[str, str]()
    used = "the checkpoint's is used"
    if config.model.trust_remote_code:
        used = "it is used as it is now, as its code is not read from a checkpoint"
    template = config.data.chat_template
    try:
        if digest_of_template(template).get(TEMPLATE) != then.get(TEMPLATE):
            found.append(f"{template}: has changed since this run began; the checkpoint's is used")
    except DataError as error:
        found.append(f"{error}; the checkpoint's is used")
    try:
        with if_forbidden(ModelError, path):
            there = path.exists()
        if path.is_absolute() and not there:
            raise ModelError(f"{path}: is no longer there")
        local = pretrained.resolve_source(path, weights=False) if there else None
        if source := local or pretrained.cached_source(config.model.source, config.model.revision):
            now = pretrained.digests_of(source)
    except ModelError as error:
        found.append(f"{error}; the checkpoint describes the model")
    changed = [what for what in now if what in then and now[what] != then[what]]
    return found + [
        f"{path}: its {what} {'have' if what.endswith('s') else 'has'} changed since this run "
        f"began; {used}"
        for what in changed
    ]


# -- shapes: models without weights ----------------------------------------------------------------


def shape_model(config: Config, layers: int | None = None) -> Model:
    """A model that has a configuration, but no files. Raises ModelError."""
    return Model(shape_config(config, layers), NO_TOKENIZER, None)


def shape_config(config: Config, layers: int | None = None) -> PretrainedConfig:
    """transformers' configuration of the config's model. A folder of a shape's name wins. layers:
    another depth than the model's own. Raises ModelError."""
    model = config.model
    if shape := named_shape(model.source):
        described: PretrainedConfig = AutoConfig.for_model(**shape)
        longest = max(described.max_position_embeddings, config.train.seq_len)
        described.max_position_embeddings = longest  # random weights know no position
    else:
        found = pretrained.resolve_source(model.source, model.revision, weights=False)
        described = pretrained.read_model_config(found, model.trust_remote_code)
    if layers is not None:
        set_depth(described, layers)
    return described
