"""What has changed around a run since it began; the checkpoint has what it needs all the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatrain.config import Config
from megatrain.errors import DataError, ModelError, if_forbidden
from megatrain.models.pretrained import cached_source, digests_of, resolve_source
from megatrain.recipes.model import TEMPLATE, digest_of_template

KEPT = "the checkpoint's is used"
DESCRIBED = "the checkpoint describes the model"


def changed_source(config: Config, then: Mapping[str, str]) -> list[str]:
    """What has changed in the files that the run's model and chat template came from.

    Of the hub it is what this machine's cache has: nothing is asked for.

    then: their digests when the run began.
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
