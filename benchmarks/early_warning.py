"""What the surge detector and the rules say of curves: of real runs labelled by eye, and of made ones.

Real: the per-step scalars of RL runs beside the repository (`../shared/data`, with their labels), fed step by step as
the service would. They are few and hold a single usable collapse, so they tune little and prove less: what is counted
is that nothing without a labelled surge moves the learning rate, and that a labelled surge beyond the first twenty
steps is found between its onset and its end. A surge within the first twenty steps may not move it by itself.

Made: flat noisy runs (false alarms), slow ramps (must not move the learning rate), and the published shape
(1000 → 3500 around step 110, rising over 13 to 66 steps) under noise.

Bars: no false move on a real curve; every late labelled surge found; on made curves no false surge up to a noise of
0.3, at most 5 % of ramps taken for surges, at least 95 % of surges found between steps 80 and 125.
Where the real curves are absent the made ones are judged alone, and the last line says so.
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

from foreshock.early_warning.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.early_warning.events import Event
from foreshock.early_warning.schedule import LengthDecaySchedule

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"
LENGTH = "rollout:response_length_mean"
# Column of a log → the quantity that the service would have of it.
COLUMNS = {
    "response_length_mean": LENGTH,
    "response_length": LENGTH,
    "clip_ratio_len": "rollout:truncated_fraction",
    "entropy": "rollout:entropy_mean",
    "grad_norm": "scalars:grad_norm",
    "rollout_probs_diff_mean": "trainer/rollout:rollout_probs_diff_mean",
    "k3": "trainer/rollout:k3_kl",
}
SURGES = ("length_surge", "length_surge_early", "length_surge_again")
LARGEST_EARLY_STEP = 20
LARGEST_NOISE_WITHOUT_FALSE_SURGE = 0.3
MADE_RUNS = 20


@dataclass(frozen=True, slots=True)
class Label:
    """What an eye saw: a surge from `onset` to `over`, a ramp, or nothing."""

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
    """What the detectors said of a curve, and whether that is right."""

    events: Sequence[Event]
    surge_step: int | None
    moving: Sequence[Event]
    right: bool


def main() -> int:
    """Print the tables and the line of results; 1 where a bar is not reached."""
    curves = list(real_curves())
    verdicts = [judge(curve) for curve in curves]
    print(
        f"{'curve':36} {'steps':>5}  {'label':14} {'length events (step: surge step)':48} {'moves the rate':30} rules"
    )
    for curve, verdict in zip(curves, verdicts, strict=True):
        print_verdict(curve, verdict)
    print()
    made = made_results()
    for name, (hits, runs) in made.items():
        print(f"{name:56} {hits:4d} of {runs}")
    late = [curve for curve in curves if curve.label.kind == "surge" and curve.label.over > LARGEST_EARLY_STEP]
    wrong = [curve.name for curve, verdict in zip(curves, verdicts, strict=True) if not verdict.right]
    false_surges = sum(hits for name, (hits, _) in made.items() if name.startswith("flat") and _is_counted(name))
    ramps, ramp_runs = _total(made, "ramp")
    found, surge_runs = _total(made, "surge")
    reached = not wrong and false_surges == 0 and ramps <= 0.05 * ramp_runs and found >= 0.95 * surge_runs
    print(
        f"reached={reached} real_curves={len(curves)} real_late_surges={len(late)} "
        f"real_wrong={','.join(wrong) or 'none'} "
        f"made_false_surges={false_surges} made_ramps_taken_for_surges={ramps}/{ramp_runs} "
        f"made_surges_found={found}/{surge_runs}"
    )
    return 0 if reached else 1


def real_curves() -> Iterator[Curve]:
    """The labelled logs and the two tiny runs, if they are there."""
    labels = read_labels(SHARED / "rl_logs" / "LABELS.md")
    for name, label in labels.items():
        with (SHARED / "rl_logs" / f"{name}.csv").open() as file:
            yield Curve(name, [closed_step(row) for row in csv.DictReader(file)], label)
    # Their notes: lengths rise over steps 30-90 of a healthy run; the other is a learning-rate collapse.
    for name, label in (("healthy", Label("ramp", 30, 90)), ("collapsed", Label("none"))):
        path = SHARED / "tiny_rl" / name / "metrics.jsonl"
        if path.exists():
            rows = [json.loads(line) for line in path.read_text().splitlines()]
            yield Curve(f"tiny_rl/{name}", [closed_step(row) for row in rows], label)


def read_labels(path: Path) -> dict[str, Label]:
    """The labels of the table in `path`: the column that reads `onset → over`, or `none`."""
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
    """A row of a log as the detectors get it; what is missing or not a number is left out."""
    values = {COLUMNS[name]: float(value) for name, value in row.items() if name in COLUMNS and value not in ("", None)}
    return ClosedStep(int(row["step"] or 0), {key: value for key, value in values.items() if math.isfinite(value)})


def watch(steps: Sequence[ClosedStep]) -> tuple[WarningState, list[Event]]:
    """The detectors' state after `steps`, and what fired."""
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
    """One line of the table."""
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


def made_results() -> dict[str, tuple[int, int]]:
    """Name → (runs in which a surge that moves the learning rate was found where it counts, runs)."""
    results: dict[str, tuple[int, int]] = {}
    step = np.arange(1, 401)
    for noise in (0.05, 0.1, 0.2, 0.3, 0.5):
        hits = [surge_of(np.full(400, 1000.0), noise, seed) for seed in range(MADE_RUNS)]
        results[f"flat, noise {noise}"] = (sum(hit is not None for hit in hits), MADE_RUNS)
    for over in (100, 200, 400):
        for noise in (0.02, 0.1, 0.2):
            curve = 1000.0 + 2000.0 * np.minimum(step / over, 1.0)
            hits = [surge_of(curve, noise, seed) for seed in range(MADE_RUNS)]
            results[f"ramp to threefold over {over} steps, noise {noise}"] = (
                sum(hit is not None for hit in hits),
                MADE_RUNS,
            )
    for width in (3.0, 6.0, 10.0, 15.0):
        for noise in (0.02, 0.1, 0.2):
            curve = 1000.0 + 2500.0 / (1.0 + np.exp(-(step - 110) / width))
            hits = [surge_of(curve, noise, seed) for seed in range(MADE_RUNS)]
            in_time = sum(hit is not None and 80 <= hit <= 125 for hit in hits)
            results[f"surge at 110 over {round(4.4 * width)} steps, noise {noise}"] = (in_time, MADE_RUNS)
    return results


def surge_of(lengths: NDArray[np.float64], noise: float, seed: int) -> int | None:
    """The surge step that the schedule would count from, under log-normal noise."""
    noisy = lengths * np.exp(noise * np.random.default_rng(seed).normal(size=len(lengths)))
    state, _ = watch([ClosedStep(number, {LENGTH: float(value)}) for number, value in enumerate(noisy, start=1)])
    return state.surge_step


def _is_counted(name: str) -> bool:
    return float(name.rpartition(" ")[2]) <= LARGEST_NOISE_WITHOUT_FALSE_SURGE


def _total(made: Mapping[str, tuple[int, int]], prefix: str) -> tuple[int, int]:
    chosen = [result for name, result in made.items() if name.startswith(prefix)]
    return sum(hits for hits, _ in chosen), sum(runs for _, runs in chosen)


if __name__ == "__main__":
    sys.exit(main())
