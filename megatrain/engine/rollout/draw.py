"""The next token of rows: drawn by counters, so that an answer does not depend on its company."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# of SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014)
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_DIGITS = 53  # of a float64


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
        scores = logits.float()
        if self.temperature == 0:
            logprobs = scores.log_softmax(-1)
            token = logprobs.argmax(-1)
            return token, _of(logprobs, token), torch.ones_like(logprobs[:, 0])
        logprobs = (scores / self.temperature).log_softmax(-1)
        probabilities = self._kept(logprobs.exp())
        up_to = probabilities.cumsum(-1, dtype=torch.float64)
        kept = up_to[:, -1:]
        # of the first token beyond the drawn share: one without probability never is
        drawn = uniform(self.seed, key, number, place)[:, None] * kept
        token = torch.searchsorted(up_to, drawn, right=True)[:, 0]
        token = torch.minimum(token, (up_to < kept).sum(-1))  # where rounding meets the end
        return token, _of(logprobs, token), kept[:, 0].float()

    def _kept(self, probabilities: Tensor) -> Tensor:
        """The probabilities, 0 where a token is never drawn."""
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


def _of(logprobs: Tensor, token: Tensor) -> Tensor:
    return logprobs.gather(1, token[:, None])[:, 0]


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
