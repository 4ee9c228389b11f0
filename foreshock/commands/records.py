"""Curves and buckets as the commands show them. NaN means "not estimable"."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Bucket", "Curve"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Measures of one comparison over the active steps; `values` has one number per step."""

    comparison: str
    steps: tuple[int, ...]
    values: Mapping[str, tuple[float, ...]]
    incomplete: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Steps that closed without some shards: (stored, expected) of each."""
    coverage: Mapping[int, str] = field(default_factory=dict)
    """Steps of which shards were sent as statistics: what the measures of each rest on."""

    def of(self, measure: str) -> tuple[float, ...]:
        """Return one number per step; all NaN if the service does not know the measure."""
        return self.values.get(measure, (math.nan,) * len(self.steps))

    def known(self, measure: str) -> bool:
        """Return True if any step has a finite value of the measure."""
        return any(math.isfinite(value) for value in self.of(measure))


@dataclass(frozen=True, slots=True)
class Bucket:
    """The tokens whose probability under the behaviour score is in [low, high)."""

    low: float
    high: float
    tokens: int
    mean_abs_d: float
    mean_d: float
    k3_kl: float
    max_abs_d: float
    mean_abs_probability_difference: float
