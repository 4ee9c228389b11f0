"""The types of arguments of commands. argparse reports an invalid value with the name of its argument."""

import argparse
import math
from collections.abc import Callable

from foreshock.api.runs import LARGEST_STEP

_LARGEST = 1e8
"""Largest time or factor; 1e8 s are three years, which every clock can add to the present."""


def whole(least: int, most: int = LARGEST_STEP) -> Callable[[str], int]:
    """Return the type of a whole number from `least` to `most`."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}, got {_short(text)}")
        return value

    return convert


def real(least: float = 0.0, most: float = _LARGEST, *, above: bool = False) -> Callable[[str], float]:
    """Return the type of a finite number from `least` to `most`; `above`: not `least` itself."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most or (above and value == least):
            start = f"above {least:g}" if above else f"from {least:g}"
            raise argparse.ArgumentTypeError(f"must be a number {start} to {most:g}, got {_short(text)}")
        return value

    return convert


def filled(text: str) -> str:
    """Return the text. Raises argparse.ArgumentTypeError if it is empty or white space."""
    if not text.strip():
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def _short(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]}…"


STEP = whole(0)
COUNT = whole(1)
SECONDS = real()
POSITIVE = real(above=True)
FINITE = real(-_LARGEST)
