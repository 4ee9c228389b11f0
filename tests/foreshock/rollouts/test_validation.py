"""Invalid rollouts are refused with row, column and remedy; unusual valid ones are accepted."""

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, LimitExceededError, RolloutsError
from foreshock.rollouts import DecodeLimits, RolloutBatch, decode_rollouts

GOOD: dict[str, Any] = {
    "sample_id": ["a", "b", "c"],
    "prompt_token_ids": [[1, 2], [3], [4]],
    "response_token_ids": [[5], [6, 7], [8, 9, 1]],
    "rollout_log_probs": [[-1.0], [-0.5, 0.0], [-2.0, -1e-9, -30.0]],
}


def body(**changes: Any) -> bytes:
    columns = {**GOOD, **changes}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({name: value for name, value in columns.items() if value is not None}), sink)
    return bytes(sink.getvalue())


def refusal(data: bytes, limits: DecodeLimits | None = None) -> RolloutsError:
    with pytest.raises(RolloutsError) as caught:
        decode_rollouts(data, limits)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "row", "column", "message"),
    [
        ({"rollout_log_probs": [[-1.0], [-1.0], [-1.0] * 3]}, 1, "rollout_log_probs", "has 1 values"),
        ({"rollout_log_probs": [[-1.0], [-1.0] * 2, [-1.0] * 4]}, 2, "rollout_log_probs", "has 4 values"),
        ({"rollout_log_probs": [[-1.0], None, [-1.0] * 3]}, 1, "rollout_log_probs", "is null"),
        ({"rollout_log_probs": [[-1.0], [-1.0, None], [-1.0] * 3]}, 1, "rollout_log_probs", "write NaN"),
        ({"rollout_log_probs": [[-1.0], [-1.0, 0.3], [0.5] * 3]}, 1, "rollout_log_probs", "above 0"),
        ({"rollout_log_probs": [["x"], ["y", "z"], ["a"] * 3]}, None, "rollout_log_probs", "must be list<float32>"),
        ({"rollout_log_probs": [-1.0, -1.0, -1.0]}, None, "rollout_log_probs", "must be list<float32>"),
        ({"response_token_ids": None}, None, "response_token_ids", "is missing"),
        ({"sample_id": None}, None, "sample_id", "is missing"),
        ({"sample_id": ["a", "b", "a"]}, 2, "sample_id", "unique"),
        ({"sample_id": ["a", "", "c"]}, 1, "sample_id", "empty"),
        ({"sample_id": ["a", None, "c"]}, 1, "sample_id", "missing"),
        ({"sample_id": [1, 2, 3]}, None, "sample_id", "must be string"),
        ({"prompt_token_ids": [[1, 2], [-3], [4]]}, 1, "prompt_token_ids", "negative"),
        ({"prompt_token_ids": [[1, 2], [3], [2**31]]}, 2, "prompt_token_ids", "does not fit"),
        ({"response_mask": [[1], [0, 1], [1, 2, 0]]}, 2, "response_mask", "0 or 1"),
        ({"response_mask": [[1], [0, 1], [1, 256, 0]]}, 2, "response_mask", "does not fit"),
        ({"turn": [[0], [-1, 0], [0, 0, 0]]}, 1, "turn", "negative"),
        ({"reward": ["good", "bad", "good"]}, None, "reward", "must be float32"),
        ({"top_k": [-1, -2, 5]}, 1, "top_k", "at least -1"),
        ({"temperature": [1.0, -1.0, 1.0]}, 1, "temperature", "negative"),
        ({"advantage": [[1.0], [1.0, 2.0], [1.0]]}, 2, "advantage", "has 1 values"),
        ({"logprobs": [1, 2, 3]}, None, "logprobs", "not a column"),
    ],
)
def test_broken_rule_names_row_and_column(changes: dict[str, Any], row: int, column: str, message: str) -> None:
    error = refusal(body(**changes))
    assert type(error) is InvalidRolloutsError
    assert (error.row, error.column) == (row, column)
    assert message in str(error)


