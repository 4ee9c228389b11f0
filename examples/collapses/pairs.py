"""Two signals together: a measure of the mismatch or the gradient beyond its baseline while the reward is falling.

An alarm stands at steps where the signal's own alarm (`leads.py`) stands and the median of the newest five rewards is
at least a given share below the best such median so far. The thresholds are chosen on the tuning part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Final

from examples.collapses.leads import SIGNALS, Signal, episodes, false_rate, rises
from foreshock.backtest.replay import RecordedRun
from foreshock.backtest.scoring import Score, score
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, TRAILING_VALUES
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import REWARD_KEY

DROPS: Final = (0.0, 0.1, 0.2, 0.3)
"""Shares of the best reward so far; 0: the signal alone."""

RATIOS: Final = (1.05, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0)

PAIRED: Final = tuple(
    signal
    for signal in SIGNALS
    if signal.key.removeprefix("trainer/rollout:")
    in ("k3_kl", "mean_abs_d", "reverse_chi2_token", "advantage_d_cov", "ess_token", "scalars:grad_norm")
)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A signal at `ratio` times its baseline, and a reward `drop` below its best."""

    signal: Signal
    ratio: float
    drop: float


def best_alarm(
    signal: Signal, runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]], most_false: float
) -> tuple[Alarm, Score]:
    """Return the alarm with the most hits at no more than `most_false` false alarms per 1,000 healthy observations.

    Of equal hits the one with fewer false alarms; if none has so few false alarms, the one with the fewest.
    """
    tried = [Alarm(signal, ratio, drop) for ratio, drop in product(RATIOS, DROPS)]
    scores = scores_of(tried, runs, steps)
    few = [pair for pair in scores if false_rate(pair[1]) <= most_false]
    if not few:
        return min(scores, key=lambda pair: false_rate(pair[1]))
    return min(few, key=lambda pair: (-pair[1].hits, false_rate(pair[1])))


def scores_of(
    alarms: Sequence[Alarm], runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]]
) -> list[tuple[Alarm, Score]]:
    """Return the score of each alarm of one signal. ``steps`` are those of each of ``runs``."""
    levels = [(rises(each, alarms[0].signal), reward_drops(each)) for each in steps]
    return [
        (alarm, score(alarm.signal.title, runs, [
            episodes(
                alarm.signal.title,
                [(step, level >= alarm.ratio and drops.get(step, 0.0) >= alarm.drop) for step, level in found],
            )
            for found, drops in levels
        ]))
        for alarm in alarms
    ]  # fmt: skip


def reward_drops(steps: Sequence[ClosedStep]) -> dict[int, float]:
    """Return step → share by which the median of the newest five rewards is below its best so far."""
    found = [(step.step, step.values[REWARD_KEY]) for step in steps if REWARD_KEY in step.values]
    best, drops = 0.0, dict[int, float]()
    for place in range(TRAILING_VALUES - 1, len(found)):
        level = median([value for _, value in found[place + 1 - TRAILING_VALUES : place + 1]])
        best = max(best, level)
        if place >= BASELINE_OBSERVATIONS and best > 0.0:
            drops[found[place][0]] = 1.0 - level / best
    return drops
