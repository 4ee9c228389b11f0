"""Some rollouts of a file are read without the rest of it, and what is read is checked."""

import io
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, LimitExceededError, RolloutsError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import DecodeLimits, RolloutBatch, ScoreBatch, decode_rollouts, encode_rollouts, encode_scores
from foreshock.rollouts.parquet_files import find_rollouts, find_scores
from tests.foreshock.batches import assert_equal_fields, random_batch

LIMITS = DecodeLimits()


class CountingFile(io.BytesIO):
    """A body that counts the bytes that are read."""

    def __init__(self, body: bytes, read: list[int]) -> None:
        super().__init__(body)
        self._read = read

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(size)
        self._read.append(len(found))
        return found


@dataclass
class BodyInMemory:
    """A body as a file of the store."""

    body: bytes
    read: list[int] = field(default_factory=list)

    def open(self) -> BinaryIO:
        """Open it."""
        return CountingFile(self.body, self.read)


def make_batch(rollouts: int, tokens: int) -> RolloutBatch:
    random = np.random.default_rng(rollouts)
    total = rollouts * tokens
    return RolloutBatch.from_arrays(
        sample_ids=[f"sample-{row}" for row in range(rollouts)],
        group_ids=[f"group-{row // 8}" for row in range(rollouts)],
        prompt_token_ids=np.arange(rollouts),
        prompt_offsets=np.arange(rollouts + 1),
        response_token_ids=random.integers(0, 32_000, total),
        response_offsets=np.arange(rollouts + 1) * tokens,
        rollout_log_probs=-random.exponential(0.5, total).astype(np.float32),
        reward=random.random(rollouts).astype(np.float32),
    )


def test_only_the_row_group_of_a_rollout_is_read() -> None:
    batch = make_batch(1024, 200)
    file = BodyInMemory(encode_rollouts(batch))
    found = find_rollouts(file, ["sample-700"], LIMITS)
    assert found is not None
    assert found.sample_ids == batch.sample_ids[640:704]
    assert_equal_fields(found, batch.select(range(640, 704)))
    assert sum(file.read) < len(file.body) / 5


def test_rollouts_of_several_row_groups_come_in_the_order_of_the_file() -> None:
    batch = make_batch(200, 5)
    found = find_rollouts(BodyInMemory(encode_rollouts(batch)), ["sample-199", "sample-3", "absent"], LIMITS)
    assert found is not None
    assert_equal_fields(found, batch.select([*range(64), *range(192, 200)]))


def test_none_is_found_if_no_row_group_holds_the_sample_id() -> None:
    assert find_rollouts(BodyInMemory(encode_rollouts(make_batch(100, 5))), ["absent"], LIMITS) is None


def test_a_footer_beyond_the_first_read_is_read_whole() -> None:
    batch = make_batch(64 * 160, 1)
    body = encode_rollouts(batch)
    assert int.from_bytes(body[-8:-4], "little") > 64 << 10
    found = find_rollouts(BodyInMemory(body), ["sample-9000"], LIMITS)
    assert found is not None
    assert "sample-9000" in found.sample_ids
    assert found.num_rollouts == 64


def test_a_file_of_another_writer_with_one_row_group_is_read_whole() -> None:
    batch = make_batch(300, 5)
    sink = io.BytesIO()
    pq.write_table(pq.read_table(io.BytesIO(encode_rollouts(batch))), sink, compression="snappy")
    found = find_rollouts(BodyInMemory(sink.getvalue()), ["sample-7"], LIMITS)
    assert found is not None
    assert_equal_fields(found, batch)


def test_scores_of_some_rollouts_are_read() -> None:
    batch = make_batch(500, 40)
    assert batch.rollout_log_probs is not None
    fingerprint = Fingerprint.from_dict({"engine": "torch", "dtype": "float32"})
    scores = ScoreBatch(batch.sample_ids, batch.rollout_log_probs, batch.response_offsets, fingerprint)
    file = BodyInMemory(encode_scores(scores))
    found = find_scores(file, ["sample-130"], LIMITS)
    assert found is not None
    assert found.sample_ids == batch.sample_ids[128:192]
    assert np.array_equal(found.log_probs, scores.log_probs[128 * 40 : 192 * 40])
    assert found.fingerprint == fingerprint


