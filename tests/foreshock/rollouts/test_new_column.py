"""A new column of the rollout table is a line in schema.py and a field in batch.py; all else derives from these."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from foreshock.rollouts import RolloutBatch
from foreshock.rollouts.schema import ROLLOUT_COLUMNS, ColumnSpec
from scripts.rollout_table_page import PAGE, page
from tests.paths import REPOSITORY

NEW_COLUMNS = """\
    ColumnSpec("prompt_loss", "float32", "prompt token", "a new column", valid=_NOT_NEGATIVE),
    ColumnSpec("expert_load", "float32", "response token", "a new column", valid=_NOT_NEGATIVE, repeatable=True),
    ColumnSpec("difficulty", "int16", "rollout", "a new column", valid=_AT_LEAST_0, null_value=0),
    ColumnSpec("judge", "string", "rollout", "a new column", field="judges"),
"""
NEW_FIELDS = """\
    prompt_loss: NDArray[np.float32] | None = None  # [P]
    expert_load: NDArray[np.float32] | None = None  # [T]
    difficulty: NDArray[np.int16] | None = None  # [N]
    judges: list[str | None] | None = None  # [N]
"""

# Takes the new columns through every form of a batch.
EXERCISE = """
import io, json, sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import foreshock
from foreshock.client.capture import capture_rollouts
from foreshock.errors import InvalidRolloutsError
from foreshock.rollouts import BatchAttributes, RolloutBatch, decode_rollouts, encode_rollouts
from foreshock.rollouts.rollout_files import read_rollout_file

assert Path(foreshock.__file__).is_relative_to(sys.argv[1])
TOKENS = {"prompt_token_ids": [[1], [2, 3]], "response_token_ids": [[4, 5], [6]]}
LISTS = {"prompt_loss": [[0.5], [1.5, 2.5]], "expert_load": [[1.0, 2.0], [3.0]], "difficulty": [7, 8]}
JUDGES = ["a", None]


def check(batch, source):
    assert batch.prompt_loss.tolist() == [0.5, 1.5, 2.5], source
    assert batch.expert_load.tolist() == [1.0, 2.0, 3.0], source
    assert batch.difficulty.tolist() == [7, 8], source
    assert batch.difficulty.dtype == np.int16, source
    assert batch.judges == JUDGES, source


def refused(row, column, call):
    try:
        call()
    except InvalidRolloutsError as error:
        assert (error.row, error.column) == (row, column), error
    else:
        raise AssertionError(column)


batch = RolloutBatch.from_lists(["x", "y"], **TOKENS, **LISTS, judges=JUDGES)
check(batch, "from_lists")
check(RolloutBatch.concat([batch.select([0]), batch.select([1])]), "select and concat")
check(decode_rollouts(encode_rollouts(batch)), "Parquet")

columns = {"sample_id": ["x", "y"], **TOKENS, **LISTS, "judge": JUDGES}
for name, wrong in (("prompt_loss", [[0.5], [1.5]]), ("expert_load", [[1.0, 2.0], []]), ("difficulty", [7, 2**20])):
    file = io.BytesIO()
    pq.write_table(pa.table({**columns, name: wrong}), file)
    refused(1, name, lambda: decode_rollouts(file.getvalue()))
refused(1, "expert_load", lambda: RolloutBatch.from_lists(["x", "y"], **TOKENS, expert_load=[[1.0, 2.0], [-3.0]]))

mask = np.array([[1, 1], [1, 0]])
padded = {
    "response_token_ids": np.array([[4, 5], [6, 0]]),
    "response_padding_mask": mask,
    "prompt_token_ids": np.array([[1, 0], [2, 3]]),
    "prompt_padding_mask": np.array([[1, 0], [1, 1]]),
    "prompt_loss": np.array([[0.5, 9.0], [1.5, 2.5]]),
    "expert_load": np.array([[1.0, 2.0], [3.0, 9.0]]),
    "difficulty": np.array([7, 8]),
    "judges": JUDGES,
}
check(RolloutBatch.from_padded(response_mask=mask, **padded), "from_padded")

for source, logged in {
    "captured lists": columns,
    "captured table": pa.table(columns),
    "captured padded arrays": padded,
    "captured flat arrays": {
        **{name: np.concatenate(columns[name]) for name in (*TOKENS, "prompt_loss", "expert_load")},
        "prompt_lengths": [1, 2], "response_lengths": [2, 1], "difficulty": np.array([7, 8]), "judge": JUDGES,
    },
}.items():
    check(capture_rollouts(logged, default_ids="0", attributes=BatchAttributes())(), source)

folder = Path(sys.argv[1])
lines = [{name: value[row] for name, value in {**TOKENS, **LISTS, "judge": JUDGES}.items()} for row in range(2)]
(folder / "step_0001.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
check(read_rollout_file(folder / "step_0001.jsonl"), "JSON lines")
"""


def insert_after(path: Path, line: str, text: str) -> None:
    source = path.read_text()
    assert source.count(line) == 1, line
    path.write_text(source.replace(line, line + text))


def test_new_column_touches_schema_and_batch_only(tmp_path: Path) -> None:
    package = tmp_path / "foreshock"
    shutil.copytree(REPOSITORY / "foreshock", package, ignore=shutil.ignore_patterns("__pycache__"))
    schema, batch = package / "rollouts" / "schema.py", package / "rollouts" / "batch.py"
    insert_after(schema, "ROLLOUT_COLUMNS: tuple[ColumnSpec, ...] = (\n", NEW_COLUMNS)
    insert_after(batch, "    min_p: NDArray[np.float32] | None = None  # [N]\n", NEW_FIELDS)
    done = subprocess.run(
        [sys.executable, "-c", EXERCISE, str(tmp_path)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("column", ROLLOUT_COLUMNS, ids=lambda column: column.name)
def test_batch_has_field_of_column(column: ColumnSpec) -> None:
    item = RolloutBatch.__dataclass_fields__[column.field]
    assert (item.default is None) == (not column.required)
    if column.is_string:
        expected = "list[str]" if column.required else "list[str | None] | None"
    else:
        expected = f"NDArray[np.{column.value_type}]" + ("" if column.required else " | None")
    assert item.type == expected
    assert column.dtype == (np.dtype(object) if column.is_string else np.dtype(column.value_type))


def test_batch_has_no_other_field() -> None:
    layout = {"prompt_offsets", "response_offsets", "attributes", "advantage_per_token"}
    assert {column.field for column in ROLLOUT_COLUMNS} | layout == set(RolloutBatch.__dataclass_fields__)


def test_page_of_the_table_is_current() -> None:
    assert PAGE.read_text() == page(), "run python -m scripts.rollout_table_page"
