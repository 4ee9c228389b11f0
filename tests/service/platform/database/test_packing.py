"""What is packed for the database is read back with the same bytes, whatever it is."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.measures.comparison import measure_step
from foreshock.measures.statistics import blob
from foreshock.rollouts import RolloutBatch
from foreshock.statistics_shards import statistics_of_shard
from service.platform.database.packing import Packed, pack, unpack


def parts(rollouts: int, tokens: int) -> Iterator[bytes]:
    """Yield the statistics and summaries of a batch."""
    random = np.random.default_rng(rollouts)
    total = rollouts * tokens
    log_probs = -random.exponential(0.5, total).astype(np.float32)
    batch = RolloutBatch.from_arrays(
        [f"r{number}" for number in range(rollouts)],
        prompt_offsets=np.arange(rollouts + 1),
        prompt_token_ids=random.integers(0, 999, rollouts),
        response_offsets=np.arange(rollouts + 1) * tokens,
        response_token_ids=random.integers(0, 999, total),
        rollout_log_probs=log_probs,
        trainer_log_probs=np.minimum(log_probs + random.normal(0.0, 0.01, total), 0.0).astype(np.float32),
    )
    for part in statistics_of_shard(measure_step(batch)):
        yield part.statistics
        if part.summaries is not None:
            yield part.summaries


@given(st.binary(max_size=300))
def test_any_bytes_are_read_back(data: bytes) -> None:
    assert unpack(pack(data)) == data
    assert len(pack(data)) <= len(data) + 3


@pytest.mark.parametrize(("rollouts", "tokens"), [(1, 1), (8, 20), (40, 300)])
def test_statistics_are_read_back_with_the_same_bytes(rollouts: int, tokens: int) -> None:
    for data in parts(rollouts, tokens):
        assert unpack(pack(data)) == data


def test_statistics_of_a_small_step_take_less_than_half() -> None:
    stored = list(parts(8, 20))
    assert sum(map(len, map(pack, stored))) < 0.45 * sum(map(len, stored))


def test_bytes_that_look_packed_are_read_back() -> None:
    for kind in range(5):
        looks_packed = b"\xf5\xf7" + bytes([kind]) + b"rest"
        assert unpack(pack(looks_packed)) == looks_packed


def test_other_arrays_and_damaged_blobs_are_read_back() -> None:
    data = blob.pack("other", {"largest_d": np.arange(3.0), "largest_minus_d": np.zeros(3), "n": np.zeros((0, 2))})
    for stored in (data, data[:-3], data[:4], data[:8] + b"x" + data[9:]):
        assert unpack(pack(stored)) == stored


def test_rows_of_older_releases_are_read_as_they_are() -> None:
    for data in parts(2, 3):
        assert unpack(data) == data


def test_packing_made_in_another_process_travels_with_the_bytes() -> None:
    data = next(parts(8, 20))
    received = pickle.loads(pickle.dumps(Packed.of(data)))
    assert (received, received.packed) == (data, pack(data))
