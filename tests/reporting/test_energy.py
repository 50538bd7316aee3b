"""Cost and energy: arithmetic over what was given, measured or assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.reporting.energy import (
    COMPUTING_SHARE,
    Economy,
    Energy,
    EnergyMeter,
    Prices,
    compared,
    described,
    planned_power,
)

HOUR = 3600.0


class Gpu:
    """As much of a GpuMeter as energy asks: a counter."""

    def __init__(self, joules: list[float] | None = None) -> None:
        self.joules = joules

    def energy_j(self) -> float | None:
        return self.joules.pop(0) if self.joules else None


def meter(gpu: Gpu, folder: Path) -> EnergyMeter:
    return EnergyMeter(gpu, folder)  # type: ignore[arg-type]


def rapl(folder: Path, number: str, name: str, energy_uj: str) -> Path:
    domain = folder / f"intel-rapl:{number}"
    domain.mkdir(parents=True)
    files = {"name": name, "energy_uj": energy_uj, "max_energy_range_uj": "1000000000"}
    for file, text in files.items():
        (domain / file).write_text(f"{text}\n")
    return domain / "energy_uj"


def test_an_hour_at_a_kilowatt():
    prices = Prices(per_hour=3.5, per_kwh=0.5, currency="EUR")
    watts, counted = planned_power(0.5, None, 350, 300, gpus=2)
    assert watts is not None
    found = Economy(2_000_000, HOUR, watts * HOUR, prices, counted)
    assert found.kwh == pytest.approx(1.0)
    assert found.cost == pytest.approx(4.0)
    assert found.cost_per_million == pytest.approx(2.0)
    assert found.kwh_per_million == pytest.approx(0.5)
    assert described(found, whole=True) == [
        ("cost", "4.00 EUR, 2.00 EUR per million tokens"),
        ("energy", "1 kWh, 0.5 kWh per million tokens (GPU 700 W, as given; host 300 W, as given)"),
    ]


def test_no_price_and_no_power_is_assumed_but_the_data_sheets():
    nothing = Economy(1000, 1.0, planned_power(1.0, None, None, None)[0], Prices(), "")
    assert (nothing.cost, nothing.kwh, described(nothing, whole=True)) == (None, None, [])
    busy = planned_power(1.0, 700, None, None)
    assert busy[0] == COMPUTING_SHARE * 700
    waiting, _ = planned_power(0.0, 700, None, None)
    assert waiting is not None and waiting < 0.5 * COMPUTING_SHARE * 700
    assert "assumed" in busy[1]
    assert planned_power(0.5, 700, 450, None)[0] == 450
    # an unknown energy has no price
    assert Economy(1000, 1.0, None, Prices(per_kwh=0.3), "").cost is None


def test_measured_stands_beside_planned():
    prices = Prices(per_hour=3.6)
    measured = Economy(1_000_000, 1100.0, None, prices, "")
    planned = Economy(4_000_000, 4000.0, None, prices, "")
    cost = "1.10 USD, 1.10 USD per million tokens; planned 1 (+10.0%)"
    assert compared(measured, planned) == [("cost", cost)]
    assert compared(Economy(0, 0.0, None, prices, ""), None) == compared(None, None) == []


def test_a_counter_of_energy_is_read(tmp_path):
    counted = meter(Gpu(joules=[500.0, 520.0, 570.0]), tmp_path)
    before = counted.read()
    assert before == Energy(20.0, None)
    assert counted.read().since(before) == Energy(50.0, None)


def test_processors_count_packages_and_memory_once_and_begin_anew(tmp_path):
    package, _ = rapl(tmp_path, "0", "package-0", "900000000"), rapl(tmp_path, "0:0", "core", "5")
    memory = rapl(tmp_path, "0:1", "dram", "0")
    counted = meter(Gpu(), tmp_path)
    package.write_text("100000000")
    memory.write_text("7000000")
    assert counted.read() == Energy(None, 200.0 + 7.0)
    package.unlink()
    assert counted.read() == Energy(None, 207.0)


def test_counters_that_may_not_be_read_are_none(tmp_path):
    rapl(tmp_path, "0", "package-0", "secret")
    assert meter(Gpu(), tmp_path).read() == Energy(None, None)
    assert meter(Gpu(), tmp_path / "nowhere").read() == Energy(None, None)


def test_what_was_given_counts_instead_of_what_was_measured():
    assert Energy(None, None).or_given(10, 300, 200) == Energy(3000, 2000)
    assert Energy(50.0, 5.0).or_given(10, 300, None) == Energy(3000, 5.0)
    assert Energy(50.0, 5.0).or_given(10, None, None) == Energy(50.0, 5.0)
    assert Energy(None, None).or_given(10, None, None).total_j is None
    assert Energy(1.0, None) + Energy(2.0, None) == Energy(3.0, None)
    assert Energy(1.0, 2.0).total_j == 3.0
