"""TRL's DPOTrainer over DeepSpeed ZeRO-3 on one GPU, with optimizer and parameters in pinned host
RAM.
python -m benchmarks.peers.trl_dpo --shape qwen2.5-7b --tokens 65536 --micro-batch-pairs 16
A pair is two sequences of `--seq-len` tokens, whose second half is the answer; `--tokens` counts
both. The reference's log-probabilities are computed before training, so that there is no second
model, and that pass is timed by itself. bf16 with fp32 master weights and moments, layers
recomputed in backward, TRL's chunked head over answers alone. Needs trl, accelerate, deepspeed,
ninja and a C++ compiler, and no network. Over DeepSpeed transformers' Trainer rounds the
reference's log-probabilities to bf16, so that the first loss is not log 2, as it is without.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.attention import sdpa_kernel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmarks.peers.deepspeed_offload import settings_of, stand_alone
from benchmarks.peers.job import (
    ATTENTION,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    Job,
    StepMeter,
    describe,
    job_of,
    ram_in_use,
    synchronize,
    write,
)
from benchmarks.peers.model import parameters_of
from megatrain.recipes.shapes import bench_config, shape_config

END, PAD = "<end>", "<pad>"
BETA = 0.1


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """One in which the word "w7" is token 7. The last two tokens end and pad."""
    words = {f"w{number}": number for number in range(vocabulary - 2)}
    words |= {END: vocabulary - 2, PAD: vocabulary - 1}
    tokenizer = Tokenizer(WordLevel(words, unk_token=PAD))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)  # type: ignore[no-any-return]


def pairs_of(job: Job, vocabulary: int) -> list[dict[str, str]]:
    """Random words for all steps: prompts, and two answers to each, which TRL gives their end."""
    generator = torch.Generator().manual_seed(0)
    prompt, answer = job.seq_len // 2, job.seq_len - job.seq_len // 2 - 1
    count = (job.warmup + job.steps) * job.tokens // (2 * job.seq_len)
    ids = torch.randint(0, vocabulary - 2, (count, prompt + 2 * answer), generator=generator)
    rows = [[f" w{number}" for number in row] for row in ids.tolist()]
    return [
        {
            "prompt": "".join(row[:prompt]),
            "chosen": "".join(row[prompt : prompt + answer]),
            "rejected": "".join(row[prompt + answer :]),
        }
        for row in rows
    ]


def deepspeed_settings(job: Job, ratio: float) -> dict[str, Any]:
    """Those of the other ZeRO-3 peer; Trainer counts a micro-batch in pairs."""
    return settings_of(job, 3, ratio) | {
        "train_micro_batch_size_per_gpu": job.micro_batch_rows // 2,
        "train_batch_size": job.micro_batch_rows // 2 * job.micro_batches,
    }


def arguments_of(job: Job, settings: dict[str, Any], reference_pairs: int, folder: str) -> Any:
    """TRL's arguments. From here on transformers builds models in ZeRO-3's shards."""
    from trl import DPOConfig

    return DPOConfig(
        output_dir=folder,
        deepspeed=settings,
        use_cpu=job.device == "cpu",
        bf16=True,
        loss_type=["sigmoid"],
        beta=BETA,
        precompute_ref_log_probs=True,
        precompute_ref_batch_size=reference_pairs,
        max_length=job.seq_len,
        per_device_train_batch_size=job.micro_batch_rows // 2,
        gradient_accumulation_steps=job.micro_batches,
        max_steps=job.warmup + job.steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=MAX_GRAD_NORM,
        gradient_checkpointing=job.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        dataloader_pin_memory=job.device == "cuda",
        logging_steps=1,  # after a step's time is taken
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


class Timed(TrainerCallback):
    """Tells the meter of steps, and of their loss, which Trainer logs after their end.

    stack: closes the meter, which is opened when all is set up.
    """

    def __init__(self, meter: StepMeter, stack: ExitStack) -> None:
        self.meter, self.stack, self.ready = meter, stack, 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.stack.enter_context(self.meter)
        self.ready = time.perf_counter()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.meter.begin()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.meter.end(loss=float("nan"))

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        logged, step = state.log_history[-1], self.meter.steps[-1]
        if "loss" in logged:  # not the summary of the run
            step["loss"] = logged["loss"]
            print(
                f"step {state.global_step - 1}: {step['seconds']:.3f} s, loss {step['loss']:.4f}",
                flush=True,
            )


def timed_trainer(job: Job, batches_s: list[float]) -> Any:
    """DPOTrainer which adds the seconds of each batch of the reference's pass to a list."""
    from trl import DPOTrainer

    class Reference(DPOTrainer):
        def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
            assert inputs["input_ids"].shape[1] == job.seq_len, "the words are no longer tokens"
            synchronize(job)
            started = time.perf_counter()
            result = super().compute_ref_log_probs(model, inputs)
            synchronize(job)
            batches_s.append(time.perf_counter() - started)
            return result

    return Reference


