"""Tests of the capture: numpy, torch, Arrow, lists and padded arrays give the same batch."""

import ctypes
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from foreshock.client.capture import capture_rollouts, prepare_token_pass, size_of
from foreshock.errors import InvalidRolloutsError
from foreshock.measures.passes import compiled
from foreshock.rollouts import BatchAttributes, RolloutBatch
from foreshock.rollouts.schema import ROLLOUT_COLUMNS

PROMPTS = [[5, 6, 7], [8]]
RESPONSES = [[1, 2], [3, 4, 9]]
LOG_PROBS = [[-0.5, -1.5], [-0.25, -2.0, -0.125]]


def flat(rows: list[list[Any]], kind: Any) -> Any:
    return np.concatenate([np.asarray(row, kind) for row in rows])


def padded(rows: list[list[Any]], kind: Any, *, left: bool = False) -> Any:
    longest = max(map(len, rows))
    filled = [[0] * (longest - len(row)) + row if left else row + [0] * (longest - len(row)) for row in rows]
    return np.asarray(filled, kind)


def as_lists() -> dict[str, Any]:
    return {"prompt_token_ids": PROMPTS, "response_token_ids": RESPONSES, "rollout_log_probs": LOG_PROBS}


def as_flat() -> dict[str, Any]:
    return {
        "prompt_token_ids": flat(PROMPTS, np.int32),
        "prompt_offsets": np.array([0, 3, 4]),
        "response_token_ids": flat(RESPONSES, np.int64),
        "response_offsets": np.array([0, 2, 5]),
        "rollout_log_probs": flat(LOG_PROBS, np.float32),
    }


def as_torch() -> dict[str, Any]:
    columns = {name: torch.from_numpy(value) for name, value in as_flat().items()}
    return columns | {"rollout_log_probs": columns["rollout_log_probs"].bfloat16().requires_grad_()}


def as_padded() -> dict[str, Any]:
    prompts, responses = (padded([[1] * len(row) for row in rows], np.bool_, left=left) for rows, left in
                          ((PROMPTS, True), (RESPONSES, False)))  # fmt: skip
    return {
        "prompt_token_ids": torch.from_numpy(padded(PROMPTS, np.int64, left=True)),
        "prompt_padding_mask": torch.from_numpy(prompts),
        "response_token_ids": padded(RESPONSES, np.int64),
        "response_padding_mask": responses,
        "rollout_log_probs": padded(LOG_PROBS, np.float32),
    }


