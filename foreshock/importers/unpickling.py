"""Unpickle tensors, arrays and plain data only. No function that a pickle names is ever called.

`Unpickler.find_class` is the only way from a pickle to code. It knows the few names below and returns replacements
written here, also for rebuild functions of torch and numpy that would do more than needed. Instances of the frameworks'
own classes become an `Opaque`, which keeps nothing. Any other name is refused.

Tensors become numpy arrays without torch: a `.pt` file is a zip archive with the pickle and one file per storage.
bfloat16, which numpy lacks, becomes float32.
"""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

METADATA_KEY = b"foreshock.dump"
"""The key of a dump's own numbers, as JSON, in the schema of the table that the process writes."""

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
        """Return all values, flat."""
        return numpy_array(self._read(), self._dtype)


class Tensor:
    """A tensor that was not rebuilt yet."""

    def __init__(self, storage: Any, offset: Any, shape: Any, stride: Any) -> None:
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
    """The type of a storage."""

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


def _tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    return Tensor(storage, offset, shape, stride)


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
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor,
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
