"""Damaged and hostile bodies raise RolloutsError, and never crash the process."""

from __future__ import annotations

import io
import random
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, RolloutsError
from foreshock.rollouts import decode_rollouts, encode_rollouts
from foreshock.rollouts.thrift_compact import ThriftError, read_struct
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
    for length in range(0, len(data), 37):
        with pytest.raises(InvalidRolloutsError):
            decode_rollouts(data[:length])


FUZZ = """
import random, sys
from foreshock.errors import RolloutsError
from foreshock.rollouts import decode_rollouts

data = bytes.fromhex(sys.stdin.read())
generator = random.Random(7)
refused = 0
for _ in range(1500):
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
    assert int(done.stdout) > 500


def test_random_footers_are_read_or_refused() -> None:
    generator = random.Random(3)
    for _ in range(3000):
        data = generator.randbytes(generator.randrange(200))
        try:
            read_struct(data)
        except ThriftError:
            continue


@pytest.mark.parametrize(
    "data",
    [
        b"\x1c" * 1000,
        b"\x19" * 1000,
        b"\x19\xfc" + b"\xff" * 8 + b"\x7f",
        b"\x18\xff\xff\x03",
        b"\x15" + b"\xff" * 20,
        b"\x1d",
    ],
)
def test_footers_that_are_too_deep_or_too_long_are_refused(data: bytes) -> None:
    with pytest.raises(ThriftError):
        read_struct(data)


def test_footer_struct_is_read() -> None:
    # Field 1: the integer −3; field 2: true; field 4: the list [1, 2]; field 5: the text "ab"; field 6: {1: 7}.
    data = bytes([0x15, 0x05, 0x11, 0x29, 0x25, 0x02, 0x04, 0x18, 0x02]) + b"ab" + bytes([0x1C, 0x15, 0x0E, 0x00, 0x00])
    struct = {1: -3, 2: True, 4: [1, 2], 5: b"ab", 6: {1: 7}}
    assert read_struct(data) == (struct, len(data))
    assert read_struct(memoryview(b".." + data), 2) == (struct, len(data) + 2)


def varint(number: int) -> bytes:
    """Return a whole number as a footer encodes it."""
    zigzag, parts = number << 1, []
    while zigzag > 127:
        parts.append(zigzag & 127 | 128)
        zigzag >>= 7
    return bytes([*parts, zigzag])


def test_pages_that_exceed_footer_are_refused_before_decoding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = 100_000
    ids = pa.ListArray.from_arrays(pa.array([0, tokens], pa.int32()), pa.array(np.zeros(tokens, np.int32)))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"sample_id": ["a"], "prompt_token_ids": [[1]], "response_token_ids": ids}), sink)
    data = bytes(sink.getvalue())
    assert decode_rollouts(data).num_tokens == tokens
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    lying = data[:footer] + data[footer:].replace(varint(tokens), varint(70_000))
    assert len(lying) == len(data)
    assert lying != data
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", None)
    with pytest.raises(InvalidRolloutsError, match="claims more than its footer does"):
        decode_rollouts(lying)
    more = data[:footer] + data[footer:].replace(varint(tokens), varint(100_500))
    with pytest.raises(InvalidRolloutsError, match="fewer values than its footer says"):
        decode_rollouts(more)


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
