"""Intervals and health: known noise on the shipped run's rollouts, pooled over steps; and the recorded runs unchanged.

log π is log μ with normal noise of a known size, so that k3 is known. The noise of a prompt is scaled by exp(s·z).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from benchmarks.recorded_runs import RecordedRun, recorded_runs, shipped_run
from benchmarks.truth.bench import Bench
from benchmarks.truth.case import Case, Outcome
from foreshock.model_kind import ModelKind
from foreshock.rollouts import RolloutBatch

# Tokens that are almost certain keep their log-prob: noise would make it positive.
_NOISY_BELOW = -0.2


def with_noise(batch: RolloutBatch, k3: float, spread: float, seed: int) -> RolloutBatch:
    """Return the batch with log π = log μ + noise, so that the expected k3 per token is `k3`, in nats.

    `spread` is s, the log-standard deviation of a prompt's factor. E ρ is 1.
    """
    random = np.random.default_rng(seed)
    behaviour = batch.rollout_log_probs
    assert behaviour is not None
    names = list(batch.group_ids or ())
    factors = {name: np.exp(spread * random.standard_normal()) for name in dict.fromkeys(names)}
    of_tokens = np.repeat([factors[name] for name in names], np.diff(batch.response_offsets))
    noisy = behaviour < _NOISY_BELOW
    # k3 is about σ²/2 per noisy token; the mean of exp(2·s·z) is exp(2·s²).
    size = np.sqrt(2.0 * k3 / noisy.mean() / np.exp(2.0 * spread**2)) * of_tokens
    size = np.minimum(size, -behaviour / 5.0)
    d = np.where(noisy, size * random.standard_normal(behaviour.size) - size**2 / 2.0, 0.0)
    return replace(batch, trainer_log_probs=np.minimum(behaviour + d, 0.0).astype(np.float32))


def first_rollouts(run: RecordedRun, steps: int) -> Iterator[tuple[int, RolloutBatch]]:
    """Yield the first recorded steps with their rollouts."""
    files = sorted(path.name for path in (run.folder / "rollouts").iterdir() if path.name.startswith("step_"))
    for name in files[:steps]:
        step = int(name.removeprefix("step_").partition(".")[0])
        yield step, run.rollouts(step)


def noisy_run(
    name: str, k3: float, *, spread: float = 0.0, steps: int = 10, prompts: int = 8, model_kind: ModelKind = "dense"
) -> Callable[[Bench], Outcome]:
    """Return a case's function: a run whose k3 is known, over `steps` steps of the first `prompts` prompts."""

    def case(bench: Bench) -> Outcome:
        batches = {}
        recorded = [batch for _, batch in first_rollouts(shipped_run(), steps)]
        for index in range(steps):
            batch = with_noise(recorded[index % len(recorded)], k3, spread, seed=index)
            chosen = set(list(dict.fromkeys(batch.group_ids or ()))[:prompts])
            rows = [row for row, group in enumerate(batch.group_ids or ()) if group in chosen]
            # Some recorded steps are used again with other noise.
            batches[index + 1] = batch.select(rows)
        return bench.shown(bench.log_run(f"interval-{name}", batches, model_kind=model_kind))

    return case


def as_recorded(run: RecordedRun) -> Callable[[Bench], Outcome]:
    """Return a case's function: the first ten steps of a recorded run, unchanged."""

    def case(bench: Bench) -> Outcome:
        batches = dict(first_rollouts(run, 10))
        return bench.shown(bench.log_run(f"interval-{run.name}", batches, model_kind="dense"))

    return case


_HEALTHY = "Healthy: the mismatch (k3)"
CASES = (
    Case("clean run, even prompts", _HEALTHY, True, noisy_run("clean", 2e-4)),
    Case("clean run near the end of the range", _HEALTHY, True, noisy_run("near", 8e-4, spread=0.6)),
    Case("one step of 8 uneven prompts", "Unknown: 1 step", True, noisy_run("one", 4e-4, spread=0.8, steps=1)),
    Case("one step of 4 prompts", "Unknown: 1 step", True, noisy_run("four", 2e-4, steps=1, prompts=4)),
    Case(
        "k3 above the range of dense models, 10 steps", "healthy to 1.0e-3", True,
        noisy_run("above", 2e-3), not_healthy=True,
    ),
    Case(
        "k3 above the range of dense models, 20 steps", "healthy to 1.0e-3", True,
        noisy_run("warning", 2e-3, steps=20), not_healthy=True,
    ),
    Case("the same k3, a mixture of experts", _HEALTHY, True, noisy_run("moe", 2e-3, model_kind="moe")),
    # One family of ranges, which is derived from that of k3: inside it nothing else is unhealthy.
    Case(
        "k3 near the end of the range of a mixture of experts", _HEALTHY, True,
        noisy_run("experts", 6e-3, steps=20, model_kind="moe"),
    ),
    *(
        Case(f"recorded run {run.name}, 10 steps", "healthy", True, as_recorded(run))
        for run in recorded_runs()
    ),
)  # fmt: skip
