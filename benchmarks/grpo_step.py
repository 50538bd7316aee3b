"""Times steps of `method: grpo` with a model of random weights on this machine's GPUs.

    python -m benchmarks.grpo_step FOLDER --gpus 1 2 --answers 512 --prompt 256 --length 1024
    python -m benchmarks.grpo_step FOLDER --answers 256 --length 512 --trl float32 bfloat16

FOLDER holds a config.json and a tokenizer. Prints one JSON line for each number of GPUs, with the
plan beside what was measured. Each run is ended after its last step, before anything is saved:
the state of a large model may have no room on a drive.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

GROUP, PROMPTS = 8, 256
REWARDS = """def odd(completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1])
    parser.add_argument("--answers", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--trl", nargs="*", default=[], help="dtypes of TRL's trainer beside it")
    parser.add_argument("--keys", nargs="*", default=[], help="further keys, such as compile=false")
    args = parser.parse_args()
    with TemporaryDirectory() as name:
        work = Path(name)
        prepare(args.folder, work, args.prompt)
        size = ["--answers", str(args.answers), "--length", str(args.length)]
        peer = [sys.executable, "-m", "benchmarks.peers.trl_grpo", str(work), *size]
        for dtype in args.trl:
            subprocess.run([*peer, "--steps", str(args.steps), "--dtype", dtype], check=False)
        for gpus in args.gpus:
            keys = [
                *(f"gpus={gpus}", f"train.max_steps={args.steps + 1}", f"output={work}/run-{gpus}"),
                *(f"grpo.max_completion_length={args.length}", f"grpo.num_generations={GROUP}"),
                *(f"rollout.generation_batch_size={args.answers}", *args.keys),
            ]
            found = {"gpu": torch.cuda.get_device_name(), "gpus": gpus, "keys": keys}
            figures = timed(work / "grpo.yaml", work / f"run-{gpus}", keys, args.steps)
            print(json.dumps(found | figures), flush=True)


def prepare(folder: Path, work: Path, tokens: int) -> None:
    """Write the model, prompts of so many tokens, a reward and a config."""
    shutil.copytree(folder, work / "model")
    config: Any = AutoConfig.from_pretrained(folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(work / "model")
    del model
    torch.cuda.empty_cache()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    texts = (tokenizer.decode([n]) for n in range(len(tokenizer)))
    words = [text for text in texts if text[:1] == " " and text[1:].isalpha() and text.isascii()]
    draws, rows = random.Random(0), list[str]()
    while len(rows) < PROMPTS:
        text = "".join(draws.choices(words, k=tokens))
        if len(tokenizer(text).input_ids) == tokens:
            rows.append(json.dumps({"prompt": text}) + "\n")
    (work / "prompts.jsonl").write_text("".join(rows))
    (work / "rewards.py").write_text(REWARDS)
    (work / "grpo.yaml").write_text(
        f"model: {work}/model\nmethod: grpo\ndata: {{train: {work}/prompts.jsonl, eval: null}}\n"
        f"train: {{schedule: constant, warmup: 0}}\ncheckpoint: {{every: null, final: none}}\n"
        f'rewards: {{functions: ["{work}/rewards.py:odd"]}}\n'
    )


def timed(config: Path, run: Path, keys: list[str], steps: int) -> dict[str, Any]:
    """The lines of so many steps of a config's run in the folder `run`, and the plan."""
    command = [sys.executable, "-m", "megatrain", "train", str(config), *keys]
    child = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    lines, path = list[str](), run / "metrics.jsonl"
    while len(lines) < steps and child.poll() is None:
        time.sleep(0.5)
        lines = path.read_text().splitlines() if path.is_file() else []
    child.kill()
    child.wait()
    names = "step", "step_s", "tokens_per_s", "tflops", "gpu_peak_bytes", "host_bytes", "time"
    figures = [{name: json.loads(line)[name] for name in names} for line in lines[:steps]]
    plan = json.loads((run / "plan.json").read_text())
    planned = {"timing": plan["timing"], "totals": plan["totals"], "values": plan["values"]}
    return {"steps": figures, "plan": planned}


if __name__ == "__main__":
    main()
