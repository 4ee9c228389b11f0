"""The scorers that workers implement: the rows of `foreshock.scorers` that name an implementation."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from foreshock.scorers import ENGINES, EXACT_PAIRS
from foreshock.scorers import SCORERS as TABLE
from foreshock_probes.scorers.request import Report, Scored, ScoreRequest, UnsupportedScoreError, WarmModel
from foreshock_probes.settings import load_settings

ScoreFunction = Callable[[ScoreRequest, WarmModel, Report], Scored]


@dataclass(frozen=True, slots=True)
class ImplementedScorer:
    """A scorer, the engine it runs in, and its function as `module:function`, imported in the engine's process only."""

    name: str
    engine: str
    function: str

    def lacks(self) -> str | None:
        """Return what this machine lacks for the scorer and what to do; None: a worker here can offer it."""
        engine = ENGINES[self.engine]
        missing = [name for name in engine.packages if importlib.util.find_spec(name) is None]
        if missing:
            return f"{', '.join(missing)} is not installed"
        server = self.name.partition(".")[0]
        if engine.remote and server not in load_settings().engine_servers:
            return f"no server is configured; set FORESHOCK_ENGINE_SERVERS='{server}=http://host:port'"
        return None

    def load(self) -> ScoreFunction:
        """Return the scorer's function. Call it in the engine's process only: it imports the engine."""
        found: ScoreFunction = imported(self.function)
        return found


SCORERS: dict[str, ImplementedScorer] = {
    name: ImplementedScorer(name, scorer.engine, scorer.implementation)
    for name, scorer in TABLE.items()
    if scorer.engine is not None and scorer.implementation is not None
}


def installed_scorers() -> tuple[str, ...]:
    """Return the names of the scorers that lack nothing on this machine."""
    return tuple(name for name, scorer in SCORERS.items() if scorer.lacks() is None)


def imported(name: str) -> Any:
    """Import the function `module:function`."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def offered_pairs(scorers: Collection[str]) -> tuple[str, ...]:
    """Return the keys of the exact pairs that a worker with these scorers can compare: those with both of them."""
    return tuple(key for key, pair in EXACT_PAIRS.items() if {pair.target, pair.behaviour} <= set(scorers))


def scorer_named(name: str) -> ImplementedScorer:
    """Return the scorer of that name. Raises UnsupportedScoreError if workers of this release have none."""
    try:
        return SCORERS[name]
    except KeyError:
        raise UnsupportedScoreError(f"unknown scorer {name!r}; scorers: {', '.join(SCORERS)}") from None
