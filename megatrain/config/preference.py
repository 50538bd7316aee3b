"""Sections of the methods that learn from preferences: keys and defaults are TRL's.

A section's keys are the arguments of its method's loss (`megatrain.losses.LOSSES`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from megatrain.config import choices as c
from megatrain.config import values as v
from megatrain.config.values import Options, key, wanted
from megatrain.methods import METHODS

if TYPE_CHECKING:
    from megatrain.config.fields import Config

NEARER = "How strongly the model is held to the reference; higher stays nearer."
_Smoothing = Annotated[
    Annotated[float, Field(ge=0, lt=0.5)], wanted("a number from 0 to below 0.5")
]
_Weights = Annotated[
    tuple[float, ...] | None,
    wanted("a list of numbers, or null", lambda x: tuple(x) if isinstance(x, list) else x),
]


class DpoOptions(Options):
    """Direct preference optimisation and its kin: pairs of answers, and a reference model."""

    beta: v.Positive = key(0.1, NEARER)
    loss_type: c.DpoLosses = key(
        ("sigmoid",),
        "Loss, or a list of losses that are added: sigmoid, hinge, ipo, exo_pair, nca_pair, "
        "robust, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, discopop, sft, "
        "sigmoid_norm.",
    )
    loss_weights: _Weights = key(None, "Weight of each loss of a list; null: 1 each.")
    label_smoothing: _Smoothing = key(
        0.0, "Share of preferences that are wrong, for robust, exo_pair, aot and aot_unpaired."
    )
    discopop_tau: v.Positive = key(0.05, "discopop: temperature of its mixture.")


class OrpoOptions(Options):
    """Odds ratio preference optimisation: pairs of answers, no reference."""

    beta: v.Positive = key(0.1, "Weight of the odds ratio beside the chosen answers' likelihood.")


class SimpoOptions(Options):
    """Simple preference optimisation: pairs of answers, no reference."""

    beta: v.PositiveOrNull = key(
        None, "Scale of rewards, which are means over tokens. Required; 2.0 to 2.5 in the paper."
    )
    simpo_gamma: v.NotNegative = key(0.5, "Margin that is wanted between rewards.")


class CpoOptions(Options):
    """Contrastive preference optimisation: pairs of answers, no reference."""

    beta: v.Positive = key(0.1, "Scale of the difference of log-probabilities.")
    cpo_alpha: v.NotNegative = key(1.0, "Weight of the chosen answers' likelihood.")
    loss_type: c.CpoLoss = key("sigmoid", "sigmoid, hinge or ipo; simpo is a method of its own.")
    label_smoothing: _Smoothing = key(0.0, "Share of preferences that are wrong.")


class KtoOptions(Options):
    """Kahneman-Tversky optimisation: answers that are wanted or not, and a reference model."""

    beta: v.Positive = key(0.1, NEARER)
    desirable_weight: v.NotNegative = key(1.0, "Weight of wanted answers' losses.")
    undesirable_weight: v.NotNegative = key(1.0, "Weight of unwanted answers' losses.")


class RewardOptions(Options):
    """A reward model, which scores answers: pairs of them, of which one should score higher."""

    center_rewards_coefficient: v.PositiveOrNull = key(
        None, "Weight of the squared sum of a pair's scores, which holds them near 0; null: none."
    )


SECTIONS: dict[str, type[Options]] = {
    "dpo": DpoOptions,
    "orpo": OrpoOptions,
    "simpo": SimpoOptions,
    "cpo": CpoOptions,
    "kto": KtoOptions,
    "reward": RewardOptions,
}


def fault_of_sections(config: Config) -> tuple[str, str] | None:
    """The first key that the config's method cannot honour, and why; None if there is none."""
    method = config.method
    for name, section in SECTIONS.items():
        for field, value in getattr(config, name):
            if name != method and value != section.model_fields[field].default:
                return f"{name}.{field}", f"belongs to method: {name}, not to {method}"
    if method == "simpo" and config.simpo.beta is None:
        return "simpo.beta", "method: simpo has no default of it; set 2.0, say"
    if method in SECTIONS and config.data.train_on != "assistant":
        return "data.train_on", f"method: {method} trains on answers; remove it"
    of_text = {
        "sample_prompt": config.sample_prompt,
        "eval.prompts": config.eval.prompts,
    }
    asked = [name for name, value in of_text.items() if value is not None]
    if METHODS[method].scores and asked:
        return asked[0], f"method: {method} trains a model that writes no text; remove it"
    return None
