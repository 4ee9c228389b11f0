"""The labelled logs beside the repository: found surges, false alarms, collapses with a warning.

Per-step scalars of RL runs, labelled by eye and processed step by step as in the service. No constant of the detectors
was fitted to them. Bars: a labelled surge is confirmed before ×2.5 or within 30 steps of its onset, and moves the
learning rate only after step 20; no other log has a surge alarm or moves it; at most one warning-level false alarm
comes per 1,000 armed observations; a usable collapse is warned of in time. Without the logs nothing is measured.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from benchmarks.bars import Line
from benchmarks.diagnosis.curves import watch
from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, collapse_step, hit_window
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import LENGTH_KEY, REWARD_KEY
from foreshock.diagnosis.rule import Event

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
# Column of a log → quantity of the service.
COLUMNS = {
    "response_length_mean": LENGTH_KEY,
    "response_length": LENGTH_KEY,
    "response_length_max": "rollout:response_length_max",
    "reward": REWARD_KEY,
    "clip_ratio_len": "rollout:truncated_fraction",
    "entropy": "rollout:entropy_mean",
    "grad_norm": "scalars:grad_norm",
    "rollout_probs_diff_mean": f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean",
    "k3": f"{TRAINER_ROLLOUT}:k3_kl",
}
SURGES = ("length_surge", "length_surge_early", "length_surge_again")
LARGEST_EARLY_STEP = 20
LARGEST_GROWTH, LONGEST_DELAY = 2.5, 30
LARGEST_FALSE_ALARMS_PER_1000 = 1.0
# Reward of a policy that learned nothing, by a part of the log's name; 0 for other logs.
_FLOORS = {"opd": -1.0, "wordle": -1.5}


@dataclass(frozen=True, slots=True)
class Label:
    """A label by eye: a surge or ramp from `onset` to `over`, or none."""

    kind: str
    onset: int = 0
    over: int = 0


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's closed steps and its label."""

    name: str
    steps: Sequence[ClosedStep]
    label: Label


@dataclass(frozen=True, slots=True)
class Judgement:
    """The detectors' result for a log. `usable`: it has a collapse with a baseline before it. `warned`: in time."""

    is_right: bool
    """only a labelled surge moves the learning rate, and it is found between its onset and its end"""
    is_in_time: bool
    has_surge: bool
    armed: int
    usable: bool
    warned: bool
    false_alarms: Sequence[Event]


def measure() -> list[Line]:
    """Judge every log; nothing is measured without the logs."""
    judged = [(curve, judge(curve)) for curve in real_curves() if not curve.name.startswith("tiny_rl")]
    if not judged:
        return [Line("logs", "logs", None)]
    surging = [each for curve, each in judged if curve.label.kind == "surge"]
    others = [each for curve, each in judged if curve.label.kind != "surge"]
    usable = [each for _, each in judged if each.usable]
    in_time, warned = sum(each.is_in_time for each in surging), sum(each.warned for each in usable)
    armed, false = sum(each.armed for _, each in judged), sum(len(each.false_alarms) for _, each in judged)
    return [
        Line("logs", "logs", len(judged)),
        Line("logs_surges_in_time", f"of {len(surging)} surges, in time", in_time, len(surging), at_least=True),
        Line("logs_surges_on_others", f"of {len(others)} others, surges", sum(each.has_surge for each in others), 0),
        Line("logs_rate_wrong", "logs with a wrong rate", sum(not each.is_right for _, each in judged), 0),
        Line(
            "logs_false_alarms", f"of {armed} observations, false", false, LARGEST_FALSE_ALARMS_PER_1000 * armed / 1000
        ),
        Line("logs_collapses_warned", f"of {len(usable)} collapses, warned of", warned, len(usable), at_least=True),
    ]  # fmt: skip


def real_curves() -> Iterator[Curve]:
    """Yield the labelled logs and the two tiny runs, if available."""
    for row in _label_rows():
        path = SHARED / "rl_logs" / f"{row[0]}.csv"
        found = re.match(r"(\d+)\S* → ~?(\d+)", row[4])
        kind = "ramp" if "ramp" in row[4] else "surge"
        if path.exists():
            with path.open() as file:
                label = Label(kind, int(found[1]), int(found[2])) if found else Label("none")
                yield Curve(row[0], [closed_step(each) for each in csv.DictReader(file)], label)
    # From the runs' notes: lengths rise over steps 30-90 of the healthy run; the other run is a learning-rate collapse.
    for name, label in (("healthy", Label("ramp", 30, 90)), ("collapsed", Label("none"))):
        path = SHARED / "tiny_rl" / name / "metrics.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            yield Curve(f"tiny_rl/{name}", [closed_step(each) for each in rows], label)


@cache
def _label_rows() -> list[list[str]]:
    """Return the cells of the table of labels."""
    path = SHARED / "rl_logs" / "LABELS.md"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in rows if len(row) >= 6]


def closed_step(row: Mapping[str, str | float | None]) -> ClosedStep:
    """Convert a row of a log for the detectors; missing and non-finite values are omitted."""
    values = {COLUMNS[name]: float(value) for name, value in row.items() if name in COLUMNS and value not in ("", None)}
    return ClosedStep(int(row["step"] or 0), {key: value for key, value in values.items() if math.isfinite(value)})


def judge(curve: Curve) -> Judgement:
    """Return the judgement on a log."""
    state, events, armed = watch(curve.steps)
    surging, moves = curve.label.kind == "surge", any(event.moves_learning_rate for event in events)
    surge = next((event for event in events if event.rule in SURGES), None)
    if not surging:
        right = not moves
    elif curve.label.over <= LARGEST_EARLY_STEP:
        right = surge is not None and not moves
    else:
        right = state.surge_step is not None and curve.label.onset <= state.surge_step <= curve.label.over
    collapse, before = _collapse(curve)
    usable = collapse is not None and before >= BASELINE_OBSERVATIONS
    alarms = [event for event in events if event.severity != "info"]
    hits = [event for event in alarms if collapse is not None and hit_window(collapse).holds(event.step)]
    # From the collapse on, an alarm is late, not false.
    false = [
        event
        for event in alarms
        if event not in hits and not (surging and event.rule in SURGES) and (collapse is None or event.step < collapse)
    ]
    in_time = surge is not None and (
        _growth(curve, surge) < LARGEST_GROWTH or surge.step <= curve.label.onset + LONGEST_DELAY
    )
    return Judgement(right, in_time, surge is not None, armed, usable, bool(hits), false)


def _collapse(curve: Curve) -> tuple[int | None, int]:
    """Return the step of the collapse by the definition, and the number of rewards before it.

    By the definition alone, noise at the start of a run can be a collapse, so the label says which runs collapsed.
    """
    told = (row[5] for row in _label_rows() if row[0] == curve.name)
    if not any(text.startswith("reward") and "not a collapse" not in text for text in told):
        return None, 0
    rewards = [(step.step, step.values[REWARD_KEY]) for step in curve.steps if REWARD_KEY in step.values]
    floor = next((value for part, value in _FLOORS.items() if part in curve.name), 0.0)
    collapse = collapse_step([step for step, _ in rewards], [reward for _, reward in rewards], floor)
    return collapse, sum(collapse is not None and step < collapse for step, _ in rewards)


def _growth(curve: Curve, event: Event) -> float:
    """Return smoothed length ÷ baseline at the confirmation."""
    lengths = [step.values[LENGTH_KEY] for step in curve.steps if step.step <= event.step and LENGTH_KEY in step.values]
    return median(lengths[-3:]) / float(event.evidence["baseline_length"])
