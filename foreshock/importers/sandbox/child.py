"""The process that unpickles: a file on stdin, a table as Arrow IPC on stdout.

`python -m foreshock.importers.sandbox.child FORMAT MEMORY_BYTES CPU_SECONDS COLUMN…` writes one row per rollout with
the named columns, and the dump's own numbers as JSON in the schema's metadata. It ends with status 3 and one line on
stderr if the file cannot be read.

`lock_down` gives up everything but reading open files, computing, and writing to open pipes:

RLIMIT_NOFILE   no further file or socket can be opened
RLIMIT_FSIZE    no byte can be written to a file
RLIMIT_AS       memory
RLIMIT_CPU      seconds of computing
PDEATHSIG       it ends with the process that started it, on Linux
no_new_privs    no program with more rights can be started
seccomp         on Linux x86-64: system calls other than those below fail with EPERM, so that no file is opened or
                removed, no socket or process is made and no other process is reached, also by root
"""

import ctypes
import errno
import io
import json
import os
import platform
import resource
import signal
import struct
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from foreshock.importers.sandbox import METADATA_KEY
from foreshock.importers.sandbox.unpickling import (
    Array,
    Tensor,
    TensorBatch,
    UnsafePickleError,
    load_pickle,
    load_pt,
    numpy_array,
)

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_PR_SET_SECCOMP = 22
_SECCOMP_MODE_FILTER = 2
_AUDIT_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_ALLOW = 0x7FFF0000
_FAIL = 0x00050000
_KILL = 0x80000000

# Numbers of arch/x86/entry/syscalls/syscall_64.tbl: memory, threads that exist, clocks, open files, the end.
_ALLOWED = {
    "read": 0, "write": 1, "close": 3, "fstat": 5, "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11,
    "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17, "writev": 20,
    "sched_yield": 24, "mremap": 25, "madvise": 28, "nanosleep": 35, "getpid": 39, "exit": 60, "sigaltstack": 131,
    "gettid": 186, "futex": 202, "sched_getaffinity": 204, "restart_syscall": 219, "clock_gettime": 228,
    "clock_nanosleep": 230, "exit_group": 231, "getrandom": 318, "rseq": 334,
}  # fmt: skip


def lock_down(*, memory_bytes: int, cpu_seconds: int) -> None:
    """Restrict this process for the rest of its life. Raises OSError if a restriction is refused."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    if sys.platform != "linux":
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    libc = ctypes.CDLL(None, use_errno=True)
    # A killed import cannot stop its child.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs was refused")
    if platform.machine() == "x86_64":
        _filter_system_calls(libc)


def _filter_system_calls(libc: ctypes.CDLL) -> None:
    program = _filter()
    buffer = ctypes.create_string_buffer(program)

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    described = Program(len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(described), 0, 0) != 0:
        code = ctypes.get_errno()
        # A kernel without seccomp: the limits and the unpickler remain.
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise OSError(code, f"the filter of system calls was refused: {os.strerror(code)}")


def _filter() -> bytes:
    """Return the BPF program: instructions of (code, jump if true, jump if false, constant)."""
    load, equal, at_least, ends = 0x20, 0x15, 0x35, 0x06
    numbers = sorted(_ALLOWED.values())
    body = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, _AUDIT_ARCH_X86_64),
        (ends, 0, 0, _KILL),
        (load, 0, 0, 0),  # the number of the call
        (at_least, len(numbers), 0, _X32_BIT),
    ]
    body += [(equal, len(numbers) - index, 0, number) for index, number in enumerate(numbers)]
    body += [(ends, 0, 0, _FAIL | errno.EPERM), (ends, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in body)


_REFUSED = 3
_LONGEST_TEXT = 200


def main() -> int:
    """Restrict the process, read the file, and write the table."""
    kind, memory, seconds, *columns = sys.argv[1:]
    output = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
    os.dup2(2, 1)
    _warm_up()
    lock_down(memory_bytes=int(memory), cpu_seconds=int(seconds))
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


def _warm_up() -> None:
    """Load what Arrow and numpy load at first use, while files can still be opened."""
    table = pa.table({"a": pa.array([[1.0]], pa.list_(pa.float64())), "b": pa.array([1]), "c": pa.array(["x"])})
    with pa.ipc.new_stream(io.BytesIO(), table.schema) as stream:
        stream.write_table(table)
    np.lib.stride_tricks.as_strided(np.zeros(1), (1,), (8,)).copy()
    "x".encode("latin1").decode("cp437")  # the codec of names in zip archives


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
    # Skip the clean-up of Python and Arrow, which uses more system calls.
    status = main()
    os._exit(status)
