"""What training takes in time, energy and money: predicted from a plan, and measured by a run. Arithmetic only.

No price is assumed. Power that was neither given nor measured is a share of the GPU's public board power, and is called assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MILLION = 1_000_000
J_PER_KWH = 3.6e6
# Of the board power in the data sheet. Assumed, not measured by us: large products run at the power limit, and a GPU whose memory and
# clocks are up while it waits draws about a third.
COMPUTING_SHARE, WAITING_SHARE = 0.9, 0.35


@dataclass(frozen=True)
class Prices:
    """What a user pays. None: nothing, or nobody said."""

    per_hour: float | None = None  # of the whole machine
    per_kwh: float | None = None
    currency: str = "USD"


@dataclass(frozen=True)
class Power:
    """Watts while a step is made; None where nobody knows."""

    gpu_w: float | None = None
    host_w: float | None = None
    assumed: bool = False  # the GPU's is a share of its data sheet's

    @property
    def total_w(self) -> float | None:
        """Of the parts that are known."""
        known = [watts for watts in (self.gpu_w, self.host_w) if watts is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class Economy:
    """What so many tokens took, or will take. Derived figures are None where price or power is unknown."""

    tokens: int
    seconds: float
    joules: float | None
    prices: Prices
    counted: str  # in joules, for the reader

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def kwh(self) -> float | None:
        return None if self.joules is None else self.joules / J_PER_KWH

    @property
    def cost(self) -> float | None:
        """In the prices' currency. None without a price; of power alone where only that is known."""
        parts = []
        if self.prices.per_hour is not None:
            parts.append(self.prices.per_hour * self.seconds / 3600)
        if self.prices.per_kwh is not None and self.kwh is not None:
            parts.append(self.prices.per_kwh * self.kwh)
        return sum(parts) if parts else None

    @property
    def kwh_per_million(self) -> float | None:
        """kWh of a million tokens."""
        return self._per_million(self.kwh)

    @property
    def cost_per_million(self) -> float | None:
        return self._per_million(self.cost)

    def _per_million(self, value: float | None) -> float | None:
        return None if value is None or not self.tokens else value * MILLION / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, derived figures included."""
        return {
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "hours": self.seconds / 3600,
            "kwh": self.kwh,
            "kwh_per_million_tokens": self.kwh_per_million,
            "cost": self.cost,
            "cost_per_million_tokens": self.cost_per_million,
            "currency": self.prices.currency,
            "counted": self.counted,
        }


def predicted(tokens: int, seconds: float, power: Power, prices: Prices) -> Economy:
    """Of `tokens` in so many seconds at this power."""
    watts = power.total_w
    return Economy(tokens, seconds, None if watts is None else watts * seconds, prices, _counted(power))


def predicted_power(busy: float, board_w: float | None, gpu_w: float | None, host_w: float | None) -> Power:
    """The power of a step in which the GPU computes for `busy` of the time, 0 to 1.

    board_w: the GPU's board power by its data sheet; None without a GPU, or for one that is not known. gpu_w, host_w: what the user gave.
    """
    if gpu_w is not None or board_w is None:
        return Power(gpu_w, host_w)
    return Power(board_w * (busy * COMPUTING_SHARE + (1 - busy) * WAITING_SHARE), host_w, assumed=True)


def _counted(power: Power) -> str:
    gpu = f"GPU {power.gpu_w:,.0f} W, {'assumed' if power.assumed else 'as given'}" if power.gpu_w is not None else ""
    host = f"host {power.host_w:,.0f} W, as given" if power.host_w is not None else "the host's power is not counted"
    return f"{gpu}; {host}" if gpu else host if power.host_w is not None else "power unknown: set economy.host_power_w"


def money(value: float | None, currency: str) -> str:
    """`0.0123 USD`; empty for None."""
    return "" if value is None else f"{value:,.2f} {currency}" if value >= 1 else f"{value:.3g} {currency}"


def energy(kwh: float | None) -> str:
    """`0.0123 kWh`; empty for None."""
    return "" if kwh is None else f"{kwh:,.3g} kWh"


def human_hours(seconds: float) -> str:
    """`0.31 hours`."""
    return f"{seconds / 3600:,.3g} hours"


def described(economy: Economy, whole: bool) -> list[tuple[str, str]]:
    """(what, in words) of cost and energy, as far as they are known; `whole`: in all, too."""
    rows = []
    currency = economy.prices.currency
    for name, total, each in (
        ("cost", money(economy.cost, currency), money(economy.cost_per_million, currency)),
        ("energy", energy(economy.kwh), energy(economy.kwh_per_million)),
    ):
        if each:
            note = f" ({economy.counted})" if name == "energy" else ""
            rows.append((name, f"{f'{total}, ' if whole else ''}{each} per million tokens{note}"))
    return rows


def compared(measured: Economy | None, planned: Economy | None) -> list[tuple[str, str]]:
    """(what, in words) of what a run took, beside what was planned for a million tokens."""
    if measured is None or not measured.tokens:
        return []
    expected: dict[str, tuple[float | None, float | None]] = {}
    if planned is not None:
        expected["cost"] = (measured.cost_per_million, planned.cost_per_million)
        expected["energy"] = (measured.kwh_per_million, planned.kwh_per_million)
    rows = []
    for name, words in described(measured, whole=True):
        found, plan = expected.get(name, (None, None))
        against = f"; planned {plan:.3g} ({found / plan - 1:+.1%})" if found is not None and plan else ""
        rows.append((name, words + against))
    return rows
