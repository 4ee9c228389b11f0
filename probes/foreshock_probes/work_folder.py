"""The folder of a worker's files: rollouts of the job, scores, logs of engines.

A process removes its folder when it ends. A killed process cannot, so the next worker of the same user on this machine
removes the folder: a folder belongs to a living process only as long as its lock is held.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "foreshock-worker-"
# A folder younger than this may not be locked yet.
_YOUNG_SECONDS = 60.0


@contextmanager
def work_folder() -> Iterator[Path]:
    """Remove the folders of killed processes, and make a folder for the time of the context."""
    remove_left_folders()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as name:
        folder = Path(name)
        with contextlib.ExitStack() as stack:
            # On a file system without locks this fails, but then no worker removes folders either.
            with contextlib.suppress(OSError):
                stack.enter_context(_locked(folder))
            yield folder


def remove_left_folders() -> None:
    """Remove the folders of this user's ended processes. Ignores folders that it cannot remove."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if entry.name.startswith(PREFIX) and entry.is_dir(follow_symlinks=False):
                    _remove_if_left(Path(entry.path), entry.stat(follow_symlinks=False))


def _remove_if_left(folder: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or time.time() - status.st_mtime < _YOUNG_SECONDS:
        return
    with _locked(folder):
        shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
