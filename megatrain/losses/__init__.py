"""Losses computed from log-probabilities of targets, or from scores: logits never exist whole."""

from collections.abc import Callable
from functools import partial

from megatrain.losses.divergence import Distillation as Distillation
from megatrain.losses.divergence import SampledDistillation as SampledDistillation
from megatrain.losses.divergence import divergence_of as divergence_of
from megatrain.losses.policy import Policy as Policy
from megatrain.losses.policy import Rloo as Rloo
from megatrain.losses.preference import Cpo as Cpo
from megatrain.losses.preference import Dpo as Dpo
from megatrain.losses.preference import Kto as Kto
from megatrain.losses.preference import Orpo as Orpo
from megatrain.losses.preference import Reward as Reward
from megatrain.losses.preference import find_ends as find_ends
from megatrain.losses.sequences import SequenceLoss as SequenceLoss
from megatrain.losses.sequences import Tally as Tally
from megatrain.losses.targets import FOR_LOSS as FOR_LOSS
from megatrain.losses.targets import IGNORE as IGNORE
from megatrain.losses.targets import Examples as Examples
from megatrain.losses.targets import Loss as Loss
from megatrain.losses.targets import NextToken as NextToken
from megatrain.losses.targets import Targets as Targets
from megatrain.losses.targets import find_examples as find_examples
from megatrain.losses.targets import find_targets as find_targets
from megatrain.losses.targets import next_token as next_token

# The loss of each method (megatrain/methods.py), made from the keys of its section in the config.
LOSSES: dict[str, Callable[..., Loss | SequenceLoss]] = {
    "sft": NextToken,
    "pretrain": NextToken,
    "dpo": Dpo,
    "orpo": Orpo,
    "simpo": partial(Cpo, cpo_alpha=0.0, loss_type="simpo"),
    "cpo": Cpo,
    "kto": Kto,
    "reward": Reward,
    "grpo": Policy,
    "rloo": Rloo,
    "distill": Distillation,
}
