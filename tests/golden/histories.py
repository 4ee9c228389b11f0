"""The recorded runs of the golden results: what their trainers logged, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from examples.collapses.results import read_results
from examples.tiny_rl.record import RECORDED, RunRecord
from foreshock.rollouts import encode_rollouts
from tests.foreshock.batches import recorded_steps
from tests.paths import REPOSITORY

_SHARED_STEPS = 120
SHARED = REPOSITORY.parent / "shared" / "data" / "tiny_rl"
COLLAPSES = (
    "bf16-lr0.0003-seed1", "kv-fp8-lr0.0004-seed0", "lag1-lr0.0004-seed2", "lag2-lr0.0003-seed0", "lag4-lr0.0002-seed3",
    "lag8-lr0.0001-seed0", "lag8-lr0.0003-seed2", "none-lr0.0004-seed1", "partial-lr0.0002-seed0",
    "w4-lr0.0002-seed2",
)  # fmt: skip
"""Ten of the collapse runs of `examples/collapses`, of every kind of mismatch."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one step logged: its rollouts as an upload's body, and its scalars."""

    number: int
    rollouts: bytes | None
    scalars: dict[str, float]


@dataclass(frozen=True, slots=True)
class History:
    """A recorded run; `probed` are the steps that are probed, `looked_at` those whose every answer is kept."""

    name: str
    about: dict[str, Any]
    steps: Callable[[], Iterator[Step]]
    probed: tuple[int, ...] = ()
    looked_at: tuple[int, ...] = ()
    folder: Path = REPOSITORY


def _recorded() -> Iterator[Step]:
    record = RunRecord(RECORDED)
    scalars = record.scalars()
    for step in record.steps():
        yield Step(step, record.rollouts_file(step).read_bytes(), _finite(scalars[step]))


def _shared(name: str) -> Iterator[Step]:
    scalars = RunRecord(SHARED / name).scalars()
    for step, batch in islice(recorded_steps(SHARED / name / "rollouts"), _SHARED_STEPS):
        logged = {key: scalars[step][key] for key in ("lr", "grad_norm", "entropy")}
        yield Step(step, encode_rollouts(batch), _finite(logged))


def _faulty() -> Iterator[Step]:
    """Yield steps of the recorded run, each with one fault that the lint looks for."""
    record = RunRecord(RECORDED)
    for number in range(1, 31):
        batch = record.rollouts(number)
        mu = batch.rollout_log_probs
        assert mu is not None
        faults: dict[str, dict[str, Any]] = {
            "shifted by one token": {"rollout_log_probs": np.roll(mu, 1)},
            "zeros": {"rollout_log_probs": np.zeros_like(mu)},
            "probabilities": {"rollout_log_probs": -np.exp(mu)},
            "another temperature": {"rollout_log_probs": mu * np.float32(1.4)},
            "the same log-probs": {"trainer_log_probs": mu},
            "sentinels": {"rollout_log_probs": np.where(np.arange(len(mu)) % 50 == 7, np.float32(-9999), mu)},
        }
        fault = list(faults)[number * len(faults) // 31]
        yield Step(number, encode_rollouts(replace(batch, **faults[fault])), {"lr": 1e-4})


def _collapse(name: str) -> Iterator[Step]:
    """Yield scalars by the names of the detectors' quantities: such a run has no rollouts any more."""
    result = read_results(only=name)[name]
    for row, step in enumerate(result.steps.tolist()):
        logged = {key: float(values[row]) for key, values in result.columns.items() if not key.startswith("fixed:")}
        yield Step(step, None, _finite(logged))


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


def histories() -> dict[str, History]:
    """Return every history by name; those of the shared runs are absent if the runs are."""
    about = {"model": "tiny", "trainer": "RLOO", "engine": "vLLM", "hardware": "cpu", "advice_mode": "apply"}
    found = {
        "recorded": History(
            "recorded",
            {**about, "initial_learning_rate": 1e-4, "length_cap": 48},
            _recorded,
            probed=(40, 120),
            looked_at=(1, 40, 120),
        )
    }
    found["faulty"] = History(
        "faulty", {**about, "initial_learning_rate": 1e-4}, _faulty, probed=(3,), looked_at=(3, 8, 13, 18, 23, 28)
    )
    for name, rate, steps in (("healthy", 5e-5, (1, 120)), ("collapsed", 8e-4, (10, 100))):
        history = History(
            name, {**about, "initial_learning_rate": rate}, partial(_shared, name), steps[:1], steps, SHARED
        )
        found[name] = history
    for name in COLLAPSES:
        found[name] = History(
            name, {**about, "initial_learning_rate": 1e-4, "length_cap": 20}, partial(_collapse, name)
        )
    return {name: history for name, history in found.items() if history.folder.is_dir()}
