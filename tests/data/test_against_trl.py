"""Token ids and loss masks against those of TRL's SFTTrainer, with the chat templates of real
models that TRL brings along. docs/rows.md lists the differences that are meant."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatrain.data.encoding import Encoder
from megatrain.data.formats import convert_row, detect_format
from megatrain.data.samples import RowError
from megatrain.data.template import Scene, Template
from megatrain.models.pretrained import ends_of_turns
from tests.helpers.commands import CHATML

trl = pytest.importorskip("trl", reason="trl is not installed (pip install --no-deps trl)")

pytestmark = pytest.mark.filterwarnings("ignore")  # TRL's own, and transformers' about it
# TRL's rows have nulls that Arrow made, which transformers hands to templates before 5.23.
nulls_left_out = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="TRL needs transformers 5.23 for these rows",
)
FOLDER = Path(trl.__file__).parent / "chat_templates"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def says(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}}
WEATHER = {"name": "get_weather", "description": "Look outside.", "parameters": PARAMETERS}
CALL: dict[str, Any] = {"type": "function", "id": "abcdefghi"}
CALL |= {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "sunny"}
ROWS: dict[str, dict[str, Any]] = {
    "turns": {"messages": [user("one?"), says("It is 1."), user("two?"), says("It is 2.")]},
    "system": {"messages": [{"role": "system", "content": "be"}, user("one?"), says("It is 1.")]},
    "tools": {
        "messages": [user("Sunny?"), says("", tool_calls=[CALL]), RESULT, says("It is sunny.")],
        "tools": [{"type": "function", "function": WEATHER}],
    },
    "reasoning": {"messages": [user("one?"), says("It is 1.", reasoning_content="let me think")]},
    "thinking": {"messages": [user("one?"), says("<think>\nhm\n</think>\n\nIt is 1.")]},
}
ALL = tuple(ROWS)
NO_TOOLS = ("turns", "system", "thinking")
# template -> (end of sequence, rows that it can render, rows for which TRL takes another template)
MODELS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "llama3": ("<|eot_id|>", NO_TOOLS, ()),
    "qwen2_5": ("<|im_end|>", ("turns", "system", "tools", "thinking"), ()),
    "qwen3": ("<|im_end|>", ALL, ("turns", "tools")),
    "qwen3_instruct_2507": ("<|im_end|>", ("turns", "system", "tools", "thinking"), ()),
    "qwen3_5_nothink": ("<|im_end|>", ALL, ("turns",)),
    "gemma": ("<eos>", ("turns", "thinking"), ()),
    "gemma3": ("<eos>", NO_TOOLS, ()),
    "phi3": ("<|endoftext|>", NO_TOOLS, ()),
    "cohere": ("<|END_OF_TURN_TOKEN|>", NO_TOOLS, ()),
    "cohere2": ("<|END_OF_TURN_TOKEN|>", NO_TOOLS, ()),
    "deepseekv3": ("<｜end▁of▁sentence｜>", ("turns", "system"), ()),
    "glm4moe": ("<|endoftext|>", ALL, ()),
    "gptoss": ("<|return|>", ALL, ()),
    "lfm2_v2": ("<|im_end|>", ("turns", "system", "tools", "thinking"), ()),
    "nemotron_3_nano": ("<|im_end|>", ALL, ()),
}
# with no difference at all
EXACT = ("llama3", "cohere", "cohere2", "glm4moe")
TOKEN = re.compile(r"<\|[^\s<>|{}'\"]+\|>|<｜[^\s<>｜{}'\"]+｜>|<(?:start|end)_of_turn>")
CASES = [(name, kind) for name, (_, kinds, _) in MODELS.items() for kind in kinds]


def of_model(make_tokenizer: Any, name: str) -> Any:
    """A tokenizer with a model's template and the special tokens in it."""
    source, eos = (FOLDER / f"{name}.jinja").read_text(), MODELS[name][0]
    tokenizer = make_tokenizer(source, trim_offsets=False)
    tokens = sorted({*TOKEN.findall(source), "<bos>"} - {eos})
    tokenizer.add_special_tokens(
        {"eos_token": eos, "bos_token": "<bos>", "extra_special_tokens": tokens}
    )
    return tokenizer


@pytest.fixture(scope="module")
def tokenizers(make_tokenizer: Any) -> dict[str, Any]:
    return {name: of_model(make_tokenizer, name) for name in MODELS}