@pytest.mark.parametrize("value", [0.06, 1.0, -9999.0, -65504.0, -800.0, float("inf")])
def test_single_value_that_is_no_log_prob_is_accepted(value: float) -> None:
    decode_rollouts(body(rollout_log_probs=[[-1.0], [-1.0, value], [-1.0] * 3]))


def test_values_at_masked_tokens_do_not_count() -> None:
    decode_rollouts(body(rollout_log_probs=[[-1.0], [1.0, 1.0], [1.0] * 3], response_mask=[[1], [0, 0], [0, 0, 0]]))


def test_probabilities_of_unlikely_tokens_are_refused() -> None:
    few = {"sample_id": ["a"], "prompt_token_ids": [[1]], "response_token_ids": [[1] * 40]}
    assert "above 0" in str(refusal(body(**{**dict.fromkeys(GOOD), **few, "rollout_log_probs": [[0.01] * 40]})))


def test_empty_table_is_refused() -> None:
    empty = pa.table({name: pa.array(value).slice(0, 0) for name, value in GOOD.items()})
    sink = pa.BufferOutputStream()
    pq.write_table(empty, sink)
    assert "no rows" in str(refusal(bytes(sink.getvalue())))


@pytest.mark.parametrize(
    ("limits", "column"),
    [
        (DecodeLimits(max_rollouts=2), None), (DecodeLimits(max_tokens=5), "response_token_ids"),
        (DecodeLimits(max_response_tokens=2), "response_token_ids"),
        (DecodeLimits(max_prompt_tokens=1), "prompt_token_ids"), (DecodeLimits(max_uncompressed_bytes=10), None),
        (DecodeLimits(max_body_bytes=10), None), (DecodeLimits(max_row_groups=0), None),
        (DecodeLimits(max_footer_bytes=10), None), (DecodeLimits(max_metadata_bytes=10), None),
        (DecodeLimits(max_identifier_bytes=0), "sample_id"),
    ],
)  # fmt: skip
def test_every_limit_can_be_reached(limits: DecodeLimits, column: str | None) -> None:
    error = refusal(body(), limits)
    assert type(error) is LimitExceededError
    assert error.column == column


