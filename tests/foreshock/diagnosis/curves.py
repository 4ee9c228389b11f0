"""Length curves for tests: generated curves of the published shapes, and a run over all detectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from foreshock.diagnosis.detectors import ClosedStep, WarningConfiguration, WarningState, advance
from foreshock.diagnosis.rule import Event

LENGTH = "rollout:response_length_mean"


def noisy(lengths: NDArray[np.float64], sigma: float = 0.06, seed: int = 0) -> NDArray[np.float64]:
    """Return ``lengths`` times log-normal noise of standard deviation ``sigma``."""
    return np.asarray(lengths * np.exp(sigma * np.random.default_rng(seed).normal(size=len(lengths))))


def surge_curve(
    middle: int, width: float, steps: int = 300, low: float = 1000.0, high: float = 3500.0
) -> NDArray[np.float64]:
    """Return a logistic rise around ``middle`` (the published 1000 → 3000-4000); element i is step i + 1."""
    step = np.arange(1, steps + 1)
    return low + (high - low) / (1.0 + np.exp(-(step - middle) / width))


def closed_steps(series: Mapping[str, Iterable[float]], steps: Iterable[int] | None = None) -> list[ClosedStep]:
    """Return one closed step per value of the series, numbered from 1 or by ``steps``."""
    rows = list(zip(*series.values(), strict=True))
    numbers = list(steps) if steps is not None else list(range(1, len(rows) + 1))
    return [
        ClosedStep(number, {key: float(value) for key, value in zip(series, row, strict=True)})
        for number, row in zip(numbers, rows, strict=True)
    ]


def watch(
    steps: Iterable[ClosedStep], configuration: WarningConfiguration | None = None
) -> tuple[WarningState, list[Event]]:
    """Return the state and all events after ``steps``."""
    state, events = WarningState(), list[Event]()
    for step in steps:
        state, new = advance(state, step, configuration or WarningConfiguration())
        events.extend(new)
    return state, events


def fired(events: Iterable[Event]) -> list[tuple[str, int]]:
    """Return (rule, step) of the events that fired."""
    return [(event.rule, event.step) for event in events if event.change == "fired"]
