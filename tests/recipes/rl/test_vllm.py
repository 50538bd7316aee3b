"""Answers that a vLLM server writes; the server is a stub."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest
from megatrain.engine.rollout.draw import Draw, mix
from megatrain.errors import ServerError
from megatrain.recipes.rl import vllm as sampler
from megatrain.recipes.rl.vllm import VllmServer
from tests.helpers.commands import metrics_of
from tests.helpers.support import engine_of, full_batches, plain_model, tiny_config
from tests.helpers.vllm_stub import SETTINGS, local_vllm, written
from tests.recipes.rl.test_rollout_runs import task  # noqa: F401
from tests.recipes.same_run import same_run

UPDATE = "/pause?mode=abort", "/start_weight_update", "/update_weights"


@pytest.mark.parametrize("tells_version", [True, False])
def test_a_server_gets_every_bit_of_the_weights_before_it_writes(tells_version, monkeypatch):
    monkeypatch.setattr(sampler, "CHUNK_BYTES", 1 << 14)
    config = tiny_config("llama", tie_word_embeddings=True)
    requests = [AnswerRequest(key, [5, 6 + key], (0, 2), 4) for key in (7, 8)]
    with local_vllm() as stub, engine_of(config, precision="bfloat16") as engine:
        stub.model, stub.tells_version = plain_model(config, seed=1).eval(), tells_version
        server, draw = VllmServer(engine, stub.url, 5.0), Draw(seed=3, temperature=0.7)
        for number in (1, 2):
            engine.train_step(full_batches(number))
            found = {(one.key, one.number): one for one in server.rollout(requests, draw, (2,))}
            own = dict(engine.iter_weights())
            assert [*stub.weights] == [*own]
            for name, weight in own.items():
                assert stub.weights[name].dtype == weight.dtype == torch.bfloat16
                assert torch.equal(stub.weights[name], weight), name
            updates = [len(one) for one in stub.chunks[stub.version]]
            assert len(updates) > 2 and sum(updates) == len(own)
            order = [*UPDATE, *["/update_weights"] * (len(updates) - 1), "/finish_weight_update"]
            assert stub.asked == ["/init_weight_transfer_engine", *[*order, "/resume"] * number]
            assert len(stub.chunks) == number, "a version each"
            assert found.keys() == {(7, 0), (7, 2), (8, 0), (8, 2)}
            for (key, n), answer in found.items():
                about = mix(3, key, n, 0), 4, 0.7, (2,)
                ids, logprobs = written(stub.model, [5, 6 + key], *about)
                finish: Any = "stop" if ids[-1] == 2 else "length"
                assert answer == Answer(key, n, ids, logprobs, None, finish)


def test_an_answer_goes_on_behind_what_a_tool_says():
    config, on = tiny_config("llama"), AnswerRequest(7, [5, 6, 8, 9], (0,), 2, drawn=2)
    with local_vllm() as stub, engine_of(config) as engine:
        stub.model = plain_model(config, seed=1).eval()
        server, came, idle = VllmServer(engine, stub.url, 5.0), [[on], [], []], []

        def more(waits: bool) -> Any:
            idle.append(waits)
            return came.pop(0)

        first, second = server.rollout([AnswerRequest(7, [5, 6], (0,), 2)], Draw(seed=3), (), more)
        for answer, ids, drawn in ((first, [5, 6], 0), (second, [*on.ids], 2)):
            about = ids, mix(3, 7, 0, drawn), 2, 1.0, ()
            assert (answer.ids, answer.logprobs) == written(stub.model, *about)
        assert idle == [True, True] and stub.asked.count("/start_weight_update") == 1


def test_a_run_is_that_of_a_sampler_here_which_writes_the_same(megatrain, task, monkeypatch):  # noqa: F811
    options = ["data.eval=4", "train.eval_every=5", "grpo.num_iterations=2"]
    with local_vllm(task / "model") as stub:
        asked = f"rollout.vllm_server_base_url={stub.url}"
        said = megatrain("train rl.yaml", *options, asked, "output=served")
        assert "neither time nor memory of what the server does" in said.err
        lines = metrics_of(task / "served")
        evaluations = sum("eval_reward" in line for line in lines)
        assert len(stub.chunks) == 10 // 2 + evaluations, "one before each has answers"
        found = megatrain("rollout rl.yaml --prompts 2 --json", asked).json
        assert len(found["answers"]) == 2 * 4
    for line in lines:  # the server has the trainer's weights
        assert line.get("sampling/sampling_logp_difference/max", 0) < 1e-4

    def own(engine: Engine, requests: Any, draw: Draw, ends: Any, *_: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(task / "model")
        model.load_state_dict(dict(engine.iter_weights()), strict=False)
        for one in requests:
            for number in one.answers:
                seed = mix(draw.seed, one.key, number, 0)
                found = written(model, one.ids, seed, one.most, draw.temperature, ends)
                yield Answer(
                    one.key, number, *found, None, "stop" if found[0][-1] in ends else "length"
                )

    monkeypatch.setattr(Engine, "rollout", own)
    megatrain("train rl.yaml", *options)
    same_run(task / "run", task / "served")


REFUSED = {
    "train rl.yaml rollout.vllm_server_timeout=3": "rollout.vllm_server_base_url; set that",
    "train rl.yaml rollout.vllm_server_base_url=localhost:8000": "such as http://localhost:8000",
    "train rl.yaml rollout.vllm_server_base_url=http://a rollout.top_p=0.9": "top_p: a vLLM",
    "train rl.yaml rollout.vllm_server_base_url=http://a rollout.min_p=0.1": "min_p: a vLLM",
    "plan rl.yaml --gpu H200 --ram 99GiB --gpus 2 device=auto "
    "rollout.vllm_server_base_url=http://a": "a server writes for one GPU; set gpus: 1",
}


def test_what_a_server_cannot_do_is_refused(megatrain, task):  # noqa: F811
    for words, reason in REFUSED.items():
        assert reason in megatrain(words, code=2).err, words


def fails(code: int, answer: Any) -> Any:
    return 500, {"error": {"message": "engine died"}}


def is_asked_to_stop(*reply: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)
    return reply


@pytest.mark.parametrize(("how", "code"), [(fails, 9), (is_asked_to_stop, 75)])
def test_a_run_that_stops_goes_on_with_another_server(megatrain, task, how, code):  # noqa: F811
    """What was written is not asked for again."""
    with local_vllm(task / "model") as stub:
        asked = f"rollout.vllm_server_base_url={stub.url}"
        megatrain("train rl.yaml", asked, "output=whole")
        whole = {str(one) for one in stub.told}
    with local_vllm(task / "model") as stub:
        stub.answer["/v1/completions"] = lambda *reply: (
            how(*reply) if len(stub.told) > 40 else reply
        )
        asked = f"rollout.vllm_server_base_url={stub.url}"
        said = megatrain("train rl.yaml", asked, code=code).err
        if code == 9:
            assert "/v1/completions: answered 500: " in said and "engine died" in said
        assert stub.state == "ready", "for others"
    files = (task / "run/rollouts").glob("*.jsonl")
    kept = sum(file.read_bytes().count(b'"finish"') for file in files)
    assert kept == 40 if code == 9 else 32 < kept <= 48
    with local_vllm(task / "model") as other:
        megatrain("resume run", f"rollout.vllm_server_base_url={other.url}")
        assert {str(one) for one in stub.told + other.told} == whole
        assert len(other.told) == len(whole) - kept
    same_run(task / "whole", task / "run")


def changed(**changes: Any) -> Any:
    """A reply whose only answer is otherwise."""
    return lambda code, answer: (code, {"choices": [{**answer["choices"][0], **changes}]})


FAULTS: dict[str, tuple[str, Any, str]] = {
    "no development mode": ("/server_info?config_format=json", (404, {}), "VLLM_SERVER_DEV_MODE=1"),
    "another backend": (
        "/server_info?config_format=json",
        (200, {"vllm_config": {**SETTINGS, "weight_transfer_config": {"backend": "nccl"}}}),
        "was started with weight transfer by nccl, and processed_logprobs; serve this run's model",
    ),
    "other log-probabilities": (
        "/server_info?config_format=json",
        (200, {"vllm_config": {**SETTINGS, "model_config": {"logprobs_mode": "raw_logprobs"}}}),
        "and raw_logprobs",
    ),
    "no vLLM": ("/server_info?config_format=json", (200, ["hello"]), "did not give its config"),
    "another model": (
        *("/update_weights", (500, {"error": "shape mismatch"})),
        '/update_weights: answered 500: {"error": "shape mismatch"}; serve this',
    ),
    "a hang": (
        "/finish_weight_update",
        (200, "hang"),
        "gave no answer within 0.5 s; raise rollout.",
    ),
    "no answer": ("/v1/completions", (200, {"choices": []}), "did not give one answer with its"),
    "two": ("/v1/completions", (200, {"choices": [{}, {}]}), "did not give one answer with its"),
    "no ids": ("/v1/completions", changed(token_ids=None), "token ids and their log-prob"),
    "no log-probabilities": ("/v1/completions", changed(logprobs=None), "their log-prob"),
    "too few": (
        *("/v1/completions", changed(logprobs={"token_logprobs": [-1.0]})),
        "other log-probabilities than tokens",
    ),
    "not a number": (
        *("/v1/completions", changed(logprobs={"token_logprobs": [float("nan")] * 4})),
        "other log-probabilities than tokens",
    ),
    "aborted": (
        "/v1/completions",
        changed(token_ids=[5], logprobs={"token_logprobs": [-1.0]}, finish_reason="abort"),
        "1 of 4 tokens and no end: abort",
    ),
    "another run's weights": (
        *("/weight_info", (200, {"weight_version": "other-1"})),
        "has weights 'other-1' instead of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_server_does_not_do_is_one_sentence(fault):
    path, reply, words = FAULTS[fault]
    with local_vllm() as stub, engine_of("llama") as engine:
        stub.model = plain_model(tiny_config("llama")).eval()
        stub.answer[path] = reply if callable(reply) else lambda *_: reply
        with pytest.raises(ServerError) as error:  # noqa: PT012  some are found before it writes
            server = VllmServer(engine, stub.url, 0.5)
            [*server.rollout([AnswerRequest(0, [5, 6], (0,), 4)], Draw(), ())]
        assert words in str(error.value) and "\n" not in str(error.value)
        assert stub.url in str(error.value)


def test_nobody_there_is_one_sentence():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with engine_of("llama") as engine, pytest.raises(ServerError, match="is it running"):
        VllmServer(engine, url, 1.0)
