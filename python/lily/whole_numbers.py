"""Options that are whole numbers."""

from __future__ import annotations

from numbers import Integral


def check_whole(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int.

    Raises:
        ValueError: it is none, or not in [low, high]; `name` leads the message.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name}: {value!r}, expected an integer")
    number = int(value)
    if high is not None and not low <= number <= high:
        raise ValueError(f"{name}: {number}, expected {low}…{high}")
    if number < low:
        raise ValueError(f"{name}: {number}, expected at least {low}")
    return number
