"""Every family of transformers that makes a language model: what it does here.

    python -m benchmarks.families            # all of them, some minutes; writes docs/models.md
    python -m benchmarks.families --only qwen3 gemma4_text

Each family's own default configuration is built without weights, and its small model goes through
`megatrain verify`: the folder that transformers saves is read and written again bit for bit, and
trained for three steps as in plain PyTorch. Nothing here knows a family but by its name; where
defaults are no model that transformers can build, COMPLETED says what is set beside them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, RESULTS = ROOT / "docs" / "models.md", ROOT / "benchmarks" / "results" / "families.json"
LIMIT_S = 240.0
STATES = {  # how a page says it, in this order
    "full": "trained as in plain PyTorch; its folder comes out as it went in",
    "text": "the same for text; its towers for images and sound are carried along unchanged",
    "not checked": "accepted; no small model of it can be made, so nothing was compared",
    "refused": "refused, for the reason that is said",
    "no default": "transformers builds no model from the family's defaults; nothing is known",
    "failed": "accepted, and differs from plain PyTorch, or ends in an error that is ours",
}


def _mrope(*pairs: int, **rotary: float) -> dict[str, Any]:
    """How many pairs of a head's dimensions turn with time, height and width."""
    kind = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(pairs)}
    return {"text_config": {"rope_parameters": {**rotary, **kind}}}


# Keys beside the defaults of families whose defaults make no model.
COMPLETED: Mapping[str, dict[str, Any]] = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "glm_moe_dsa": {"indexer_types": ["full"] * 78},
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "paddleocr_vl"), _mrope(16, 24, 24)),
    **dict.fromkeys(("glm4v", "glm46v"), _mrope(8, 12, 12, partial_rotary_factor=0.5)),
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "gemma4_text": {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
}


def check(family: str) -> dict[str, Any]:
    """What a family does: its state, and the reason where it has one."""
    from transformers import CONFIG_MAPPING

    from megatrain.engine.verify import verify
    from megatrain.errors import ModelError
    from megatrain.models.skeleton import Skeleton

    try:
        config = CONFIG_MAPPING[family](**COMPLETED.get(family, {}))
        if config.architectures is None:
            config.architectures = [named for named in [class_of(family)] if named]
    except Exception as error:  # noqa: BLE001  whatever a family's code does with its own defaults
        return {"state": "no default", "reason": f"{type(error).__name__}: {error}"}
    try:
        skeleton = Skeleton(config)
    except ModelError as error:
        if error.__cause__ is not None and "cannot be built" in str(error):
            return {"state": "no default", "reason": str(error)}
        return {"state": "refused", "reason": str(error)}
    verdict = verify(skeleton)
    if verdict.state != "passed":
        reason = ": ".join(filter(None, [verdict.stage, verdict.reason]))
        return {"state": verdict.state, "reason": reason}
    carried = skeleton.anatomy.unused_weights.names
    return {"state": "text" if carried else "full", "reason": ""}


def class_of(family: str) -> str | None:
    """The class of a folder that holds more than a language model."""
    named = seeing().get(family)
    return named if isinstance(named, str) or named is None else named[0]


