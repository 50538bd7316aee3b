"""Sections of what a run may use, and what that costs."""

from __future__ import annotations

from megatrain.config import choices as c
from megatrain.config import values as v
from megatrain.config.values import Options, key, option


class MemoryOptions(Options):
    """Budgets of the memory tiers, and what is placed on which."""

    gpu: v.SizeOrAuto = key("auto", "GPU memory to use, such as 70GiB; auto: all that is free.")
    host: v.SizeOrAuto = key(
        "auto", "Host RAM to use, such as 120GiB; auto: what the machine or its container has."
    )
    resident: v.NumberOrAuto = option("resident")
    replicated: v.NumberOrAuto = option("replicated")
    offload_activations: v.FlagOrAuto = option("offload_activations")
    retained_on_host: v.NumberOrAuto = option("retained_on_host")
    second_backward: v.FlagOrAuto = option("second_backward")
    sums_on_device: v.NumberOrAuto = option("sums_on_device")
    activations: c.Activations = key(
        "none",
        "Codec of recomputed layers' activation checkpoints: int8 takes 52% of bf16's bytes, int6 "
        "39%, int4 28%. The loss stays exact, gradients are near; with none they are exact.",
    )
    nvme: v.FoldersOrNull = key(
        None,
        "Folder on NVMe, or folders on several drives, for what host RAM lacks room for; or null.",
    )
    nvme_size: v.SizeOrAuto = key(
        "auto", "NVMe space to use, such as 800GiB; auto: all that is free."
    )
    nvme_blocks: v.NumberOrAuto = option("nvme_blocks")
    nvme_arrays: c.NvmeArrays = option("nvme_arrays")
    transport: c.Transport = key(
        "auto",
        "How weights in host RAM come to several GPUs: each uploads its share and they gather the "
        "rest, or all read the host's one copy; the result is the same. auto: read where GPUs do "
        "not reach each other's memory (RTX 4090, 5090).",
    )


class EconomyOptions(Options):
    """Prices and power, for the costs that a plan and a run show. No price is assumed."""

    price_per_hour: v.PositiveOrNull = key(
        None, "Price of the whole machine for an hour; null shows no cost."
    )
    price_per_kwh: v.PositiveOrNull = key(None, "Price of electricity, if paid on top of that.")
    currency: v.Text = key("USD", "Currency of the prices; only shown.")
    gpu_power_w: v.PositiveOrNull = key(
        None,
        "Watts that the GPU draws; null: measured in a run, a share of the data sheet's in a plan.",
    )
    host_power_w: v.PositiveOrNull = key(
        None,
        "Watts of everything but the GPU; null: what the processors' counters show, if readable.",
    )
