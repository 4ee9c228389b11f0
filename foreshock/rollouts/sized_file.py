"""A file of known size that is read at positions: what Arrow needs of a file that is not on this machine's disk."""

from __future__ import annotations

import io

__all__ = ["SizedFile"]


class SizedFile(io.RawIOBase):
    """Base of such files: the position, and moving it. A subclass reads at `_position` and moves it on."""

    def __init__(self, size: int) -> None:
        self._size, self._position = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position
