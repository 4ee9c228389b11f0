"""A body is stored as it came only if it is laid out as `encode_rollouts` does it."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.rollouts import DecodeLimits, RolloutBatch, encode_rollouts
from foreshock.rollouts.parquet import read_rollouts

OWN = {
    "row_group_size": 64,
    "compression": "zstd",
    "use_dictionary": ["sample_id", "finish_reason"],
    "use_byte_stream_split": ["rollout_log_probs.list.element", "trainer_log_probs.list.element"],
    "write_statistics": False,
    "write_page_checksum": True,
}


def rollouts(count: int = 130) -> RolloutBatch:
    """Return a batch of three row groups with strings, masks, log-probs and a reward."""
    random = np.random.default_rng(3)
    tokens = count * 5
    log_probs = -random.exponential(0.5, tokens).astype(np.float32)
    return RolloutBatch.from_arrays(
        [f"rollout {number}" for number in range(count)],
        prompt_offsets=np.arange(count + 1),
        prompt_token_ids=random.integers(0, 99, count),
        response_offsets=np.arange(count + 1) * 5,
        response_token_ids=random.integers(0, 99, tokens),
        rollout_log_probs=log_probs,
        trainer_log_probs=log_probs,
        reward=random.random(count).astype(np.float32),
        finish_reasons=["stop"] * count,
    )


def keeps(body: bytes) -> bool:
    return read_rollouts(body, DecodeLimits()).own_layout


def written(table: pa.Table, **changed: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **(OWN | changed))
    return sink.getvalue()


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_what_encode_rollouts_returns_has_the_own_layout(count: int) -> None:
    assert keeps(encode_rollouts(rollouts(count)))


def test_table_of_an_own_body_written_in_the_same_way_has_the_own_layout() -> None:
    assert keeps(written(pq.read_table(io.BytesIO(encode_rollouts(rollouts())))))


@pytest.mark.parametrize(
    "changed",
    [
        {"row_group_size": 100},
        {"compression": "snappy"},
        {"use_byte_stream_split": False},
        {"use_dictionary": True, "use_byte_stream_split": False},
        {"write_statistics": True},
        {"write_page_checksum": False},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_body_of_another_layout_is_encoded_again(changed: dict[str, Any]) -> None:
    table = pq.read_table(io.BytesIO(encode_rollouts(rollouts())))
    assert not keeps(written(table, **changed))


def test_body_with_other_order_or_metadata_is_encoded_again() -> None:
    table = pq.read_table(io.BytesIO(encode_rollouts(rollouts())))
    attributes = table.schema.metadata
    assert not keeps(written(table.select(table.column_names[::-1])))
    assert not keeps(written(table.replace_schema_metadata(attributes | {b"note": b"x"})))
    newer = {b"foreshock.batch": b'{"of_a_newer_release":1}'}
    assert not keeps(written(table.replace_schema_metadata(newer)))


def test_bytes_that_belong_to_no_page_are_not_kept() -> None:
    body = encode_rollouts(rollouts())
    footer = int.from_bytes(body[-8:-4], "little")
    assert not keeps(body[: -8 - footer] + b"hidden" + body[-8 - footer :])


def test_body_that_does_not_begin_as_parquet_is_encoded_again() -> None:
    body = encode_rollouts(rollouts())
    assert read_rollouts(body, DecodeLimits()).own_layout
    assert not read_rollouts(b"Q" + body[1:], DecodeLimits()).own_layout


def test_body_with_a_wider_type_is_encoded_again() -> None:
    body = encode_rollouts(rollouts())
    plain = pq.read_table(io.BytesIO(body))
    for _ in range(2):
        assert read_rollouts(body, DecodeLimits()).own_layout
        for wider in (pa.float64(), pa.float32()):
            place = plain.schema.get_field_index("reward")
            table = plain.set_column(place, "reward", plain.column("reward").cast(wider))
            sink = io.BytesIO()
            pq.write_table(table, sink, **OWN)
            assert read_rollouts(sink.getvalue(), DecodeLimits()).own_layout == (wider == pa.float32())
