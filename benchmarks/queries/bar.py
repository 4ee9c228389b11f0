"""What one bar of `make bench-queries` gives: lines of a table, figures, and whether it is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """The result of one bar."""

    name: str
    lines: Sequence[str]
    values: Mapping[str, float]
    reached: bool
