"""Answers that a vLLM server on the same GPU writes, given the weights by its own protocol."""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from http.client import HTTPException
from itertools import count
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from megatrain.engine.components import naming_the_gpu
from megatrain.engine.engine import Engine
from megatrain.engine.rollout.decode import Answer, AnswerRequest, More
from megatrain.engine.rollout.draw import Draw, mix
from megatrain.errors import ServerError, printable
from megatrain.heartbeat import beat, doing

CHUNK_BYTES = 1 << 30  # of copies on the device at a time, or one larger tensor
AT_A_TIME = 256  # requests
# What the server would else take from the model's generation_config.json.
UNCUT: dict[str, Any] = {
    "n": 1, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
ADVICE = (
    "serve this run's model on its GPU, with vLLM 0.22 or later: VLLM_SERVER_DEV_MODE=1 "
    "VLLM_ALLOW_INSECURE_SERIALIZATION=1 vllm serve MODEL --weight-transfer-config "
    """'{"backend": "ipc"}' --logprobs-mode processed_logprobs"""
)


# why: decision 0114
class VllmServer:
    """A server that is this run's alone, and has the engine's weights whenever it writes.

    Raises ServerError, as its methods do, where it cannot be reached or was started otherwise.

    Args:
        timeout_s: that the server may take for one request, such as one answer.
    """

    def __init__(self, engine: Engine, url: str, timeout_s: float) -> None:
        self.engine, self.url, self.timeout_s = engine, url.rstrip("/"), timeout_s
        self.run, self.sent, self.version = uuid4().hex[:8], count(1), ""  # of the weights
        self.tells_version = True
        found: Any = self._ask("/server_info?config_format=json")
        with _reading(self.url, "its configuration"):
            config = found["vllm_config"]
            backend = (config["weight_transfer_config"] or {}).get("backend")
            mode = config["model_config"]["logprobs_mode"]
            self.model = self._ask("/v1/models")["data"][0]["id"]
        if (backend, mode) != ("ipc", "processed_logprobs"):
            was = f"weight transfer by {backend or 'nothing'}, and {mode}"
            raise ServerError(f"{self.url}: was started with {was}; {ADVICE}")
        self._ask("/init_weight_transfer_engine", {"init_info": {}})

    def rollout(
        self, requests: Sequence[AnswerRequest], draw: Draw, ends: Sequence[int], more: More = None
    ) -> Generator[Answer, None, None]:
        """Answers to requests as they end, as `Engine.rollout` of one GPU: each has a seed that
        follows from `draw.seed`, its request's key, its number and its tokens so far. Nothing is
        cut by `draw`."""
        self._send_weights()
        with ThreadPoolExecutor(AT_A_TIME) as pool:

            def asked(of: Sequence[AnswerRequest]) -> set[Future[Answer]]:
                each = ((request, number) for request in of for number in request.answers)
                return {pool.submit(self._answer, *one, draw, ends) for one in each}

            pending = asked(requests)
            failed: BaseException | None = None
            try:
                while pending:
                    done, pending = wait(pending, 1.0, FIRST_COMPLETED)
                    beat()  # each has its own limit of time
                    for one in done:
                        if (error := one.exception()) is None:
                            yield one.result()
                        elif failed is None:  # others may end well: they are kept
                            failed, pending = error, self._abort(pending)
                    if more and failed is None:
                        pending |= asked(more(not pending))
            finally:
                self._abort(pending)
        if failed is not None:
            raise failed

    def _abort(self, pending: set[Future[Answer]]) -> set[Future[Answer]]:
        """Have answers end early; those that were asked for already, which are to be waited for."""
        asked = {one for one in pending if not one.cancel()}
        if asked:
            with suppress(ServerError):
                self._ask("/pause?mode=abort", {})
                self._ask("/resume", {})
        return asked

    def _answer(
        self, request: AnswerRequest, number: int, draw: Draw, ends: Sequence[int]
    ) -> Answer:
        about = {"model": self.model, "prompt": [*request.ids], "max_tokens": request.most}
        about |= {"stop_token_ids": [*ends], "ignore_eos": True}  # which ends are meant is said
        seed = mix(draw.seed, request.key, number, request.drawn)
        about |= {"seed": seed, "temperature": draw.temperature}
        about |= {"logprobs": 0, "return_token_ids": True}  # 0: of the token that was drawn
        found: Any = self._ask("/v1/completions", {**UNCUT, **about})
        self._check_version()  # versions only rise: so it had this one all the while
        with _reading(self.url, "one answer with its token ids and their log-probabilities"):
            (choice,) = found["choices"]
            ids, why = [*choice["token_ids"]], choice["finish_reason"]
            logprobs = [float(one) for one in choice["logprobs"]["token_logprobs"]]
            if len(ids) != len(logprobs) or not all(map(math.isfinite, logprobs)):
                raise ValueError("other log-probabilities than tokens")
            ended = bool(ids) and ids[-1] in ends
            if len(ids) > request.most or not (ended or len(ids) == request.most):
                raise ValueError(f"{len(ids)} of {request.most} tokens and no end: {why}")
        finish: Any = "stop" if ended else "length"
        return Answer(request.key, number, ids, logprobs, None, finish)

    def _send_weights(self) -> None:
        """Let the server have the weights of now; one that failed at it stays paused."""
        self.version = f"{self.run}-{next(self.sent)}"
        with doing("giving the weights to vLLM", aloud=False):
            self._ask("/pause?mode=abort", {})  # empties its caches, too
            self._ask("/start_weight_update", {"is_checkpoint_format": True})
            with naming_the_gpu("weights for vLLM"), openable_memory(self.engine.device):
                for copies in self._copies():
                    self._ask("/update_weights", {"update_info": handles_of(copies)})
                    copies.clear()
                    beat()
            self._ask("/finish_weight_update", {"weight_version": self.version})
            self._check_version()
            self._ask("/resume", {})

    def _copies(self) -> Iterator[dict[str, Tensor]]:
        """All published tensors in their order, some at a time, each in memory of its own on the
        device: a server that still holds one when it acknowledges keeps that one alone."""
        copies, nbytes, on = dict[str, Tensor](), 0, self.engine.device
        for name, weight in self.engine.iter_weights():
            if copies and nbytes + weight.nbytes > CHUNK_BYTES:
                yield copies
                copies, nbytes = {}, 0
            copies[name] = torch.empty(weight.shape, dtype=weight.dtype, device=on).copy_(weight)
            nbytes += weight.nbytes
        yield copies

    def _check_version(self) -> None:
        """Raise ServerError where the server says that it has other weights."""
        told = self._ask("/weight_info", absent={}) if self.tells_version else {}
        self.tells_version = bool(told)
        if told and told.get("weight_version") != self.version:
            now = f"{told.get('weight_version')!r} instead of {self.version!r}"
            raise ServerError(f"{self.url}: has weights {now}; let no other run use this server")

    def _ask(self, path: str, body: Any = None, absent: Any = None) -> Any:
        """Post a body in JSON, or get where there is none; the answer. absent: what stands for a
        path that the server does not know."""
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.url + path, data, {"Content-Type": "application/json"})
        advice = "look into its log"
        try:
            with urlopen(request, timeout=self.timeout_s) as response:
                return json.load(response)
        except HTTPError as error:
            if error.code == 404 and absent is not None:
                return absent
            said = " ".join(error.read(1000).decode(errors="replace").split())
            reason = f"answered {error.code}: {printable(said)}"
            advice = ADVICE if error.code == 404 or "weight" in path else advice
        except (OSError, HTTPException, ValueError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            reason = f"cannot be asked: {str(cause) or repr(cause)}; is it running?"
            if isinstance(cause, TimeoutError):
                reason = f"gave no answer within {self.timeout_s:g} s"
                advice = "raise rollout.vllm_server_timeout, or look into its log"
        raise ServerError(f"{self.url}{path}: {reason}; {advice}")


@contextmanager
def _reading(url: str, what: str) -> Iterator[None]:
    """Raise ServerError where the server's JSON has another form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ServerError(f"{url}: did not give {what} ({error!r}); {ADVICE}") from error


def handles_of(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The `update_info` by which vLLM opens tensors of this process's GPU; they must live until it
    has acknowledged them. Tensors on the CPU travel in it."""
    owner, device = "cpu", next(iter(tensors.values())).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # wait: others read the copies on streams of their own
        owner = str(torch.cuda.get_device_properties(device).uuid)
    handles = [{owner: arguments} for _, arguments in map(reduce_tensor, tensors.values())]
    return {
        "names": [*tensors],
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [[*one.shape] for one in tensors.values()],
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
    }


@contextmanager
def openable_memory(device: torch.device) -> Iterator[None]:
    """Inside, memory is taken such that another process may open it: that of segments that grow
    can only be opened by one with rights over this. Free memory is the server's meanwhile."""
    if device.type != "cuda":
        yield
        return
    usual = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "expandable_segments:False"
    configure: Any = torch._C._accelerator_setAllocatorSettings
    torch.cuda.empty_cache()
    configure(f"{usual},expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        configure(usual)
