"""Where a run goes on: its checkpoint, the config of that, and what has changed since."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megatrain.config import Config
from megatrain.config.resuming import check_changes, resumed_configs
from megatrain.data.build import Expected
from megatrain.errors import StorageError
from megatrain.recipes.changed import changed_source
from megatrain.recipes.describe import RANKS, SUMS
from megatrain.recipes.model import Model, describe_model, read_model
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


@dataclass(frozen=True)
class GoingOn:
    """A checkpoint to go on from, and the config that it was saved under."""

    found: Resumable
    digests: Mapping[str, str]  # of the model's files, when the run began
    rows: Expected
    before: Config
    config: Config
    warnings: tuple[str, ...]  # of checkpoints passed over, and of what has changed
    sums: int | None = None  # that stay on the device, as was planned for so many ranks
    ranks: int | None = None

    def is_the_end(self, run_dir: Path) -> bool:
        """Whether the run was finished, and nothing else is asked of it now."""
        if self.found.path is None or self.found.named or self.config != self.before:
            return False
        return sequence_of(run_dir / FINAL, -1) >= sequence_of(self.found.path)

    def model(self) -> Model:
        """As the checkpoint describes it; what has changed where it came from is said.

        Code that comes with a model is trusted where the config says, and nowhere else: then all is
        read from there.
        """
        assert self.found.path is not None
        for change in changed_source(self.before, self.digests):
            logger.warning(change)
        if self.config.model.trust_remote_code:
            return read_model(self.config)
        return replace(describe_model(str(self.found.path)), digests=self.digests)


def final_is_whole(run_dir: Path) -> bool:
    """Whether every file of `final/` but its card, which is made to be edited, is as it was saved.

    If not, it says so.
    """
    final = run_dir / FINAL
    try:
        manifest = read_manifest(final)
        check_files(final, manifest, [name for name in manifest.files if name != CARD])
    except StorageError as error:
        logger.warning(f"{error}; {final} is written anew")
        return False
    return True


def where_to_go_on(
    run_dir: Path, asked: Config, name: str | None = None, *, deep: bool = False
) -> GoingOn:
    """Find the checkpoint and compare configs. Raises StorageError and ConfigError."""
    found = named_checkpoint(run_dir, name) if name else find_resumable(run_dir, deep)
    if found.path is None:
        for warning in found.warnings:
            logger.warning(warning)
        raise nothing_to_resume(run_dir)
    about = read_about(found.path)
    before, config = resumed_configs(run_dir, asked, about["state"])
    changes = check_changes(before, config)
    digests = about["made_of"].get("source", {})
    same = before.data.eval == config.data.eval
    held_out = about["state"].get("held_out") if same else None
    rows = Expected(about["state"]["position"]["data"], held_out)
    sums, ranks = (about["state"].get(name) for name in (SUMS, RANKS))
    return GoingOn(found, digests, rows, before, config, (*found.warnings, *changes), sums, ranks)
