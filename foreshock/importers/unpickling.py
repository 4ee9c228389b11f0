"""Unpickle tensors, arrays and plain data only, in a process of its own. No function that a pickle names is called.

`python -m foreshock.importers.unpickling FORMAT MEMORY_BYTES CPU_SECONDS COLUMN…` reads a file on stdin and writes JSON
lines: the dump's own numbers, then the named columns of each rollout. It ends with status 3 and one line on stderr if
the file cannot be read. The limits keep a damaged file from taking the machine.

`Unpickler.find_class` is the only way from a pickle to code. It knows the few names below and returns replacements
written here, also for rebuild functions of torch and numpy that would do more than needed. Instances of the frameworks'
own classes become an `Opaque`, which keeps nothing. Any other name is refused.

Tensors become numpy arrays without torch: a `.pt` file is a zip archive with the pickle and one file per storage.
bfloat16, which numpy lacks, becomes float32.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import resource
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

_REFUSED = 3
_LONGEST_REASON = 200

# Classes of these packages are data of the frameworks that Foreshock does not need, such as the images of a prompt.
_OPAQUE_PACKAGES = frozenset({"slime", "miles", "skyrl", "skyrl_train", "PIL", "pathlib", "datetime", "uuid", "enum"})
_STORAGES = {
    "DoubleStorage": "<f8",
    "FloatStorage": "<f4",
    "HalfStorage": "<f2",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "<i8",
    "IntStorage": "<i4",
    "ShortStorage": "<i2",
    "CharStorage": "<i1",
    "ByteStorage": "<u1",
    "BoolStorage": "?",
}
_TENSOR_BATCHES = frozenset({"TensorBatch", "TrainingInputBatch", "TrainingOutputBatch"})
_LARGEST_STORAGE_BYTES = 8 << 30


class UnsafePickleError(Exception):
    """The pickle names something that is not plain data."""


class Opaque:
    """An object of a framework that is not read. Building it does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Opaque:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class TensorBatch(dict[str, Any]):
    """SkyRL's TensorBatch: `state` is what its `__getstate__` wrote."""

    state: dict[str, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        self.state = state if isinstance(state, dict) else None


class Storage:
    """A storage of a .pt file; `read` is called only for tensors that are rebuilt."""

    def __init__(self, dtype: str, read: Callable[[], bytes]) -> None:
        self._dtype = dtype
        self._read = read

    def values(self) -> NDArray[Any]:
        return numpy_array(self._read(), self._dtype)


class Tensor:
    """A tensor that was not rebuilt yet."""

    def __init__(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> None:
        if not isinstance(storage, Storage):
            raise UnsafePickleError("a tensor without a storage")
        self._storage = storage
        self._offset = int(offset)
        self._shape = tuple(int(size) for size in shape)
        self._stride = tuple(int(step) for step in stride)

    def array(self) -> NDArray[Any]:
        """Return the values as an array. Raises UnsafePickleError if they are not inside the storage."""
        values = self._storage.values()
        if len(self._shape) != len(self._stride) or min((*self._shape, *self._stride, self._offset), default=0) < 0:
            raise UnsafePickleError("a tensor with an invalid shape")
        last = self._offset + sum((size - 1) * step for size, step in zip(self._shape, self._stride, strict=True))
        if 0 not in self._shape and last >= values.size:
            raise UnsafePickleError("a tensor that is larger than its storage")
        if 0 in self._shape:
            return np.zeros(self._shape, values.dtype)
        strides = tuple(step * values.itemsize for step in self._stride)
        return np.lib.stride_tricks.as_strided(values[self._offset :], self._shape, strides).copy()


def numpy_array(data: bytes, dtype: str) -> NDArray[Any]:
    """Return bytes as a flat array of `dtype`, a name of numpy or "bfloat16". Raises UnsafePickleError."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    kind = np.dtype(dtype)
    if kind.hasobject:
        raise UnsafePickleError(f"an array of {dtype}")
    return np.frombuffer(data, kind)


def load_pt(file: IO[bytes]) -> Any:
    """Return the object of a file that `torch.save` wrote. Raises UnsafePickleError, pickle and zip errors."""
    archive = zipfile.ZipFile(file)
    names = {name.partition("/")[2]: name for name in archive.namelist()}
    if "data.pkl" not in names:
        raise UnsafePickleError("a zip archive without data.pkl, so not written by torch.save")
    if "byteorder" in names and archive.read(names["byteorder"]) != b"little":
        raise UnsafePickleError("tensors in big-endian order")

    def storage(identifier: Any) -> Storage:
        kind, dtype, key = identifier[:3]
        name = names.get(f"data/{key}")
        if kind != "storage" or not isinstance(dtype, StorageType) or name is None:
            raise UnsafePickleError("a tensor without its storage")
        if archive.getinfo(name).file_size > _LARGEST_STORAGE_BYTES:
            raise UnsafePickleError("a tensor above 8 GiB")
        return Storage(dtype.dtype, lambda: archive.read(name))

    with archive.open(names["data.pkl"]) as pickled:
        return _Unpickler(io.BytesIO(pickled.read()), storage).load()


def load_pickle(file: IO[bytes]) -> Any:
    """Return the object of a pickle. Raises UnsafePickleError and pickle errors."""
    return _Unpickler(file, None).load()


class StorageType:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], storage: Callable[[Any], Storage] | None) -> None:
        super().__init__(file)
        self._storage = storage

    def persistent_load(self, pid: Any) -> Any:
        if self._storage is None:
            raise UnsafePickleError("a reference to another file")
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and name in _STORAGES:
            return StorageType(_STORAGES[name])
        package = module.partition(".")[0]
        if package in ("skyrl", "skyrl_train") and name in _TENSOR_BATCHES:
            return TensorBatch
        if package in ("skyrl", "skyrl_train") and name == "_rebuild_tensor_batch":
            return _tensor_batch
        if package in _OPAQUE_PACKAGES:
            return Opaque
        raise UnsafePickleError(f"the name {module}.{name}, which is no plain data")


def _tensor_batch(_: Any, state: Any) -> TensorBatch:
    batch = TensorBatch()
    batch.__setstate__(state)
    return batch


def _text(*values: Any) -> str:
    return "".join(str(value) for value in values)


def _bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "utf-8"):
        raise UnsafePickleError("an encoded text that is none")
    return text.encode(encoding)


class Array:
    """A numpy array that `BUILD` fills: numpy's own `__setstate__` would also accept objects."""

    values: NDArray[Any] | None = None

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, data = state
        if not isinstance(data, bytes) or not isinstance(dtype, _Dtype):
            raise UnsafePickleError("an array of objects")
        self.values = _shaped(numpy_array(data, dtype.text), shape, fortran=bool(fortran))


class _Dtype:
    """The dtype of a numpy array or scalar: a kind and a size."""

    def __init__(self, text: Any, *_: Any) -> None:
        if isinstance(text, bytes):
            text = text.decode("ascii", "replace")
        if not isinstance(text, str) or text.lstrip("<|=") not in _NUMPY_KINDS:
            raise UnsafePickleError(f"an array of {text!r}")
        self.text = text

    def __setstate__(self, state: Any) -> None:
        if state[1] in (">", b">"):
            raise UnsafePickleError("an array in big-endian order")


_NUMPY_KINDS = frozenset({"f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1"})


def _scalar(dtype: Any, data: Any = b"") -> Any:
    if not isinstance(dtype, _Dtype) or not isinstance(data, bytes):
        raise UnsafePickleError("a numpy scalar of objects")
    return numpy_array(data, dtype.text)[0].item()


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any) -> NDArray[Any]:
    if not isinstance(dtype, _Dtype):
        raise UnsafePickleError("an array of objects")
    return _shaped(numpy_array(bytes(data), dtype.text), shape, fortran=order == "F")


def _shaped(values: NDArray[Any], shape: Any, *, fortran: bool) -> NDArray[Any]:
    sizes = tuple(int(size) for size in shape)
    return values.reshape(sizes, order="F") if fortran else values.reshape(sizes)


_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("_codecs", "encode"): _bytes,
    ("builtins", "bytearray"): bytearray,
    ("builtins", "complex"): complex,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("torch._utils", "_rebuild_tensor"): Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): Tensor,
    ("torch._utils", "_rebuild_tensor_v3"): Tensor,
    ("torch", "device"): _text,
    ("torch", "Size"): tuple,
    ("numpy", "ndarray"): Opaque,
    ("numpy", "dtype"): _Dtype,
} | {
    (f"numpy.{package}.{module}", name): replacement
    for package in ("core", "_core")
    for module, name, replacement in (
        ("multiarray", "_reconstruct", Array),
        ("multiarray", "scalar", _scalar),
        ("numeric", "_frombuffer", _from_buffer),
    )
}