SHAPES: dict[str, Any] = {
    "lists": as_lists,
    "lists of arrays": lambda: {name: [np.asarray(row) for row in rows] for name, rows in as_lists().items()},
    "flat arrays with offsets": as_flat,
    "flat arrays with lengths": lambda: {
        **{name: value for name, value in as_flat().items() if "offsets" not in name},
        "prompt_lengths": [3, 1],
        "response_lengths": torch.tensor([2, 3]),
    },
    "torch tensors": as_torch,
    "padded arrays": as_padded,
    "Arrow lists": lambda: {name: pa.array(rows) for name, rows in as_lists().items()},
    "sliced Arrow lists": lambda: {name: pa.array([*rows, rows[0]])[:2] for name, rows in as_lists().items()},
    "an Arrow table": lambda: pa.table(as_lists()),
    "an Arrow record batch": lambda: pa.RecordBatch.from_pydict(as_lists()),
    "a RolloutBatch": lambda: RolloutBatch.from_lists(["7-0-0", "7-0-1"], **as_lists()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_gives_the_same_batch(shape: str) -> None:
    rollouts = SHAPES[shape]()
    batch = capture_rollouts(rollouts, default_ids="7-0", attributes=None)()
    expected = RolloutBatch.from_lists(["7-0-0", "7-0-1"], **as_lists())
    for column in ROLLOUT_COLUMNS:
        found, wanted = getattr(batch, column.field), getattr(expected, column.field)
        assert np.array_equal(found, wanted) if isinstance(wanted, np.ndarray) else found == wanted, column.name
    assert batch.prompt_offsets.tolist() == [0, 3, 4]
    assert batch.response_offsets.tolist() == [0, 2, 5]
    assert size_of(rollouts) > 0


@pytest.mark.parametrize("rows", [[{"sample_id": "a"}], None, "rollouts.parquet"])
def test_rollouts_that_are_no_columns_are_refused_with_what_to_do(rows: object) -> None:
    with pytest.raises(InvalidRolloutsError, match=rf"got {type(rows).__name__}; make columns of a list of rows"):
        size_of(rows)


MUTABLE = (
    "lists of arrays", "flat arrays with offsets", "torch tensors", "padded arrays", "a RolloutBatch",
    "Arrow lists", "sliced Arrow lists", "an Arrow table", "an Arrow record batch",
)  # fmt: skip


@pytest.mark.parametrize("shape", MUTABLE)
def test_arrays_overwritten_after_the_call_are_logged_unchanged(shape: str) -> None:
    rollouts = SHAPES[shape]()
    captured = capture_rollouts(rollouts, default_ids="7-0", attributes=None)
    _overwrite(rollouts)
    batch = captured()
    assert batch.response_token_ids.tolist() == [1, 2, 3, 4, 9]
    assert batch.rollout_log_probs is not None
    assert batch.rollout_log_probs.tolist() == [-0.5, -1.5, -0.25, -2.0, -0.125]


def _overwrite(value: Any) -> None:
    if isinstance(value, pa.Table | pa.RecordBatch | pa.ChunkedArray):
        for part in value.chunks if isinstance(value, pa.ChunkedArray) else value.columns:
            _overwrite(part)
    elif isinstance(value, pa.Array):
        # The memory that a trainer uses again; the last buffer has the values of the lists.
        values = value.buffers()[-1]
        ctypes.memset(values.address, 0, values.size)
    elif isinstance(value, RolloutBatch):
        for name in ("response_token_ids", "rollout_log_probs"):
            getattr(value, name)[:] = 0
    elif isinstance(value, Mapping):
        for item in value.values():
            _overwrite(item)
    elif isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.zero_()
    elif isinstance(value, np.ndarray):
        value[:] = 0
    elif isinstance(value, list):
        for item in value:
            _overwrite(item)


def test_nested_lists_are_copied() -> None:
    rows = [[1, 2], [3]]
    captured = capture_rollouts(
        {"prompt_token_ids": [[0], [0]], "response_token_ids": rows}, default_ids="a", attributes=None
    )
    rows[0][0] = 99
    rows.append([4])
    assert captured().response_token_ids.tolist() == [1, 2, 3]


def test_columns_may_be_named_as_in_the_schema_or_as_the_fields() -> None:
    columns = {**as_lists(), "sample_id": [1, "b"], "finish_reason": ["stop", None], "group_ids": np.array([3, 3])}
    batch = capture_rollouts(columns, default_ids="a", attributes=None)()
    assert batch.sample_ids == ["1", "b"]
    assert batch.finish_reasons == ["stop", None]
    assert batch.group_ids == ["3", "3"]


def test_batch_attributes_override_call_attributes() -> None:
    own = BatchAttributes(temperature=0.7)
    batch = RolloutBatch.from_lists(["a", "b"], **as_lists(), attributes=own)
    given = BatchAttributes(temperature=1.0, logprobs_mode="raw_logprobs")
    built = capture_rollouts(batch, default_ids="a", attributes=given)()
    assert built.attributes == BatchAttributes(temperature=0.7, logprobs_mode="raw_logprobs")


@pytest.mark.parametrize(
    ("change", "column"),
    [
        ({"rollout_log_probs": [[-0.5], [-0.25]]}, "rollout_log_probs"),
        ({"rollout_log_probs": [[0.5, 3.0], [0.25, -2.0, 0.125]]}, "rollout_log_probs"),
        ({"response_token_ids": np.arange(5)}, "response_token_ids"),
        ({"response_padding_mask": np.ones((2, 9), bool), "response_token_ids": np.ones((2, 3))}, "response_token_ids"),
        ({"response_token_ids": None}, "response_token_ids"),
        ({"rolout_log_probs": LOG_PROBS}, "rolout_log_probs"),
        ({"rollout_log_probs": torch.zeros(5, device="meta")}, "rollout_log_probs"),
        ({"response_token_ids": pa.array([[1, 2], None])}, "response_token_ids"),
    ],
)
def test_invalid_column_is_named(change: dict[str, Any], column: str) -> None:
    with pytest.raises(InvalidRolloutsError) as raised:
        capture_rollouts({**as_lists(), **change}, default_ids="a", attributes=None)()
    assert raised.value.column == column


def test_trainer_compiles_in_another_process_first(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    monkeypatch.setattr(compiled, "_add_rollouts", None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: steps.append(command[1:]))
    monkeypatch.setattr(compiled, "prepare", lambda: steps.append("prepare"))
    assert prepare_token_pass()
    assert steps == [["-c", "from foreshock.measures.passes.compiled import prepare; prepare()"], "prepare"]


def short(rows: Any) -> Any:
    return [*rows[:1], rows[1][:-1]] if isinstance(rows, list) else pa.array([rows[0].as_py(), rows[1].as_py()[:-1]])


@pytest.mark.parametrize("shape", ["lists", "lists of arrays", "Arrow lists", "an Arrow table"])
def test_rollout_with_a_log_prob_too_few_is_left_out_and_the_others_stay(shape: str) -> None:
    rollouts = SHAPES[shape]()
    if isinstance(rollouts, pa.Table):
        rollouts = pa.table({**rollouts.to_pydict(), "rollout_log_probs": short(LOG_PROBS), "reward": [0.5, 1.0]})
    else:
        rollouts |= {"rollout_log_probs": short(rollouts["rollout_log_probs"]), "reward": np.array([0.5, 1.0])}
    noted: list[tuple[int, str]] = []
    batch = capture_rollouts(
        rollouts, default_ids="7-0", attributes=None, note=lambda count, sentence: noted.append((count, sentence))
    )()
    assert (batch.sample_ids, batch.response_token_ids.tolist()) == (["7-0-0"], [1, 2])
    assert batch.reward is not None
    assert batch.reward.tolist() == [0.5]
    ((count, sentence),) = noted
    assert count == 1
    assert sentence.startswith("left out 1 of 2 rollouts, since the lists of a rollout must have equal lengths: row")
    assert sentence.endswith("row 1, column `rollout_log_probs`: 2 values, but `response_token_ids` has 3")
