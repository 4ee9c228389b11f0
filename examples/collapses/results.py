"""Finished runs on disk: a row a step, a column a quantity, and what made each run in the metadata.

An experiment is one Parquet file, `runs.parquet` in its folder. A run that has just finished is a file of its own
beside it, until `pack_results` adds it: so that an interrupted experiment loses at most the run that it was making.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

RESULTS: Final = Path(__file__).parent / "results"
LAYOUT: Final = 1
"""Version of the file's layout and of what the columns mean; runs of different versions are never analysed together."""

PACKED: Final = "runs.parquet"
"""The file of an experiment's packed runs, in its folder."""

_METADATA: Final = b"foreshock.collapses"
_RUN: Final = "run"


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
    metadata = json.dumps(_metadata_of(result), sort_keys=True)
    _write(path, _table_of(result).replace_schema_metadata({_METADATA: metadata}))


def read_result(path: Path) -> Result:
    """Read the file of one run. Raises UnreadableResult."""
    table = pq.read_table(path)
    found = (table.schema.metadata or {}).get(_METADATA)
    if found is None:
        raise UnreadableResult(f"{path} is no result of this benchmark: it has no metadata {_METADATA.decode()!r}")
    return _result(path, table, json.loads(found))


def finished_runs(folder: Path) -> set[str]:
    """Return the names of the runs that a folder has, packed or not."""
    packed = folder / PACKED
    names = {path.stem for path in folder.glob("*.parquet") if path != packed}
    return names | set(_packed_metadata(packed) if packed.exists() else ())


def read_results(folder: Path = RESULTS, only: str | None = None) -> dict[str, Result]:
    """Return all results of a folder by the runs' names, or one of them. Raises UnreadableResult."""
    found: dict[str, Result] = {}
    packed = folder / PACKED
    if packed.exists():
        of_run = _packed_metadata(packed)
        table = pq.read_table(packed, filters=None if only is None else [(_RUN, "=", only)])
        runs = table[_RUN].combine_chunks()
        for name in of_run if only is None else {only} & of_run.keys():
            metadata = of_run[name]
            rows = table.filter(pc.equal(runs, name)).select(["step", *metadata["columns"]])
            found[name] = _result(packed, rows, metadata)
    for path in folder.glob("*.parquet"):
        if path != packed and only in (None, path.stem):
            found[path.stem] = read_result(path)
    return dict(sorted(found.items()))


def pack_results(folder: Path) -> None:
    """Add the files of single runs to the packed file, and remove them."""
    loose = [path for path in folder.glob("*.parquet") if path.name != PACKED]
    if not loose:
        return
    results = read_results(folder)
    tables = [
        _table_of(result).add_column(0, _RUN, pa.array([name] * len(result.steps))) for name, result in results.items()
    ]
    metadata = {name: _metadata_of(result) for name, result in results.items()}
    packed = pa.concat_tables(tables, promote_options="default")
    _write(folder / PACKED, packed.replace_schema_metadata({_METADATA: json.dumps(metadata, sort_keys=True)}))
    for path in loose:
        path.unlink()


def _packed_metadata(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(pq.read_schema(path).metadata[_METADATA])
    return found


def _metadata_of(result: Result) -> dict[str, Any]:
    return {
        "layout": LAYOUT,
        "settings": result.settings,
        "ended": result.ended,
        "cpu_seconds": round(result.cpu_seconds, 3),
        "wall_seconds": round(result.wall_seconds, 3),
        "made_by": result.made_by,
        "columns": sorted(result.columns),
    }


def _table_of(result: Result) -> pa.Table:
    columns = {name: pa.array(result.columns[name], pa.float32(), from_pandas=True) for name in sorted(result.columns)}
    return pa.table({"step": pa.array(result.steps, pa.int32())} | columns)


def _write(path: Path, table: pa.Table) -> None:
    """Write a table so that the file is there with all of its content or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    # The plain encoding in one row group: dictionaries and statistics would be half of so small a file.
    dictionary = [_RUN] if _RUN in table.column_names else False
    pq.write_table(table, part, compression="zstd", use_dictionary=dictionary, write_statistics=False)
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(path)


def _result(path: Path, table: pa.Table, metadata: Mapping[str, Any]) -> Result:
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


def columns_of(values: Iterable[Mapping[str, float]]) -> dict[str, NDArray[np.float32]]:
    """Return steps' values as columns; NaN if a step lacks a value."""
    rows = list(values)
    names = sorted({name for row in rows for name in row})
    return {name: np.array([row.get(name, np.nan) for row in rows], np.float32) for name in names}
