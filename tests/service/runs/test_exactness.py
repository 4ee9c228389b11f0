"""Measures over HTTP against the formulas, evaluated directly, to 1e-9 relative."""

from __future__ import annotations

import math

import httpx
import numpy as np
import pytest

from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.jsonl import read_jsonl
from tests.foreshock.measures.direct import direct_measures
from tests.paths import SHARED_RUNS
from tests.service.sending import Sender, make_batch, start_run


def assert_served_exactly(sender: Sender, step: int, batch: RolloutBatch) -> None:
    """Assert that each measure with a direct formula is returned equal to 1e-9 relative."""
    columns = sender.get("measurements", comparison="trainer/rollout", from_step=step, to_step=step).json()["columns"]
    compared = 0
    for name, expected in direct_measures(batch).items():
        if name not in columns or (name == "ess_turn" and batch.turn is None):
            continue
        (served,) = columns[name]
        if not math.isfinite(expected):
            assert served is None, name
            continue
        assert served == pytest.approx(expected, rel=1e-9, abs=1e-15), name
        compared += 1
    assert compared >= 20


def put_in_shards(sender: Sender, step: int, batch: RolloutBatch, shards: int) -> None:
    """Upload a batch cut into shards."""
    for shard, rows in enumerate(np.array_split(np.arange(batch.num_rollouts), shards)):
        sender.put_shard(step, batch.select(rows), shard, shards).raise_for_status()


@pytest.mark.parametrize("shards", [1, 3])
def test_measures_of_synthetic_rollouts_equal_the_formulas(http: httpx.Client, shards: int) -> None:
    sender = start_run(http)
    for step, scale in enumerate((1e-6, 1e-2, 3.0)):
        batch = make_batch(30, seed=step)
        assert batch.rollout_log_probs is not None
        noise = np.random.default_rng(step).normal(0, scale, batch.num_tokens)
        target = np.minimum(batch.rollout_log_probs + noise, 0).astype(np.float32)
        target[5] = np.nan
        changed = make_batch(30, seed=step, trainer_log_probs=target)
        put_in_shards(sender, step, changed, shards)
        assert_served_exactly(sender, step, changed)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.shared
@pytest.mark.skipif(not SHARED_RUNS.exists(), reason="the recorded runs in ../shared are not there")
@pytest.mark.parametrize(("run", "step"), [("healthy", 1), ("healthy", 120), ("collapsed", 20)])
def test_measures_of_recorded_rollouts_equal_the_formulas(http: httpx.Client, run: str, step: int) -> None:
    batch = read_jsonl(SHARED_RUNS / run / "rollouts" / f"step_{step:04d}.jsonl.gz", step=step)
    sender = start_run(http)
    put_in_shards(sender, step, batch, 4)
    assert_served_exactly(sender, step, batch)
