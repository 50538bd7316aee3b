"""`megatrain plan`: from what is known of a model if its question was asked before, in a second and
without torch; else from the model itself."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from megatrain.config import Config
from megatrain.config.load import with_random_weights
from megatrain.errors import ModelError
from megatrain.methods import METHODS
from megatrain.models.pretrained import digests_of, resolve_source
from megatrain.models.shapes import named_shape
from megatrain.planner.plan import Plan
from megatrain.planner.planning import make_plan
from megatrain.planner.question import Question, Site, keep_question, known_question, posed
from megatrain.recipes.planned_site import beside_others, notice, planned_site, with_economy
from megatrain.recipes.ranks.launch import ranks_for
from megatrain.settings import OPTIONS, contradiction

OF_SEVERAL = {"gpus", "hosts", "network"}  # these alone describe no other machine
# Keys on which a kept question does not depend: `plan_known` reads them anew, or plans do not.
FREE: dict[str, Any] = {
    **dict.fromkeys(("model", "economy", "gpus", "output", "threads"), True),
    "train": {
        *("tokens_per_step", "rows_per_step", "epochs", "max_steps"),
        *("head_chunk_tokens", "retained", "cheap_retention"),
    },
    "memory": {
        *("gpu", "host", "transport"),
        *(one.key.removeprefix("memory.") for one in OPTIONS if one.key.startswith("memory.")),
    },
}


def plan(
    config: Config, shape_alone: bool = False, described: Mapping[str, Any] | None = None
) -> Plan:
    """The plan of a config's run. Loads no weights and touches no GPU. Raises MegaTrainError.

    Args:
        shape_alone: only the model's configuration is read, as a named shape's always is.
        described: another machine than this one, or several of its GPUs, in the keywords of
            `doctor.planned_machine`, if any of them is not None.
    """
    named = named_shape(config.model.source) is not None
    shape_alone = shape_alone or named
    if shape_alone:
        config = with_random_weights(config)
    other = {name: value for name, value in (described or {}).items() if value is not None}
    if other and "gpus" not in other and config.gpus != "auto":
        other["gpus"] = config.gpus
    if not (other or shape_alone) and (gpus := ranks_for(config)) > 1:
        other = {"gpus": gpus}
    site = causes = None
    if other.keys() - OF_SEVERAL:
        site = planned_site(config, **other)
        causes = question_causes(config, site) if shape_alone else None
    if site is not None and causes is not None:
        question = known_question(causes, config.model.source if named else None)
        if question is not None and _is_possible(config, site, question):
            return plan_known(config, site, question)
    # only here: what follows imports torch and transformers
    from megatrain.engine.resolved import Machine, make_job
    from megatrain.recipes.doctor import planned_machine
    from megatrain.recipes.run import plan_model

    machine = Machine.of_site(site) if site else planned_machine(config, **other) if other else None
    found, silent = plan_model(config, shape_alone, machine)
    if causes is not None and silent:
        made_of = found.made_of
        keep_question(causes, Question(make_job(made_of), made_of.shape, made_of.compile))
    return found


def question_causes(config: Config, site: Site) -> dict[str, Any] | None:
    """All that a question follows from but versions, as JSON. None: the plan also follows from what
    is not looked at here, such as packed rows, drives, or code that comes with the model."""
    model, whole = config.model, METHODS[config.method].whole_documents
    more = config.train.context_parallel > 1 or config.memory.nvme or model.trust_remote_code
    found: Any = named_shape(model.source)
    if found is None:
        with suppress(ModelError):  # whose reader says it
            found = digests_of(resolve_source(model.source, model.revision, weights=False))
    if found is None or more or not whole:
        return None
    given = config.model_dump(mode="json", exclude_defaults=True, exclude=FREE)
    options = {name: value for name, value in given.items() if value != {}}
    return {"model": found, "precision": site.precision, "options": options}


def _is_possible(config: Config, site: Site, question: Question) -> bool:
    """False where working the question out raises an error, which tells more."""
    fixed = {**config.asked(), "compile": question.compile, "nvme_folders": ()}
    whole_tensors = question.job.whole_update is not None and site.ranks * site.hosts > 1
    none_kept = fixed["keep_attention"] and not question.shape.cost.kept_attention_bytes
    return not (whole_tensors or none_kept) and contradiction(fixed, in_config=True) is None


def plan_known(config: Config, site: Site, question: Question) -> Plan:
    """The plan of a question that is known, which is what the model itself would give."""
    notice(config, site)
    train, memory, asked = config.train, config.memory, config.asked()
    tokens = train.tokens_per_step or (train.rows_per_step or 1) * train.seq_len
    asked["tokens_per_step"] = max(tokens, question.job.least_tokens)
    asked["rows_per_step"] = train.rows_per_step
    steps = train.max_steps if train.epochs is None else None

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
        return with_economy(config, found, site, steps)

    return beside_others(config, plan_on(site, suggest=True), site.alone, plan_on)
