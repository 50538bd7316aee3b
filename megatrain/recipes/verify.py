"""The self-check of a model's family, and its verdicts: `plan` and `train` ask for one once."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass, replace
from os.path import expanduser  # leaves `~nobody` as it is, where Path's raises
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PretrainedConfig

from megatrain.config import Config
from megatrain.config.load import bench_config
from megatrain.data.samples import name_for
from megatrain.engine.verify import FORMAT, Verdict
from megatrain.engine.verify import verify as check
from megatrain.errors import MegaTrainError, StorageError, VerificationError, logger
from megatrain.machine.profile import (
    PACKAGES,
    cache_folder,
    installed_version,
    read_cached,
    write_json,
)
from megatrain.models.constants import parts_of
from megatrain.models.family import is_foreign
from megatrain.models.skeleton import Skeleton
from megatrain.recipes.model import read_model, shape_config
from megatrain.recipes.setup import quiet_libraries
from megatrain.storage.manifest import check_model_files, manifest_of_model

REMOTE = "transformers_modules."  # where transformers keeps code that comes with a model
NOT_OF_THE_FAMILY = ("_name_or_path", "dtype", "use_cache")


@dataclass(frozen=True)
class Checked:
    """The verdict of `megatrain verify`."""

    model: str
    family: str
    verdict: Verdict
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        about = {"model": self.model, "family": self.family, "seconds": round(self.seconds, 3)}
        return about | self.verdict.to_dict()

    def render(self, console: Console) -> None:
        found, on = self.verdict, " on text and images" * self.verdict.images
        passed = f"a small model of it is read, written and trained{on} as in plain PyTorch"
        about = f"{self.family}: {found.state} ({self.seconds:.1f} s)"
        said = [about, passed * (found.state == "passed"), found.stage, found.reason]
        console.print(": ".join(filter(None, said)), highlight=False, markup=False, soft_wrap=True)


def verify(source: str, trust_remote_code: bool = False) -> Checked:
    """Check the family of a folder, hub id or named shape, and keep the verdict: with an image
    where the model has a processor. In a folder that has a manifest every file is compared with it
    before (StorageError)."""
    quiet_libraries()
    folder = Path(expanduser(source))
    if manifest := manifest_of_model(folder):
        check_model_files(folder, manifest, manifest.files, trust_remote_code)
    trusted = {"model.trust_remote_code": trust_remote_code, "model.images": True}
    config = bench_config(source).with_values(trusted)
    started = time.perf_counter()
    skeleton, blind = seeing_skeleton(config, shape_config(config))
    verdict = check(skeleton, trust_remote_code)
    keep(skeleton, verdict)
    verdict = replace(verdict, reason=verdict.reason or blind)
    return Checked(source, skeleton.anatomy.family, verdict, time.perf_counter() - started)


def seeing_skeleton(config: Config, described: PretrainedConfig) -> tuple[Skeleton, str]:
    """The model's skeleton, which sees if its processor can be used, or the reason why not."""
    blind, trusted = "", config.model.trust_remote_code
    try:
        if parts_of(described) and (sight := read_model(config).sight):
            return Skeleton(described, image_row=sight.row, trust_remote_code=trusted), ""
    except MegaTrainError as error:
        blind = f"on text alone ({error})"
    return Skeleton(described, trust_remote_code=trusted), blind


def check_once(skeleton: Skeleton, trust_remote_code: bool) -> Verdict:
    """Check a model's family, once for a configuration and versions: its verdict. Raises
    VerificationError."""
    verdict = read_cached(file_of(skeleton), Verdict)
    if verdict is None:
        logger.info(f"comparing a small {skeleton.anatomy.family} model with plain PyTorch, once")
        verdict = check(skeleton, trust_remote_code)
        keep(skeleton, verdict)
    if verdict.computes_wrongly:
        raise VerificationError(
            f"a small {skeleton.anatomy.family} model is not trained as in plain PyTorch "
            f"({verdict.stage}: {verdict.reason}), so this one would not be; please report it with "
            "the model's config.json"
        )
    if verdict.reason and verdict.state != "failed":
        was = "was checked" if verdict.state == "passed" else "was not checked:"
        logger.warning(
            f"whether {skeleton.anatomy.family} models are trained as in plain PyTorch {was} "
            f"{verdict.reason}"
        )
    return verdict


# -- verdicts that are kept ------------------------------------------------------------------------


def causes_of(skeleton: Skeleton) -> dict[str, object]:
    """All that a model's results follow from, but for its weights, by name."""
    stated = skeleton.config.to_dict().items()
    return {
        "model class": type(skeleton.model).__name__ + " of images" * bool(skeleton.image_row),
        "attention": skeleton.config._attn_implementation,
        "configuration": {key: one for key, one in stated if key not in NOT_OF_THE_FAMILY},
        "code": code_digests(skeleton),
        **{package: installed_version(package) for package in PACKAGES},
    }


def causes_named(skeleton: Skeleton) -> dict[str, str]:
    """A short name for each of these causes, which ranks compare."""
    return {name: name_for({name: part}) for name, part in causes_of(skeleton).items()}


def file_of(skeleton: Skeleton) -> Path:
    """Path of the cached verdict on a configuration, for these versions."""
    return cache_folder() / f"verified-{name_for({'format': FORMAT, **causes_of(skeleton)})}.json"


def code_digests(skeleton: Skeleton) -> list[str]:
    """SHA-256 of each Python file of the model's code, where that came with it or the program."""
    stacked = (module for layer in skeleton.layers for module in layer.modules())
    modules = (*skeleton.model.modules(), *stacked)
    names = {type(module).__module__ for module in modules if is_foreign(module)}
    # what came with a model lies in one package, whose modules may use each other
    packages = tuple(f"{name.rpartition('.')[0]}." for name in names if name.startswith(REMOTE))
    names |= {name for name in sys.modules if name.startswith(packages)}
    files = {getattr(sys.modules.get(name), "__file__", None) for name in names}
    texts = (Path(file).read_bytes() for file in files if file)
    return sorted(hashlib.sha256(text).hexdigest() for text in texts)


def keep(skeleton: Skeleton, verdict: Verdict) -> None:
    """Keep a verdict, unless it stops runs: that is asked anew each time."""
    file = file_of(skeleton)
    try:
        if verdict.computes_wrongly:
            file.unlink(missing_ok=True)
        else:
            write_json(file, verdict.to_dict())
    except (OSError, StorageError) as error:
        logger.warning(f"the verdict is not kept: {error}")
