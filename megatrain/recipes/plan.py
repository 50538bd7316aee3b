"""`megatrain plan`: from what is known of a model if its question was asked before, in a second and
without torch; else from the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatrain.config import Config
from megatrain.errors import ModelError
from megatrain.methods import METHODS
from megatrain.models.pretrained import digests_of, resolve_source
from megatrain.models.shapes import named_shape
from megatrain.planner.plan import Plan, make_plan
from megatrain.planner.question import (
    Question,
    Site,
    check_fixed,
    keep_question,
    known_question,
    posed,
)
from megatrain.recipes.planned_site import (
    beside_others,
    described_site,
    notice_no_bfloat16,
    notice_no_effect,
    notice_other_balance,
    steps_of,
    with_economy,
)
from megatrain.recipes.ranks.launch import ranks_for
from megatrain.settings import OPTIONS

OF_SEVERAL = {"gpus", "hosts", "network"}  # these alone describe no other machine
# Options on which a kept question depends: sizes of the dry run, and a check of groups.
OF_SHAPE = {"train.micro_batch_tokens", "train.layer_chunk_tokens", "train.groups"}
# Keys on which it does not depend: `plan_known` reads them anew, or plans do not.
FREE = {option.key for option in OPTIONS} - OF_SHAPE
FREE |= {"gpus", "output", "memory.gpu", "memory.host", "memory.transport"}
FREE |= {f"train.{key}" for key in ("tokens_per_step", "rows_per_step", "epochs", "max_steps")}


def plan(
    config: Config, shape_alone: bool = False, described: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a config's run. Loads no weights and touches no GPU. Raises MegaTrainError.

    Args:
        shape_alone: the model has no files but its configuration, or is a name (models/shapes.py).
        described: another machine than this one, or several of its GPUs, in the keywords of
            `planned_machine`, if any of them is not None.
    """
    other = {name: value for name, value in (described or {}).items() if value is not None}
    if other and "gpus" not in other and config.gpus != "auto":
        other["gpus"] = config.gpus
    if not (other or shape_alone) and (gpus := ranks_for(config)) > 1:
        other = {"gpus": gpus}
    site = described_site(config, **other) if other.keys() - OF_SEVERAL else None
    causes = question_causes(config, site) if site is not None and shape_alone else None
    if site is not None and causes is not None:
        named = config.model.source if named_shape(config.model.source) else None
        question = known_question(causes, named)
        if question is not None and _is_possible(question, site):
            return plan_known(config, site, question)
    # only here: what follows imports torch and transformers
    from megatrain.engine.resolved import Machine
    from megatrain.recipes.planned_machine import planned_machine
    from megatrain.recipes.run import plan_model
    from megatrain.recipes.setup import question_of

    machine = Machine.of_site(site) if site else planned_machine(config, **other) if other else None
    found, checked = plan_model(config, shape_alone, machine)
    if causes is not None and checked:
        keep_question(causes, question_of(found.made_of))
    return found


def question_causes(config: Config, site: Site) -> dict[str, Any] | None:
    """All that a question follows from but versions, as JSON. None: the plan also follows from what
    is not looked at here, such as packed rows, drives, or code that comes with the model."""
    model, whole = config.model, METHODS[config.method].whole_documents
    if not whole or config.train.context_parallel > 1 or config.memory.nvme:
        return None
    if model.trust_remote_code:
        return None
    found: Any = named_shape(model.source)
    if found is None:
        with suppress(ModelError):  # the model's own reader says it
            found = digests_of(resolve_source(model.source, model.revision, weights=False))
    values = {}
    for name, value in config.model_dump(mode="json", exclude_defaults=True).items():
        inner = value.items() if isinstance(value, dict) else [("", value)]
        values.update({f"{name}.{key}".rstrip("."): one for key, one in inner})
    kept = {k: v for k, v in values.items() if k not in FREE and k.partition(".")[0] != "economy"}
    of_model = [key for key in kept if key.startswith("model.")]
    options = {key: value for key, value in kept.items() if key not in of_model}
    return found and {"model": found, "precision": site.precision, "options": options}


def _is_possible(question: Question, site: Site) -> bool:
    """False where working the question out raises an error that tells more."""
    return question.job.whole_update is None or site.ranks * site.hosts == 1


def plan_known(config: Config, site: Site, question: Question) -> Plan:
    """The plan of a question that is known, which is what the model itself would give."""
    notice_no_bfloat16(site)
    notice_no_effect(config, site)
    notice_other_balance(config, *question.balance)
    train, memory, asked = config.train, config.memory, config.asked()
    check_fixed(asked, question.compile, (), config.where)
    tokens = train.tokens_per_step or (train.rows_per_step or 1) * train.seq_len
    asked["tokens_per_step"] = max(tokens, question.job.least_tokens)
    asked["rows_per_step"] = train.rows_per_step

    def plan_on(site: Site, suggest: bool = False) -> Plan:
        found = make_plan(
            posed(question.job, site, memory.transport, **asked),
            question.shape,
            site.hardware,
            site.profile,
            gpu_limit=None if memory.gpu == "auto" else int(memory.gpu),
            host_limit=None if memory.host == "auto" else int(memory.host),
            suggest=suggest,
        )
        found = replace(found, ranks_assumed=site.together_assumed, made_of=site)
        return with_economy(config, found, site, steps_of(config))

    return beside_others(config, plan_on(site, suggest=True), site.alone, plan_on)
