"""Measure the held-out curves: moved learning rates, Σ η under `apply`, and realised against stated false alarms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks.detector.curves import (
    PUBLISHED_NOISE,
    PUBLISHED_SEEDS,
    PUBLISHED_SURGES,
    published_curve,
    watch,
)
from benchmarks.detector.held_out import (
    HELD_OUT_SEED,
    RULE_TEXT,
    held_out_healthy,
    recorded_noise_curves,
    recorded_residuals,
)
from benchmarks.early_warning import Curve
from foreshock.backtest.replay import lost_learning_rate, scales_under_apply
from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration
from foreshock.diagnosis.statistics import proportion_interval
from foreshock.learning_rate.schedule import DECAY_MULTIPLIER, ScheduleSettings

EARLIEST, LATEST = 0.65, 1.03
STATED_RUN_LENGTHS = (1e3, 1e4, 1e5)
"""Average run lengths to a false alarm that are compared with what happens; the last one is the default."""


@dataclass(slots=True)
class HealthyResult:
    """What healthy curves got at one stated average run length."""

    runs: int = 0
    armed: int = 0
    alarmed: int = 0
    moved: int = 0
    lost: list[float] = field(default_factory=list)

    @property
    def armed_of_run(self) -> float:
        """Armed observations of a run, in the mean."""
        return self.armed / max(self.runs, 1)


def measure_held_out(real: Sequence[Curve]) -> list[str]:
    """Print the tables of the held-out curves; return the results."""
    print(f"held-out seeds: {HELD_OUT_SEED}, from {RULE_TEXT!r}")
    print(
        f"{'curves':34}{'stated 1 / A':>13}{'at most':>9}  {'a surge alarm, 95 %':26}{'learning rate moved, 95 %':30}"
    )
    sets: list[tuple[str, list[list[ClosedStep]]]] = [("healthy", [each.steps for each in held_out_healthy()])]
    residuals = recorded_residuals(real)
    sets.append((f"noise of {len(residuals)} recorded runs", list(recorded_noise_curves(residuals))))
    results = []
    for name, curves in sets:
        for length in STATED_RUN_LENGTHS if curves else ():
            chosen = length == STATED_RUN_LENGTHS[-1]
            found = _healthy(curves, length, with_loss=chosen)
            print(f"{name:34}{1 / length:13.0e}{_percent(found.armed_of_run / length):>9}  "
                  f"{_share(found.alarmed, found.runs):26}{_share(found.moved, found.runs):30}")  # fmt: skip
            if chosen:
                label = "held_out" if name == "healthy" else "recorded_noise"
                median, decile = (float(np.quantile(found.lost, share)) for share in (0.5, 0.9))
                print(f"{name:34}Σ η lost under apply: median {_percent(median)}, worst decile from "
                      f"{_percent(decile)}, largest {_percent(max(found.lost))}")  # fmt: skip
                results += [f"{label}_moved={found.moved}/{found.runs}", f"{label}_lost_median={median:.4f}",
                            f"{label}_lost_decile={decile:.4f}"]  # fmt: skip
    results.append(f"held_out_published_worst={_published()}/{PUBLISHED_SEEDS}")
    print()
    return results


def _healthy(curves: Iterable[list[ClosedStep]], run_length: float, with_loss: bool) -> HealthyResult:
    configuration = WarningConfiguration()
    configuration = replace(configuration, surge=replace(configuration.surge, average_run_length=run_length))
    result = HealthyResult()
    for steps in curves:
        state, events, armed = watch(steps, configuration)
        result.runs, result.armed = result.runs + 1, result.armed + armed
        result.alarmed += any(event.rule.startswith("length_surge") for event in events)
        result.moved += state.surge_step is not None
        if with_loss:
            # Without a surge there is no decision: these curves have lengths only.
            moved = state.surge_step is not None
            result.lost.append(lost_learning_rate(steps, scales_under_apply(steps, configuration)) if moved else 0.0)
    return result


def _published() -> int:
    worst = PUBLISHED_SEEDS
    for run, surge in PUBLISHED_SURGES.items():
        for deviation, autocorrelation in PUBLISHED_NOISE:
            within = 0
            for seed in range(HELD_OUT_SEED, HELD_OUT_SEED + PUBLISHED_SEEDS):
                state, _, _ = watch(published_curve(surge, deviation, autocorrelation, seed))
                ratio = 0.0
                if state.surge_step is not None:
                    ratio = ScheduleSettings().period(state.surge_step) / (DECAY_MULTIPLIER * surge)
                within += EARLIEST <= ratio <= LATEST
            print(f"published {run}, noise {deviation:.2f}, φ {autocorrelation:.1f}: {within} of {PUBLISHED_SEEDS} "
                  "decay periods in the bar")  # fmt: skip
            worst = min(worst, within)
    return worst


def _share(hits: int, runs: int) -> str:
    low, high = proportion_interval(hits, runs)
    return f"{hits} of {runs} ({100 * low:.2f}-{100 * high:.2f} %)"


def _percent(value: float) -> str:
    return f"{100 * value:.2f} %"
