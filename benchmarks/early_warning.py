"""Benchmark of the surge detector and the rules on recorded curves with labels, and on generated curves.

Recorded: per-step scalars of RL runs beside the repository (`../shared/data`, labelled by eye), processed step by step
as in the service. They are few, with a single usable collapse, and support only two checks: no curve without a labelled
surge moves the learning rate, and a labelled surge after the first twenty steps is found between its onset and its end.
A surge within the first twenty steps may not move the learning rate by itself.

Generated: flat noisy runs (false alarms), slow ramps (must not move the learning rate), and the published shape
(1000 → 3500 around step 110, rising over 13 to 66 steps) with noise.

Thresholds: no false move on a recorded curve; every late labelled surge found; on generated curves no false surge up to
a noise of 0.3, at most 5 % of ramps detected as surges, at least 95 % of surges found between steps 80 and 125.
Without the recorded curves only the generated ones are tested; the last line reports the number of recorded curves.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from foreshock.comparisons import TRAINER_ROLLOUT
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.rule import Event
from foreshock.learning_rate.schedule import LengthDecaySchedule

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
LENGTH = "rollout:response_length_mean"
# Column of a log → quantity of the service.
COLUMNS = {
    "response_length_mean": LENGTH,
    "response_length": LENGTH,
    "response_length_max": "rollout:response_length_max",
    "reward": "rollout:reward_mean",
    "clip_ratio_len": "rollout:truncated_fraction",
    "entropy": "rollout:entropy_mean",
    "grad_norm": "scalars:grad_norm",
    "rollout_probs_diff_mean": f"{TRAINER_ROLLOUT}:rollout_probs_diff_mean",
    "k3": f"{TRAINER_ROLLOUT}:k3_kl",
}
SURGES = ("length_surge", "length_surge_early", "length_surge_again")
LARGEST_EARLY_STEP = 20
LARGEST_NOISE_WITHOUT_FALSE_SURGE = 0.3
GENERATED_RUNS = 20


@dataclass(frozen=True, slots=True)
class Label:
    """A label by eye: a surge or ramp from `onset` to `over`, or none."""

    kind: str
    onset: int = 0
    over: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind} {self.onset}-{self.over}"


@dataclass(frozen=True, slots=True)
class Curve:
    """One run's closed steps and its label."""

    name: str
    steps: Sequence[ClosedStep]
    label: Label


@dataclass(frozen=True, slots=True)
class Verdict:
    """The detectors' events on a curve; `right` is true if they agree with the label."""

    events: Sequence[Event]
    surge_step: int | None
    moving: Sequence[Event]
    right: bool


def main() -> int:
    """Print the tables and the line of results; return 1 if a threshold is missed."""
    curves = list(real_curves())
    verdicts = [judge(curve) for curve in curves]
    print(
        f"{'curve':36} {'steps':>5}  {'label':14} {'length events (step: surge step)':48} {'moves the rate':30} rules"
    )
    for curve, verdict in zip(curves, verdicts, strict=True):
        print_verdict(curve, verdict)
    print()
    generated = generated_results()
    for name, (hits, runs) in generated.items():
        print(f"{name:56} {hits:4d} of {runs}")
    late = [curve for curve in curves if curve.label.kind == "surge" and curve.label.over > LARGEST_EARLY_STEP]
    wrong = [curve.name for curve, verdict in zip(curves, verdicts, strict=True) if not verdict.right]
    false_surges = sum(hits for name, (hits, _) in generated.items() if name.startswith("flat") and _is_counted(name))
    ramps, ramp_runs = _total(generated, "ramp")
    found, surge_runs = _total(generated, "surge")
    reached = not wrong and false_surges == 0 and ramps <= 0.05 * ramp_runs and found >= 0.95 * surge_runs
    print(
        f"reached={reached} real_curves={len(curves)} real_late_surges={len(late)} "
        f"real_wrong={','.join(wrong) or 'none'} "
        f"generated_false_surges={false_surges} generated_ramps_detected_as_surges={ramps}/{ramp_runs} "
        f"generated_surges_found={found}/{surge_runs}"
    )
    return 0 if reached else 1


def real_curves() -> Iterator[Curve]:
    """Yield the labelled logs and the two tiny runs, if available."""
    labels = read_labels(SHARED / "rl_logs" / "LABELS.md")
    for name, label in labels.items():
        with (SHARED / "rl_logs" / f"{name}.csv").open() as file:
            yield Curve(name, [closed_step(row) for row in csv.DictReader(file)], label)
    # By their notes: lengths rise over steps 30-90 of the healthy run; the other is a learning-rate collapse.
    for name, label in (("healthy", Label("ramp", 30, 90)), ("collapsed", Label("none"))):
        path = SHARED / "tiny_rl" / name / "metrics.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            yield Curve(f"tiny_rl/{name}", [closed_step(row) for row in rows], label)


