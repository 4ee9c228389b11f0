"""Give up everything but reading open files, computing, and writing to open pipes.

RLIMIT_NOFILE   no further file or socket can be opened
RLIMIT_FSIZE    no byte can be written to a file
RLIMIT_AS       memory
RLIMIT_CPU      seconds of computing
no_new_privs    no program with more rights can be started
seccomp         on Linux x86-64: system calls other than those below fail with EPERM, so that no file is opened or
                removed, no socket or process is made and no other process is reached, also by root
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

__all__ = ["lock_down"]

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
