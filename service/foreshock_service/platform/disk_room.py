"""Room that uploads leave on the disks.

Uploads are refused while the disks are nearly full, because deletions and retention write to the database before they
free space. SQLite opens no database on a full disk: so a reserve file beside it is deleted at such a start.
"""

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from foreshock_service.platform import problem
from foreshock_service.platform.database.engine import parse_database_url
from foreshock_service.platform.settings import Settings

_MOST_KEPT_BYTES = 16 << 20
_PART_KEPT = 16
_NEEDED_TO_OPEN = 1 << 20


def folders_to_watch(settings: Settings) -> list[Path]:
    """Return the local folders that uploads fill: the store's, and a SQLite database's."""
    reserve = _reserve(settings)
    folders = [settings.store_folder] if settings.store_is_folder else []
    return folders if reserve is None else [*folders, reserve.parent]


def check_room(folders: Sequence[Path]) -> None:
    """Raise StorageFull if one of these folders has only the room left that deletions and retention need."""
    for folder in folders:
        free, kept = _free_and_kept(folder)
        if free < kept:
            raise problem.StorageFull(
                "the disk is nearly full: nothing was stored; free space or extend it", headers={"Retry-After": "30"}
            )


def free_reserve(settings: Settings) -> None:
    reserve = _reserve(settings)
    if reserve is not None and reserve.exists() and _free_and_kept(reserve.parent)[0] < _NEEDED_TO_OPEN:
        reserve.unlink()


def make_reserve(settings: Settings) -> None:
    reserve = _reserve(settings)
    if reserve is None or reserve.exists():
        return
    free, kept = _free_and_kept(reserve.parent)
    if free > 4 * kept:
        with contextlib.suppress(OSError), open(reserve, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, kept)


def _reserve(settings: Settings) -> Path | None:
    url = parse_database_url(settings.database_url)
    return Path(f"{url.database}.reserve").absolute() if url.get_backend_name() == "sqlite" else None


def _free_and_kept(folder: Path) -> tuple[int, int]:
    """Return a disk's free bytes, and the bytes that uploads must leave free: 16 MiB, or 1/16 of a small disk."""
    while not folder.exists():
        folder = folder.parent
    usage = shutil.disk_usage(folder)
    return usage.free, min(_MOST_KEPT_BYTES, usage.total // _PART_KEPT)
