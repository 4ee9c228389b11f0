"""What the analysis keeps of each run: its label, its mismatch before the collapse, and its steps for a replay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from examples.collapses.grid import DOSES, Part, RunSettings, part_of
from examples.collapses.labels import Kind, kind_of, label
from examples.collapses.results import Result
from foreshock.diagnosis.collapse import BASELINE_OBSERVATIONS
from foreshock.diagnosis.detectors import ClosedStep
from foreshock.diagnosis.mismatch_rules import K3
from foreshock.diagnosis.quantities import REWARD_KEY

FIRST_STEP, LAST_STEP = 9, 20
"""Steps over which the mismatch of a run is taken: from the first with the full lag of every dose, as few as give a
steady median, so that most collapses come later. Steps from the collapse on are left out."""


@dataclass(frozen=True, slots=True)
class Summary:
    """One run."""

    name: str
    dose: str
    learning_rate: float
    seed: int
    part: Part
    steps: int
    collapse: int | None
    kind: Kind
    k3: float
    """Median k3 of trainer/rollout in the window above, nats per token."""
    fixed_k3: float
    """Median k3 of the frozen float32 scorer against the sampler on the fixed prompts, before the collapse."""
    best_reward: float
    """Largest median of ten consecutive rewards."""
    engine_error: float
    """Largest mean |d| between the engine and its own weights in float32; NaN if no engine sampled."""
    cpu_seconds: float

    @property
    def usable(self) -> bool:
        """Whether the collapse leaves a baseline before it, without which no rule can warn."""
        return self.collapse is not None and self.collapse > BASELINE_OBSERVATIONS


def summarize(results: Mapping[str, Result]) -> list[Summary]:
    """Return the summaries of runs by name, in the order of doses, learning rates and seeds."""
    collapses = {name: label(result.steps.tolist(), _rewards(result)) for name, result in results.items()}
    order = {dose.name: place for place, dose in enumerate(DOSES)}
    summaries = [_summary(name, result, collapses) for name, result in results.items()]
    return sorted(summaries, key=lambda run: (order[run.dose], run.learning_rate, run.seed))


def closed_steps(result: Result) -> list[ClosedStep]:
    """Return the steps of a run as the detectors read them."""
    return [
        ClosedStep(
            int(step),
            {name: float(values[row]) for name, values in result.columns.items() if np.isfinite(values[row])},
        )
        for row, step in enumerate(result.steps)
    ]


def _rewards(result: Result) -> list[float]:
    return [float(reward) for reward in result.columns[REWARD_KEY]]


def _summary(name: str, result: Result, collapses: Mapping[str, int | None]) -> Summary:
    collapse = collapses[name]
    before = result.steps < (np.inf if collapse is None else max(collapse, 3))
    window = before & (result.steps >= FIRST_STEP) & (result.steps <= LAST_STEP)
    if not window.any():
        window = before
    rewards = np.lib.stride_tricks.sliding_window_view(result.columns[REWARD_KEY], 10)
    twin = RunSettings(DOSES[0], result.learning_rate, result.seed).name
    errors = result.columns.get("fixed:engine_error")
    return Summary(
        name=name,
        dose=result.dose,
        learning_rate=result.learning_rate,
        seed=result.seed,
        part=part_of(result.seed),
        steps=len(result.steps),
        collapse=collapse,
        kind=kind_of(name, twin, collapses),
        k3=float(np.median(result.columns[K3][window])),
        fixed_k3=float(np.nanmedian(result.columns["fixed:float32_k3_kl"][before])),
        best_reward=float(np.median(rewards, axis=1).max()),
        engine_error=float("nan") if errors is None else float(np.nanmax(errors)),
        cpu_seconds=result.cpu_seconds,
    )
