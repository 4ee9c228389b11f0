"""The counts, sums, extremes and examples of one batch, while they are collected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from foreshock.lint.evidence.fields import COUNTS, EXTREMES, SUMS
from foreshock.lint.report import Example

__all__ = ["EXAMPLES_KEPT", "EvidenceBuilder"]

EXAMPLES_KEPT = 3  # per check


@dataclass(slots=True)
class EvidenceBuilder:
    """COUNTS, SUMS and EXTREMES by name, and up to EXAMPLES_KEPT examples of each check."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SUMS, 0.0))
    extremes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(EXTREMES, -math.inf))
    examples: dict[str, list[Example]] = field(default_factory=dict)

    def count(self, **numbers: int) -> None:
        """Add to counts."""
        counts = self.counts
        for name, number in numbers.items():
            counts[name] += int(number)

    def add(self, **numbers: float) -> None:
        """Add to sums."""
        for name, number in numbers.items():
            self.sums[name] += float(number)

    def raise_extremes(self, values: Mapping[str, float]) -> None:
        """Raise each extreme to its value if that is larger; NaN is ignored."""
        for name, value in values.items():
            if value > self.extremes[name]:
                self.extremes[name] = float(value)

    def has_room(self, check: str) -> bool:
        """Return True if the check has fewer than EXAMPLES_KEPT examples."""
        return len(self.examples.get(check, ())) < EXAMPLES_KEPT

    def add_example(self, check: str, example: Example) -> None:
        """Keep an example of a check, if there is room."""
        if self.has_room(check):
            self.examples.setdefault(check, []).append(example)
