"""The texts that a config key can hold, and the reasons for refusing others that users know."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from megatrain.config.names import INSTEAD_OF_ADAFACTOR
from megatrain.config.values import Choice, as_texts, wanted

_NOT_BUILT = "not built yet"
_LOSS_SCALING = "not offered, since it needs loss scaling and bfloat16 does not"
_NO_FP8 = "no longer offered: use int8, which takes the same bytes at half the gradient error"
_METHODS = ("ppo", "grpo", "rloo", "distill", "gkd")
_OPTIMIZERS = ("adam", "sgd", "lamb", "adagrad", "rmsprop", "sophia")
_OTHER_METHODS = dict.fromkeys(_METHODS, _NOT_BUILT)
_OTHER_OPTIMIZERS = dict.fromkeys(_OPTIMIZERS, _NOT_BUILT) | {
    "adafactor": f"no longer offered: {INSTEAD_OF_ADAFACTOR}"
}
_OTHER_PRECISIONS = dict.fromkeys(("float16", "fp16"), _LOSS_SCALING) | {
    "float8": "called fp8 here"
}

Method = Annotated[
    Literal["sft", "pretrain", "dpo", "orpo", "simpo", "cpo", "kto", "reward"],
    Choice(_OTHER_METHODS),
]
_DpoLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "exo_pair",
    "nca_pair",
    "robust",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "sft",
    "sigmoid_norm",
]
DpoLosses = Annotated[
    tuple[_DpoLoss, ...],
    wanted(f"one of {', '.join(get_args(_DpoLoss))}, or a list of them", as_texts),
]
CpoLoss = Annotated[Literal["sigmoid", "hinge", "ipo"], Choice({"simpo": "a method of its own"})]
Init = Annotated[Literal["pretrained", "random"], Choice()]
Format = Annotated[
    Literal[
        "auto",
        "messages",
        "prompt_completion",
        "alpaca",
        "sharegpt",
        "text",
        "preference",
        "ranking",
        "alpaca_ranking",
        "implicit_prompt",
    ],
    Choice(),
]
Prompts = Annotated[Literal["text", "chat", "alpaca"], Choice()]
TrainOn = Annotated[Literal["assistant", "all"], Choice()]
BadRow = Annotated[Literal["refuse", "skip"], Choice()]
Truncation = Annotated[Literal["keep_start", "keep_end", "drop"], Choice()]
Final = Annotated[Literal["model", "full", "none"], Choice()]
Schedule = Annotated[Literal["constant", "linear", "cosine", "wsd"], Choice()]
OptimizerName = Annotated[Literal["adamw", "lion", "muon"], Choice(_OTHER_OPTIMIZERS)]
Moments = Annotated[Literal["auto", "float32", "bfloat16", "int8"], Choice()]
AdjustLr = Annotated[Literal["auto", "match_rms_adamw", "original"], Choice()]
Precision = Annotated[Literal["auto", "bfloat16", "float32", "fp8"], Choice(_OTHER_PRECISIONS)]
Attention = Annotated[
    Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"],
    Choice(),
]
Transport = Annotated[Literal["auto", "gather", "read"], Choice()]
Wire = Annotated[Literal["float32", "bfloat16"], Choice()]
Activations = Annotated[Literal["none", "int8", "int6", "int4"], Choice({"fp8": _NO_FP8})]
_Tracker = Literal["wandb", "tensorboard", "trackio"]
TRACKERS = get_args(_Tracker)
Trackers = Annotated[
    tuple[_Tracker, ...],
    wanted("wandb, tensorboard, trackio or a list of them", as_texts),
]
Device = Annotated[Literal["auto", "cpu", "cuda"], Choice()]