def test_body_of_equal_values_that_decodes_to_ten_times_the_limit_is_refused() -> None:
    """Such a body is small, and so are the sizes in its footer: its tokens are counted while it is decoded."""
    tokens = 1_000_000
    ids = pa.ListArray.from_arrays(pa.array([0, tokens], pa.int32()), pa.array(np.zeros(tokens, np.int32)))
    one = pa.table({"sample_id": ["a"], "prompt_token_ids": ids, "response_token_ids": ids})
    sink = pa.BufferOutputStream()
    pq.write_table(one, sink, compression="zstd")
    data = bytes(sink.getvalue())
    assert len(data) < 10_000
    assert type(refusal(data, DecodeLimits(max_tokens=tokens // 10))) is LimitExceededError
    assert type(refusal(data, DecodeLimits(max_uncompressed_bytes=tokens))) is LimitExceededError


def test_rows_and_bytes_beyond_the_limit_are_refused_by_the_footer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(1).integers(0, 9_999, 100_000).astype(np.int32)
    ids = pa.ListArray.from_arrays(pa.array(np.arange(0, 100_001, 1_000), pa.int32()), pa.array(tokens))
    sink = pa.BufferOutputStream()
    names = [f"rollout {row}" for row in range(100)]
    table = pa.table({"sample_id": names, "prompt_token_ids": ids, "response_token_ids": ids})
    pq.write_table(table, sink, use_dictionary=False)

    def decoding(*_: object, **__: object) -> None:
        raise AssertionError("values were decoded")

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", decoding)
    data = bytes(sink.getvalue())
    assert type(refusal(data, DecodeLimits(max_rollouts=10))) is LimitExceededError
    assert type(refusal(data, DecodeLimits(max_uncompressed_bytes=100_000))) is LimitExceededError


def test_long_string_in_dictionary_is_refused() -> None:
    error = refusal(body(group_id=pa.array(["x" * 5000] * 3).dictionary_encode()))
    assert type(error) is LimitExceededError
    assert error.column == "group_id"


def test_non_finite_log_probs_are_accepted() -> None:
    odd = [math.nan, math.inf, -math.inf]
    batch = decode_rollouts(body(rollout_log_probs=[[-1.0], [-0.5, 5e-5], odd]))
    assert batch.rollout_log_probs is not None
    np.testing.assert_array_equal(batch.rollout_log_probs[3:], np.array(odd, np.float32))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("sample_id", pa.array(GOOD["sample_id"], pa.large_string())),
        ("sample_id", pa.array(GOOD["sample_id"]).dictionary_encode()),
        ("prompt_token_ids", pa.array(GOOD["prompt_token_ids"], pa.list_(pa.int64()))),
        ("prompt_token_ids", pa.array(GOOD["prompt_token_ids"], pa.large_list(pa.uint16()))),
        ("prompt_token_ids", pa.array([[1], [2], [3]], pa.list_(pa.int32(), 1))),
        ("rollout_log_probs", pa.array(GOOD["rollout_log_probs"], pa.list_(pa.float64()))),
        ("rollout_log_probs", pa.array([[-1.0], [-0.5, 0.0], [-2.0] * 3], pa.large_list(pa.float32()))),
        ("top_k", pa.array([1, None, 3], pa.int64())),
    ],
)
def test_types_that_hold_same_values_are_accepted(name: str, values: pa.Array) -> None:
    batch = decode_rollouts(body(**{name: values}))
    assert batch.num_rollouts == 3
    field = {"sample_id": "sample_ids"}.get(name, name)
    kept = getattr(batch, field)
    if name.endswith("_ids"):
        assert kept.dtype == np.int32
        assert kept.tolist() == [item for row in values.to_pylist() for item in row]
    elif name == "top_k":
        assert kept.tolist() == [1, -1, 3]
    elif name == "sample_id":
        assert kept == ["a", "b", "c"]
    else:
        assert kept.dtype == np.float32


def test_null_reward_is_nan_and_rollout_may_be_empty() -> None:
    batch = decode_rollouts(
        body(reward=[1.0, None, 0.5], response_token_ids=[[], [6, 7], []], rollout_log_probs=[[], [-1.0, -1.0], []])
    )
    assert batch.reward is not None
    np.testing.assert_array_equal(batch.reward, np.array([1.0, np.nan, 0.5], np.float32))
    assert batch.response_lengths.tolist() == [0, 2, 0]


def test_from_lists_refuses_what_decoder_refuses() -> None:
    with pytest.raises(InvalidRolloutsError) as caught:
        RolloutBatch.from_lists(["a", "b"], [[1], [2]], [[1], [2, 3]], rollout_log_probs=[[-1.0], [-1.0]])
    assert (caught.value.row, caught.value.column) == (1, "rollout_log_probs")
    with pytest.raises(InvalidRolloutsError, match="unknown field"):
        RolloutBatch.from_lists(["a"], [[1]], [[1]], log_probs=[[-1.0]])
    with pytest.raises(InvalidRolloutsError, match="must hold int32"):
        RolloutBatch.from_lists(["a"], [[1]], [[1.5]])  # type: ignore[list-item]
    with pytest.raises(InvalidRolloutsError, match="int32 cannot hold"):
        RolloutBatch.from_lists(["a"], [[1]], [[2**40]])


def test_from_arrays_refuses_invalid_offsets() -> None:
    for offsets in ([0, 1], [0, 2, 1], [1, 2, 3], [0, 1, 2]):
        with pytest.raises(InvalidRolloutsError) as caught:
            RolloutBatch.from_arrays(["a", "b"], [1, 2], [0, 1, 2], [1, 2, 3], offsets)
        assert caught.value.column == "response_token_ids"
