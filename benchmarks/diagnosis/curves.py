"""Generated curves of lengths: healthy ones of many kinds, and the two published surges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import LENGTH_KEY, LONGEST_KEY, TRUNCATED_KEY
from foreshock.diagnosis.rule import Event

DEVIATIONS = (0.05, 0.10, 0.15, 0.20, 0.25)
AUTOCORRELATIONS = (0.0, 0.3, 0.6, 0.8, 0.9, 0.95)
HEALTHY_KINDS = ("flat", "drift up", "drift down", "capped", "gaps")
HEALTHY_STEPS = 400
HELD_OUT_SEED = 2_759_304_860
"""The first eight hexadecimal digits of the SHA-256 of "foreshock held-out curves". This rule was fixed before any of
these curves was run; no constant was chosen with them."""

SEEDS_PER_CELL = 4
"""Deviations × autocorrelations × kinds × seeds: 5 × 6 × 5 × 4 = 600 curves."""

PUBLISHED_SURGES = {"Qwen3-4B-Base": 110, "Qwen3-8B-Base": 90}
"""Run → step of the surge according to the published text, which read it by eye."""

PUBLISHED_NOISE = ((0.07, 0.0), (0.10, 0.2), (0.20, 0.4))
"""(standard deviation, autocorrelation) of log lengths. The deviations are quartiles of the residuals of twelve
recorded runs in detrended blocks of 30 values (0.070, 0.10 and 0.19). Their autocorrelations are −0.06 to 0.17; two
runs have 0.31 and 0.57."""

PUBLISHED_SEEDS = 100

WIDTHS = (3.0, 15.0)
"""Widths of the logistic rise: 13 to 66 steps from 10 to 90 %. Only levels and steps are published."""

BORDER = {0.07: 9.0, 0.10: 9.0, 0.20: 5.0}
"""Noise → the largest width of a rise that lengths alone distinguish from a ramp ×4 in 80 steps: 40 steps, or 22;
the widest of which all 60 rises of the tuning seeds are found."""


def healthy_curves() -> Iterator[tuple[str, list[ClosedStep]]]:
    """Yield the kind and the steps of each healthy curve."""
    cells = product(HEALTHY_KINDS, DEVIATIONS, AUTOCORRELATIONS, range(SEEDS_PER_CELL))
    for seed, (kind, deviation, autocorrelation, _) in enumerate(cells):
        yield kind, _healthy(kind, deviation, autocorrelation, np.random.default_rng([HELD_OUT_SEED, seed]))


def published_curve(
    surge: int, deviation: float, autocorrelation: float, seed: int, slow: bool = False
) -> list[ClosedStep]:
    """Return the published rise, 1000 → 3000-4000 tokens around ``surge``, with noise.

    The rise is logistic; its width depends on the seed, up to the border of this noise. A slow rise is wider: by its
    lengths alone it is a ramp, so k3 rises with it from 2e-4 to 6e-3, with 25 % noise.
    """
    random = np.random.default_rng([surge, seed])
    first, last = (BORDER[deviation], WIDTHS[1]) if slow else (WIDTHS[0], BORDER[deviation])
    high, width = random.uniform(3000.0, 4000.0), random.uniform(first, last)
    step = np.arange(1, 301)
    done = 1.0 / (1.0 + np.exp(-(step - surge) / width))
    lengths = (1000.0 + (high - 1000.0) * done) * np.exp(noise_of(deviation, autocorrelation, len(step), random))
    values = {LENGTH_KEY: lengths}
    if slow:
        values[K3] = 2e-4 * 30.0**done * np.exp(0.25 * random.normal(size=len(step)))
    rows = zip(*values.values(), strict=True)
    return [
        ClosedStep(int(number), {key: float(value) for key, value in zip(values, row, strict=True)})
        for number, row in zip(step, rows, strict=True)
    ]


def noise_of(deviation: float, autocorrelation: float, count: int, random: np.random.Generator) -> NDArray[np.float64]:
    """Return stationary AR(1) noise of the standard deviation ``deviation``."""
    innovations = deviation * np.sqrt(1.0 - autocorrelation**2) * random.normal(size=count)
    values = np.empty(count)
    values[0] = deviation * random.normal()
    for i in range(1, count):
        values[i] = autocorrelation * values[i - 1] + innovations[i]
    return values


def watch(steps: Sequence[ClosedStep]) -> tuple[WarningState, list[Event], int]:
    """Return the state after the steps, the events that fired, and the steps at which the detector was armed."""
    chosen, state, fired, armed = WarningConfiguration(), WarningState(), list[Event](), 0
    for step in steps:
        armed += state.armed(chosen.surge)
        state, events = advance(state, step, chosen)
        fired.extend(event for event in events if event.change == "fired")
    return state, fired, armed


def _healthy(kind: str, deviation: float, autocorrelation: float, random: np.random.Generator) -> list[ClosedStep]:
    level = float(np.exp(random.uniform(np.log(100.0), np.log(8000.0))))
    step = np.arange(1, HEALTHY_STEPS + 1)
    logs = np.log(level) + noise_of(deviation, autocorrelation, HEALTHY_STEPS, random)
    if kind == "drift up":
        logs += np.log(random.uniform(1.2, 3.0)) * step / HEALTHY_STEPS
    if kind == "drift down":
        logs -= np.log(random.uniform(1.2, 3.0)) * step / HEALTHY_STEPS
    lengths = np.exp(logs)
    if kind == "capped":
        return [
            _capped(int(number), float(length), level, random) for number, length in zip(step, lengths, strict=True)
        ]
    kept = random.random(HEALTHY_STEPS) > (0.3 if kind == "gaps" else 0.0)
    return [
        ClosedStep(int(number), {LENGTH_KEY: float(length)})
        for number, length, keep in zip(step, lengths, kept, strict=True)
        if keep
    ]


def _capped(step: int, length: float, level: float, random: np.random.Generator) -> ClosedStep:
    """Return the measures of 64 responses around ``length`` that are cut at 1.3 times the level of the run."""
    cap = 1.3 * level
    responses = length * np.exp(0.5 * random.normal(size=64) - 0.125)
    cut = np.minimum(responses, cap)
    values = {LENGTH_KEY: cut.mean(), LONGEST_KEY: cut.max(), TRUNCATED_KEY: (responses > cap).mean()}
    return ClosedStep(step, {key: float(value) for key, value in values.items()})
