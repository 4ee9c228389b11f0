"""The result of a family."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """Whether every bar is reached, and the measured values as `key=value`."""

    reached: bool
    results: list[str]
