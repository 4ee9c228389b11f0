"""Do Foreshock's warnings come earlier than simple ones of the same scalars? `make bench-warning`.

Rules are scored as `foreshock backtest` scores them, on runs of known outcome that are replayed step by step: the
locked part of `examples/collapses`, the runs at a constant rate of `examples/closed_loop`, the labelled public logs
if they are there, and the runs that others published (`examples/collapses/public/SOURCES.md`), of which every third
repository is locked. Arguments are files of more such runs, whose licence keeps them out of this repository. A simple
rule is one threshold on one moving average; it is the lowest one with at most one false alarm per 1,000 healthy steps
on the tuning part of `examples/collapses`, or of the published runs for these.

Foreshock's early warnings are `reward_fall` and `effective_sample_size_fall`; that of all its warnings stands beside
them. `fallen` is how far the moving average of the reward had fallen from its best at the first hit, in the median.
`losing` counts the false alarms after which it is a quarter below its best within 40 steps: the run lost reward, but
less than half of it, or not for ten steps, or much later.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.bars import Line, report
from benchmarks.diagnosis.logs import real_curves
from examples.closed_loop.__main__ import RESULTS as CLOSED_LOOP
from examples.collapses.leads import false_rate
from examples.collapses.results import RESULTS as COLLAPSES
from examples.collapses.results import Result, read_results
from examples.collapses.summary import closed_steps, summarize
from foreshock.backtest.replay import Episode, RecordedRun, replay_run
from foreshock.backtest.scoring import Score, score, warnings_of
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS, HELD_OBSERVATIONS, hit_window
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.quantities import GRADIENT_NORM_KEY, REWARD_KEY

EARLY: Final = ("reward_fall", "effective_sample_size_fall")
MOST_FALSE: Final = 1.0
"""False alarms per 1,000 healthy steps."""

WEIGHT: Final = 0.2
"""Of the newest value in the moving averages of the simple rules."""
APART: Final = 20
"""An alarm within so many steps after the last one is the same."""
THRESHOLDS: Final = 200
PUBLISHED: Final = COLLAPSES.parent / "public" / "runs.parquet"
BEYOND_NOISE: Final = 5.0
"""Standard errors of a published collapse: the best ten rewards in a row above the ten from the collapse on. Noise
alone makes some 3.5, since both are chosen, and few rollouts a step collapse by the definition without a fall."""
LOST: Final = 0.25
WITHIN: Final = 40

Alarm = Callable[["Run"], Sequence[Episode]]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A recorded run, replayed through the rules, and its steps."""

    replayed: RecordedRun
    steps: Sequence[ClosedStep]

    def values(self, key: str) -> NDArray[np.float64]:
        return np.array([each.values.get(key, math.nan) for each in self.steps], dtype=np.float64)


