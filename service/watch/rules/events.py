"""Events of changed rules. Published with the run locked."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """A run has other rules from a step on."""

    run_id: str
