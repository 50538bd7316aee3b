"""The next token of rows: drawn by counters, so that an answer does not depend on its company; and
seeds of what layers draw."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

# of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014)
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DIGITS = 53  # of a float64
BLOCK = 512  # tokens whose probabilities are summed first


@dataclass(frozen=True, kw_only=True)
class Draw:
    """The choice of tokens: the likeliest at temperature 0, else drawn from the distribution at
    that temperature, among the `top_k` likeliest, the likeliest with `top_p` of the probability
    together, and those with `min_p` of the likeliest's."""

    seed: int = 0
    temperature: float = 1.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None

    @property
    def cuts(self) -> bool:
        """True if some tokens are never drawn."""
        return any(value is not None for value in (self.top_p, self.top_k, self.min_p))

    def __call__(
        self, logits: Tensor, key: Tensor, number: Tensor, place: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, int64 [rows]; their log-probabilities in the whole distribution at this
        temperature; and the probability of all tokens that might have been drawn, both fp32 [rows].

        Args:
            logits: [rows, vocabulary].
            key, number, place: int64 [rows], of the request, the answer and the token in it.
        """
        if self.temperature not in (0, 1):
            logits = logits.float() / self.temperature
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        if self.temperature == 0:
            token = logprobs.argmax(-1)
            return token, _of(logprobs, token), torch.ones_like(logprobs[:, 0])
        share = uniform(self.seed, key, number, place)[:, None]
        token, kept = _beyond(share, self._kept(logprobs.exp()))
        return token, _of(logprobs, token), kept.float()

    def _kept(self, probabilities: Tensor) -> Tensor:
        """The probabilities, 0 where a token is never drawn."""
        if not self.cuts:
            return probabilities
        least = torch.zeros_like(probabilities[:, :1])
        if self.top_k is not None:
            count = min(self.top_k, probabilities.shape[-1])
            least = probabilities.topk(count, dim=-1).values[:, -1:]
        if self.top_p is not None and self.top_p < 1:
            falling = probabilities.sort(dim=-1, descending=True).values
            inside = falling.cumsum(-1) - falling < self.top_p  # the one that reaches it, too
            least = torch.maximum(least, torch.where(inside, falling, 1.0).amin(-1, keepdim=True))
        if self.min_p is not None:
            least = torch.maximum(least, probabilities.amax(-1, keepdim=True) * self.min_p)
        return torch.where(probabilities >= least, probabilities, 0.0)


def _beyond(share: Tensor, probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """The first token at which the sum of probabilities exceeds this share [rows, 1] of all, int64
    [rows], and the sum of all, float64 [rows]. One without probability never is."""
    rows, tokens = probabilities.shape
    blocks = probabilities.view(rows, -1, math.gcd(tokens, BLOCK))
    up_to = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    drawn = share * up_to[:, -1:]
    block = _first(up_to, drawn)
    before = functional.pad(up_to, (1, 0)).gather(1, block)
    inside = blocks.take_along_dim(block[..., None], 1)[:, 0].cumsum(-1, dtype=torch.float64)
    token = _first(before + inside, drawn)
    return (block * blocks.shape[-1] + token)[:, 0], up_to[:, -1]


def _first(up_to: Tensor, drawn: Tensor) -> Tensor:
    """The first place [rows, 1] where a sum exceeds what was drawn, or, where rounding leaves none,
    where it reaches its end."""
    last = (up_to < up_to[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(up_to, drawn, right=True), last)


def _of(logprobs: Tensor, token: Tensor) -> Tensor:
    return logprobs.gather(1, token[:, None])[:, 0]


def mix(*numbers: int) -> int:
    """A 63-bit seed that follows from whole numbers."""
    state, bits = 0, (1 << 64) - 1
    for number in numbers:
        state = (state + (number & bits) + _GAMMA) & bits
        state = ((state ^ (state >> 30)) * _FIRST) & bits
        state = ((state ^ (state >> 27)) * _SECOND) & bits
        state ^= state >> 31
    return state >> 1


def uniform(seed: int, *counters: Tensor) -> Tensor:
    """Numbers from 0 to below 1, float64, that follow from a seed and counters (int64) alone."""
    state = torch.full_like(counters[0], _signed(seed))
    for counter in counters:
        state = _mixed(state + counter + _signed(_GAMMA))
    return _shifted(state, 64 - _DIGITS).double() * 2.0**-_DIGITS


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ _shifted(state, 30)) * _signed(_FIRST)
    state = (state ^ _shifted(state, 27)) * _signed(_SECOND)
    return state ^ _shifted(state, 31)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """Shifted to the right without its sign, which int64 has and the hash has not."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    number &= (1 << 64) - 1
    return number - (1 << 64) if number >> 63 else number