def read_labels(path: Path) -> dict[str, Label]:
    """Return the labels of the table in `path`: the column with `onset → over`, or `none`."""
    if not path.exists():
        return {}
    labels = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) < 5 or not (path.parent / f"{cells[0]}.csv").exists():
            continue
        found = re.match(r"(\d+)\S* → ~?(\d+)", cells[4])
        kind = "ramp" if "ramp" in cells[4] else "surge"
        labels[cells[0]] = Label(kind, int(found[1]), int(found[2])) if found else Label("none")
    return labels


def closed_step(row: Mapping[str, str | float | None]) -> ClosedStep:
    """Convert a row of a log for the detectors; missing and non-finite values are omitted."""
    values = {COLUMNS[name]: float(value) for name, value in row.items() if name in COLUMNS and value not in ("", None)}
    return ClosedStep(int(row["step"] or 0), {key: value for key, value in values.items() if math.isfinite(value)})


def watch(steps: Sequence[ClosedStep]) -> tuple[WarningState, list[Event]]:
    """Return the detectors' state after `steps`, and the events that fired."""
    state, events = WarningState(), list[Event]()
    configuration = WarningConfiguration()
    for closed in steps:
        state, new = advance(state, closed, configuration)
        events.extend(event for event in new if event.change == "fired")
    return state, events


def judge(curve: Curve) -> Verdict:
    """Run the detectors over a curve and compare with its label."""
    state, events = watch(curve.steps)
    moving = [event for event in events if event.moves_learning_rate]
    if curve.label.kind != "surge":
        right = not moving
    elif curve.label.over <= LARGEST_EARLY_STEP:
        right = not moving and any(event.rule in SURGES for event in events)
    else:
        right = state.surge_step is not None and curve.label.onset <= state.surge_step <= curve.label.over
    return Verdict(events, state.surge_step, moving, right)


def print_verdict(curve: Curve, verdict: Verdict) -> None:
    """Print one line of the table."""
    lengths = [
        f"{event.rule.removeprefix('length_')} {event.step}: {event.evidence['surge_step']}"
        for event in verdict.events
        if event.rule.startswith(("length_surge", "length_ramp"))
    ]
    moves = [f"{event.rule} at {event.step}" for event in verdict.moving]
    if verdict.surge_step is not None:
        moves.append(f"T={LengthDecaySchedule.from_surge(verdict.surge_step).decay_period}")
    rules = [
        f"{event.rule}@{event.step}" for event in verdict.events if not event.rule.startswith(("length_s", "length_r"))
    ]
    mark = "" if verdict.right else "  <- WRONG"
    print(
        f"{curve.name:36} {len(curve.steps):5d}  {curve.label!s:14} {', '.join(lengths) or '-':48} "
        f"{', '.join(moves) or '-':30} {', '.join(rules) or '-'}{mark}"
    )


def generated_results() -> dict[str, tuple[int, int]]:
    """Return by name: (runs with a surge detected in the counted range of steps, runs)."""
    results: dict[str, tuple[int, int]] = {}
    step = np.arange(1, 401)
    for noise in (0.05, 0.1, 0.2, 0.3, 0.5):
        hits = [surge_of(np.full(400, 1000.0), noise, seed) for seed in range(GENERATED_RUNS)]
        results[f"flat, noise {noise}"] = (sum(hit is not None for hit in hits), GENERATED_RUNS)
    for over in (100, 200, 400):
        for noise in (0.02, 0.1, 0.2):
            curve = 1000.0 + 2000.0 * np.minimum(step / over, 1.0)
            hits = [surge_of(curve, noise, seed) for seed in range(GENERATED_RUNS)]
            results[f"ramp to threefold over {over} steps, noise {noise}"] = (
                sum(hit is not None for hit in hits),
                GENERATED_RUNS,
            )
    for width in (3.0, 6.0, 10.0, 15.0):
        for noise in (0.02, 0.1, 0.2):
            curve = 1000.0 + 2500.0 / (1.0 + np.exp(-(step - 110) / width))
            hits = [surge_of(curve, noise, seed) for seed in range(GENERATED_RUNS)]
            in_time = sum(hit is not None and 80 <= hit <= 125 for hit in hits)
            results[f"surge at 110 over {round(4.4 * width)} steps, noise {noise}"] = (in_time, GENERATED_RUNS)
    return results


def surge_of(lengths: NDArray[np.float64], noise: float, seed: int) -> int | None:
    """Return the surge step that the schedule counts from, with log-normal noise."""
    noisy = lengths * np.exp(noise * np.random.default_rng(seed).normal(size=len(lengths)))
    state, _ = watch([ClosedStep(number, {LENGTH: float(value)}) for number, value in enumerate(noisy, start=1)])
    return state.surge_step


def _is_counted(name: str) -> bool:
    return float(name.rpartition(" ")[2]) <= LARGEST_NOISE_WITHOUT_FALSE_SURGE


def _total(generated: Mapping[str, tuple[int, int]], prefix: str) -> tuple[int, int]:
    chosen = [result for name, result in generated.items() if name.startswith(prefix)]
    return sum(hits for hits, _ in chosen), sum(runs for _, runs in chosen)


if __name__ == "__main__":
    sys.exit(main())
