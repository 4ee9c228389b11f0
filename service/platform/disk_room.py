"""Room on the disks of the service, so that a full one can still be read, deleted from and purged.

Uploads are refused while little is left: deletions and retention write to the database before they free anything.
SQLite opens no database on a disk without any room, so that a file beside it is given up at such a start.
"""

import contextlib
import os
import shutil
from pathlib import Path

from foreshock_service.platform import problem
from foreshock_service.platform.database.engine import parse_database_url
from foreshock_service.platform.settings import Settings

_MOST_KEPT_BYTES = 16 << 20
_PART_KEPT = 16
_NEEDED_TO_OPEN = 1 << 20


def check_room(settings: Settings) -> None:
    """Raise StorageFull if an upload would take what deletions and retention need."""
    for folder in _folders(settings):
        if _free_and_kept(folder)[0] < _free_and_kept(folder)[1]:
            raise problem.StorageFull(
                "the disk is nearly full: nothing was stored; free space or extend it", headers={"Retry-After": "30"}
            )


def free_reserve(settings: Settings) -> None:
    """Give up the file that was kept beside a SQLite database, if its disk is full."""
    reserve = _reserve(settings)
    if reserve is not None and reserve.exists() and _free_and_kept(reserve.parent)[0] < _NEEDED_TO_OPEN:
        reserve.unlink()


def make_reserve(settings: Settings) -> None:
    """Keep a file beside a SQLite database, if its disk has room."""
    reserve = _reserve(settings)
    if reserve is None or reserve.exists():
        return
    free, kept = _free_and_kept(reserve.parent)
    if free > 4 * kept:
        with contextlib.suppress(OSError), open(reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, kept)


def _reserve(settings: Settings) -> Path | None:
    url = parse_database_url(settings.database_url)
    named = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return Path(f"{url.database}.reserve").absolute() if named else None


def _folders(settings: Settings) -> list[Path]:
    reserve = _reserve(settings)
    found = [settings.store_folder] if settings.store_is_folder else []
    return found if reserve is None else [*found, reserve.parent]


def _free_and_kept(folder: Path) -> tuple[int, int]:
    """Return the free bytes of a folder's disk, and those that uploads leave free: 16 MiB, of a small disk 1/16."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, min(_MOST_KEPT_BYTES, usage.total // _PART_KEPT)
