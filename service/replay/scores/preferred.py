"""Choose among several scores of a step: those made in the run's own environment, else the newest.

Scores of one scorer in two environments coexist. The chain takes those whose environment differs least from that of the
run; the others are compared with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from foreshock.environment import Environment, differences
from foreshock.errors import ConfigurationError
from foreshock.fingerprint import Fingerprint
from foreshock.scorers import SCORERS


class _Made(Protocol):
    @property
    def scorer(self) -> str: ...
    @property
    def variant(self) -> str: ...
    @property
    def fingerprint(self) -> Mapping[str, Any]: ...


AScore = TypeVar("AScore", bound=_Made)


def environment_of(score: _Made) -> Environment:
    """Return the environment that made a score; one without any known field if its fingerprint is invalid."""
    try:
        return Environment.of_fingerprint(Fingerprint.from_dict(score.fingerprint))
    except ConfigurationError:
        return Environment()


def preferred_scores(scores: Sequence[AScore], run: Mapping[str, Fingerprint | None]) -> list[AScore]:
    """Return one score for each scorer and variant, in the order of their names.

    `scores` are newest first. Of a scorer's plain scores the one counts whose environment differs in the fewest fields
    from that of the run's logged score of its side (`run` by name, `rollout` or `trainer`), and of equal ones the
    newest. A variant is taken from the same platform as the plain score if there is one.
    """
    chosen: dict[tuple[str, str], AScore] = {}
    for name in sorted({score.scorer for score in scores}):
        plain = [score for score in scores if score.scorer == name and not score.variant]
        own = _own_environment(name, run)
        if plain:
            chosen[name, ""] = best = min(plain, key=lambda score: _distance(own, environment_of(score)))
            own = environment_of(best)
        for variant in sorted({score.variant for score in scores if score.scorer == name and score.variant}):
            again = [score for score in scores if (score.scorer, score.variant) == (name, variant)]
            chosen[name, variant] = min(again, key=lambda score: _distance(own, environment_of(score)))
    return [chosen[key] for key in sorted(chosen)]


def other_environments(scores: Sequence[AScore], chosen: AScore) -> list[AScore]:
    """Return the plain scores of the same scorer on other platforms than `chosen`, the newest of each first."""
    seen = {environment_of(chosen).platform}
    found = []
    for score in scores:
        platform = environment_of(score).platform
        if score.scorer == chosen.scorer and not score.variant and platform not in seen:
            seen.add(platform)
            found.append(score)
    return found


def _own_environment(scorer: str, run: Mapping[str, Fingerprint | None]) -> Environment | None:
    side = SCORERS[scorer].side if scorer in SCORERS else None
    sides = {"engine": ("rollout", "trainer"), "trainer": ("trainer", "rollout")}[side or "trainer"]
    known = next((run[name] for name in sides if run.get(name) is not None), None)
    return Environment.of_fingerprint(known) if known is not None else None


def _distance(own: Environment | None, made: Environment) -> int:
    if own is None:
        return 0
    return len(differences(own, made, same_engine=own.engine == made.engine))
