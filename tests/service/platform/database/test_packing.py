"""What is packed for the database is read back with the same bytes, whatever it is."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock.lint import collect_evidence
from foreshock.measures.comparison import measure_step
from foreshock.measures.comparison_statistics import ComparisonStatistics
from foreshock.measures.statistics import blob
from foreshock.rollouts import RolloutBatch
from foreshock.statistics_shards import statistics_of_shard
from foreshock_service.platform.database.packing import Packed, is_newer_than_sparse, pack, pack_as_sparse, unpack

DERIVED = b"\xf5\xf7\x04"
DERIVED_OF_A_SMALL_STEP = (
    "f5f70478bb64e98b5703ad9eac195d3d49f3d5936678d74e9a8dae9c1cb62b27f12f9c24b46e12d7b2c9c1ba6ad2d4d0c0d2d2c8c4909455"
    "934fff43802bab086c3480f96f82dc3195cd9121f1b55cdc2c0c9ce80b45c080b9019be8281805440109380b32bdf009ce673480330f60d3"
    "c9c3c0fc7e67c0a1e91ff8ffffef747dc0dbd88fd582fa1fd470e6281805648139a2c094cdc4c4c6c6c6c4c2c6c40806e627857427e46328"
    "65646262e602ad4c67626365062a636264060dd3f2330732307074ac5e0d52f3f21a54315304c713860f29422f20dc254a754a6a8d771842"
    "2362b26d1c04406a2f85a5841a182f8e3a826acbaa58b16c06861d517756ad0271b57f43c5efbded5def7068a1d8150837b6ddff534fc613"
    "06d7a3cfdf5fdd26b98a817bddced0f4d04b77dfdfdf876ae0923d312f1918f6beec8018f8f22354fccc435703a925bdc7fc21dca522a5df"
    "a44f9e65b04898dccf5736751543cebcb8d04ba1e94b0f48b7a01af866cfd63f0c0c4f1eeb800c6c6090d6868aff985373b467cee39b9022"
    "62ceab30c949db3b37324ccb2e0a52cc9bb78ac15cf995eaa195b3cd4b5fae4535f0c8ac99320c0c910a73b48c18188c34b82e4084636acb"
    "baa78b7c626edd04e6d6da3cafdec4d4bdf9015fcfbb45a233ccd7b1557879055d5a1c37d7ffb316aa811bd25cf2197c52396f5dad606090"
    "4f3c6a041156da71a068cb3775c7186930b7bebc6c8eea3fceddc52ded4e7d2dd77dd476854f60fdcff4472f3521e90caa81550f98ab19b6"
    "3c38d8141eb45f65529c489f4181c47e15a30c63e7e5ceffcdc2e4c31e7cf8708081415070faa2858b584d05198d05054b5a52eb4d4dd99f"
    "b23f8de7e2e2923870c1e1404080c3820d20d0b06ad1fa0d1fb2ffffb7b7b7dfbd0748d8efb1b6d9bdc7613f88696767676f676dbd7bf7ee"
    "030e0e2001fbfd6004613900e17e07a0c46eeb3d3636367b765befb6b6de0302d620d300a84e5c62"
)
DIGEST_OF_A_SMALL_STEP = "255a9fe71436102fd9f616f0efae54c6e1717e4ee17f3b371f9d3d4ea6d78c4d"


def parts(rollouts: int, tokens: int, spread: float = 0.01, **columns: Any) -> Iterator[bytes]:
    """Yield the statistics and summaries of a batch."""
    for part in statistics_of_shard(measure_step(small_batch(rollouts, tokens, spread, **columns))):
        yield part.statistics
        if part.summaries is not None:
            yield part.summaries


def comparison_of(rollouts: int) -> bytes:
    """Return the statistics of the comparison of a batch."""
    return next(data for data in parts(rollouts, 11) if b"largest_d" in data[:4000])


def uncompressed(data: bytes) -> blob.Blob:
    """Return a blob of statistics as it is before compression."""
    start = 8 + int.from_bytes(data[4:8], "little")
    return blob.Blob(data[:start], zlib.decompress(data[start:]))


def small_batch(rollouts: int, tokens: int, spread: float = 0.01, **columns: Any) -> RolloutBatch:
    """Return rollouts whose log-probs differ with this spread."""
    random = np.random.default_rng(rollouts)
    total = rollouts * tokens
    log_probs = -random.exponential(0.5, total).astype(np.float32)
    return RolloutBatch.from_arrays(
        [f"r{number}" for number in range(rollouts)],
        prompt_offsets=np.arange(rollouts + 1),
        prompt_token_ids=random.integers(0, 999, rollouts),
        response_offsets=np.arange(rollouts + 1) * tokens,
        response_token_ids=random.integers(0, 999, total),
        rollout_log_probs=log_probs,
        trainer_log_probs=np.minimum(log_probs + random.normal(0.0, spread, total), 0.0).astype(np.float32),
        **columns,
    )


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
    assert sum(map(len, map(pack, stored))) < 0.25 * sum(map(len, stored))


@pytest.mark.parametrize("spread", [0.0, 1e-8, 0.01, 1.0, 10.0])
@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"group_ids": list("aabbcdef")},
        {"entropy": np.linspace(0.0, 3.0, 160, dtype=np.float32)},
        {"advantage": np.linspace(-1.0, 1.0, 8, dtype=np.float32)},
        {"turn": np.tile(np.repeat(np.arange(4, dtype=np.int16), 5), 8)},
        {"response_mask": (np.arange(160) % 7 > 0).astype(np.uint8)},
    ],
    ids=lambda columns: next(iter(columns), "plain"),
)
def test_statistics_that_list_every_token_are_derived_and_read_back(spread: float, columns: dict[str, Any]) -> None:
    derived = 0
    for data in parts(8, 20, spread, **columns):
        packed = pack(data)
        assert unpack(packed) == data
        assert not data.startswith(b"FSST") or Packed.of(uncompressed(data)).packed == packed
        derived += packed.startswith(DERIVED)
    assert derived == 1


def test_statistics_of_merged_shards_are_read_back() -> None:
    merged = [ComparisonStatistics.from_bytes(comparison_of(rollouts)) for rollouts in (3, 5, 7)]
    data = merged[0].merge(merged[1]).merge(merged[2]).to_bytes()
    assert pack(data).startswith(DERIVED)
    assert unpack(pack(data)) == data


@given(st.data())
def test_wrong_numbers_in_statistics_are_read_back(data: st.DataObject) -> None:
    stored = comparison_of(4)
    start = 8 + int.from_bytes(stored[4:8], "little")
    words = np.frombuffer(zlib.decompress(stored[start:]), "<u8").copy()
    for _ in range(data.draw(st.integers(1, 30))):
        words[data.draw(st.integers(0, words.size - 1))] = data.draw(
            st.one_of(
                st.integers(0, 2**64 - 1), st.sampled_from([1, 1 << 63, 0x7FF0 << 48, 0xFFF8 << 48, 0x7FF8 << 48])
            )
        )
    stored = stored[:start] + zlib.compress(words.tobytes(), 1)
    assert unpack(pack(stored)) == stored


def test_packings_of_small_steps_are_read_by_every_later_release() -> None:
    packed = bytes.fromhex(DERIVED_OF_A_SMALL_STEP)
    assert packed.startswith(DERIVED)
    statistics = unpack(packed)
    start = 8 + int.from_bytes(statistics[4:8], "little")
    digest = hashlib.sha256(statistics[8:start] + zlib.decompress(statistics[start:])).hexdigest()
    assert digest == DIGEST_OF_A_SMALL_STEP
    assert ComparisonStatistics.from_bytes(statistics).tokens == 6


def test_damaged_packings_of_statistics_are_refused() -> None:
    packed = pack(comparison_of(4))
    for cut in (20, len(packed) // 2, len(packed) - 9):
        with pytest.raises((ValueError, zlib.error)):
            unpack(packed[:cut])


def test_statistics_are_packed_for_the_release_before() -> None:
    newer = [data for data in (*parts(8, 20), evidence_of_a_step()) if is_newer_than_sparse(pack(data))]
    assert len(newer) == 3
    for data in newer:
        assert not is_newer_than_sparse(pack_as_sparse(data))
        assert unpack(pack_as_sparse(data)) == data


def test_evidence_of_the_lint_is_read_back_and_takes_less_in_planes() -> None:
    data = evidence_of_a_step()
    assert unpack(pack(data)) == data
    assert len(pack(data)) < len(pack_as_sparse(data))


def evidence_of_a_step() -> bytes:
    """Return the evidence of the lint on a small step."""
    return collect_evidence(small_batch(8, 20)).to_bytes()


def test_bytes_that_look_packed_are_read_back() -> None:
    for kind in range(7):
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
    assert (bytes(received), received.packed) == (data, pack(data))