def moving(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the moving average at each step; missing values are left out."""
    averages, average = np.full(len(values), math.nan), math.nan
    for place, value in enumerate(values):
        if math.isfinite(value):
            average = value if math.isnan(average) else average + WEIGHT * (value - average)
        averages[place] = average
    return averages


def fallen(run: Run) -> NDArray[np.float64]:
    """Return by which part of its best the moving average of the reward has fallen; NaN in the baseline."""
    averages = moving(run.values(REWARD_KEY))
    best = np.fmax.accumulate(np.where(np.arange(len(averages)) < BASELINE_OBSERVATIONS // 2, -math.inf, averages))
    found = np.where(best > 0.0, 1.0 - averages / np.maximum(best, 1e-9), math.nan)
    found[:BASELINE_OBSERVATIONS] = math.nan
    return found


def gradient_deviations(run: Run) -> NDArray[np.float64]:
    """Return the standard deviations of the gradient norm from the mean of the 50 steps before."""
    values = run.values(GRADIENT_NORM_KEY)
    found = np.full(len(values), math.nan)
    for place in range(BASELINE_OBSERVATIONS + 5, len(values)):
        before = values[max(place - 50, 0) : place]
        before = before[np.isfinite(before)]
        if len(before) > BASELINE_OBSERVATIONS and before.std() > 0.0:
            found[place] = (values[place] - before.mean()) / before.std()
    return found


SIMPLE: Final[dict[str, Callable[[Run], NDArray[np.float64]]]] = {
    "reward below its best": fallen,
    "k3": lambda run: moving(run.values("trainer/rollout:k3_kl")),
    "k3 / entropy": lambda run: moving(run.values("trainer/rollout:k3_kl_per_entropy")),
    "gradient norm, deviations": gradient_deviations,
}


def alarms(name: str, run: Run, values: NDArray[np.float64], threshold: float) -> list[Episode]:
    """Return the alarms of a simple rule: the stretches of steps at or above the threshold, those near as one."""
    made, last = list[Episode](), -math.inf
    for closed, value in zip(run.steps, values, strict=True):
        if not value >= threshold:
            continue
        if closed.step - last > APART:
            made.append(Episode(name, "warning", closed.step, closed.step))
        last = closed.step
    return made


def of_simple(name: str, threshold: float) -> Alarm:
    return lambda run: alarms(name, run, SIMPLE[name](run), threshold)


def of_rules(*rules: str) -> Alarm:
    return lambda run: [each for each in run.replayed.episodes if each.rule in rules]


def chosen_threshold(name: str, tuning: Sequence[Run]) -> float:
    """Return the lowest threshold with few enough false alarms on the tuning part; infinite if none has."""
    values = [SIMPLE[name](run) for run in tuning]
    finite = np.concatenate([each[np.isfinite(each)] for each in values])
    if not len(finite):
        return math.inf
    candidates = np.unique(np.quantile(finite, np.linspace(0.3, 1.0, THRESHOLDS)))
    for threshold in candidates:
        found = [alarms(name, run, each, threshold) for run, each in zip(tuning, values, strict=True)]
        if false_rate(score(name, [run.replayed for run in tuning], found)) <= MOST_FALSE:
            return float(threshold)
    return math.inf


def scored(name: str, runs: Sequence[Run], alarm: Alarm) -> tuple[Score, float]:
    """Return a rule's score, and how far the reward had fallen at its first hits, in the median; NaN without a hit."""
    found = [alarm(run) for run in runs]
    depths = list[float]()
    for run, episodes in zip(runs, found, strict=True):
        collapse = run.replayed.collapse
        if collapse is None or not run.replayed.usable:
            continue
        starts = [each.start for each in episodes if hit_window(collapse).holds(each.start)]
        if starts:
            place = [each.step for each in run.steps].index(min(starts))
            depths.append(float(fallen(run)[place]))
    known = [each for each in depths if math.isfinite(each)]
    return score(name, [run.replayed for run in runs], found), median(known) if known else math.nan


def losing(runs: Sequence[Run], alarm: Alarm) -> tuple[int, int]:
    """Return the number of false alarms that a loss of reward follows, and that of all."""
    found = []
    for run in runs:
        collapse, steps, depths = run.replayed.collapse, [each.step for each in run.steps], fallen(run)
        first = math.inf if collapse is None else hit_window(collapse).first
        places = [steps.index(each.start) for each in alarm(run) if each.start < first]
        found += [bool((depths[place : place + WITHIN] >= LOST).any()) for place in places]
    return sum(found), len(found)


def recorded(results: dict[str, Result], part: str) -> list[Run]:
    """Return the runs of a part of `examples/collapses`, replayed."""
    configuration = WarningConfiguration.for_model("dense")
    named = [each.name for each in summarize(results) if each.part == part]
    steps = [closed_steps(results[name]) for name in named]
    return [Run(replay_run(name, each, configuration, 0.0), each) for name, each in zip(named, steps, strict=True)]


def constants() -> list[Run]:
    """Return the runs of `examples/closed_loop` at a constant rate, replayed."""
    configuration, found = WarningConfiguration.for_model("dense"), list[Run]()
    for name, result in read_results(CLOSED_LOOP).items():
        if result.settings["arm"] == "constant":
            steps = closed_steps(result)
            found.append(Run(replay_run(name, steps, configuration, 0.0), steps))
    return found


def public() -> list[Run]:
    """Return the labelled public logs, replayed; empty without them."""
    configuration = WarningConfiguration()
    return [
        Run(replay_run(curve.name, curve.steps, configuration), curve.steps)
        for curve in real_curves()
        if not curve.name.startswith("tiny_rl") and any(REWARD_KEY in each.values for each in curve.steps)
    ]


def is_locked(run: str) -> bool:
    """Return whether nothing may be chosen on a published run. ``run`` is "owner/repository#number"."""
    return int(sha256(run.partition("#")[0].encode()).hexdigest(), 16) % 3 == 0


def without_noise(run: Run) -> Run:
    """Return the run, without its collapse if the rewards fall no further than noise does."""
    rewards, at = run.values(REWARD_KEY), run.replayed.collapse
    rewards = rewards[np.isfinite(rewards)]
    logged = [each.step for each in run.steps if REWARD_KEY in each.values]
    if at is None or not run.replayed.usable:
        return run
    place = logged.index(at)
    means = np.convolve(rewards, np.full(HELD_OBSERVATIONS, 1.0 / HELD_OBSERVATIONS), "valid")
    # Neighbours differ by √2 deviations, means of ten by √(2 / 10).
    error = math.sqrt(float(np.mean(np.diff(rewards) ** 2)) / HELD_OBSERVATIONS)
    fallen = float(means[: place - HELD_OBSERVATIONS + 1].max() - means[place])
    if fallen >= BEYOND_NOISE * error:
        return run
    return replace(run, replayed=replace(run.replayed, collapse=None, usable=False))


def published(paths: Iterable[Path], *, locked: bool) -> list[Run]:
    """Return the published runs of a part, replayed."""
    configuration, found = WarningConfiguration(), dict[str, list[ClosedStep]]()
    for path in paths:
        for row in pq.read_table(path).to_pylist():
            name, step = row.pop("run"), row.pop("step")
            if is_locked(name) == locked:
                values = {key: value for key, value in row.items() if value is not None}
                found.setdefault(name, []).append(ClosedStep(step, values))
    return [without_noise(Run(replay_run(name, each, configuration), each)) for name, each in found.items()]


def main() -> int:
    """Print the table of each set; return 1 if a simple rule with few enough false alarms has more hits."""
    results, paths = read_results(COLLAPSES), [PUBLISHED, *map(Path, sys.argv[1:])]
    sets = {"locked": recorded(results, "locked"), "constants": constants(), "public": public()}
    lines = compared("tuning", recorded(results, "tuning"), sets)
    lines += compared("published, tuning", published(paths, locked=False), {"published": published(paths, locked=True)})
    return report(lines)


def compared(tuned: str, tuning: Sequence[Run], sets: dict[str, list[Run]]) -> list[Line]:
    """Print the tables of a tuning part and of the sets whose simple rules have their thresholds from it."""
    rules: dict[str, Alarm] = {"early warnings": of_rules(*EARLY)}
    rules |= {f"`{rule}`": of_rules(rule) for rule in EARLY}
    rules["all warnings"] = lambda run: warnings_of(run.replayed)
    simple, lines = list[str](), list[Line]()
    for name in SIMPLE:
        threshold = chosen_threshold(name, tuning)
        if math.isinf(threshold):
            continue
        simple.append(f"{name} ≥ {threshold:.3g}")
        rules[simple[-1]] = of_simple(name, threshold)
    for part, runs in {tuned: tuning, **sets}.items():
        if not runs:
            continue
        print(f"\n{part}: {len(runs)} runs, {sum(run.replayed.usable for run in runs)} collapses to warn of")
        print(f"  {'rule':36s}{'hits':>8s}{'false':>8s}{'losing':>9s}{'lead':>7s}{'fallen':>8s}")
        found = {name: scored(name, runs, alarm) for name, alarm in rules.items()}
        for name, (each, depth) in found.items():
            lead = "–" if each.median_lead is None else f"{each.median_lead:g}"
            depth_words = "–" if math.isnan(depth) else f"{depth:.0%}"
            hits = f"{each.hits}/{each.hits + each.misses}"
            real, false = losing(runs, rules[name])
            print(f"  {name:36s}{hits:>8s}{false_rate(each):8.2f}{f'{real}/{false}':>9s}{lead:>7s}{depth_words:>8s}")
        if part == tuned:
            continue
        own = found["early warnings"][0]
        rivals = [each for name, (each, _) in found.items() if name in simple and false_rate(each) <= MOST_FALSE]
        best = max((each.hits for each in rivals), default=0)
        lines.append(Line(f"{part}_hits", f"{part}, hits; bar: the best simple rule", own.hits, best, at_least=True))
        lines.append(Line(f"{part}_false_per_1000", f"{part}, false per 1,000", false_rate(own), MOST_FALSE))
        real, false = losing(runs, rules["early warnings"])
        lossless = false_rate(own) * (false - real) / max(false, 1)
        lines.append(Line(f"{part}_lossless_per_1000", f"{part}, of these without a loss", lossless, MOST_FALSE))
    return lines


if __name__ == "__main__":
    sys.exit(main())
