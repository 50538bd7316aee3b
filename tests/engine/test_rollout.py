"""Answers of many rows at once, by a family's own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from megatrain.engine.rollout import decode
from megatrain.engine.rollout.decode import Answer, AnswerRequest, answers
from megatrain.engine.rollout.draw import Draw, uniform
from megatrain.errors import OutOfMemory
from tests.helpers.support import engine_of, plain_model, tiny_config

ENDS = (5, 6)
MOST = 12
FAST = ("llama", "mistral-sliding", "gemma2", "gpt-oss", "mixtral", "qwen3-next")
SLOW = (
    *("qwen2", "qwen3", "gemma3", "gemma4", "phi3", "olmo2", "cohere", "stablelm", "opt", "gptj"),
    *("gpt2", "gpt-neox", "falcon-7b", "falcon-40b", "qwen3-moe", "granitemoe", "apertus"),
    *("mimo-v2-flash", "bamba", "granitemoehybrid", "jamba", "falcon-h1", "lfm2-moe", "falcon-rw"),
)
GRAPHED = {"llama", "mistral-sliding", "gemma2", "qwen2", "qwen3"}  # at least
BY_GENERATE = {"falcon-rw"}  # ALiBi


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    model = plain_model(tiny_config(family)).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0)  # or all distributions are flat
    return model


def prompts(count: int = 9) -> list[list[int]]:
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 12, (count,), generator=draws).tolist()
    return [torch.randint(7, 97, (length,), generator=draws).tolist() for length in lengths]


def by_key(found: Any) -> dict[tuple[int, int], Answer]:
    return {(answer.key, answer.number): answer for answer in found}


def logprobs(model: Any, prompt: list[int], ids: list[int], temperature: float = 1.0) -> Any:
    whole = torch.tensor([prompt + ids], device=model.device)
    logits = model(whole).logits[0, len(prompt) - 1 : -1].float().cpu()
    of_ids = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])
    return of_ids[:, 0].tolist()


@pytest.mark.parametrize(
    "family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
@torch.no_grad()
def test_answers_are_the_family_s_and_do_not_depend_on_their_company(
    family, caplog, device, monkeypatch
):
    """On a GPU by CUDA graphs, and fused."""
    model, given, drawn = model_of(family).to(device), prompts(), Draw(seed=7, temperature=1.2)
    greedy = [AnswerRequest(n, ids, (0,), MOST) for n, ids in enumerate(given)]
    monkeypatch.setattr(decode, "FUSED_FROM", 0)
    fuse = device != "cpu"
    found = by_key(answers(model, greedy, Draw(temperature=0.0), ENDS, slots=4, fuse=fuse))
    how: Any = GenerationConfig(
        do_sample=False, max_new_tokens=MOST, eos_token_id=[*ENDS], pad_token_id=0
    )
    for number, ids in enumerate(given):
        whole = model.generate(
            torch.tensor([ids], device=device),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=device),
            generation_config=how,
        )
        assert found[number, 0].ids == whole[0, len(ids) :].tolist()
    assert ("generate writes answers" in caplog.text) == (family in BY_GENERATE)
    assert family not in GRAPHED or "without CUDA graphs" not in caplog.text
    groups = [AnswerRequest(n, ids, (0, 1, 2), MOST) for n, ids in enumerate(given)]
    state = torch.get_rng_state()
    one, *others = (
        by_key(answers(model, asked, drawn, ENDS, slots=slots, fuse=fuse))
        for asked, slots in ((groups, 2), (groups[::-1], 9), (groups, None))
    )
    assert torch.equal(state, torch.get_rng_state())
    for other in others:
        assert other.keys() == one.keys()
        differ = [(other[key].ids, one[key].ids) for key in one if other[key].ids != one[key].ids]
        # a GPU's sums round by the number of rows, so that a draw at an edge takes a neighbour
        edges = [next(abs(x - y) for x, y in zip(*ids, strict=False) if x != y) for ids in differ]
        assert edges == ([] if device == "cpu" else [1] * len(edges[:1]))
    assert len({tuple(answer.ids) for answer in one.values()}) > len(one) / 2
    for (key, _), answer in one.items():
        expected = logprobs(model, given[key], answer.ids, 1.2)
        assert answer.logprobs == pytest.approx(expected, abs=3e-3)
        assert answer.kept_mass is None
        assert (answer.ids[-1] in ENDS) == (answer.finish == "stop")
        assert len(answer.ids) == MOST or answer.finish == "stop"


def test_draws_follow_the_distribution_and_cuts_keep_what_they_say():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -2.0]]).expand(20_000, -1)
    numbers = torch.arange(len(logits))
    whole = logits[0].softmax(0)
    for cut, kept in (
        ({}, 5),
        ({"top_k": 2}, 2),
        ({"top_p": 0.8}, 2),
        ({"top_p": 0.5}, 1),
        ({"min_p": 0.1}, 3),
        ({"temperature": 0.5, "min_p": 0.1}, 2),
    ):
        draw = Draw(seed=3, **cut)
        wanted = (logits[0] / draw.temperature).softmax(0)
        token, logprob, mass = draw(logits, numbers, 0 * numbers, 0 * numbers)
        shares = token.bincount(minlength=5) / len(token)
        left = torch.where(torch.arange(5) < kept, wanted, 0.0)
        assert torch.allclose(shares, left / left.sum(), atol=0.01), cut
        assert torch.allclose(logprob, wanted.log()[token]) and torch.allclose(mass, left.sum())
    alone = Draw(seed=3)(logits[:1], numbers[7:8], numbers[:1], numbers[:1])
    assert int(alone[0]) == int(Draw(seed=3)(logits, numbers, 0 * numbers, 0 * numbers)[0][7])
    assert whole.argmax() == Draw(temperature=0.0)(logits[:1], *[numbers[:1]] * 3)[0]
    drawn = torch.cat([uniform(5, numbers, 0 * numbers + n) for n in range(3)])
    assert abs(drawn.mean() - 0.5) < 0.01 and len(drawn.unique()) == len(drawn)
    assert 0 <= drawn.min() < 1e-3 and 1 - 1e-3 < drawn.max() < 1


def test_an_engine_writes_and_is_as_before(monkeypatch):
    model = model_of("llama")
    engine = engine_of("llama", weights=model)
    before = {name: value.clone() for name, value in engine.iter_weights()}
    given = prompts(4)
    asked = [AnswerRequest(n, ids, (0, 3), MOST) for n, ids in enumerate(given)]
    found = by_key(engine.rollout(asked, Draw(seed=1), ENDS))
    assert sorted(found) == [(n, number) for n in range(4) for number in (0, 3)]
    for (key, _), answer in found.items():
        ids = torch.tensor([given[key] + answer.ids])
        (values,) = engine.logprobs([{"input_ids": ids, "labels": ids}])
        expected = values[0, len(given[key]) :].tolist()
        assert answer.logprobs == pytest.approx(expected, abs=1e-4)
    early: Any = engine.rollout(asked, Draw(seed=1), ENDS)
    assert next(early).ids == found[next(iter(found))].ids
    early.close()
    assert all(torch.equal(before[name], value) for name, value in engine.iter_weights())
    assert [*engine.rollout([], Draw(), ENDS)] == []
    monkeypatch.setattr(decode, "free_for_rows", lambda device: 10)
    with pytest.raises(OutOfMemory, match="set a smaller max_completion_length"):
        [*engine.rollout(asked, Draw(), ENDS)]
