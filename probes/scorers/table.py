"""The scorers that workers implement: the rows of `foreshock.scorers` that name an implementation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass

from foreshock.scorers import ENGINES, EXACT_PAIRS
from foreshock.scorers import SCORERS as TABLE
from probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel

__all__ = ["SCORERS", "ImplementedScorer", "installed_scorers", "offered_pairs", "scorer_named"]

ScoreFunction = Callable[[ScoreRequest, WarmModel, Report], Scored]


@dataclass(frozen=True, slots=True)
class ImplementedScorer:
    """A scorer, the engine it runs in, and its function as `module:function`, imported in the engine's process only."""

    name: str
    engine: str
    function: str

    def load(self) -> ScoreFunction:
        """Return the scorer's function. Call it in the engine's process only: it imports the engine."""
        module, _, function = self.function.partition(":")
        found: ScoreFunction = getattr(importlib.import_module(module), function)
        return found


SCORERS: dict[str, ImplementedScorer] = {
    name: ImplementedScorer(name, scorer.engine, scorer.implementation)
    for name, scorer in TABLE.items()
    if scorer.engine is not None and scorer.implementation is not None
}


def installed_scorers() -> tuple[str, ...]:
    """Return the names of the scorers whose engine is installed on this machine."""
    installed = {
        engine.name
        for engine in ENGINES.values()
        if all(importlib.util.find_spec(package) is not None for package in engine.packages)
    }
    return tuple(name for name, scorer in SCORERS.items() if scorer.engine in installed)


def offered_pairs(scorers: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the exact pairs that a worker with these scorers can compare: those with both of them."""
    return tuple(key for key, pair in EXACT_PAIRS.items() if {pair.target, pair.behaviour} <= set(scorers))


def scorer_named(name: str) -> ImplementedScorer:
    """Return the scorer of that name. Raises UnsupportedScoreError if workers of this release have none."""
    try:
        return SCORERS[name]
    except KeyError:
        raise UnsupportedScoreError(f"unknown scorer {name!r}; scorers: {', '.join(SCORERS)}") from None
