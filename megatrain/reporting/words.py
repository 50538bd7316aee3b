"""Numbers in words."""

from __future__ import annotations


def human_bytes(count: float | None, digits: int = 1) -> str:
    """Bytes in the largest binary unit that keeps the value at 1 or more; `-` if unknown. digits:
    after the point of GiB and TiB; smaller units have one."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    places = {"B": 0, "KiB": 1, "MiB": 1}.get(unit, digits)
    return f"{value:.{places}f} {unit}"


def three_digits(value: float) -> str:
    """`12,345`, `123`, `1.23`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def human_parameters(count: int, active: int) -> str:
    """`7,000 parameters`, and of a mixture how many act on a token."""
    return f"{count:,} parameters" + (f", {active:,} of them active" if active != count else "")


def human_seconds(seconds: float) -> str:
    """Seconds as `8.4s`, `3m12s`, `2h05m` or `1d03h`."""
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, hours, days = seconds / 60, seconds / 3600, seconds / 86400
    if minutes < 60:
        return f"{int(minutes)}m{int(seconds % 60):02d}s"
    if hours < 24:
        return f"{int(hours)}h{int(minutes % 60):02d}m"
    return f"{int(days)}d{int(hours % 24):02d}h"
