"""A vLLM server on this machine: as much of it as a run asks for, and strict about the order."""

from __future__ import annotations

import base64
import json
import pickle
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_tensor
from transformers import AutoModelForCausalLM

SETTINGS: dict[str, Any] = {
    "weight_transfer_config": {"backend": "ipc"},
    "model_config": {"logprobs_mode": "processed_logprobs"},
}


def written(
    model: Any, prompt: Sequence[int], seed: int, most: int, temperature: float, ends: Sequence[int]
) -> tuple[list[int], list[float]]:
    """An answer that is drawn from the model as vLLM's seeds do it, in a way of its own."""
    generator, ids, logprobs = torch.Generator().manual_seed(seed), [*prompt], list[float]()
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or ids[-1] not in ends):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].float()
        scores = (logits / (temperature or 1)).log_softmax(-1)
        token = scores.exp().multinomial(1, generator=generator) if temperature else scores.argmax()
        ids.append(int(token))
        logprobs.append(float(scores[token]))
    return ids[len(prompt) :], logprobs


@dataclass
class Vllm:
    """Its state, which tests look at and change.

    Attributes:
        model: that answers; None: no answers are asked for.
        asked: paths in order, but for those of answers and versions.
        chunks: names of the tensors of each update, by version.
        weights: as they came last.
        told: bodies of requests for answers.
        answer: changes (status, JSON) of the reply to a path, by the path.
    """

    model: Any = None
    url: str = ""
    tells_version: bool = True
    asked: list[str] = field(default_factory=list)
    chunks: dict[str, list[list[str]]] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    told: list[dict[str, Any]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=dict)
    state: str = "ready"
    version: str = "default"
    updates: list[list[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        """What it answers, and does."""
        steps = {
            "/pause?mode=abort": ("ready", "paused"),
            "/start_weight_update": ("paused", "updating"),
            "/update_weights": ("updating", "updating"),
            "/finish_weight_update": ("updating", "paused"),
            "/resume": ("paused", "ready"),
        }
        if path == "/server_info?config_format=json":
            return 200, {"vllm_config": SETTINGS}
        if path == "/v1/models":
            return 200, {"data": [{"id": "policy"}]}
        if path == "/weight_info" and self.tells_version:
            return 200, {"weight_version": self.version}
        if path == "/v1/completions":
            return (200, self.completed(body)) if self.state == "ready" else (503, "paused")
        if path not in (*steps, "/init_weight_transfer_engine"):
            return 404, {"detail": "Not Found"}
        self.asked.append(path)
        if path in steps:
            before, after = steps[path]
            if self.state != before:
                return 409, f"{path} while {self.state}"
            self.state = after
        if path == "/start_weight_update":
            self.weights, self.updates = {}, []
        if path == "/update_weights":
            self.take(**body["update_info"])
        if path == "/finish_weight_update":
            self.version = body["weight_version"]
            self.chunks[self.version] = self.updates
            if self.model is not None:
                missing, _ = self.model.load_state_dict(self.weights, strict=False)
                assert {*missing} <= {"lm_head.weight"}, missing
        return 200, {}

    def take(
        self, names: list[str], dtype_names: list[str], shapes: Any, ipc_handles_pickled: str
    ) -> None:
        handles = pickle.loads(base64.b64decode(ipc_handles_pickled))
        for name, dtype, shape, handle in zip(names, dtype_names, shapes, handles, strict=True):
            tensor = rebuild_tensor(*handle["cpu"])
            assert (str(tensor.dtype), [*tensor.shape]) == (f"torch.{dtype}", shape)
            assert name not in self.weights
            self.weights[name] = tensor.clone()
        self.updates.append(names)

    def completed(self, body: Any) -> Any:
        self.told.append(body)
        assert body["logprobs"] == 0 and body["return_token_ids"] and body["ignore_eos"]
        assert (body["model"], body["top_p"], body["top_k"]) == ("policy", 1.0, 0)
        about = body["seed"], body["max_tokens"], body["temperature"], body["stop_token_ids"]
        ids, logprobs = written(self.model, body["prompt"], *about)
        choice: Any = {"index": 0, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}}
        choice["finish_reason"] = "stop" if ids[-1] in about[-1] else "length"
        return {"choices": [choice]}


@contextmanager
def local_vllm(folder: Path | None = None) -> Iterator[Vllm]:
    """Inside, it runs, with the model of a folder."""
    model = None if folder is None else AutoModelForCausalLM.from_pretrained(folder)
    vllm = Vllm(model)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with vllm.lock:
                code, answer = vllm.reply(self.path, json.loads(data or "null"))
                change = vllm.answer.get(self.path)
                if change is not None:
                    code, answer = change(code, answer)
            if answer == "hang":
                time.sleep(1)
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST

    kind = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 512})
    server = kind(("127.0.0.1", 0), Handler)
    vllm.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield vllm
    finally:
        server.shutdown()
        server.server_close()