def seeing() -> Mapping[str, Any]:
    """Classes of models that see, too, by model type."""
    from transformers.models.auto import modeling_auto

    return modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def families() -> dict[str, list[str]]:
    """Model types by heading."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as SPEAKING

    return {
        "Language models": sorted(set(SPEAKING) - set(seeing())),
        "Models that see, too": sorted(seeing()),
    }


def in_a_process(family: str) -> dict[str, Any]:
    """`check` where it can do no harm, and for so long."""
    started = time.perf_counter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(family, sender))
    process.start()
    sender.close()
    found = {"state": "not checked", "reason": f"nothing was found out in {LIMIT_S:.0f} s"}
    if receiver.poll(LIMIT_S):
        try:
            found = receiver.recv()
        except EOFError:
            found = {"state": "no default", "reason": "its process ended without an answer"}
    process.kill()
    process.join()
    print(f"{family:28} {found['state']:12} {found['reason'][:110]}", flush=True)
    return {"family": family, **found, "seconds": round(time.perf_counter() - started, 1)}


def _send(family: str, sender: Any) -> None:
    import torch
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        sender.send(check(family))
    except Exception as error:  # noqa: BLE001  a defect of ours, which belongs on the page
        sender.send({"state": "failed", "reason": f"{type(error).__name__}: {error}"})


# -- the page --------------------------------------------------------------------------------------


def page(results: Mapping[str, Any]) -> str:
    """docs/models.md."""
    lines = [
        "# Models",
        "",
        "What every family of transformers does here: its default configuration, made small, goes",
        "through the same self-check as `megatrain verify MODEL`, in float32 on a CPU. The folder",
        "that transformers saves is read and written again bit for bit, and trained for three",
        "steps as in plain PyTorch. Another configuration of a family may do more or less:",
        "`megatrain verify` says it, and `plan` and `train` ask once for each. In bfloat16 all",
        "weights are saved so, routers that transformers keeps in float32 among them; it is said.",
        "",
        f"Made by `python -m benchmarks.families` on {results['date']} with transformers "
        f"{results['transformers']} and torch {results['torch']}.",
        "",
        *textwrap.wrap(f"Defaults that make no model were completed: {', '.join(COMPLETED)}.", 118),
        "",
    ]
    for heading, rows in results["families"].items():
        lines += [f"## {heading}", ""]
        counts = Counter(row["state"] for row in rows)
        lines += ["| | families | |", "|---|---|---|"]
        lines += [f"| {s} | {counts[s]} | {words} |" for s, words in STATES.items() if counts[s]]
        lines += ["", *_names("full", rows), *_names("text", rows)]
        others = sorted(
            (row for row in rows if row["state"] not in ("full", "text")),
            key=lambda row: (list(STATES).index(row["state"]), row["family"]),
        )
        lines += ["| family | | why |", "|---|---|---|"]
        lines += [f"| {r['family']} | {r['state']} | {_cell(r['reason'])} |" for r in others]
        lines.append("")
    return "\n".join([*lines, *_with_images()])


def _with_images() -> list[str]:
    """The families whose towers are trained, which tests/engine/test_images.py compares."""
    from tests.engine.test_images import PADDED, REFUSED
    from tests.helpers.multimodal import MULTIMODAL

    full = [name for name in MULTIMODAL if name not in REFUSED]
    said = "In float32, small models of random values: the loss of rows with and without images "
    said += "within 1e-6 of plain transformers, every gradient within 1e-5 by its norm (of Qwen3.5 "
    said += "1e-4), over micro-batches, groups, offloaded activations and two backward passes; the "
    said += (
        "folder that is saved is loaded by transformers, which sees as the engine does (but for "
    )
    said += f"shieldgemma2, whose class does not load what it saves): {', '.join(full)}. "
    said += (
        "Packed rows with images have the loss and gradients of rows apart; padded are those of "
    )
    said += f"{', '.join(sorted(PADDED))}."
    rows = [f"| {name} | refused | {reason} |" for name, reason in REFUSED.items()]
    wrapped = textwrap.wrap(said, 118, break_on_hyphens=False)
    return ["## With images", "", *wrapped, "", "| family | | why |", "|---|---|---|", *rows, ""]


def _names(state: str, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    names = [row["family"] for row in rows if row["state"] == state]
    said = f"{STATES[state][0].upper()}{STATES[state][1:]}: {', '.join(names)}."
    return [*textwrap.wrap(said, 118, break_on_hyphens=False), ""] if names else []


def _cell(reason: str) -> str:
    """One short line of a reason."""
    first = reason.strip().splitlines()[0] if reason.strip() else ""
    first = first.split("cannot be streamed exactly: ")[-1].replace("|", "/")
    return first if len(first) <= 160 else f"{first[:157]}..."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", help="print these, and write nothing")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args(arguments)
    import torch
    import transformers

    from megatrain.recipes.setup import quiet_libraries

    import_module("megatrain.engine.verify")  # once, before the forks
    quiet_libraries()
    with ThreadPoolExecutor(args.jobs) as threads:
        if args.only:
            list(threads.map(in_a_process, args.only))
            return
        found = {
            heading: list(threads.map(in_a_process, names)) for heading, names in families().items()
        }
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    results = {"date": date.today().isoformat(), **versions, "families": found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))


if __name__ == "__main__":
    main()
