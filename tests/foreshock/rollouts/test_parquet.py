"""The Parquet codec: batches and scores round-trip, as plain Parquet that any reader reads."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.errors import InvalidRolloutsError
from foreshock.fingerprint import Fingerprint
from foreshock.rollouts import (
    BatchAttributes,
    DecodeLimits,
    RolloutBatch,
    ScoreBatch,
    decode_rollouts,
    decode_scores,
    encode_rollouts,
    encode_scores,
)
from foreshock.rollouts.parquet import read_rollouts
from foreshock.rollouts.schema import ROLLOUT_COLUMNS
from tests.foreshock.batches import assert_equal_fields, random_batch


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), rollouts=st.integers(1, 150))
def test_batch_round_trips_through_parquet(seed: int, rollouts: int) -> None:
    batch = random_batch(seed, rollouts, longest=8)
    data = encode_rollouts(batch)
    assert_equal_fields(decode_rollouts(data), batch)
    assert encode_rollouts(decode_rollouts(io.BytesIO(data))) == data


def test_file_has_documented_layout() -> None:
    batch = random_batch(1, rollouts=130)
    file = pq.ParquetFile(io.BytesIO(encode_rollouts(batch)))
    assert file.schema_arrow.names == [column.name for column in ROLLOUT_COLUMNS]
    for column in ROLLOUT_COLUMNS:
        expected = column.arrow_type(per_token=batch.offsets_of(column) is not None)
        assert file.schema_arrow.field(column.name).type == expected
    assert [file.metadata.row_group(index).num_rows for index in range(3)] == [64, 64, 2]
    group = file.metadata.row_group(0)
    columns = {group.column(index).path_in_schema: group.column(index) for index in range(group.num_columns)}
    log_probs = columns["rollout_log_probs.list.element"]
    assert log_probs.compression == "ZSTD"
    assert "BYTE_STREAM_SPLIT" in log_probs.encodings
    assert file.schema_arrow.metadata[b"foreshock.batch"] == batch.attributes.to_json().encode()
    read = pa.Table.from_batches(list(file.iter_batches()))
    assert (
        read.column("response_token_ids").to_pylist()[0]
        == batch.response_token_ids[: batch.response_offsets[1]].tolist()
    )


def test_attributes_round_trip_and_unknown_ones_are_ignored() -> None:
    attributes = BatchAttributes(
        temperature=1.0, top_p=0.9, top_k=-1, min_p=0.0, logprobs_mode="processed_logprobs", trainer_weights_version=7,
        trainer_policy="recomputed_old", entropy_policy="trainer", length_cap=64, clip_low=0.2, clip_high=0.28,
        loss_aggregation="token-mean", engine_fingerprint=Fingerprint("vllm", flags={"a": "b"}),
    )  # fmt: skip
    assert BatchAttributes.from_json(attributes.to_json()) == attributes
    assert BatchAttributes.from_json('{"temperature":1,"moon":"full"}') == BatchAttributes(temperature=1.0)


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"temperature":"hot"}', '{"temperature":-1}', '{"temperature":NaN}', '{"logprobs_mode":"cooked"}',
     '{"trainer_policy":"old"}', '{"entropy_policy":"mine"}', '{"loss_aggregation":""}', '{"loss_aggregation":1}',
     '{"length_cap":0}', '{"top_k":-2}', '{"engine_fingerprint":{}}',
     '{"engine_fingerprint":"vllm"}'],
)  # fmt: skip
def test_invalid_attributes_are_refused(text: str) -> None:
    with pytest.raises(InvalidRolloutsError):
        BatchAttributes.from_json(text)


def test_advantage_level_is_kept_if_counts_are_equal() -> None:
    of_tokens = RolloutBatch.from_lists(["a", "b"], [[1], [1]], [[], [1, 2]], advantage=[[], [1.0, 2.0]])
    of_rollouts = RolloutBatch.from_lists(["a", "b"], [[1], [1]], [[], [1, 2]], advantage=[1.0, 2.0])
    assert decode_rollouts(encode_rollouts(of_tokens)).advantage_per_token
    assert not decode_rollouts(encode_rollouts(of_rollouts)).advantage_per_token


def test_scores_round_trip_with_fingerprint() -> None:
    fingerprint = Fingerprint("torch", dtype="float32", library_versions={"torch": "2.13"})
    log_probs = np.array([-1.0, np.nan, -np.inf, -2.5], np.float32)
    scores = ScoreBatch(["a", "b"], log_probs, np.array([0, 1, 4]), fingerprint)
    again = decode_scores(encode_scores(scores))
    assert again.sample_ids == ["a", "b"]
    assert again.fingerprint == fingerprint
    np.testing.assert_array_equal(again.log_probs, log_probs)
    np.testing.assert_array_equal(again.offsets, scores.offsets)


def test_scores_without_fingerprint_and_rollouts_as_scores_are_refused() -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"sample_id": ["a"], "log_probs": [[-1.0]]}), sink)
    with pytest.raises(InvalidRolloutsError, match=r"foreshock\.fingerprint"):
        decode_scores(bytes(sink.getvalue()))
    with pytest.raises(InvalidRolloutsError, match="not a column"):
        decode_scores(encode_rollouts(random_batch()))


def test_concat_of_selected_rollouts_is_the_batch() -> None:
    batch = random_batch(3, rollouts=20)
    order = np.random.default_rng(0).permutation(20)
    back = np.argsort(order)
    assert_equal_fields(batch.select(order).select(back), batch)
    assert_equal_fields(RolloutBatch.concat([batch.select(np.arange(20) < 7), batch.select(range(7, 20))]), batch)


def test_concat_refuses_batches_with_different_columns() -> None:
    with_reward = RolloutBatch.from_lists(["a"], [[1]], [[1]], reward=[1.0])
    without = RolloutBatch.from_lists(["b"], [[1]], [[1]])
    with pytest.raises(InvalidRolloutsError, match="some of the batches lack it"):
        RolloutBatch.concat([with_reward, without])
    with pytest.raises(InvalidRolloutsError, match="at least one"):
        RolloutBatch.concat([])


OWN = {
    "row_group_size": 64,
    "compression": "zstd",
    "use_dictionary": [column.name for column in ROLLOUT_COLUMNS if column.is_string],
    "use_byte_stream_split": [
        f"{name}.list.element" for name in ("rollout_log_probs", "trainer_log_probs", "entropy", "advantage")
    ],
    "write_statistics": False,
    "write_page_checksum": True,
}


def rollouts(count: int = 130) -> RolloutBatch:
    """Return a batch of three row groups."""
    return random_batch(3, count, longest=6)


def keeps(body: bytes) -> bool:
    return read_rollouts(body, DecodeLimits()).own_layout


def written(table: pa.Table, **changed: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **(OWN | changed))
    return sink.getvalue()


@pytest.mark.parametrize("count", [1, 64, 65, 130])
def test_what_encode_rollouts_returns_has_the_own_layout(count: int) -> None:
    assert keeps(encode_rollouts(rollouts(count)))


@pytest.mark.parametrize("changed", [{"row_group_size": 100}, {"compression": "snappy"}, {"write_statistics": True}])
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


def test_body_with_a_wider_type_is_encoded_again() -> None:
    body = encode_rollouts(rollouts())
    plain = pq.read_table(io.BytesIO(body))
    place = plain.schema.get_field_index("reward")
    for _ in range(2):
        assert keeps(body)
        for wider in (pa.float64(), pa.float32()):
            table = plain.set_column(place, "reward", plain.column("reward").cast(wider))
            assert keeps(written(table)) == (wider == pa.float32())