def build(job: Job, args: Any) -> Any:
    """The model with random weights, whose every layer may be compiled, as the other peers'."""
    torch.manual_seed(0)
    config = shape_config(bench_config(job.shape), job.layers)
    model: Any = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    assert args.hf_deepspeed_config.is_zero3()
    if job.compiled:
        import deepspeed  # type: ignore[import-not-found]

        # a layer's parameters are gathered together, by hooks outside of what is compiled
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.model.layers[0])])
        for layer in model.model.layers:
            layer.forward = torch.compile(layer.forward)
    return model


def count_parameters(job: Job) -> int:
    """Before ZeRO-3 empties them."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            shape_config(bench_config(job.shape), job.layers)
        )
    return parameters_of(model)


def run(job: Job, reference_pairs: int, ratio: float) -> None:
    """Set up, the reference's pass, and the steps; prints and writes the figures."""
    from datasets import Dataset

    ram_before, started = ram_in_use(), time.perf_counter()
    parameters, settings = count_parameters(job), deepspeed_settings(job, ratio)
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(ATTENTION, set_priority=True))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        args = arguments_of(job, settings, reference_pairs, folder)
        model = build(job, args)
        vocabulary = model.config.vocab_size
        batches_s: list[float] = []
        trainer = timed_trainer(job, batches_s)(
            model=model,
            args=args,
            train_dataset=Dataset.from_list(pairs_of(job, vocabulary)),
            processing_class=tokenizer_of(vocabulary),
        )
        print(f"reference: {sum(batches_s):.1f} s", flush=True)
        timed = Timed(StepMeter(job, ram_before), stack)
        trainer.add_callback(timed)
        trainer.train()
    setup_s = timed.ready - started - sum(batches_s)
    rows = {"reference_pairs": reference_pairs, "beta": BETA, "deepspeed": settings}
    packages = ("trl", "accelerate", "deepspeed", "datasets")
    report = describe("trl-dpo", job, parameters, rows, packages)
    report |= {"setup_s": setup_s} | reference_figures(job, reference_pairs, batches_s)
    write(job, report | timed.meter.figures(parameters))


def reference_figures(job: Job, pairs: int, batches_s: list[float]) -> dict[str, Any]:
    """Seconds of the whole pass, and, from the median batch, of as many tokens as a step has."""
    step_s = statistics.median(batches_s) * job.tokens / (2 * job.seq_len * pairs)
    return {
        "reference_batches_s": batches_s,
        "reference_s": sum(batches_s),
        "reference_s_per_step": step_s,
        "reference_tokens_per_s": job.tokens / step_s,
    }


def parsed() -> tuple[Job, int, float]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-7b", help="a named shape, or a model folder")
    parser.add_argument("--layers", type=int, help="override the number of layers")
    parser.add_argument("--tokens", type=int, default=65536, help="per step, of both sides")
    parser.add_argument("--seq-len", type=int, default=1024, help="prompt and answer")
    parser.add_argument("--micro-batch-pairs", type=int, default=16)
    parser.add_argument("--reference-pairs", type=int, help="of a batch; default a micro-batch's")
    parser.add_argument("--ratio", type=float, default=1.0, help="of the optimizer, on the CPU")
    parser.add_argument("--steps", type=int, default=4, help="measured")
    parser.add_argument("--warmup", type=int, default=2)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--compiled", action=switch, default=False, help="torch.compile per layer")
    parser.add_argument("--checkpointing", action=switch, default=True, help="recompute layers")
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=available)
    parser.add_argument("--output", type=Path, dest="json", help="where the JSON goes")
    args = parser.parse_args()
    args.micro_batch_rows = 2 * args.micro_batch_pairs
    return job_of(args), args.reference_pairs or args.micro_batch_pairs, args.ratio


def main() -> None:
    job, reference_pairs, ratio = parsed()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if job.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    stand_alone()
    run(job, reference_pairs, ratio)


if __name__ == "__main__":
    main()
