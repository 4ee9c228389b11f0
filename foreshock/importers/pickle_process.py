"""The process that unpickles: a file on stdin, a table as Arrow IPC on stdout.

`python -m foreshock.importers.pickle_process FORMAT MEMORY_BYTES CPU_SECONDS COLUMN…` writes one row per rollout with
the named columns, and the dump's own numbers as JSON in the schema's metadata. It ends with status 3 and one line on
stderr if the file cannot be read. What keeps a pickle from running code is the unpickler's list of names
(`unpickling.py`); the process has limits on memory and time, so that a damaged file cannot take the machine.
"""

import io
import json
import os
import resource
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from foreshock.importers.unpickling import (
    METADATA_KEY,
    Array,
    Tensor,
    TensorBatch,
    UnsafePickleError,
    load_pickle,
    load_pt,
    numpy_array,
)

_REFUSED = 3
_LONGEST_TEXT = 200


def main() -> int:
    """Set the limits, read the file, and write the table."""
    kind, memory, seconds, *columns = sys.argv[1:]
    output = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    try:
        with open(0, "rb", closefd=False) as file:
            value = load_pt(file) if kind == "pt" else load_pickle(file)
            table = _table(value, columns)
    except UnsafePickleError as error:
        return _refuse(f"it has {error}; only tensors, arrays and plain data are read")
    except MemoryError:
        return _refuse(f"it needs more than {int(memory) >> 30} GiB of memory")
    except zipfile.BadZipFile:
        return _refuse("it is no complete file of torch.save: half-written, or damaged")
    except RecursionError:
        return _refuse("its values are nested too deeply")
    except Exception as error:
        return _refuse(f"it is damaged: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]}")
    with pa.ipc.new_stream(output, table.schema) as stream:
        stream.write_table(table)
    output.flush()
    return 0


def _refuse(reason: str) -> int:
    os.write(2, " ".join(reason.split()).encode(errors="replace") + b"\n")
    return _REFUSED


def _table(value: Any, columns: Sequence[str]) -> pa.Table:
    metadata: dict[str, Any]
    if isinstance(value, TensorBatch):
        state = value.state or {}
        batch = state.get("batch_dict")
        if not isinstance(batch, Mapping):
            raise UnsafePickleError("no batch_dict, so no SkyRL batch of a known version")
        rows = _rows_of_columns({name: _skyrl_array(batch.get(name)) for name in columns})
        metadata = {
            "kind": "tensor batch",
            "fields": sorted(map(str, batch)),
            "metadata": _plain(state.get("metadata")),
        }
    elif isinstance(value, Mapping) and isinstance(value.get("samples"), Sequence):
        rows = [dict(sample) for sample in value["samples"] if isinstance(sample, Mapping)]
        if len(rows) != len(value["samples"]):
            raise UnsafePickleError("`samples` that are not mappings")
        metadata = {"kind": "samples", "fields": sorted({str(name) for row in rows for name in row})}
        metadata |= {name: _plain(item) for name, item in value.items() if name not in ("samples", "dp_shards")}
    elif isinstance(value, Mapping) and isinstance(value.get("rollout_data"), Mapping):
        data = value["rollout_data"]
        rows = _rows_of_columns({name: data.get(name) for name in columns})
        metadata = {"kind": "rollout_data", "fields": sorted(map(str, data))}
        metadata |= {name: _plain(item) for name, item in value.items() if name != "rollout_data"}
        metadata["raw_reward"] = _plain(data.get("raw_reward"))
    else:
        raise UnsafePickleError(f"a {type(value).__name__} at the top, where a known dump has its rollouts")
    arrays = {name: _column([row.get(name) for row in rows], name) for name in columns}
    return pa.table(arrays).replace_schema_metadata({METADATA_KEY: json.dumps(metadata, default=str).encode()})


def _skyrl_array(value: Any) -> Any:
    """Return a tensor of SkyRL's `__getstate__` as an array [N, L]; any other value as `_array` does."""
    if isinstance(value, Mapping) and isinstance(value.get("data"), bytes):
        if "dtype" in value:
            return numpy_array(value["data"], str(value["dtype"])).reshape(tuple(value["shape"]))
        value = load_pt(io.BytesIO(value["data"]))  # a dtype that numpy lacks
    return _array(value)


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.array()
    return value.values if isinstance(value, Array) else value


def _rows_of_columns(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {name: _array(values) for name, values in columns.items()}
    known = {name: values for name, values in known.items() if isinstance(values, np.ndarray | list | tuple)}
    lengths = {name: len(values) for name, values in known.items() if np.ndim(_first(values)) or name in _OF_ROLLOUTS}
    count = max(lengths.values(), default=0)
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong:
        raise UnsafePickleError(f"columns of other lengths than {count} rollouts: {wrong}")
    return [{name: known[name][row] for name in lengths} for row in range(count)]


_OF_ROLLOUTS = frozenset({"response_lengths", "total_lengths", "sample_indices", "truncated"})


def _first(values: Any) -> Any:
    first = values[0] if len(values) else 0
    return first.array() if isinstance(first, Tensor) else first


def _column(values: list[Any], name: str) -> pa.Array:
    """Return a column: lists of numbers, numbers or texts; null for a value that is none of these."""
    converted = [_value(value) for value in values]
    lists = any(isinstance(value, np.ndarray) for value in converted)
    if lists:
        kept = [value if isinstance(value, np.ndarray) and value.ndim == 1 else None for value in converted]
        whole = all(value is None or value.dtype.kind in "iub" or not value.size for value in kept)
        element = np.int64 if whole else np.float64
        arrays = [None if value is None else value.astype(element) for value in kept]
        return pa.array(arrays, pa.list_(pa.from_numpy_dtype(element)))
    if any(isinstance(value, str) for value in converted):
        return pa.array([value if isinstance(value, str) else None for value in converted], pa.string())
    numbers = [value if isinstance(value, int | float) else None for value in converted]
    return pa.array(numbers, pa.float64() if any(isinstance(value, float) for value in numbers) else pa.int64())


def _value(value: Any) -> Any:
    value = _array(value)
    if isinstance(value, Mapping):
        return json.dumps(_plain(value), default=str)
    if isinstance(value, list | tuple):
        if all(isinstance(item, str) for item in value) and value:
            return json.dumps(list(value))
        try:
            value = np.asarray([item.item() if isinstance(item, np.generic) else item for item in value])
        except (ValueError, TypeError, OverflowError):
            return None
    if isinstance(value, np.ndarray):
        return value if value.dtype.kind in "iufb" else None
    if isinstance(value, bool | np.bool_):
        return int(value)
    return value.item() if isinstance(value, np.generic) else value


def _plain(value: Any, depth: int = 0) -> Any:
    """Return the parts of a value that JSON can hold: numbers, texts, lists and mappings, without anything else."""
    value = _array(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping) and depth < 4:
        return {str(name): _plain(item, depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple) and depth < 4:
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    return value if isinstance(value, int | float | bool) or value is None else None


if __name__ == "__main__":
    sys.exit(main())
