"""Small disks, full to the last byte."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def small_disk(size: int) -> Iterator[Path]:
    """Mount a tmpfs of `size` bytes (a multiple of 4,096) and yield its folder. Needs the rights of root.

    A file of it takes whole blocks of 4,096 bytes; names take none.
    """
    with tempfile.TemporaryDirectory(prefix="foreshock-disk-") as name:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", name], check=True)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "--lazy", name], check=True)


def fill(folder: Path) -> None:
    """Write a file that takes what is left of the disk of a folder."""
    try:
        with (folder / "filling").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
    except OSError:
        return
