"""Tests of shards that travel as statistics: which rollouts are in full, how large the body is, damaged bodies."""

from dataclasses import replace

import numpy as np
import pytest

from foreshock.comparisons import STEP_ROW, TRAINER_ROLLOUT
from foreshock.digests import rollout_set_digest
from foreshock.errors import StatisticsError
from foreshock.measures import measure_step
from foreshock.rollouts import RolloutBatch, decode_rollouts
from foreshock.statistics_shards import FullRollouts, StatisticsShard, encode_statistics_shard
from tests.foreshock.batches import random_batch

_FULL = FullRollouts(8, 2)


def shard_of(batch: RolloutBatch, full: FullRollouts = _FULL, seed: str = "run/1/0") -> StatisticsShard:
    return StatisticsShard.from_bytes(encode_statistics_shard(batch, seed=seed, full=full))


def full_rollouts(shard: StatisticsShard) -> RolloutBatch:
    return decode_rollouts(bytes(shard.full))


def test_statistics_are_those_of_all_tokens() -> None:
    batch = random_batch(1, 60)
    shard = shard_of(batch)
    expected = measure_step(batch)
    pair = expected.comparisons[TRAINER_ROLLOUT]
    assert (shard.rollouts, shard.tokens) == (batch.num_rollouts, batch.num_tokens)
    assert shard.rollout_set_digest == rollout_set_digest(batch.sample_ids)
    assert {part.comparison: (part.statistics, part.summaries) for part in shard.statistics} == {
        STEP_ROW: (expected.step.to_bytes(), None),
        TRAINER_ROLLOUT: (pair.statistics.to_bytes(), pair.summaries.to_bytes()),
    }


def test_rollouts_in_full_are_a_sample_by_length_and_those_with_the_largest_difference() -> None:
    batch = random_batch(2, 100)
    shard = shard_of(batch, FullRollouts(10, 3))
    full = full_rollouts(shard)
    rows = [batch.sample_ids.index(sample_id) for sample_id in full.sample_ids]
    assert shard.sampled == 10
    assert rows[:10] == sorted(rows[:10])
    assert batch.select(rows).rollout_log_probs is not None
    np.testing.assert_array_equal(full.rollout_log_probs, batch.select(rows).rollout_log_probs)
    # One in each tenth of the rollouts by length.
    ranks = np.argsort(np.argsort(batch.response_lengths, kind="stable"))[rows[:10]]
    assert len(set(np.sort(ranks) // 10)) >= 9
    largest = measure_step(batch).comparisons[TRAINER_ROLLOUT].summaries.largest_abs_d()
    worst = set(np.argsort(-np.nan_to_num(largest, nan=-1))[:3].tolist())
    assert worst <= set(rows)
    assert set(rows[10:]) <= worst


def test_equal_batches_and_seeds_give_equal_bytes() -> None:
    full = FullRollouts(5, 1)
    one, again = (encode_statistics_shard(random_batch(3, 50), seed="run/7/0", full=full) for _ in range(2))
    assert one == again
    other = encode_statistics_shard(random_batch(3, 50), seed="run/8/0", full=full)
    assert StatisticsShard.from_bytes(other).full != StatisticsShard.from_bytes(one).full


@pytest.mark.parametrize("max_bytes", [40_000, 60_000, 120_000])
def test_the_sample_shrinks_until_the_body_fits(max_bytes: int) -> None:
    batch = random_batch(4, 200, 300)
    unbounded = encode_statistics_shard(batch, seed="a", full=FullRollouts(200, 2, 10_000_000))
    assert len(unbounded) > 120_000
    assert full_rollouts(StatisticsShard.from_bytes(unbounded)).num_rollouts == 200
    body = encode_statistics_shard(batch, seed="a", full=FullRollouts(200, 2, max_bytes))
    shard = StatisticsShard.from_bytes(body)
    statistics = sum(len(part.statistics) + len(part.summaries or b"") for part in shard.statistics)
    assert 1 <= shard.sampled < 200
    if max_bytes > statistics + 20_000:
        assert 0.7 * max_bytes < len(body) <= max_bytes
    else:
        assert shard.sampled == 1


def test_a_step_has_its_numbers_of_rollouts_in_full_whatever_the_shards() -> None:
    step = FullRollouts(64, 4, 900_000)
    for shards in (1, 3, 8, 64):
        parts = [step.of_shard(shard, shards) for shard in range(shards)]
        assert sum(part.sampled for part in parts) == 64
        assert sum(part.max_bytes for part in parts) <= 900_000
        assert all(part.worst >= 1 for part in parts)
    assert FullRollouts(2, 0).of_shard(5, 8) == FullRollouts(1, 0, 118_750)


def test_without_both_log_probs_there_is_a_sample_and_no_worst() -> None:
    batch = replace(random_batch(5, 30), trainer_log_probs=None)
    shard = shard_of(batch, FullRollouts(6, 4))
    assert [part.comparison for part in shard.statistics] == [STEP_ROW]
    assert (shard.sampled, full_rollouts(shard).num_rollouts) == (6, 6)


def test_all_rollouts_are_in_full_if_there_are_few() -> None:
    shard = shard_of(random_batch(6, 5), FullRollouts(64, 4))
    assert (shard.sampled, full_rollouts(shard).num_rollouts) == (5, 5)


def test_damaged_bodies_are_refused() -> None:
    body = encode_statistics_shard(random_batch(7, 20), seed="a", full=FullRollouts(3, 1))
    assert StatisticsShard.from_bytes(body).to_bytes() == body
    for damaged, message in (
        (b"PAR1" + body[4:], "not a shard of statistics"),
        (body[:6], "not a shard of statistics"),
        (body[:40], "header is truncated"),
        (body[:-1], "size differs"),
        (body + b"x", "size differs"),
        (body.replace(b'"rollouts":20', b'"rollouts":-2'), "`rollouts` must be a whole number"),
        (body.replace(b'{"full"', b'["full"'), "not JSON"),
        (body.replace(b'"statistics":[[', b'"statistics":[3,['), "damaged"),
    ):
        with pytest.raises(StatisticsError, match=message):
            StatisticsShard.from_bytes(damaged)


def test_statistics_of_another_version_say_what_to_do() -> None:
    body = encode_statistics_shard(random_batch(8, 20), seed="a", full=FullRollouts(3, 1))
    version = measure_step(random_batch(8, 20)).step.statistics_version
    other = body.replace(f'"statistics_version":{version},"tokens"'.encode(), b'"statistics_version":9,"tokens"')
    assert other != body
    with pytest.raises(StatisticsError, match=r'same release of foreshock .*mode="tokens"'):
        StatisticsShard.from_bytes(other)
