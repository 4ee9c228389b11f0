"""Healthy, warning, critical: the published ranges, at lag 0 and by token mean, whatever the GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from foreshock.commands.text import Style

__all__ = ["RANGES", "STYLES", "Range", "Verdict", "verdict_of", "worst"]

Verdict = Literal["healthy", "warning", "critical", "unknown"]

STYLES: dict[str, Style | None] = {
    "healthy": "good",
    "warning": "warning",
    "critical": "critical",
    "unknown": "dim",
    "info": None,
}
"""How a verdict, or an alert's severity, is painted."""


@dataclass(frozen=True, slots=True)
class Range:
    """A measure is healthy up to `warning_above`, critical above `critical_above` (None: none is published)."""

    measure: str
    label: str
    warning_above: float
    critical_above: float | None
    shown: str
    """The healthy range and what lies beyond, in a few words."""

    def verdict(self, value: float) -> Verdict:
        """What is to be said about a value; "unknown" where it is not finite."""
        if not math.isfinite(value):
            return "unknown"
        if self.critical_above is not None and value > self.critical_above:
            return "critical"
        return "warning" if value > self.warning_above else "healthy"


_COMMON = (
    Range("rollout_probs_diff_mean", "mean |Δp|", 0.01, None, "to 0.005, warning > 0.01"),
    Range("token_mult_prob_error", "E[exp |d|]", 1.05, 1.1, "to 1.05, critical > 1.1"),
    Range("tail_2", "F(2)", 0.01, 0.1, "to 0.01, critical > 0.1"),
)

RANGES: dict[str, tuple[Range, ...]] = {
    "dense": (Range("k3_kl", "k3_kl", 1e-3, 1e-2, "1e-5 to 1e-3, critical > 1e-2"), *_COMMON),
    "moe": (Range("k3_kl", "k3_kl", 1e-2, 1e-1, "1e-3 to 1e-2, critical > 1e-1"), *_COMMON),
}
"""By kind of model, in bfloat16: published ranges of k3 for mixtures of experts lie one decade above dense ones."""

_ORDER: tuple[Verdict, ...] = ("unknown", "healthy", "warning", "critical")


def verdict_of(measure: str, value: float, model_kind: str = "dense") -> Verdict:
    """The verdict on one measure; "unknown" for a measure without a published range."""
    for known in RANGES[model_kind]:
        if known.measure == measure:
            return known.verdict(value)
    return "unknown"


def worst(verdicts: list[Verdict]) -> Verdict:
    """The gravest of them."""
    return max(verdicts, key=_ORDER.index, default="unknown")
