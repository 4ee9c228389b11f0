"""Which signals lead: one simple alarm for each signal, its threshold swept, scored as `foreshock backtest` scores.

The alarm: the median of the newest five values (sizes, of signed quantities) is at least θ times the median of the
run's first ten; for signals that fall, at most 1/θ of it. An episode ends once that is over. Nothing here is a rule of
Foreshock; those are replayed as they are beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from foreshock.backtest.replay import Episode, RecordedRun
from foreshock.backtest.scoring import Score, score
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, TRAILING_VALUES
from foreshock.diagnosis.detectors import ClosedStep

RATIOS: Final = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0)

MOST_FALSE_ALARMS: Final = 5.0
"""Per 1,000 healthy observations. The threshold of a signal is the lowest with at most so many on the tuning part."""


@dataclass(frozen=True, slots=True)
class Signal:
    """A quantity whose rise, or fall, may precede a collapse."""

    key: str
    title: str
    falls: bool = False


SIGNALS: Final = (
    Signal("trainer/rollout:k3_kl", "k3 rises"),
    Signal("trainer/rollout:k3_kl_per_entropy", "k3 / entropy rises"),
    Signal("trainer/rollout:chi2_token", "χ²(π‖μ) rises"),
    Signal("trainer/rollout:reverse_chi2_token", "χ²(μ‖π) rises"),
    Signal("trainer/rollout:mean_abs_d", "mean abs d rises"),
    Signal("trainer/rollout:max_abs_d", "max abs d rises"),
    Signal("trainer/rollout:tail_2", "tail F(2) rises"),
    Signal("trainer/rollout:log_ppl_abs_diff", "difference of log perplexity rises"),
    Signal("trainer/rollout:advantage_d_cov", "size of cov(A, d) rises"),
    Signal("trainer/rollout:advantage_skew", "size of the advantage skew rises"),
    Signal("trainer/rollout:ess_token", "effective sample size falls", falls=True),
    Signal("scalars:grad_norm", "gradient norm rises"),
    Signal("trainer/rollout:training_log_ppl", "log perplexity of π rises"),
    Signal("rollout:entropy_mean", "entropy rises"),
    Signal("rollout:entropy_mean", "entropy falls", falls=True),
    Signal("rollout:response_length_mean", "response length rises"),
    Signal("rollout:response_length_mean", "response length falls", falls=True),
    Signal("rollout:truncated_fraction", "truncated fraction rises"),
    Signal("rollout:reward_mean", "reward falls", falls=True),
)


def rises(steps: Sequence[ClosedStep], signal: Signal) -> list[tuple[int, float]]:
    """Return (step, how many times its baseline the signal is) after the baseline; for one that falls, the inverse."""
    found = [(step.step, abs(step.values[signal.key])) for step in steps if signal.key in step.values]
    if len(found) <= BASELINE_OBSERVATIONS:
        return []
    baseline = median([value for _, value in found[:BASELINE_OBSERVATIONS]])
    if baseline <= 0.0:
        return []
    levels = [
        (found[place][0], median([value for _, value in found[place + 1 - TRAILING_VALUES : place + 1]]))
        for place in range(BASELINE_OBSERVATIONS, len(found))
    ]
    if signal.falls:
        return [(step, baseline / level if level > 0.0 else math.inf) for step, level in levels]
    return [(step, level / baseline) for step, level in levels]


def episodes(title: str, over: Sequence[tuple[int, bool]]) -> list[Episode]:
    """Return the episodes of an alarm from whether it stands at each step."""
    made: list[Episode] = []
    since: int | None = None
    for step, stands in over:
        if stands and since is None:
            since = step
        elif not stands and since is not None:
            made.append(Episode(title, "warning", since, step))
            since = None
    if since is not None:
        made.append(Episode(title, "warning", since, None))
    return made


def roc(signal: Signal, runs: Sequence[RecordedRun], steps: Sequence[Sequence[ClosedStep]]) -> dict[float, Score]:
    """Return a signal's score at each ratio. ``steps`` are those of each of ``runs``."""
    levels = [rises(each, signal) for each in steps]
    return {ratio: score(signal.title, runs, [_alarms(each, signal, ratio) for each in levels]) for ratio in RATIOS}


def _alarms(levels: Sequence[tuple[int, float]], signal: Signal, ratio: float) -> list[Episode]:
    return episodes(signal.title, [(step, level >= ratio) for step, level in levels])


def chosen_ratio(scores: dict[float, Score]) -> float | None:
    """Return the lowest ratio with few enough false alarms, None if there is none."""
    return next((ratio for ratio, each in sorted(scores.items()) if false_rate(each) <= MOST_FALSE_ALARMS), None)


def false_rate(each: Score) -> float:
    """Return false alarms per 1,000 healthy observations; the simple alarms are armed at all of them."""
    return 1000.0 * each.false_alarms / each.healthy_observations if each.healthy_observations else 0.0
