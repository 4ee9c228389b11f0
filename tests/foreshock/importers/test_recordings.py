"""Tests of recorded runs on disk: their files, and the errors of unsupported ones."""

import gzip
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from foreshock.errors import ConfigurationError, InvalidRolloutsError
from foreshock.importers.dumps import Dump, ReadOptions
from foreshock.importers.recordings import find_recording, read_recorded, read_scalars
from foreshock.rollouts import BatchAttributes, encode_rollouts
from tests.foreshock.batches import random_batch

LINE = {"group": 0, "prompt_token_ids": [1], "response_token_ids": [2, 3], "rollout_log_probs": [-1.0, -2.0]}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "step_0001.parquet is empty or cut off: expected a Parquet file"),
        (encode_rollouts(random_batch(1))[:-9], "step_0001.parquet is empty or cut off: expected a Parquet file"),
        (b"PAR1 and nothing more", "step_0001.parquet is empty or cut off: expected a Parquet file"),
        (b"sample_id,tokens", "step_0001.parquet is not a Parquet file"),
    ],
)
def test_file_that_is_no_parquet_is_named_with_what_to_do(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "step_0001.parquet"
    path.write_bytes(data)
    with pytest.raises(InvalidRolloutsError) as raised:
        read_recorded(Dump(1, (path,)), ReadOptions())
    assert str(raised.value) == message


@pytest.mark.parametrize("step", [-1, 2**31, 10**30])
def test_step_that_no_service_takes_is_refused(tmp_path: Path, step: int) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "lr": 0.5}))
    with pytest.raises(
        ConfigurationError, match=r"a step must be from 0 to 2147483647, got .* in metrics\.jsonl, line 1"
    ):
        read_scalars(tmp_path / "metrics.jsonl")
    if step > 0:
        (tmp_path / f"step_{step}.parquet").write_bytes(b"")
        with pytest.raises(ConfigurationError, match="a step must be from 0 to 2147483647"):
            find_recording([tmp_path])


def write_run(folder: Path) -> None:
    (folder / "rollouts").mkdir(parents=True)
    for step in (2, 10, 1):
        with gzip.open(folder / "rollouts" / f"step_{step:04d}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"step": step, **LINE}) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "lr": 0.5, "note": "x"}\n\n{"step": 2, "grad_norm": NaN}\n')
    for step in (1, 10):
        (folder / "checkpoints" / f"step_{step:04d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:04d}" / "model.safetensors").write_bytes(b"w")
    (folder / "checkpoints" / "step_0005").mkdir()


def test_runs_folder_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    write_run(tmp_path)
    recording = find_recording([tmp_path])
    assert [(dump.step, len(dump.files)) for dump in recording.dumps] == [(1, 1), (2, 1), (10, 1)]
    assert recording.scalars == (tmp_path / "metrics.jsonl",)
    assert [step for step, _ in recording.checkpoints] == [1, 10]
    attributes = BatchAttributes(temperature=1.0)
    (batch,) = read_recorded(recording.dumps[0], ReadOptions(attributes=attributes)).batches
    assert batch.response_token_ids.tolist() == [2, 3]
    assert batch.attributes == attributes


def test_rollouts_whose_lists_differ_in_length_are_left_out_and_counted(tmp_path: Path) -> None:
    short = LINE | {"rollout_log_probs": [-1.0]}
    path = tmp_path / "step_0001.jsonl"
    path.write_text("\n".join(map(json.dumps, (LINE, short, LINE))))
    (dump,) = find_recording([tmp_path]).dumps
    found = read_recorded(dump, ReadOptions())
    assert found.batches[0].num_rollouts == 2
    rule = "since the lists of a rollout must have equal lengths"
    assert found.left_out == ((1, f"left out 1 of 3 rollouts, {rule}: step_0001.jsonl, row 1 (from 0)"),)
    path.write_text(json.dumps(short))
    with pytest.raises(InvalidRolloutsError, match=r"has 1 values, .*, in step_0001\.jsonl"):
        read_recorded(dump, ReadOptions())


def test_scalars_keep_numbers_only(tmp_path: Path) -> None:
    write_run(tmp_path)
    (first, second) = read_scalars(tmp_path / "metrics.jsonl")
    assert first == (1, {"lr": 0.5})
    assert second[0] == 2
    assert math.isnan(second[1]["grad_norm"])
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n{"x": 1}\n')
    with pytest.raises(ConfigurationError, match="line 2"):
        read_scalars(tmp_path / "metrics.jsonl")


def test_shards_of_one_step_are_counted(tmp_path: Path) -> None:
    batch = random_batch(0)
    names = ["step_0003_shard_0.parquet", "step_0003_shard_12.parquet", "step_0003_shard_2.parquet"]
    for name in names:
        (tmp_path / name).write_bytes(encode_rollouts(batch))
    (tmp_path / "README.md").write_text("not rollouts")
    (dump,) = find_recording([tmp_path]).dumps
    assert [file.name for file in dump.files] == [names[0], names[2], names[1]]
    assert [each.sample_ids for each in read_recorded(dump, ReadOptions()).batches] == [batch.sample_ids] * 3


def test_file_of_another_name_needs_its_step(tmp_path: Path) -> None:
    path = tmp_path / "dump.parquet"
    path.write_bytes(encode_rollouts(random_batch(0)))
    with pytest.raises(ConfigurationError, match="--step"):
        find_recording([path])
    assert find_recording([path], step=7).dumps == (Dump(7, (path,)),)


def other_table(rows: int = 2, **columns: object) -> pa.Table:
    """Return rollouts of another writer: without sample ids."""
    return pa.table({
        "prompt_token_ids": [[1]] * rows, "response_token_ids": [[2, 3]] * rows, "reward": [0.5] * rows, **columns
    })  # fmt: skip


def test_step_comes_from_name_or_column(tmp_path: Path) -> None:
    pq.write_table(other_table(), tmp_path / "rollouts-step=7.parquet")
    pq.write_table(other_table(step=[9, 9]), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text(json.dumps({"step": 8, **LINE}))
    (tmp_path / "c.jsonl").write_text(json.dumps(LINE))
    (tmp_path / "metrics.jsonl").write_text("")
    recording = find_recording([tmp_path])
    assert [(dump.step, *(file.name for file in dump.files)) for dump in recording.dumps] == [
        (7, "rollouts-step=7.parquet"), (8, "b.jsonl"), (9, "a.parquet")
    ]  # fmt: skip
    assert [path.name for path in recording.unread] == ["c.jsonl"]
    assert all(read_recorded(dump, ReadOptions()).batches[0].num_rollouts for dump in recording.dumps)
    pq.write_table(other_table(step=[9, 10]), tmp_path / "a.parquet")
    found = [read_recorded(dump, ReadOptions()) for dump in find_recording([tmp_path / "a.parquet"]).dumps]
    assert [(each.step, each.batches[0].num_rollouts) for each in found] == [(9, 1), (10, 1)]
    pq.write_table(other_table(step=[9, 10]), tmp_path / "step_9.parquet")
    with pytest.raises(InvalidRolloutsError, match="row 1, column `step`: is 10 in a file of step 9"):
        read_recorded(Dump(9, (tmp_path / "step_9.parquet",)), ReadOptions())


def test_missing_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no such file or folder"):
        find_recording([tmp_path / "missing"])
    (tmp_path / "metrics.csv").write_text("step,reward\n1,0.5\n")
    with pytest.raises(ConfigurationError, match="metrics only is read by `foreshock backtest`"):
        find_recording([tmp_path / "metrics.csv"])
    with pytest.raises(ConfigurationError, match="no rollouts found"):
        find_recording([tmp_path])
