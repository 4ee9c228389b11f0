"""Rollouts from JSON lines, with reproducible ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.errors import InvalidRolloutsError, LimitExceededError
from foreshock.rollouts import BatchAttributes, DecodeLimits
from foreshock.rollouts.jsonl import read_jsonl, step_of_file

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
    batch = read_jsonl(path, attributes=BatchAttributes(temperature=1.0))
    assert batch.sample_ids == [
        "step-0002-group-0-sample-0", "step-0002-group-1-sample-0", "step-0002-group-0-sample-1"
    ]  # fmt: skip
    assert batch.group_ids == ["step-0002-group-0", "step-0002-group-1", "step-0002-group-0"]
    assert batch.trainer_log_probs is not None
    np.testing.assert_array_equal(batch.trainer_log_probs[:3], np.array(LINE["old_log_probs"], np.float32))
    assert batch.finish_reasons == ["stop"] * 3
    assert batch.attributes.temperature == 1.0
    assert read_jsonl(path).sample_ids == batch.sample_ids


def test_line_may_have_any_column_of_the_table(tmp_path: Path) -> None:
    columns = {"advantage": [0.5, 0.5, 0.5], "response_mask": [1, 0, 1], "top_k": None, "data_source": "sums"}
    line = LINE | columns | {"trainer_log_probs": [-1.2, -0.1, -0.25], "colour": "red"}
    batch = read_jsonl(write(tmp_path, line, line), attributes=BatchAttributes(top_k=20))
    assert batch.trainer_log_probs is not None
    assert (batch.advantage_per_token, np.asarray(batch.advantage).tolist()) == (True, [0.5] * 6)
    assert np.asarray(batch.response_mask).tolist() == [1, 0, 1] * 2
    assert np.asarray(batch.top_k).tolist() == [20, 20]
    assert batch.data_sources == ["sums"] * 2
    assert batch.trainer_log_probs[0] == np.float32(-1.2)


def test_ids_of_a_line_are_kept_and_other_keys_named(tmp_path: Path) -> None:
    lines = [LINE | {"sample_id": f"mine-{row}", "group_id": "prompt-a", "colour": "red"} for row in range(2)]
    notes = list[str]()
    batch = read_jsonl(write(tmp_path, *lines), note=notes.append)
    assert (batch.sample_ids, batch.group_ids) == (["mine-0", "mine-1"], ["prompt-a"] * 2)
    (note,) = notes
    assert note.startswith("not read from the JSON lines: colour; columns: ")


@pytest.mark.parametrize(
    ("line", "column"),
    [
        ("not json", None),
        ("[1]", None),
        (LINE | {"step": 3}, "step"),
        ({key: value for key, value in LINE.items() if key != "old_log_probs"}, "old_log_probs"),
        (LINE | {"rollout_log_probs": [-1.0]}, "rollout_log_probs"),
        (LINE | {"rollout_log_probs": [-1.0, "a", -1.0]}, "rollout_log_probs"),
        (LINE | {"response_token_ids": [1, 2.5, 3]}, "response_token_ids"),
        (LINE | {"reward": "high"}, "reward"),
        (LINE | {"finish_reason": 3}, "finish_reason"),
        (LINE | {"reward": True}, "reward"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: Any, column: str | None) -> None:
    with pytest.raises(InvalidRolloutsError) as caught:
        read_jsonl(write(tmp_path, LINE, line))
    assert (caught.value.row, caught.value.column) == (1, column)


def test_files_that_are_not_step_files_are_refused(tmp_path: Path) -> None:
    assert step_of_file("a/step_0012.jsonl.gz") == 12
    with pytest.raises(InvalidRolloutsError, match="not named like"):
        read_jsonl(write(tmp_path, LINE, name="rollouts.jsonl"))
    with pytest.raises(InvalidRolloutsError, match="cannot be read"):
        read_jsonl(tmp_path / "step_0009.jsonl")
    (tmp_path / "step_0003.jsonl.gz").write_bytes(b"not gzip")
    with pytest.raises(InvalidRolloutsError, match="cannot be read"):
        read_jsonl(tmp_path / "step_0003.jsonl.gz")
    with pytest.raises(InvalidRolloutsError, match="no rollouts"):
        read_jsonl(write(tmp_path, ""))


def test_gzip_bomb_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, " " * 5_000_000, name="step_0002.jsonl.gz")
    with pytest.raises(LimitExceededError):
        read_jsonl(path, limits=DecodeLimits(max_uncompressed_bytes=1_000_000))
    with pytest.raises(LimitExceededError):
        read_jsonl(write(tmp_path, LINE, LINE), limits=DecodeLimits(max_rollouts=1))
