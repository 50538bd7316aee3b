"""The example that `megatrain init` writes, and the schema that `megatrain schema` prints."""

from __future__ import annotations

from typing import Any

from megatrain.config.fields import Config

_EXAMPLE = """\
# MegaTrain fine-tunes every parameter of a model, streamed from host RAM.
#   megatrain data this.yaml      what will be trained on
#   megatrain plan this.yaml      whether it fits, and how
#   megatrain train this.yaml     do it; any key can be set after it: train.learning_rate=2e-5

model: HuggingFaceTB/SmolLM2-135M-Instruct   # hub id, folder, GGUF; or {config: folder}
method: sft                                  # sft | pretrain

data:                                        # messages, prompt/completion, alpaca, sharegpt, text
  train: train.jsonl                         # file, folder or hub id
  eval: 0.02                                 # held out: share, number of rows, source or null
  train_on: assistant                        # assistant | all

train:
  tokens_per_step: 65536                     # of a step, without padding; or rows_per_step
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
