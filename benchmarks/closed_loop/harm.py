"""How much learning rate the advice takes from healthy curves: recorded, generated and labelled ones of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np

from benchmarks.bars import Line
from benchmarks.closed_loop.arms import CONFIGURATION
from benchmarks.diagnosis.curves import HELD_OUT_SEED, healthy_curves
from benchmarks.diagnosis.logs import real_curves
from examples.collapses.results import RESULTS, read_results
from examples.collapses.summary import closed_steps, summarize
from foreshock.backtest.replay import AppliedAdvice
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.lags import LAG_KEY
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LAST_STEP_KEY, LEARNING_RATE_KEY

EVERY: Final = 3
"""Every third generated curve is judged, with and without a planned end."""
MOST_LOST: Final = 0.05


def harm_lines() -> list[Line]:
    """Return, for each kind of curves, the fraction that loses more than 5 % of Σ η, and its bar."""
    results = read_results(RESULTS)
    runs = summarize(results)
    healthy = [each for each in runs if each.collapse is None and each.learning_rate == 1e-4 and "lag" not in each.dose]
    logs = [each.steps for each in real_curves() if each.name.startswith("benign")]
    lines = []
    generated = [list(_with_mismatch(planned=planned)) for planned in (False, True)]
    for key, text, curves, bar in (
        ("recorded", "recorded, 1e-4, no lag", [closed_steps(results[each.name]) for each in healthy], 0.01),
        (
            "curves",
            "generated, lag known",
            [steps for of in generated for steps in of if LAG_KEY in steps[0].values],
            0.01,
        ),
        (
            "blind",
            "generated, lag unknown",
            [steps for of in generated for steps in of if LAG_KEY not in steps[0].values],
            0.01,
        ),
        ("logs", "labelled benign logs", logs, 0.0),
    ):
        fraction = sum(_lost(steps) > MOST_LOST for steps in curves) / len(curves)
        lines.append(Line(f"losing_{key}", f"curves that lose more than {MOST_LOST:.0%}: {text}", fraction, bar))
    return lines


def _lost(steps: Sequence[ClosedStep]) -> float:
    """Return the fraction of Σ η that the advice takes from a trainer that follows it, if nothing follows the rate."""
    advice, scales = AppliedAdvice(CONFIGURATION, starts=True), list[float]()
    for closed in steps:
        scales.append(advice.scale(closed.step))
        advice.observe(replace(closed, values={**closed.values, LEARNING_RATE_KEY: scales[-1]}))
    return 1.0 - math.fsum(scales) / len(scales)


def _with_mismatch(*, planned: bool = False) -> Iterator[list[ClosedStep]]:
    """Yield healthy curves of lengths with a k3 of any healthy or static size, at lag 0, 1 to 8 or unknown.

    k3 has 25 % noise and drifts by a factor of up to 1.75, as in recorded runs. For lagging tokens it is below the set
    point.
    """
    for seed, (_, steps) in enumerate(islice(healthy_curves(), 0, None, EVERY)):
        random = np.random.default_rng([HELD_OUT_SEED, seed, 1])
        lag = (0.0, float(random.integers(1, 9)), None)[seed % 3]
        level = float(np.exp(random.uniform(np.log(1e-5), np.log(1e-3 if lag else 3e-2))))
        drift = float(random.uniform(1.0, 1.75))
        found = []
        for place, step in enumerate(steps):
            k3 = level * drift ** (place / len(steps)) * math.exp(0.25 * random.normal())
            lags = {} if lag is None else {LAG_KEY: 0.0 if place == 0 else lag}
            plan = {LAST_STEP_KEY: float(steps[-1].step)} if planned else {}
            found.append(ClosedStep(step.step, {**step.values, K3: k3, **lags, **plan}))
        yield found
