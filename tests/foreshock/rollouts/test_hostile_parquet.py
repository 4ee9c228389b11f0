"""Damaged and hostile bodies raise RolloutsError, and never crash the process."""

from __future__ import annotations

import io
import subprocess
import sys
import textwrap
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, RolloutsError
from foreshock.rollouts import decode_rollouts, encode_rollouts
from tests.foreshock.batches import random_batch


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