def main() -> int:
    """Set the limits, read the file, and write the rollouts."""
    kind, memory, seconds, *columns = sys.argv[1:]
    output = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
    try:
        with open(0, "rb", closefd=False) as file:
            lines = json_lines(load_pt(file) if kind == "pt" else load_pickle(file), columns)
    except UnsafePickleError as error:
        return _refuse(f"it has {error}; only tensors, arrays and plain data are read")
    except MemoryError:
        return _refuse(f"it needs more than {int(memory) >> 30} GiB of memory")
    except zipfile.BadZipFile:
        return _refuse("it is no complete file of torch.save: half-written, or damaged")
    except RecursionError:
        return _refuse("its values are nested too deeply")
    except Exception as error:
        return _refuse(f"it is damaged: {type(error).__name__}: {str(error)[:_LONGEST_REASON]}")
    output.writelines(line.encode() + b"\n" for line in lines)
    output.flush()
    return 0


def _refuse(reason: str) -> int:
    os.write(2, " ".join(reason.split()).encode(errors="replace") + b"\n")
    return _REFUSED


def json_lines(value: Any, columns: Sequence[str]) -> list[str]:
    """Return the dump's own numbers, then the named columns of each rollout, as JSON. Raises UnsafePickleError."""
    rows: Sequence[Any]
    if isinstance(value, TensorBatch):
        state = value.state or {}
        batch = state.get("batch_dict")
        if not isinstance(batch, Mapping):
            raise UnsafePickleError("no batch_dict, so no SkyRL batch of a known version")
        rows = _rows_of({name: _skyrl_array(batch.get(name)) for name in columns})
        head = {"kind": "tensor batch", "fields": sorted(map(str, batch)), "metadata": state.get("metadata")}
    elif isinstance(value, Mapping) and isinstance(value.get("samples"), Sequence):
        rows = value["samples"]
        if not all(isinstance(row, Mapping) for row in rows):
            raise UnsafePickleError("`samples` that are not mappings")
        head = {"kind": "samples", "fields": sorted({str(name) for row in rows for name in row})}
    elif isinstance(value, Mapping) and isinstance(value.get("rollout_data"), Mapping):
        data = value["rollout_data"]
        # The rewards are of the whole batch, not of these rollouts.
        rows = _rows_of({name: _plain(data.get(name)) for name in columns if name != "raw_reward"})
        head = {"kind": "rollout_data", "fields": sorted(map(str, data))}
    else:
        raise UnsafePickleError(f"a {type(value).__name__} at the top, where a known dump has its rollouts")
    if isinstance(value, Mapping) and not isinstance(value, TensorBatch):
        rewards = value.get("rollout_data", value).get("raw_reward")
        head |= {"rollout_id": value.get("rollout_id"), "cp_size": value.get("cp_size"), "raw_reward": rewards}
    found = [{name: row[name] for name in columns if row.get(name) is not None} for row in rows]
    return [json.dumps(each, default=_plain, skipkeys=True) for each in (head, *found)]


def _skyrl_array(value: Any) -> Any:
    """Return a tensor of SkyRL's `__getstate__` as an array [N, L]; any other value as `_plain` does."""
    if isinstance(value, Mapping) and isinstance(value.get("data"), bytes):
        if "dtype" in value:
            return numpy_array(value["data"], str(value["dtype"])).reshape(tuple(value["shape"]))
        value = load_pt(io.BytesIO(value["data"]))  # a dtype that numpy lacks
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a list for a tensor or an array, the number for a scalar; lists stay, anything else is None."""
    value = value.array() if isinstance(value, Tensor) else value.values if isinstance(value, Array) else value
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist() if value.dtype.kind in "iufb" else None
    return value if isinstance(value, list | tuple) else None


def _rows_of(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    known = {name: values for name, values in columns.items() if values is not None}
    lengths = {name: len(values) for name, values in known.items()}
    if len(set(lengths.values())) > 1:
        raise UnsafePickleError(f"columns that differ in their number of rollouts: {lengths}")
    return [dict(zip(known, row, strict=True)) for row in zip(*known.values(), strict=True)]


if __name__ == "__main__":
    sys.exit(main())
