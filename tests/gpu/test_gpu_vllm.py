"""Another process opens the weights that a vLLM server is given, on the GPU where they lie."""

from __future__ import annotations

import base64
import multiprocessing
import pickle
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from megatrain.engine.rollout.draw import Draw
from megatrain.recipes.rl import vllm as sampler
from megatrain.recipes.rl.vllm import VllmServer
from tests.helpers.support import engine_of, full_batches, tiny_config
from tests.helpers.vllm_stub import local_vllm


def bits_of(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    plain = tensor.detach().cpu().contiguous()
    return str(plain.dtype), tuple(plain.shape), plain.view(torch.uint8).numpy().tobytes()


def opens(pipe: Any) -> None:
    """What a worker of vLLM does, one that holds all tensors until the update is finished."""
    held = dict[str, torch.Tensor]()
    while (asked := pipe.recv()) is not None:
        if asked == "finish":
            bits = {name: bits_of(tensor) for name, tensor in held.items()}
            held.clear()
            torch.cuda.ipc_collect()
            pipe.send(bits)
            continue
        owner = str(torch.cuda.get_device_properties(0).uuid)
        handles = pickle.loads(base64.b64decode(asked["ipc_handles_pickled"]))
        for name, handle in zip(asked["names"], handles, strict=True):
            arguments = [*handle[owner]]
            arguments[6] = 0  # its own number of the device
            held[name] = rebuild_cuda_tensor(*arguments)
        torch.cuda.synchronize()
        pipe.send("opened")


def test_another_process_opens_every_bit_and_nothing_stays(monkeypatch):
    monkeypatch.setattr(sampler, "CHUNK_BYTES", 1 << 14)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=opens, args=(theirs,), daemon=True)
    worker.start()
    chunks = list[list[str]]()

    def take(**info: Any) -> None:
        ours.send(info)
        assert ours.poll(60) and ours.recv() == "opened"
        chunks.append(info["names"])

    config = tiny_config("llama", hidden_size=64)
    options: dict[str, Any] = {"device": "cuda", "precision": "bfloat16"}
    with local_vllm() as stub, engine_of(config, **options) as engine:
        monkeypatch.setattr(stub, "take", take)
        server, taken = VllmServer(engine, stub.url, 60.0), list[int]()
        for number in range(3):
            engine.train_step(full_batches(number))
            chunks.clear()
            assert not [*server.rollout([], Draw(), ())]
            ours.send("finish")
            assert ours.poll(60)
            found = ours.recv()
            own = {name: bits_of(weight) for name, weight in engine.iter_weights()}
            assert len(chunks) > 2 and [name for names in chunks for name in names] == [*own]
            assert found == own
            torch.cuda.ipc_collect()
            taken.append(torch.cuda.memory_allocated())
    ours.send(None)
    worker.join(60)
    assert worker.exitcode == 0
    assert taken[1] == taken[2], "what was opened is given back"
