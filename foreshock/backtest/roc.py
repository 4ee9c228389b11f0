"""The ROC of every rule: hits against false alarms as its threshold moves.

All thresholds move together by a factor, in one replay each; the definitions of hit and false alarm stay. What other
rules corroborate moves with them, as it would if an operator made all rules stricter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from foreshock.backtest.replay import replay_run
from foreshock.backtest.scoring import Score, scores_of
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.rule import ThresholdRule

STRICTNESS = (0.4, 0.6, 0.8, 1.0, 1.5, 2.5)
"""Distance of a threshold from what is normal, in units of the default's: below 1 a rule fires more easily."""


@dataclass(frozen=True, slots=True)
class RocPoint:
    """The score of a rule with its threshold at a strictness; 1.0 is the default."""

    strictness: float
    score: Score

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"score": self.score.to_json()}


def roc_points(
    names: Sequence[str],
    steps: Sequence[Sequence[ClosedStep]],
    configuration: WarningConfiguration,
    floor: float | None = None,
) -> list[RocPoint]:
    """Return the points of every rule that fires at any strictness, and of all warning-level rules together."""
    replayed = {}
    for strictness in STRICTNESS:
        chosen = stricter(configuration, strictness)
        replayed[strictness] = [replay_run(name, each, chosen, floor) for name, each in zip(names, steps, strict=True)]
    rules = {each.rule for runs in replayed.values() for run in runs for each in run.episodes}
    points = [
        RocPoint(strictness, each) for strictness, runs in replayed.items() for each in scores_of(runs, sorted(rules))
    ]
    return sorted(points, key=lambda point: (point.score.rule, point.strictness))


def stricter(configuration: WarningConfiguration, factor: float) -> WarningConfiguration:
    """Return the configuration with every threshold ``factor`` times as far from what is normal.

    The distance of a relative threshold is the log of its multiple of the baseline, so 5× becomes 25× at factor 2; an
    absolute one moves by a factor of ten, its evidence and that of the falling reward in standard deviations alike.
    """
    surge, reward = configuration.surge, configuration.reward
    return replace(
        configuration,
        surge=replace(surge, growth=surge.growth**factor, average_run_length=surge.average_run_length**factor),
        reward=replace(reward, fall=min(reward.fall * factor, 0.95), z=reward.z * factor),
        rules=tuple(_stricter_rule(rule, factor) for rule in configuration.rules),
    )


def _stricter_rule(rule: ThresholdRule, factor: float) -> ThresholdRule:
    absolute, relative = rule.absolute, rule.relative
    if absolute is not None and absolute > 0.0:
        away = math.log(10.0) * (factor - 1.0)
        absolute *= math.exp(-away if rule.direction == "below" else away)
    if relative is not None:
        relative = relative**factor
    return replace(rule, absolute=absolute, relative=relative)
