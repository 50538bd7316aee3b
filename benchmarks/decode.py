"""Times whole rollouts of a model of random weights on a GPU: prompts, captured graphs and all.

    python -m benchmarks.decode FOLDER --rows 64 256 512 --prompt 256 --answer 1024

FOLDER holds a config.json. Prints one JSON line for each number of rows; nothing ends an answer.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.engine.rollout.decode import AnswerRequest, answers
from megatrain.engine.rollout.draw import Draw

GROUP = 8  # answers to a prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=1024)
    parser.add_argument("--generate", type=int, default=0, help="tokens of transformers' own loop")
    args = parser.parse_args()
    config: Any = AutoConfig.from_pretrained(args.folder)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    draws = torch.Generator().manual_seed(0)
    for rows in args.rows:
        prompts = torch.randint(0, config.vocab_size, (rows // GROUP, args.prompt), generator=draws)
        numbers = tuple(range(GROUP))
        asked = [
            AnswerRequest(n, ids, numbers, args.answer) for n, ids in enumerate(prompts.tolist())
        ]
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        tokens = sum(
            len(answer.ids) for answer in answers(model, asked, Draw(), (), slots=rows, fuse=True)
        )
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        found = {"rows": rows, "tokens": tokens, "seconds": round(seconds, 2)}
        found |= {"tokens_per_s": round(tokens / seconds)}
        found |= {"peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1)}
        print(json.dumps({"gpu": torch.cuda.get_device_name(), **found}), flush=True)
        torch.cuda.empty_cache()
        if args.generate:
            print(json.dumps({"generate": rows, **by_transformers(model, prompts, args.generate)}))
            torch.cuda.empty_cache()


def by_transformers(model: Any, prompts: torch.Tensor, tokens: int) -> dict[str, float]:
    """The rate of transformers' `generate` for as many rows."""
    ids = prompts.repeat_interleave(GROUP, 0).to(model.device)
    how = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    began = time.perf_counter()
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, **how)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    rate = round(len(ids) * tokens / seconds)
    gib = round(torch.cuda.max_memory_reserved() / 2**30, 1)
    return {"tokens": len(ids) * tokens, "seconds": round(seconds, 2), "tokens_per_s": rate} | {
        "peak_gib": gib
    }


if __name__ == "__main__":
    main()
