"""Single values of the config: what each kind takes, and what it says otherwise."""

from collections.abc import Sequence

import pytest

from megatrain.config import Config, load_config
from megatrain.errors import ConfigError


@pytest.fixture
def load(tmp_path):
    """Load a minimal config with `key=value` arguments."""
    path = tmp_path / "cfg.yaml"
    path.write_text("model: some/folder\ndata: {train: rows.jsonl}\n")

    def load_with(overrides: Sequence[str]) -> Config:
        return load_config(path, overrides)

    return load_with


@pytest.fixture
def refusal(load):
    """The sentence with which one `key=value` argument is refused."""

    def refused(override: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load([override])
        return str(caught.value)

    return refused


COUNTS = ("train.seq_len", "train.log_every", "train.seed", "threads", "checkpoint.keep")
NO_COUNTS = ["true", "yes please", "1.5", "'3'", ".nan", "-.inf", "null", "1e400"]


OUT_OF_RANGE = {
    "train.learning_rate": ["0", "-1e-5", ".nan", ".inf", "true", "'1e-5'"],
    "train.seq_len": ["1"],
    "train.warmup": ["-0.1", "1.5"],
    "train.max_grad_norm": ["0"],
    "train.router_aux_loss_coef": ["-0.1", ".inf", "off"],
    "train.min_lr_ratio": ["1.1"],
    "train.epochs": ["0"],
    "train.max_steps": ["0", "-1"],
    "optimizer.betas": ["[0.9]", "[0.9, 1]", "[-0.1, 0.9]", "[1, 2, 3]"],
    "optimizer.eps": ["0"],
    "optimizer.weight_decay": ["-1"],
    "data.eval": ["0", "1.0", "-5"],
    "memory.gpu": ["80", "80 apples", "-80GiB"],
    "memory.host": ["null"],
    "output": ["null"],
    "method": ["sftt"],
    "device": ["tpu"],
}


def test_values_out_of_range_are_refused(refusal):
    for key, every in {**OUT_OF_RANGE, **dict.fromkeys(COUNTS, NO_COUNTS)}.items():
        for bad in every:
            assert refusal(f"{key}={bad}").startswith(f"command line: {key}: must be "), (key, bad)


CHOICES = "must be one of constant, linear, cosine, wsd, not 'cosin'; did you mean cosine?"


OTHERS = {
    "method=ppo": "ppo is not built yet; choose from sft, ",
    "optimizer.name=sgd": "sgd is not built yet; choose from adamw, ",
    "precision=float8": "float8 is called fp8 here; choose from auto, ",
    "train.schedule=cosin": CHOICES,
}


def test_a_choice_names_the_one_to_use(refusal):
    for override, words in OTHERS.items():
        assert refusal(override).startswith(f"command line: {override.partition('=')[0]}: {words}")


def test_human_sizes_and_whole_floats(load):
    sizes = {"80GiB": 80 * 2**30, "80G": 80 * 2**30, "512 MB": 512 * 10**6, "1.5TB": 15 * 10**11}
    for written, size in {**sizes, "2tib": 2 * 2**40, "2097152": 2**21, "auto": "auto"}.items():
        assert load([f"memory.host={written}"]).memory.host == size
    assert load(["train.tokens_per_step=1e6"]).train.tokens_per_step == 1_000_000


ONE = "a file, a folder, a glob, a hub id, or {path, weight, split, format}"
WRONG_SOURCES = {
    "data.train=3": f"must be {ONE}, not 3",
    "data.train=[]": f"must be {ONE}, or a list of these, not an empty list",
    "data.train={pth: a}": f"must be {ONE}; pth is none of path, weight, split, format; did you",
    "data.train={split: a}": f"must be {ONE}; path is missing",
    "data.train=[a, [b]]": f"source 2: must be {ONE}, not ['b']",
    "data.train=[{path: a, weight: 0}]": "source 1: weight: must be a number above 0, or null, not",
    "data.train=[{path: a, format: x}]": "source 1: format: must be one of auto, messages, prompt_",
    "data.train=[{path: a, weight: 2}, b]": "b must be given a weight, too: all sources have one",
    "data.train='  '": "must be a file, a folder or a hub id, not '  '",
    "data.train=~nosuch/a": "there is no user of the name nosuch",
    "data.eval=[{path: a, weight: 2}]": "a: a weight is for data.train; every held-out row counts",
    "data.eval={path: a, splt: 2}": f"must be {ONE}; splt is none of path, weight, split, format",
}


def test_wrong_sources_are_refused(refusal):
    for override, words in WRONG_SOURCES.items():
        key = override.partition("=")[0]
        assert refusal(override).startswith(f"command line: {key}: {words}")


def test_sources_are_read_and_written_as_short_as_they_were(load, tmp_path):
    for text in ("a.jsonl", "[a, b]", "{path: a, split: test}", "[{path: a, weight: 2.0}]"):
        written = load([f"data.train={text}", "data.eval=[c, d]"]).to_yaml()
        (tmp_path / "again.yaml").write_text(written)
        again = load_config(tmp_path / "again.yaml")
        assert again == load([f"data.train={text}", "data.eval=[c, d]"])
    assert "train: a.jsonl\n" in load(["data.train=a.jsonl"]).to_yaml()
    assert [one.path for one in load(["data.train=*.jsonl"]).data.train] == ["*.jsonl"]


def test_a_glob_in_a_file_needs_quotes(tmp_path):
    (tmp_path / "glob.yaml").write_text("model: a\ndata:\n  train: *.jsonl\n")
    with pytest.raises(
        ConfigError, match=r"glob\.yaml:3: .*; put quotes around a text that begins"
    ):
        load_config(tmp_path / "glob.yaml")
