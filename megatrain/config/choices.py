"""The texts that a config key can hold, and the reasons for refusing others that users know."""

from __future__ import annotations

from typing import Annotated, Literal

from megatrain.config.names import INSTEAD_OF_ADAFACTOR
from megatrain.config.values import choice

NOT_BUILT = "not built yet"
_LOSS_SCALING = "not offered, since it needs loss scaling and bfloat16 does not"
_NO_FP8 = "no longer offered: use int8, which takes the same bytes at half the gradient error"
_METHODS = ("dpo", "kto", "orpo", "simpo", "cpo", "ppo", "grpo", "rloo", "reward", "distill", "gkd")
_OPTIMIZERS = ("adam", "sgd", "lamb", "adagrad", "rmsprop", "sophia")
_OTHER_METHODS = dict.fromkeys(_METHODS, NOT_BUILT)
_OTHER_OPTIMIZERS = dict.fromkeys(_OPTIMIZERS, NOT_BUILT) | {
    "adafactor": f"no longer offered: {INSTEAD_OF_ADAFACTOR}"
}
_OTHER_PRECISIONS = dict.fromkeys(("float16", "fp16"), _LOSS_SCALING) | {
    "float8": "called fp8 here"
}

_METHOD = Literal["sft", "pretrain"]
_INIT = Literal["pretrained", "random"]
_FORMAT = Literal["auto", "messages", "prompt_completion", "alpaca", "sharegpt", "text"]
_TRAIN_ON = Literal["assistant", "all"]
_BAD_ROW = Literal["refuse", "skip"]
_SCHEDULE = Literal["constant", "linear", "cosine", "wsd"]
_OPTIMIZER = Literal["adamw", "lion", "muon"]
_MOMENTS = Literal["auto", "float32", "bfloat16", "int8"]
_ADJUST_LR = Literal["auto", "match_rms_adamw", "original"]
_PRECISION = Literal["auto", "bfloat16", "float32", "fp8"]
_ATTENTION = Literal[
    "auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"
]
_ACTIVATIONS = Literal["none", "int8", "int6", "int4"]
_NVME_ARRAYS = Literal["auto", "state", "gradients", "all"]
_DEVICE = Literal["auto", "cpu", "cuda"]

Method = Annotated[_METHOD, choice(_METHOD, _OTHER_METHODS)]
Init = Annotated[_INIT, choice(_INIT)]
Format = Annotated[_FORMAT, choice(_FORMAT)]
TrainOn = Annotated[_TRAIN_ON, choice(_TRAIN_ON)]
BadRow = Annotated[_BAD_ROW, choice(_BAD_ROW)]
Schedule = Annotated[_SCHEDULE, choice(_SCHEDULE)]
OptimizerName = Annotated[_OPTIMIZER, choice(_OPTIMIZER, _OTHER_OPTIMIZERS)]
Moments = Annotated[_MOMENTS, choice(_MOMENTS)]
AdjustLr = Annotated[_ADJUST_LR, choice(_ADJUST_LR)]
Precision = Annotated[_PRECISION, choice(_PRECISION, _OTHER_PRECISIONS)]
Attention = Annotated[_ATTENTION, choice(_ATTENTION)]
Activations = Annotated[_ACTIVATIONS, choice(_ACTIVATIONS, {"fp8": _NO_FP8})]
NvmeArrays = Annotated[_NVME_ARRAYS, choice(_NVME_ARRAYS)]
Device = Annotated[_DEVICE, choice(_DEVICE)]