@pytest.mark.parametrize("place", [100, 0.3, 0.6, 0.9])
def test_a_flipped_bit_of_a_page_is_an_error_for_those_who_read_it_only(place: float) -> None:
    batch = make_batch(256, 300)
    body = bytearray(encode_rollouts(batch))
    body[int(place if place > 1 else place * len(body))] ^= 1
    outcomes = []
    for row in (10, 100, 150, 250):
        try:
            found = find_rollouts(BodyInMemory(bytes(body)), [f"sample-{row}"], LIMITS)
        except RolloutsError:
            outcomes.append("error")
        else:
            assert found is not None
            assert_equal_fields(found, batch.select(range(row // 64 * 64, row // 64 * 64 + 64)))
            outcomes.append("read")
    # The pages of the sample ids are read for every rollout.
    assert outcomes.count("error") in ((1, 4) if place < 200 else (1,))


def test_mutated_files_are_read_rightly_or_refused() -> None:
    body = encode_rollouts(make_batch(130, 20))
    random = np.random.default_rng(5)
    refused = 0
    for _ in range(300):
        mutated = bytearray(body)
        for place in random.integers(0, len(body), random.integers(1, 4)):
            mutated[place] = random.integers(256)
        start = int(random.integers(len(mutated)))
        if random.random() < 0.2:
            del mutated[start : start + int(random.integers(1, 500))]
        try:
            find_rollouts(BodyInMemory(bytes(mutated)), ["sample-70"], LIMITS)
        except RolloutsError:
            refused += 1
    assert refused > 150


@pytest.mark.parametrize("size", [0, 3, 11, 12])
def test_a_file_that_is_cut_off_is_refused(size: int) -> None:
    body = encode_rollouts(make_batch(10, 5))
    for cut in (body[:size], body[len(body) - size :], body[: len(body) - size - 1]):
        with pytest.raises(RolloutsError):
            find_rollouts(BodyInMemory(cut), ["sample-1"], LIMITS)


def test_limits_hold_for_what_is_read() -> None:
    body = encode_rollouts(make_batch(100, 50))
    with pytest.raises(LimitExceededError):
        find_rollouts(BodyInMemory(body), ["sample-1"], DecodeLimits(max_rollouts=99))
    with pytest.raises(LimitExceededError):
        find_rollouts(BodyInMemory(body), ["sample-1"], DecodeLimits(max_response_tokens=49))


@pytest.mark.parametrize(
    "data",
    [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + b"\0" * 8 + b"PAR1", b"PAR1\xff\xff\xff\xffPAR1", b"x" * 100, b"PK\x03\x04"],
)
def test_body_that_is_not_parquet_is_refused(data: bytes) -> None:
    with pytest.raises(RolloutsError):
        decode_rollouts(data)


def test_truncated_body_is_refused() -> None:
    data = encode_rollouts(random_batch(0, rollouts=3, longest=4))
    for length in range(0, len(data), 101):
        with pytest.raises(InvalidRolloutsError):
            decode_rollouts(data[:length])


FUZZ = """
import random, sys
from foreshock.errors import RolloutsError
from foreshock.rollouts import decode_rollouts

data = bytes.fromhex(sys.stdin.read())
generator = random.Random(7)
refused = 0
for _ in range(800):
    damaged = bytearray(data)
    for _ in range(generator.choice([1, 1, 2, 4])):
        position = generator.randrange(len(damaged))
        damaged[position] = generator.choice([0, 255, damaged[position] ^ (1 << generator.randrange(8))])
    try:
        decode_rollouts(bytes(damaged))
    except RolloutsError:
        refused += 1
print(refused)
"""


@pytest.mark.skipif(
    tuple(int(part) for part in pa.__version__.split(".")[:3]) <= (23, 0, 0),
    reason="older pyarrow crashes on pages that are damaged inside; the service demands a newer one",
)
def test_damaged_body_does_not_crash_process() -> None:
    """The test runs in a subprocess, because Arrow can crash the process on a damaged footer."""
    data = encode_rollouts(random_batch(0, rollouts=3, longest=4))
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ)], input=data.hex(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 250


@pytest.mark.parametrize(
    "options",
    [
        {"data_page_version": "2.0"},
        {"data_page_size": 64, "write_batch_size": 8},
        {"compression": "none"},
        {"compression": "gzip", "use_dictionary": False},
        {"compression": {"sample_id": "snappy", "response_token_ids": "brotli"}},
        {"write_page_checksum": True, "write_page_index": True, "write_statistics": True},
        {"dictionary_pagesize_limit": 16},
        {"version": "1.0"},
        {"row_group_size": 1},
    ],
)
def test_files_of_other_writers_are_accepted(options: dict[str, Any]) -> None:
    batch = random_batch(0, rollouts=40, longest=30)
    table = pq.read_table(io.BytesIO(encode_rollouts(batch)))
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    again = decode_rollouts(sink.getvalue())
    assert encode_rollouts(again) == encode_rollouts(batch)
