"""What a rule's alarms were worth on recorded runs: hits, misses, lead times and false alarms, with exact intervals.

Definitions are those of `foreshock.early_warning.collapse`. An alarm from three steps before a collapse on is neither a
hit nor false: it is late. Runs whose collapse leaves no baseline count for nothing after it, and are no miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreshock.backtest.replay import Episode, RecordedRun
from foreshock.early_warning.collapse import HitWindow, hit_window
from foreshock.early_warning.exact_intervals import poisson_interval, proportion_interval
from foreshock.early_warning.robust import median


@dataclass(frozen=True, slots=True)
class Score:
    """A rule's score. Rates are per 1,000 armed observations; intervals are exact 95 % ones."""

    rule: str
    hits: int
    misses: int
    hit_rate_interval: tuple[float, float]
    leads: tuple[int, ...]
    false_alarms: int
    armed_observations: int
    false_alarms_per_1000: float
    false_alarms_per_1000_interval: tuple[float, float]
    healthy_observations: int
    healthy_share_in_alarm: float

    @property
    def median_lead(self) -> float | None:
        """Steps from the first hit to the collapse, in the median over hit collapses."""
        return median([float(lead) for lead in self.leads]) if self.leads else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median_lead": self.median_lead}


def score(rule: str, runs: Sequence[RecordedRun], episodes: Sequence[Sequence[Episode]]) -> Score:
    """Return the score of one rule's ``episodes``, a sequence for each run."""
    hits, misses, false, armed, healthy, alarmed = 0, 0, 0, 0, 0, 0
    leads: list[int] = []
    for run, mine in zip(runs, episodes, strict=True):
        window = hit_window(run.collapse) if run.collapse is not None else None
        if window is not None and run.usable:
            starts = [episode.start for episode in mine if window.holds(episode.start)]
            hits, misses = hits + bool(starts), misses + (not starts)
            leads.extend([run.collapse - min(starts)] if starts and run.collapse is not None else [])
        false += sum(_is_healthy(episode.start, window) for episode in mine)
        for step, is_armed in zip(run.steps, run.armed, strict=True):
            if _is_healthy(step, window):
                armed += is_armed
                healthy += 1
                alarmed += any(episode.holds(step) for episode in mine)
    low, high = poisson_interval(false)
    scale = 1000.0 / armed if armed else 0.0
    return Score(
        rule=rule,
        hits=hits,
        misses=misses,
        hit_rate_interval=proportion_interval(hits, hits + misses),
        leads=tuple(leads),
        false_alarms=false,
        armed_observations=armed,
        false_alarms_per_1000=false * scale,
        false_alarms_per_1000_interval=(low * scale, high * scale),
        healthy_observations=healthy,
        healthy_share_in_alarm=alarmed / healthy if healthy else 0.0,
    )


def scores_of(runs: Sequence[RecordedRun]) -> list[Score]:
    """Return the score of every rule that fired, and of all warning-level rules together."""
    rules = sorted({episode.rule for run in runs for episode in run.episodes})
    scores = [
        score(rule, runs, [[each for each in run.episodes if each.rule == rule] for run in runs]) for rule in rules
    ]
    return [score("any warning or critical", runs, [warnings_of(run) for run in runs]), *scores]


def warnings_of(run: RecordedRun) -> list[Episode]:
    """Return the warning-level episodes of a run."""
    return [episode for episode in run.episodes if episode.severity in ("warning", "critical")]


def _is_healthy(step: int, window: HitWindow | None) -> bool:
    return window is None or step < window.first
