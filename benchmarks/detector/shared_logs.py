"""The labelled logs beside the repository, judged: surges found, false alarms, collapses warned of.

The logs are evaluation data: no constant of the detectors was fitted to them. Without them the benchmark says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from benchmarks.detector.curves import watch
from benchmarks.early_warning import SHARED, Curve
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, collapse_step, hit_window
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY
from foreshock.diagnosis.rule import Event
from foreshock.diagnosis.statistics import median

SURGES = ("length_surge", "length_surge_early", "length_surge_again")
ALARMS = ("warning", "critical")
LARGEST_GROWTH = 2.5
LONGEST_DELAY = 30

FLOORS = {"opd": -1.0, "wordle": -1.5}
"""Reward of a policy that learned nothing, by a part of the log's name; 0 for the others."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What the detectors say of one log. ``growth`` is the smoothed length / baseline at the confirmation.

    ``collapse`` is the step by the definition; ``usable`` is false if it leaves no baseline before it.
    """

    curve: Curve
    events: Sequence[Event]
    armed: int
    confirmed: int | None
    growth: float | None
    collapse: int | None
    usable: bool
    hits: Sequence[Event]
    false_alarms: Sequence[Event]

    @property
    def is_surge_found(self) -> bool:
        """Return whether the labelled surge was confirmed in time."""
        if self.confirmed is None or self.growth is None:
            return False
        return self.growth < LARGEST_GROWTH or self.confirmed <= self.curve.label.onset + LONGEST_DELAY


def judge(curve: Curve) -> Judgement:
    """Return the judgement on a log."""
    _, events, armed = watch(list(curve.steps))
    rewards = [(step.step, step.values[REWARD_KEY]) for step in curve.steps if REWARD_KEY in step.values]
    floor = next((value for part, value in FLOORS.items() if part in curve.name), 0.0)
    # By the definition alone, noise at the start of a run can be a collapse: the label says which runs collapsed.
    labelled = curve.name in labelled_collapses()
    collapse = collapse_step([step for step, _ in rewards], [reward for _, reward in rewards], floor)
    collapse = collapse if labelled else None
    before = sum(1 for step, _ in rewards if collapse is not None and step < collapse)
    usable = collapse is not None and before >= BASELINE_OBSERVATIONS
    alarms = [event for event in events if event.severity in ALARMS]
    found = next((event for event in events if event.rule in SURGES), None)
    surging = curve.label.kind == "surge"
    window = hit_window(collapse) if collapse is not None else None
    hits = [event for event in alarms if window is not None and window.holds(event.step)]
    false = [
        event
        for event in alarms
        if event not in hits
        and not (surging and event.rule in SURGES)
        # From the collapse on, an alarm is late, not false.
        and (collapse is None or event.step < collapse)
    ]
    return Judgement(
        curve,
        events,
        armed,
        None if found is None else found.step,
        None if found is None else _growth(curve, found),
        collapse,
        usable,
        hits,
        false,
    )


@cache
def labelled_collapses() -> frozenset[str]:
    """Return the logs whose label tells of a collapse: the reward falls, and not "not a collapse"."""
    rows = [line.strip("|").split("|") for line in (SHARED / "rl_logs" / "LABELS.md").read_text().splitlines()]
    return frozenset(
        row[0].strip()
        for row in rows
        if len(row) >= 6 and row[5].strip().startswith("reward") and "not a collapse" not in row[5]
    )


def _growth(curve: Curve, event: Event) -> float:
    lengths = [step.values[LENGTH_KEY] for step in curve.steps if step.step <= event.step and LENGTH_KEY in step.values]
    return median(lengths[-3:]) / float(event.evidence["baseline_length"])
