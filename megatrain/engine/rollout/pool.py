"""Keys and values of many rows in slots, and attention over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "megatrain_rollout"


@dataclass(frozen=True)
class RowBytes:
    """Bytes of a row: of each of its tokens' keys and values, and of states."""

    token: int
    states: int


class Pool(Cache):
    """Keys and values [slots, room, heads, head] of each layer, and states [slots, ...] of
    recurrent ones, made when it is first called.

    A call is of all tokens of some prompts (`prefill`), or of one token of each of the first `rows`
    slots (`step`); the forward passes between are a family's own.
    """

    def __init__(self, slots: int, room: int) -> None:
        super().__init__(layers=[])
        self.slots, self.room = slots, room
        self.arrays: dict[int, tuple[Tensor, Tensor]] = {}
        self.states: dict[tuple[str, int, int], Tensor] = {}  # by kind, layer and number in it
        self._at: Tensor | None = None  # int64 [tokens], in [slots * room], of what comes
        self._slots: Tensor | slice = slice(0)  # of the next call's rows
        self._rows, self._seen = 0, 0

    def prefill(self, slots: Tensor, width: int) -> None:
        """The next call is of prompts [len(slots), width]."""
        along = torch.arange(width, device=slots.device)
        self._at, self._rows = (slots[:, None] * self.room + along).flatten(), 0
        self._slots = slots

    def step(self, places: Tensor, seen: int) -> None:
        """The next call is of the tokens at `places`, int64 [rows], which see `seen` places."""
        rows = torch.arange(len(places), device=places.device)
        self._at, self._rows, self._seen = rows * self.room + places, len(places), seen
        self._slots = slice(len(places))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep these [rows, heads, tokens, head]; returns what the rows see."""
        both = key_states, value_states
        if layer_idx not in self.arrays:
            self.arrays[layer_idx] = tuple(  # type: ignore[assignment]
                one.new_zeros(self.slots, self.room, one.shape[1], one.shape[3]) for one in both
            )
        assert self._at is not None
        for array, new in zip(self.arrays[layer_idx], both, strict=True):
            flat = new.transpose(1, 2).flatten(0, 1)
            array.view(-1, *array.shape[2:]).index_copy_(0, self._at, flat)
        if not self._rows:
            return both
        keys, values = self.arrays[layer_idx]
        seen = slice(self._rows), slice(self._seen)
        return keys[seen].transpose(1, 2), values[seen].transpose(1, 2)

    def copy(self, source: int, targets: Tensor, tokens: int) -> None:
        """Give slots the first tokens of another one."""
        for both in self.arrays.values():
            for array in both:
                array[targets, :tokens] = array[source, :tokens]
        for state in self.states.values():
            state[targets] = state[source].clone()

    def forget(self, slots: slice) -> None:
        """Begin these slots' rows without states."""
        for state in self.states.values():
            state[slots] = 0

    def row_bytes(self) -> RowBytes:
        """Sizes of a row in the layers that were called."""
        kept = [one for both in self.arrays.values() for one in both]
        token = sum(one.shape[2] * one.shape[3] * one.itemsize for one in kept)
        return RowBytes(token, sum(one[0].nbytes for one in self.states.values()))

    # -- states, as transformers' recurrent layers ask for them ------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state("conv", layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._state("recurrent", layer_idx, state_idx)

    def _state(self, *key: Any) -> Tensor | None:
        """A view that a layer may change, in a step; a prompt has none before it."""
        return self.states[key][: self._rows] if self._rows and key in self.states else None

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Keep the last inputs of a convolution [rows, channels, tokens]; returns all it sees."""
        width = conv_kernel_size or conv_states.shape[-1]
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            whole = F.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat([before, conv_states], -1)
        self._keep(whole[..., -width:], "conv", layer_idx, state_idx)
        return whole

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep states [rows, ...]; returns them."""
        self._keep(recurrent_states, "recurrent", layer_idx, state_idx)
        return recurrent_states

    def _keep(self, state: Tensor, *key: Any) -> None:
        if key not in self.states:
            self.states[key] = state.new_zeros(self.slots, *state.shape[1:])
        self.states[key][self._slots] = state

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return self._rows > 0

    def is_recording_past(self, *_: Any) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, *_: Any, **__: Any) -> tuple[int, int]:
        return self._seen, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return self.room

    @property
    def is_compileable(self) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.arrays)


def masks_of(config: Any, near: Tensor, dtype: torch.dtype, as_bool: bool) -> Any:
    """The mask of a call as a family's forward takes it: of each kind of layer where it has some.

    near: int64 [rows, 1, queries, keys], how far each key lies before each query; negative: behind.
    """
    text = config.get_text_config()
    window, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or ()
    window = window if getattr(text, "use_sliding_window", True) else None

    def mask(seen: Tensor) -> Tensor:
        if as_bool:
            return seen
        least = torch.finfo(dtype).min
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, least)

    whole = mask(near >= 0)
    if not window or (kinds and not any("sliding" in kind for kind in kinds)):
        return whole
    slid = mask((near >= 0) & (near < window))
    if not kinds:
        return slid
    others = {kind: None if kind in ("linear_attention", "conv") else whole for kind in kinds}
    return {kind: slid if "sliding" in kind else other for kind, other in others.items()}


@contextmanager
def attending(model: Any) -> Iterator[bool]:
    """Inside, attention that goes through PyTorch reads keys where they lie, and no copy for each
    head that shares them. Yields True where masks may be boolean."""
    before = model.config._attn_implementation
    if before != "sdpa":
        yield False
        return
    AttentionInterface.register(ATTENTION, attend_shared)
    model.set_attn_implementation(ATTENTION)
    try:
        yield True
    finally:
        model.set_attn_implementation(before)


def attend_shared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: [rows, heads, queries, head], fewer heads of keys."""
    shared = query.shape[1] != key.shape[1]
    # with a mask and shared heads the others compute in plain matmuls; there are few shapes to plan
    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True) if query.is_cuda else nullcontext():
        found = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=shared
        )
    return found.transpose(1, 2), None
