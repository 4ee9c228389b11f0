"""A finished run as one Parquet file: a row a step, a column a quantity, and what made it in the metadata."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

RESULTS: Final = Path(__file__).parent / "results"
LAYOUT: Final = 1
"""Version of the file's layout and of what the columns mean; runs of different versions are never analysed together."""

_METADATA: Final = b"foreshock.collapses"


class UnreadableResult(ValueError):
    """A file that is no result of this benchmark, or one of another layout."""


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """A finished run."""

    settings: Mapping[str, Any]
    ended: str
    """`all steps`, `collapsed`, or `weights not finite`."""
    cpu_seconds: float
    wall_seconds: float
    made_by: Mapping[str, Any]
    """Versions, fingerprints of engine and trainer, and the digest of the start's weights."""
    steps: NDArray[np.int32]
    columns: Mapping[str, NDArray[np.float32]]
    """By the detectors' names; NaN if not measured at a step."""

    @property
    def dose(self) -> str:
        return str(self.settings["dose"]["name"])

    @property
    def learning_rate(self) -> float:
        return float(self.settings["learning_rate"])

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])


def result_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.parquet"


def write_result(path: Path, result: Result) -> None:
    """Write a result so that the file is there with all of its content or not at all."""
    names = sorted(result.columns)
    metadata = {
        "layout": LAYOUT,
        "settings": result.settings,
        "ended": result.ended,
        "cpu_seconds": round(result.cpu_seconds, 3),
        "wall_seconds": round(result.wall_seconds, 3),
        "made_by": result.made_by,
    }
    table = pa.table(
        {"step": pa.array(result.steps, pa.int32())}
        | {name: pa.array(result.columns[name], pa.float32(), from_pandas=True) for name in names}
    ).replace_schema_metadata({_METADATA: json.dumps(metadata, sort_keys=True)})
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # The plain encoding in one row group: dictionaries and statistics would be half of so small a file.
    pq.write_table(table, part, compression="zstd", use_dictionary=False, write_statistics=False)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def read_result(path: Path) -> Result:
    """Read a result. Raises UnreadableResult."""
    table = pq.read_table(path)
    found = (table.schema.metadata or {}).get(_METADATA)
    if found is None:
        raise UnreadableResult(f"{path} is no result of this benchmark: it has no metadata {_METADATA.decode()!r}")
    metadata = json.loads(found)
    if metadata["layout"] != LAYOUT:
        raise UnreadableResult(f"{path} has layout {metadata['layout']}, expected {LAYOUT}: make its run again")
    return Result(
        settings=metadata["settings"],
        ended=metadata["ended"],
        cpu_seconds=metadata["cpu_seconds"],
        wall_seconds=metadata["wall_seconds"],
        made_by=metadata["made_by"],
        steps=table["step"].to_numpy().astype(np.int32),
        columns={name: table[name].to_numpy().astype(np.float32) for name in table.column_names if name != "step"},
    )


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return all results of a folder by the runs' names."""
    return {path.stem: read_result(path) for path in sorted(folder.glob("*.parquet"))}


def columns_of(values: Iterable[Mapping[str, float]]) -> dict[str, NDArray[np.float32]]:
    """Return steps' values as columns; NaN if a step lacks a value."""
    rows = list(values)
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, np.nan) for row in rows], np.float32) for name in names}
