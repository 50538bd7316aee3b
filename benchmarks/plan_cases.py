"""The configurations that benchmarks/plan_check.py holds the plan to: families, sizes, precisions,
dials, limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One run with random weights, of Qwen2's layers (biases in attention, 128 wide heads) unless
    another family is named."""

    hidden: int
    layers: int
    tokens: int  # per step
    micro_batch: int | None  # tokens; None and every None below: the planner's choice
    vocab: int = 32_768
    seq_len: int = 512
    groups: int | None = 1
    resident: int | None = 0  # blocks
    sums: int | None = 0  # blocks whose gradient sums stay on the device between groups
    retained: int | None = 0  # layers
    offload: bool | None = False
    on_host: int | None = 0  # layers whose graphs wait in host RAM
    compiled: bool = False
    cheap: bool | None = False  # retention
    clipping: bool = True
    tied: bool = False
    precision: str = "bfloat16"
    moments: str = "float32"
    family: str = "qwen2"
    varied: bool = False  # rows of many lengths, padded; else full rows, as in pre-training
    head_chunk: int | None = None
    gpu_cap: float | None = None  # GiB
    host_cap: float | None = None  # GiB
    # a tier, and its limit as a share of the least that the planner could make do with
    edge: tuple[str, float] | None = None

    def config(self) -> Any:
        from transformers import AutoConfig

        heads = max(2, self.hidden // 128)
        return AutoConfig.for_model(
            self.family,
            hidden_size=self.hidden,
            intermediate_size=self.hidden * 16 // 3 // 128 * 128,
            num_hidden_layers=self.layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
            head_dim=self.hidden // heads,
            vocab_size=self.vocab,
            tie_word_embeddings=self.tied,
            pad_token_id=0,
        )


def free(case: Case) -> Case:
    """The same with every choice left to the planner."""
    dials = ("micro_batch", "groups", "resident", "sums", "retained", "offload", "on_host", "cheap")
    none: dict[str, Any] = dict.fromkeys(dials)
    return replace(case, **none)


def edges(name: str, case: Case, tiers: tuple[str, ...]) -> dict[str, Case]:
    """Runs just below and just above the least that the planner could make do with."""
    return {
        f"{name}, {share:.2f}x {tier}": replace(free(case), edge=(tier, share))
        for tier in tiers
        for share in (0.95, 1.05)
    }


GPU_7B = Case(3584, 4, 65_536, 16_384, vocab=152_064, seq_len=1024, head_chunk=4096)
GPU_2048 = Case(2048, 8, 32_768, 4096)
CUDA_CASES = {
    "small": Case(1024, 8, 16_384, 2048),
    "tied, large vocabulary": Case(1024, 16, 32_768, 8192, vocab=151_936, tied=True),
    "float32": Case(1024, 8, 16_384, 4096, precision="float32"),
    "unclipped": replace(GPU_2048, micro_batch=8192, clipping=False),
    "groups, sums on the GPU": replace(GPU_2048, groups=2, sums=10),
    "groups, sums on the host": replace(GPU_2048, groups=2),
    "half resident": replace(GPU_2048, micro_batch=8192, resident=5),
    "all resident, all retained": replace(GPU_2048, groups=4, resident=10, sums=10, retained=8),
    "half retained, sums here and there": replace(
        GPU_2048, groups=2, resident=3, sums=6, retained=4
    ),
    "compiled, retained": replace(GPU_2048, groups=2, sums=10, retained=8, compiled=True),
    "compiled, cheaply retained": replace(
        GPU_2048, groups=2, sums=10, retained=8, compiled=True, cheap=True
    ),
    "offloaded": replace(GPU_2048, tokens=65_536, resident=3, offload=True),
    "graphs in host RAM": replace(GPU_2048, tokens=65_536, offload=True, on_host=4),
    "qwen-7b, 4 layers": GPU_7B,
    "qwen-7b, 4 layers, head decides": replace(GPU_7B, micro_batch=8192),
    "qwen-7b, 4 layers, fp8": replace(GPU_7B, precision="fp8", compiled=True),
    "qwen-7b, 4 layers, sequences of 4,096": replace(GPU_7B, seq_len=4096),
    "qwen-7b, 14 layers, compiled": free(replace(GPU_7B, layers=14, compiled=True)),
    "qwen-7b, 28 layers, compiled": free(replace(GPU_7B, layers=28, compiled=True)),
    "qwen-7b, 28 layers, compiled, 24 GiB": free(
        replace(GPU_7B, layers=28, compiled=True, gpu_cap=24)
    ),
    "qwen-7b, 14 layers, 16 GiB": free(replace(GPU_7B, layers=14, tokens=32_768, gpu_cap=16)),
    "qwen-7b, 14 layers, 48 GiB of RAM": free(
        replace(GPU_7B, layers=14, compiled=True, host_cap=48)
    ),
    "llama": replace(GPU_2048, family="llama"),
    "llama, bf16 moments": replace(GPU_2048, family="llama", moments="bfloat16"),
    "llama, bf16 moments, unclipped": replace(
        GPU_2048, family="llama", moments="bfloat16", clipping=False
    ),
    "llama, planned freely": free(replace(GPU_2048, family="llama", layers=16)),
    "qwen3": replace(GPU_2048, family="qwen3"),
    "mistral, compiled": replace(GPU_2048, family="mistral", compiled=True),
    "gemma": replace(GPU_2048, family="gemma", tied=True),
    "olmo2": replace(GPU_2048, family="olmo2"),
    "rows of many lengths": replace(GPU_2048, seq_len=1024, varied=True),
    "rows of many lengths, all retained": replace(GPU_2048, seq_len=1024, varied=True, retained=8),
    "rows of many lengths, planned freely": free(replace(GPU_2048, seq_len=1024, varied=True)),
    "rows of many lengths, small": Case(
        1024, 8, 32_768, 4096, seq_len=1024, retained=8, varied=True
    ),
    **edges("edge", replace(GPU_2048, layers=16), ("gpu", "host")),
    **edges("edge, qwen-7b, 14 layers", replace(GPU_7B, layers=14), ("gpu", "host")),
}
CPU_512 = Case(512, 8, 2048, 1024, vocab=8192, seq_len=256)
CPU_CASES = {
    "small": replace(CPU_512, micro_batch=512, seq_len=128),
    "tied, large vocabulary": replace(CPU_512, vocab=49_152, tied=True),
    "float32": replace(CPU_512, precision="float32"),
    "float32, tied": Case(
        512, 4, 1024, 512, vocab=49_152, seq_len=256, precision="float32", tied=True
    ),
    "unclipped": replace(CPU_512, clipping=False),
    "groups": replace(CPU_512, micro_batch=512, seq_len=128, groups=2, sums=10),
    "all resident, all retained": replace(
        CPU_512, micro_batch=512, seq_len=128, groups=4, resident=10, sums=10, retained=8
    ),
    "half retained, sums here and there": replace(
        CPU_512, micro_batch=512, seq_len=128, groups=2, resident=3, sums=6, retained=4
    ),
    "middle": Case(1024, 8, 2048, 1024, vocab=16_384, seq_len=256),
    "llama, bf16 moments": replace(CPU_512, family="llama", moments="bfloat16"),
    "qwen3, long rows": replace(CPU_512, family="qwen3", seq_len=1024),
    "gemma, tied": replace(CPU_512, family="gemma", tied=True),
    "rows of many lengths": replace(CPU_512, varied=True),
    "rows of many lengths, all retained": replace(CPU_512, varied=True, retained=8),
    "planned freely": free(CPU_512),
    "planned freely, 1.5 GiB": free(replace(CPU_512, layers=12, host_cap=1.5)),
    **edges("edge", replace(CPU_512, layers=16), ("host",)),
    **edges("edge, float32", replace(CPU_512, precision="float32"), ("host",)),
}
