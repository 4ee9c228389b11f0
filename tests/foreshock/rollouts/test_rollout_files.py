"""Rollouts from files of any writer, with reproducible ids."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts import BatchAttributes, DecodeLimits
from foreshock.rollouts.rollout_files import read_rollout_file, step_of_file, steps_in_file

LINE: dict[str, Any] = {
    "step": 2, "group": 0, "prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5],
    "rollout_log_probs": [-1.0, -0.1, -0.25], "old_log_probs": [-1.1, -0.1, -0.25], "reward": 1.0,
    "finish_reason": "stop",
}  # fmt: skip


def write(folder: Path, *lines: Any, name: str = "step_0002.jsonl") -> Path:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["step_0002.jsonl", "step_0002.jsonl.gz"])
def test_line_is_a_rollout(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, LINE, LINE | {"group": 1}, LINE, name=name)
    batch = read_rollout_file(path, attributes=BatchAttributes(temperature=1.0))
    assert batch.sample_ids == [
        "step-0002-group-0-sample-0", "step-0002-group-1-sample-0", "step-0002-group-0-sample-1"
    ]  # fmt: skip
    assert batch.group_ids == ["step-0002-group-0", "step-0002-group-1", "step-0002-group-0"]
    assert batch.trainer_log_probs is not None
    np.testing.assert_array_equal(batch.trainer_log_probs[:3], np.array(LINE["old_log_probs"], np.float32))
    assert batch.finish_reasons == ["stop"] * 3
    assert batch.attributes.temperature == 1.0
    assert read_rollout_file(path).sample_ids == batch.sample_ids


def test_line_may_have_any_column_of_the_table(tmp_path: Path) -> None:
    columns = {"advantage": [0.5, 0.5, 0.5], "response_mask": [1, 0, 1], "top_k": None, "data_source": "sums"}
    line = LINE | columns | {"trainer_log_probs": [-1.2, -0.1, -0.25], "colour": "red"}
    batch = read_rollout_file(write(tmp_path, line, line), attributes=BatchAttributes(top_k=20))
    assert batch.trainer_log_probs is not None
    assert (batch.advantage_per_token, np.asarray(batch.advantage).tolist()) == (True, [0.5] * 6)
    assert np.asarray(batch.response_mask).tolist() == [1, 0, 1] * 2
    assert np.asarray(batch.top_k).tolist() == [20, 20]
    assert batch.data_sources == ["sums"] * 2
    assert batch.trainer_log_probs[0] == np.float32(-1.2)


def test_ids_of_a_line_are_kept_and_other_keys_named(tmp_path: Path) -> None:
    lines = [LINE | {"sample_id": f"mine-{row}", "group_id": "prompt-a", "colour": "red"} for row in range(2)]
    notes = list[str]()
    batch = read_rollout_file(write(tmp_path, *lines), note=notes.append)
    assert (batch.sample_ids, batch.group_ids) == (["mine-0", "mine-1"], ["prompt-a"] * 2)
    assert notes[0] == "read old_log_probs as trainer_log_probs"
    assert notes[1].startswith("not read: colour; --map NAME=COLUMN reads a name as one of data_source, engine_id, ")


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("not json", None),
        ("[1]", None),
        (LINE | {"step": 3}, "step"),
        ({key: value for key, value in LINE.items() if key != "old_log_probs"}, "trainer_log_probs"),
        (LINE | {"rollout_log_probs": [-1.0, "a", -1.0]}, "rollout_log_probs"),
        (LINE | {"response_token_ids": [1, 2.5, 3]}, "response_token_ids"),
        (LINE | {"reward": "high"}, "reward"),
        (LINE | {"finish_reason": 3}, "finish_reason"),
        (LINE | {"reward": True}, "reward"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: Any, column: str | None) -> None:
    with pytest.raises(InvalidRolloutsError) as caught:
        read_rollout_file(write(tmp_path, LINE, line))
    assert (caught.value.row, caught.value.column) == (1, column)


def test_files_that_are_not_step_files_are_refused(tmp_path: Path) -> None:
    assert step_of_file("a/step_0012.jsonl.gz") == 12
    with pytest.raises(InvalidRolloutsError, match="has no step in its name"):
        read_rollout_file(write(tmp_path, LINE, name="rollouts.jsonl"))
    with pytest.raises(InvalidRolloutsError, match="cannot be read"):
        read_rollout_file(tmp_path / "step_0009.jsonl")
    (tmp_path / "step_0003.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(InvalidRolloutsError, match="cannot be read"):
        read_rollout_file(tmp_path / "step_0003.jsonl.gz")
    with pytest.raises(InvalidRolloutsError, match="no rollouts"):
        read_rollout_file(write(tmp_path, ""))


def test_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, " " * 5_000_000, name="step_0002.jsonl.gz")
    with pytest.raises(LimitExceededError):
        read_rollout_file(path, limits=DecodeLimits(max_uncompressed_bytes=1_000_000))
    with pytest.raises(LimitExceededError):
        read_rollout_file(write(tmp_path, LINE, LINE), limits=DecodeLimits(max_rollouts=1))


def both_formats(folder: Path, *rows: dict[str, Any]) -> list[Path]:
    pq.write_table(pa.Table.from_pylist(list(rows)), folder / "all.parquet")
    return [write(folder, *rows, name="all.jsonl"), folder / "all.parquet"]


def test_json_lines_and_parquet_give_the_same_rollouts(tmp_path: Path) -> None:
    """The file of another writer: names of its own, two steps in one file, a mask of booleans."""
    row = {"prompt_tokens": [1], "response_tokens": [2, 3], "logprobs": [-0.5, -1.0], "mine": [-0.25, -1.5],
           "prompt_idx": 4, "dataset": "sums", "loss_mask": [True, False], "colour": "red"}  # fmt: skip
    for path in both_formats(tmp_path, row | {"it": 3}, row | {"it": 5}, row | {"it": 5}):
        renamed, notes = {"it": "step", "mine": "trainer_log_probs"}, list[str]()
        assert (steps_in_file(path), steps_in_file(path, renamed)) == ([], [3, 5])
        batch = read_rollout_file(path, step=5, renamed=renamed, note=notes.append)
        assert batch.sample_ids == ["step-0005-group-4-sample-0", "step-0005-group-4-sample-1"]
        assert batch.data_sources == ["sums"] * 2
        for name, values in {"rollout_log_probs": [-0.5, -1.0], "trainer_log_probs": [-0.25, -1.5]}.items():
            assert np.asarray(getattr(batch, name)).tolist() == values * 2
        assert np.asarray(batch.response_mask).tolist() == [1, 0, 1, 0]
        assert "logprobs as rollout_log_probs" in notes[0]
        assert notes[1].startswith("not read: colour; ")
        with pytest.raises(InvalidRolloutsError, match="has no rollouts of step 4"):
            read_rollout_file(path, step=4, renamed=renamed)
        with pytest.raises(InvalidRolloutsError, match=r"has no column 'absent'; columns: colour, dataset"):
            read_rollout_file(path, step=5, renamed={"absent": "reward"})


def test_unequal_rollouts_of_a_table_with_ids_are_left_out_too(tmp_path: Path) -> None:
    row = {key: LINE[key] for key in ("prompt_token_ids", "response_token_ids", "rollout_log_probs")}
    rows = [row | {"sample_id": "a"}, row | {"sample_id": "b", "rollout_log_probs": [-1.0]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "step_0001.parquet")
    notes = list[str]()
    assert read_rollout_file(tmp_path / "step_0001.parquet", note=notes.append).sample_ids == ["a"]
    assert notes[0].startswith(
        "left out 1 of 2 rollouts, since the lists of a rollout must have equal lengths: step_0001.parquet"
    )
