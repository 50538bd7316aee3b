"""What `megatrain init` writes and `megatrain schema` prints."""

from __future__ import annotations

from typing import Any

from megatrain.config.fields import Config

_EXAMPLE = """\
# MegaTrain fine-tunes every parameter of a model, streamed from host RAM.
#   megatrain data this.yaml      what will be trained on
#   megatrain plan this.yaml      whether it fits, and how
#   megatrain train this.yaml     do it; any key can be set after it: train.learning_rate=2e-5

model: HuggingFaceTB/SmolLM2-135M-Instruct   # hub id, local folder or GGUF file; or {config: folder, init: random} to pre-train
method: sft                                  # sft | pretrain

data:
  train: train.jsonl                         # file, folder or hub id: messages, prompt/completion, alpaca, sharegpt or text rows
  eval: 0.02                                 # held out: a share, a number of rows, a source of its own, or null
  train_on: assistant                        # assistant | all

train:
  tokens_per_step: 65536                     # real tokens of one optimizer step; or rows_per_step: 64
  seq_len: 4096                              # longer rows are cut, and counted
  epochs: 1
  learning_rate: 1e-5
  schedule: cosine                           # constant | linear | cosine | wsd
  warmup: 0.03                               # below 1 a share of all steps, else steps
  max_grad_norm: 1.0                         # null does not clip and saves 2 bytes a parameter
  eval_every: 100                            # steps
  seed: 0

checkpoint: {every: 200, keep: 2}            # steps; the last step is always kept
optimizer: {name: adamw, weight_decay: 0.0}
memory: {gpu: auto, host: auto}              # budgets such as 70GiB; auto = what the machine has
precision: auto                              # bfloat16 (exact fp32 master) | float32 | fp8
output: runs/my-first
"""


def example_config() -> str:
    """A commented config to start from."""
    return _EXAMPLE


def config_schema() -> dict[str, Any]:
    """JSON schema of the config, for editors."""
    return Config.model_json_schema()
