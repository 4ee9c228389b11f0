"""Measurements of data-parallel ranks fold into that of one process over all rollouts."""

from __future__ import annotations

import dataclasses
import math
import pickle

import numpy as np
import pytest

from foreshock.errors import StatisticsError
from foreshock.measures import StepMeasurement, fold, measure_step
from foreshock.rollouts import RolloutBatch
from tests.foreshock.batches import random_batch


def sent(measurement: StepMeasurement) -> StepMeasurement:
    """Return the measurement as it arrives from another process."""
    arrived: StepMeasurement = pickle.loads(pickle.dumps(measurement))
    return arrived


def all_measures(measurement: StepMeasurement) -> dict[str, float]:
    return measurement.step.measures() | measurement.comparisons["trainer/rollout"].measures()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_measurements_of_ranks_are_folded_into_one(ranks: int) -> None:
    batch = random_batch(3, 30, 50)
    shards = np.array_split(np.random.default_rng(0).permutation(30), ranks)
    whole = all_measures(measure_step(batch))
    found = all_measures(fold(sent(measure_step(batch.select(rows))) for rows in shards))
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        clustered = name.endswith(("_low", "_high")) and "_bootstrap_" not in name
        assert found[name] == pytest.approx(value, rel=1e-7 if clustered else 1e-12, nan_ok=True), name


def test_ranks_exchange_the_stored_form_for_any_vocabulary() -> None:
    batch = random_batch(0, 40, 600)
    ids = np.random.default_rng(0).permutation(150_000)[: batch.num_tokens].astype(np.int32)
    measurement = measure_step(dataclasses.replace(batch, response_token_ids=ids))
    here = measurement.comparisons["trainer/rollout"].statistics
    there = sent(measurement).comparisons["trainer/rollout"].statistics
    assert there.to_bytes() == here.to_bytes()
    assert len(pickle.dumps(here)) < len(here.to_bytes()) + 200
    np.testing.assert_equal(all_measures(sent(measurement)), all_measures(measurement))
    table = there.token_id_table(10**6)
    assert table.token_ids.size == 512 < here.token_id_table(10**6).token_ids.size
    assert table.k3_sum_unnamed == here.token_id_table(513).k3_sum[-1]


def test_measurements_of_different_comparisons_are_not_folded() -> None:
    batch = random_batch(0)
    without = measure_step(dataclasses.replace(batch, trainer_log_probs=None))
    with pytest.raises(StatisticsError, match="same comparisons"):
        fold([measure_step(batch), without])


def test_equal_sample_ids_of_two_ranks_stay_two_rollouts() -> None:
    """Ranks number their own rows. Without prompt groups each row is a cluster by itself, whatever its id."""
    ranks = [dataclasses.replace(random_batch(seed, 6, 40), group_ids=None) for seed in range(2)]
    numbered = [dataclasses.replace(batch, sample_ids=[str(row) for row in range(6)]) for batch in ranks]
    apart = measure_step(RolloutBatch.concat(ranks)).comparisons["trainer/rollout"]
    alike = fold(measure_step(batch) for batch in numbered).comparisons["trainer/rollout"]
    assert np.unique(alike.summaries.clusters()).size == 12
    for name in ("k3_kl", "chi2_token", "tv_token"):
        one, two = (part.summaries.interval(name) for part in (apart, alike))
        assert one.clusters == two.clusters == apart.statistics.interval(name).clusters
        assert (two.low, two.high) == pytest.approx((one.low, one.high), rel=1e-9)
        assert math.isfinite(alike.measures()[f"{name}_bootstrap_low"])
