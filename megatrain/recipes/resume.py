"""The checkpoint that a run is resumed from: its config, and the changes since it was saved."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.config import Config
from megatrain.config.resuming import check_changes, former_keys, resumed_configs
from megatrain.data.build import Expected
from megatrain.errors import DataError, ModelError, StorageError, if_forbidden
from megatrain.models.pretrained import cached_source, digests_of, resolve_source
from megatrain.recipes.describe import RANKS, SUMS
from megatrain.recipes.model import TEMPLATE, Model, describe_model, digest_of_template, read_model
from megatrain.storage.manifest import check_files, read_manifest
from megatrain.storage.restore import (
    Resumable,
    find_resumable,
    named_checkpoint,
    nothing_to_resume,
    read_about,
)
from megatrain.storage.run_folder import CARD, FINAL
from megatrain.storage.saves import sequence_of

logger = logging.getLogger("megatrain")

KEPT = "the checkpoint's is used"
DESCRIBED = "the checkpoint describes the model"


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from, and the config that it was saved under."""

    found: Resumable
    digests: Mapping[str, str]  # of the model's files, when the run began
    rows: Expected
    before: Config
    config: Config
    warnings: tuple[str, ...]  # of checkpoints passed over, and of what has changed
    sums: int | None = None  # that stay on the device, as planned for `ranks`
    ranks: int | None = None

    def is_the_end(self, run_dir: Path) -> bool:
        """True if the run was finished, and nothing else is asked of it now."""
        if self.found.path is None or self.found.named or self.config != self.before:
            return False
        return sequence_of(run_dir / FINAL, -1) >= sequence_of(self.found.path)

    def model(self) -> Model:
        """The model as the checkpoint describes it, with warnings of changes in its source.

        A model whose own code is trusted is read from its source: no checkpoint's code is run.
        """
        assert self.found.path is not None
        for change in changed_source(self.before, self.digests):
            logger.warning(change)
        if self.config.model.trust_remote_code:
            return read_model(self.config)
        return replace(describe_model(str(self.found.path)), digests=self.digests)


def final_is_whole(run_dir: Path) -> bool:
    """True if every file of `final/` but its card, which is made to be edited, is as it was saved;
    a warning names the first that is not."""
    final = run_dir / FINAL
    try:
        manifest = read_manifest(final)
        check_files(final, manifest, [name for name in manifest.files if name != CARD])
    except StorageError as error:
        logger.warning(f"{error}; {final} is written again")
        return False
    return True


# why: decision 0050
def resume_point(
    run_dir: Path, asked: Config, name: str | None = None, *, deep: bool = False
) -> ResumePoint:
    """Find the checkpoint and compare configs. Raises StorageError and ConfigError."""
    found = named_checkpoint(run_dir, name) if name else find_resumable(run_dir, deep)
    if found.path is None:
        for warning in found.warnings:
            logger.warning(warning)
        raise nothing_to_resume(run_dir)
    about = read_about(found.path)
    before, config = resumed_configs(run_dir, asked, about["state"])
    changes = [*former_keys(about["state"]), *check_changes(before, config)]
    digests = about["made_of"].get("source", {})
    same = before.data.eval == config.data.eval
    held_out = about["state"].get("held_out") if same else None
    rows = Expected(about["state"]["position"]["data"], held_out)
    sums, ranks = (about["state"].get(name) for name in (SUMS, RANKS))
    return ResumePoint(
        found, digests, rows, before, config, (*found.warnings, *changes), sums, ranks
    )


def changed_source(config: Config, then: Mapping[str, str]) -> list[str]:
    """Describe changes in the files that the run's model and chat template came from.

    A hub's model is looked up in this machine's cache only. then: digests when the run began.
    """
    found, template = [], config.data.chat_template
    try:
        if digest_of_template(template).get(TEMPLATE) != then.get(TEMPLATE):
            found.append(f"{template}: has changed since this run began; {KEPT}")
    except DataError as error:
        found.append(f"{error}; {KEPT}")
    path, revision, used = Path(config.model.source), config.model.revision, KEPT
    if config.model.trust_remote_code:
        used = "it is used as it is now, as its code is not read from a checkpoint"
    try:
        with if_forbidden(ModelError, path):
            there = path.exists()
        if path.is_absolute() and not there:
            return [*found, f"{path}: is no longer there; {DESCRIBED}"]
        local = resolve_source(path, weights=False) if there else None
        source = local or cached_source(config.model.source, revision)
        now = digests_of(source) if source else {}
    except ModelError as error:
        return [*found, f"{error}; {DESCRIBED}"]
    changed = [what for what in now if what in then and now[what] != then[what]]
    return found + [
        f"{path}: its {what} {'have' if what.endswith('s') else 'has'} changed since this run "
        f"began; {used}"
        for what in changed
    ]
