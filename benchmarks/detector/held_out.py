"""Held-out curves: seeds that no constant of the detector was tuned on, chosen by a rule that was written first.

The rule: the seed is the number in the first eight hexadecimal digits of the SHA-256 of `RULE_TEXT`. It makes 2,400
healthy curves (four times the tuned 600, by the same recipe), 100 curves of each published surge at each noise, and
2,400 curves whose noise is that of the recorded runs without a surge, drawn again in blocks. The result stands as it
comes: a constant that is changed because of it makes these seeds tuned ones, and needs a new text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.detector.curves import HEALTHY_STEPS, HealthyCurve, healthy_curves
from benchmarks.early_warning import Curve
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.quantities import LENGTH_KEY
from foreshock.diagnosis.statistics import residuals_of

RULE_TEXT = "foreshock held-out curves"
HELD_OUT_SEED = int(hashlib.sha256(RULE_TEXT.encode()).hexdigest()[:8], 16)

SEEDS_PER_CELL = 16
"""150 cells of deviation, autocorrelation and kind: 2,400 curves."""

RECORDED_CURVES = 2_400
BLOCK_VALUES = 20
"""Values of a block: several times the memory of the recorded residuals, whose lag-1 autocorrelation is below 0.6."""

TREND_VALUES = 30
"""Values over which a trend is removed from a recorded run: the residuals keep what is faster."""


def held_out_healthy() -> Iterator[HealthyCurve]:
    """Yield the 2,400 held-out healthy curves."""
    return healthy_curves(HELD_OUT_SEED, SEEDS_PER_CELL)


def recorded_residuals(curves: Sequence[Curve]) -> list[NDArray[np.float64]]:
    """Return the residuals of the log lengths of each run without a surge, in stretches without their trend."""
    found = []
    for curve in curves:
        lengths = [step.values[LENGTH_KEY] for step in curve.steps if step.values.get(LENGTH_KEY, 0.0) > 0.0]
        logs = np.log(np.maximum(lengths, 1.0))
        stretches = [logs[first : first + TREND_VALUES] for first in range(0, len(logs), TREND_VALUES)]
        whole = [residuals_of(list(each)) for each in stretches if len(each) == TREND_VALUES]
        if curve.label.kind == "none" and whole:
            found.append(np.concatenate(whole))
    return found


def recorded_noise_curves(residuals: Sequence[NDArray[np.float64]]) -> Iterator[list[ClosedStep]]:
    """Yield flat curves with the noise of one recorded run each, by a circular block bootstrap of its residuals."""
    for number in range(RECORDED_CURVES if residuals else 0):
        random = np.random.default_rng([HELD_OUT_SEED, number])
        pool = residuals[number % len(residuals)]
        starts = random.integers(len(pool), size=-(-HEALTHY_STEPS // BLOCK_VALUES))
        places = (starts[:, None] + np.arange(BLOCK_VALUES)).ravel()[:HEALTHY_STEPS] % len(pool)
        lengths = 1000.0 * np.exp(pool[places])
        yield [ClosedStep(step, {LENGTH_KEY: float(length)}) for step, length in enumerate(lengths, start=1)]
