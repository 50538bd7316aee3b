"""Helpers that several test files use. Fixtures belong to the `conftest.py` of a folder; what one
file alone needs stands in it.

Modules:
    commands: what tests of commands share: the tiny setup of `tests/recipes/conftest.py`, and
        how to read what a run wrote.
    compare: how far tensors are from each other: bit for bit, and by their norms.
    delays: delays in lanes, waits that are taken away, and calls that fail once: what races and
        interruptions are found with.
    drives: drives as tests want them.
    files: damaged files, full disks and GGUF files, for tests of what is written and read back.
    forked: `python -m MODULE` in a process that is forked from the tests': it need not import
        anything.
    gguf_toys: tiny models and tokenizers of all families that are written as GGUF files.
    hub_stub: a hub on this machine: what `huggingface_hub` asks of it to publish a model,
        without Xet.
    kernel_packages: stand-ins for packages of kernels beside transformers (fla, mamba-ssm,
        causal-conv1d), which need a GPU, given to transformers' own decorator.
    multimodal: tiny multimodal models, and the folders that transformers saves of them.
    mutated: rows of every format with something wrong in them.
    namespaces: two hosts of one machine: network namespaces, joined by a cable that can be
        pulled out.
    once: what is found out about equal models once in a session, where tests build the same
        tiny ones again and again, in several processes.
    pages: how tests read pages, and look at them in a browser.
    plain: the plain PyTorch loop that the engine has to agree with.
    planned: models and machines that the planner's tests reckon with, as dry runs and probes
        found them.
    quantised: model folders whose weights are quantised, as published ones are.
    ranks: several ranks in processes of their own: forked from the tests', or with a GPU each.
    runs: runs of engines, and what they leave behind.
    still: an engine that stands still, for tests of what is written and read back.
    support: tiny models of every family, engines on them, and random batches.
    tasks: small tasks for lm-evaluation-harness, from files alone: choices, letters, a text,
        answers.
    theirs: configs of other trainers for tests of their import.
    trl_oracle: TRL's own trainers as oracles of preference losses: their batch, loss, gradients
        and metrics.
"""