@pytest.fixture(scope="module")
def of_trl(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """of_trl(tokenizer, row): (ids, mask) as TRL trains on them, the mask on the answers alone."""
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    datasets.disable_progress_bars()
    sizes: Any = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=600, num_attention_heads=1, **sizes))
    folder = str(tmp_path_factory.mktemp("trl"))

    def rows(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
        only_answers = "messages" in row
        args = trl.SFTConfig(
            output_dir=folder, max_length=None, report_to="none", assistant_only_loss=only_answers,
            use_cpu=True, bf16=False,
        )  # fmt: skip
        if "tools" in row:  # as text, or Arrow would give every parameter the fields of all
            row = {**row, "tools": json.dumps(row["tools"])}
        data = datasets.Dataset.from_list([row])
        trainer = trl.SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
        (found,) = trainer.train_dataset
        return found["input_ids"], [label != -100 for label in found["labels"]]

    yield rows
    datasets.enable_progress_bars()


def ours(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[bool]]:
    form = detect_format(row)
    assert form is not None
    encoder = Encoder(tokenizer)
    ((ids, mask),) = encoder.encode([*map(encoder.mark, convert_row(form, row).texts)])
    return ids.tolist(), mask.tolist()


def runs(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    pairs = itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for target, run in pairs if target]


def prompt_of(tokenizer: Any) -> str:
    """What the template writes for a generation prompt."""
    template, asked = Template(tokenizer), Scene((user("one?"),))
    return template.render(asked, generation_prompt=True).removeprefix(template.render(asked))


@nulls_left_out
@pytest.mark.slow
def test_ids_and_masks_but_for_what_is_meant(tokenizers, of_trl):
    for name, kind in CASES:
        tokenizer, row = tokenizers[name], ROWS[kind]
        own, theirs = ours(tokenizer, row), of_trl(tokenizer, row)
        if kind in MODELS[name][2]:
            assert own[0] != theirs[0]
            continue
        assert own[0] == theirs[0]
        if name in EXACT:
            assert own[1] == theirs[1]
        for mine, other in zip(runs(tokenizer, *own), runs(tokenizer, *theirs), strict=True):
            # white space behind the token that ends a turn
            stem, tail = other[: len(other.rstrip())], other[len(other.rstrip()) :]
            assert mine.rstrip() == mine or mine == other
            # what the generation prompt supplies
            lead = stem.removesuffix(mine.rstrip())
            assert stem.endswith(mine.rstrip())
            assert lead in prompt_of(tokenizer)
            assert not tail.strip()


@nulls_left_out
@pytest.mark.slow
def test_with_trl_s_own_template_there_is_no_difference(tokenizers, of_trl):
    """Its templates for training have `{% generation %}` blocks, which decide then."""
    for name, kind in CASES:
        template = trl.chat_template_utils.get_training_chat_template(tokenizers[name])
        if template is None:
            continue  # TRL trains with the template itself
        tokenizer, row = copy.deepcopy(tokenizers[name]), ROWS[kind]
        tokenizer.chat_template = template
        own, theirs = ours(tokenizer, row), of_trl(tokenizer, row)
        assert own[0] == theirs[0]
        if name != "phi3":  # which has a block of its own for the end of a conversation
            assert own[1] == theirs[1]


def test_every_answer_ends_where_the_saved_model_stops(tokenizers):
    for name, kind in CASES:
        tokenizer, template = tokenizers[name], Template(tokenizers[name])
        stops = {tokenizer.eos_token, *ends_of_turns(tokenizer)}
        ends = [template.last_token(one) for one in runs(tokenizer, *ours(tokenizer, ROWS[kind]))]
        if (name, kind) == ("gptoss", "turns"):  # whose model goes on after <|end|>: a warning
            assert ends.pop(0) == "<|end|>"
        assert stops.issuperset(ends)


def test_what_a_template_does_not_show_is_refused(tokenizers):
    for name, kind in [
        (name, kind) for name in MODELS for kind in ROWS if (name, kind) not in CASES
    ]:
        with pytest.raises(RowError, match=r"the chat template (leaves|refuses|rewrites)"):
            ours(tokenizers[name], ROWS[kind])


def test_plain_texts(make_tokenizer, of_trl):
    for template in [None, CHATML]:
        for bos in [False, True]:
            for row in [
                {"prompt": "What is two plus two?", "completion": " It is four."},
                {"prompt": "naïve ", "completion": "café ☕<|endoftext|>"},
                {"text": "hello world"},
            ]:
                tokenizer = make_tokenizer(template, trim_offsets=False, bos=bos)
                own, theirs = ours(tokenizer, row), of_trl(tokenizer, row)
                assert own[0] == theirs[0]
                assert own[1][1:] == theirs[1][1:]  # nothing predicts the first token


def test_lists_of_messages(make_tokenizer, of_trl):
    tokenizer = make_tokenizer(trim_offsets=False)
    row = {"prompt": [user("one?")], "completion": [says("It is 1.")]}
    own, theirs = ours(tokenizer, row), of_trl(tokenizer, row)
    assert own[0] == theirs[0]
    newline = [tokenizer.decode([token]) for token in own[0]][-1]
    assert newline == "\n"  # behind the end of the turn, which TRL trains on
    assert [*own[1][:-1], True] == theirs[1]
