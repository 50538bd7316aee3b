"""What is found out about equal models once in a session, where tests build the same tiny ones
again and again, in several processes."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import typer
from torch import Tensor, nn

from megatrain.data import workers
from megatrain.data.workers import Team
from megatrain.engine.verify import Verdict
from megatrain.engine.verify import verify as check_family
from megatrain.models.skeleton import Skeleton
from megatrain.models.transforms.chunked import chunks_of
from megatrain.models.trials.probe import Findings, probe_model
from megatrain.planner.cost.dry_run import shape_of
from megatrain.planner.cost.shape import ModelShape
from tests.helpers.kernel_packages import kernels_there

MAP = Team.map
SAMPLE_TOKENS = 2  # of the answer that ends every run: each takes a forward of its own


def config_of(model: Any) -> dict[str, Any]:
    """What a model was made with, wherever its folder is: a run's checkpoints have the same."""
    return {**model.config.to_dict(), "_name_or_path": ""}


def key_of(skeleton: Skeleton, *more: Any, frozen: bool = True) -> str:
    """Of what a skeleton is made. `frozen`: and of which of its tensors are trained."""
    attention = getattr(skeleton.config, "_attn_implementation", None)
    chunked = [
        name
        for layer in skeleton.layers
        for name, module in layer.named_modules()
        if chunks_of(module)
    ]
    hooked = [
        name
        for layer in skeleton.layers
        for name, module in layer.named_modules()
        if module._forward_hooks
    ]
    config = config_of(skeleton.model)
    names = skeleton.anatomy.frozen if frozen else ()
    return repr((skeleton.model, skeleton.dtype, attention, config, chunked, hooked, names, more))


class Once:
    """Values by a key, for all processes of a session: files in its temporary folder."""

    def __init__(self, kind: str) -> None:
        self.folder = Path(os.environ["MEGATRAIN_TEST_HF_HOME"]) / "once" / kind
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Any] = {}

    def get(self, key: str, find: Callable[[], Any]) -> Any:
        if key not in self.known:
            file = self.folder / hashlib.sha256(key.encode()).hexdigest()
            if not file.exists():
                mine = file.with_suffix(f".{os.getpid()}")
                mine.write_bytes(pickle.dumps(find()))
                mine.replace(file)  # whole, whoever else writes or reads it
            self.known[key] = pickle.loads(file.read_bytes())
        return self.known[key]


@contextmanager
def products_left_out_are_found_once() -> Iterator[None]:
    """Which products recomputation may leave out: half of the time to build a tiny engine."""
    once, find = Once("products"), Skeleton.find_skippable

    def found(skeleton: Skeleton) -> list[tuple[str, ...]]:
        find(skeleton)
        return skeleton._skippable

    def find_skippable(skeleton: Skeleton) -> None:
        # layers' tensors are frozen only when they are bound, later
        key = key_of(skeleton, frozen=False)
        skeleton._skippable = once.get(key, lambda: found(skeleton))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Skeleton, "find_skippable", find_skippable)
        yield


@contextmanager
def models_are_probed_once() -> Iterator[None]:
    """How a model is put together: a third of the time to build a tiny skeleton."""
    once = Once("findings")

    def probed_once(
        model: nn.Module, layers: nn.ModuleList, image_row: Mapping[str, Tensor] | None
    ) -> Findings:
        if image_row is not None:
            return probe_model(model, layers, image_row)
        config: Any = model.config
        changed = (
            [name for name, _ in model.named_parameters()],
            [name for name, module in model.named_modules() if module._forward_hooks],
            kernels_there(model),
        )
        key = repr((type(model), config._attn_implementation, config_of(model), changed))
        findings: Findings = once.get(key, lambda: probe_model(model, layers))
        return findings

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.models.skeleton.probe_model", probed_once)
        yield


@contextmanager
def commands_dry_run_models_once() -> Iterator[None]:
    """What the planner knows of a model: half of the time of a short run."""
    once = Once("shapes")

    def found_once(skeleton: Skeleton, *positional: Any, **named: Any) -> ModelShape:
        of_what = {name: getattr(value, "__qualname__", value) for name, value in named.items()}
        shape: ModelShape = once.get(
            key_of(skeleton, positional, of_what),
            lambda: shape_of(skeleton, *positional, **named),
        )
        return shape

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.engine.resolved.shape_of", found_once)
        yield


@contextmanager
def answers_are_short() -> Iterator[None]:
    """What the model says at the end of every run: a quarter of the time of a short one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.recipes.sample.SAMPLE_TOKENS", SAMPLE_TOKENS)
        yield


@contextmanager
def families_are_checked_once() -> Iterator[None]:
    """What runs with a token cache of their own, where no verdict is kept, would each do again."""
    from megatrain.recipes import verify

    once = Once("verdicts")

    def checked_once(skeleton: Skeleton, trust_remote_code: bool) -> Verdict:
        if trust_remote_code:
            return check_family(skeleton, trust_remote_code)
        key = verify.file_of(skeleton).name  # of all that a verdict depends on
        verdict: Verdict = once.get(key, lambda: check_family(skeleton, trust_remote_code))
        return verdict

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "check", checked_once)
        yield


@contextmanager
def arguments_are_declared_once() -> Iterator[None]:
    """The command line's parser: a hundredth of a second of each command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("typer.main.get_command", cache(typer.main.get_command))
        yield


@contextmanager
def auto_precision_is_float32() -> Iterator[None]:
    """As on a processor that is not fast at bf16, which takes half as long again for tiny products
    and is asked for by name where runs have to be the same in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.engine.request.bf16_is_fast", lambda kind: False)
        yield


@contextmanager
def few_steps_are_looked_at() -> Iterator[None]:
    """How long rows are is known of a run's first steps, which are ten here and not hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatrain.data.loader.STEPS_LOOKED_AT", 16)
        yield


@contextmanager
def no_power_is_lost() -> Iterator[None]:
    """No file is waited for until it is on the disk: a kill loses none. Tests of what must be there
    count the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        yield


@contextmanager
def rows_are_encoded_here() -> Iterator[None]:
    """Each command that renders, and each set of rows, would fork the tests' process for that: a
    tenth of a second. Tests of hostile templates, and of large sets, do."""

    def encoded_here(team: Any, items: Iterable[Any]) -> Iterator[Any]:
        coming = iter(items)
        alone = islice(coming, workers.ALONE_ITEMS) if team.processes > 1 else coming
        for item in alone:
            sent = pickle.dumps(item)
            done = workers.outcome(lambda: team._work(pickle.loads(sent)))  # noqa: B023
            result, error = pickle.loads(pickle.dumps(done))
            if error is not None:
                raise error
            yield result
        yield from MAP(team, coming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "map", encoded_here)
        yield


@contextmanager
def rows_are_encoded_in_workers() -> Iterator[None]:
    """As they are for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Team, "map", MAP)
        yield


@contextmanager
def runs_are_quick() -> Iterator[None]:
    """For the length of a test, or of a fixture that trains: unlike what is found once, this would
    be another thing to the tests of other folders."""
    with (
        auto_precision_is_float32(),
        no_power_is_lost(),
        few_steps_are_looked_at(),
        rows_are_encoded_here(),
    ):
        yield


@contextmanager
def engines_are_built_fast() -> Iterator[None]:
    with models_are_probed_once(), products_left_out_are_found_once():
        yield


@contextmanager
def commands_are_short() -> Iterator[None]:
    with (
        engines_are_built_fast(),
        commands_dry_run_models_once(),
        answers_are_short(),
        families_are_checked_once(),
        arguments_are_declared_once(),
    ):
        yield
