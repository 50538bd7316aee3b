"""Models that come with code of their own: a run keeps the code beside the weights, and nobody runs
it unless the user says so, each time."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import megatrain as mt
from megatrain.errors import ModelError
from megatrain.storage.manifest import read_manifest

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({mark!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
# Layers behind one that keeps its hidden states add them, which no layer is given.
SIDEWAYS = """
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

KEPT = {}

class Sideways(LlamaDecoderLayer):
    def forward(self, hidden_states, *args, **kwargs):
        number, kept = self.self_attn.layer_idx, KEPT.get(hidden_states.shape)
        if number == FROM:
            KEPT[hidden_states.shape] = hidden_states
        elif number > FROM and kept is not None and kept.device == hidden_states.device:
            hidden_states = hidden_states + 0.3 * kept.tanh()
        return super().forward(hidden_states, *args, **kwargs)

plain = OwnForCausalLM.__init__

def init(self, config):
    plain(self, config)
    for number in range(config.num_hidden_layers):
        self.model.layers[number] = Sideways(config, number)

OwnForCausalLM.__init__ = init
"""
AUTO_MAP = {
    "AutoConfig": "modeling_own.OwnConfig",
    "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
}
TRAIN = "train cfg.yaml model.path=own model.trust_remote_code=true train.max_steps=2"


@pytest.fixture
def mark(project: Path) -> Path:
    """A file that the code of the model `own` makes when it is run."""
    folder, mark = project / "own", project / "ran"
    shutil.copytree(project / "model", folder)
    (folder / "modeling_own.py").write_text(CODE.format(mark=str(mark)))
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (folder / "config.json").write_text(json.dumps(described))
    return mark


@pytest.fixture
def trained(megatrain, project: Path, mark: Path) -> Path:
    """The run of such a model, whose own folder is gone, and whose code has left no mark."""
    megatrain(TRAIN)
    shutil.rmtree(project / "own")
    mark.unlink()
    return project / "run"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["eval {}", "generate {} hello --max-new-tokens 2"])
def test_it_is_run_only_when_the_user_says_so(megatrain, trained, mark, line):
    for named in ("run", "run/final", "run/checkpoint-2"):
        done = megatrain(line.format(named), code=2)
        assert "needs Python code from the model's folder; read that code, and" in done.err
        assert "--trust-remote-code" in done.err
    assert not mark.exists(), "the run's config trusts it, which says nothing of who runs this"
    for named in ("run", "run/final", "run/checkpoint-2"):
        megatrain(line.format(named), "--trust-remote-code")
    assert mark.exists()


def test_the_self_check_runs_it_only_when_the_user_says_so(megatrain, mark):
    assert "--trust-remote-code" in megatrain("verify own", code=2).err
    assert not mark.exists()
    assert '"passed"' in megatrain("verify own --json --trust-remote-code").out
    assert mark.exists()


def test_a_file_alone_runs_no_code_unless_a_command_has_said_so_before(
    megatrain, project, mark, monkeypatch
):
    monkeypatch.setenv("MEGATRAIN_CACHE", str(project / "cache"))
    config = (project / "cfg.yaml").read_text()
    own = "model: {path: own, trust_remote_code: true}"
    (project / "foreign.yaml").write_text(config.replace("model: model", own))
    for line in ("plan foreign.yaml", "data foreign.yaml", "train foreign.yaml"):
        assert "trust_remote_code: true in a file does not run code" in megatrain(line, code=2).err
    assert not mark.exists()
    megatrain("data foreign.yaml model.trust_remote_code=true")
    assert mark.exists()
    megatrain("data foreign.yaml")
    shutil.copytree(project / "own", project / "another")
    assert (
        "add model.trust_remote_code=true"
        in megatrain("data foreign.yaml model.path=another", code=2).err
    )


def handing_on(folder: Path, layer: int) -> None:
    with (folder / "modeling_own.py").open("a") as code:
        code.write(f"FROM = {layer}\n{SIDEWAYS}")


@pytest.mark.slow
def test_other_code_is_checked_anew(megatrain, project, mark):
    assert "comparing a small own model" in megatrain(TRAIN).err
    assert "comparing a small own model" not in megatrain(TRAIN, "output=again").err
    handing_on(project / "own", 0)
    assert "is not trained as in plain PyTorch" in megatrain(TRAIN, "output=other", code=8).err


def test_layers_of_its_own_are_all_checked(megatrain, project, mark):
    """What is alike may do otherwise by its number."""
    described = json.loads((project / "own" / "config.json").read_text())
    (project / "own" / "config.json").write_text(json.dumps(described | {"num_hidden_layers": 6}))
    handing_on(project / "own", 3)
    assert '"failed"' in megatrain("verify own --json --trust-remote-code", code=8).out


def test_code_that_draws_random_numbers_is_refused(megatrain, project, mark):
    code = (project / "own" / "modeling_own.py").read_text()
    noise = "hidden_states = hidden_states + 0.3 * torch.randn_like(hidden_states)"
    noisy = SIDEWAYS.replace("number, kept =", f"{noise}; number, kept =")
    (project / "own" / "modeling_own.py").write_text(f"import torch\n{code}FROM = 99\n{noisy}")
    error = megatrain(TRAIN, code=2).err
    assert "computes other logits each time" in error and "random numbers" in error


def test_the_code_is_part_of_every_model_folder(megatrain, trained, project, mark):
    megatrain("export run out")
    code = CODE.format(mark=str(mark)).encode()
    for folder in (trained / "final", trained / "checkpoint-2"):
        assert "modeling_own.py" in read_manifest(folder).files
    for folder in (trained / "final", project / "out"):
        assert (folder / "modeling_own.py").read_bytes() == code
    model = transformers.AutoModelForCausalLM.from_pretrained(
        project / "out", trust_remote_code=True
    )
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_code_that_was_changed_is_not_run(megatrain, trained, mark):
    path = trained / "final" / "modeling_own.py"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data + b"#")
    done = megatrain("eval run/final --trust-remote-code", code=7)
    assert "modeling_own.py: does not match its checksum" in done.err
    assert not mark.exists()


@pytest.mark.slow
def test_a_resumed_run_keeps_it(megatrain, project, mark):
    megatrain(TRAIN)
    megatrain("resume run train.max_steps=3")
    assert "modeling_own.py" in read_manifest(project / "run" / "checkpoint-3").files


def test_in_python(trained, mark):
    with pytest.raises(ModelError):
        mt.evaluate(trained)
    assert not mark.exists()
    assert mt.evaluate(trained, trust_remote_code=True)["eval_loss"] > 0
