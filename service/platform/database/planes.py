"""Words in planes: the lowest byte of each, then the next one, as many as the largest word takes.

Small integers take a byte each, and the bytes of signs and exponents, which are alike, compress together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlaneReader", "Words", "words_in_planes"]

Words = NDArray[np.uint64]
_COUNT_BYTES = 3


def words_in_planes(words: Words) -> bytes:
    """Return the number of words, the number of planes, and the planes. Raises OverflowError beyond 2^24 words."""
    planes = -(-int(words.max(initial=0)).bit_length() // 8)
    of_words = words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :planes]
    return words.size.to_bytes(_COUNT_BYTES, "little") + bytes([planes]) + np.ascontiguousarray(of_words.T).tobytes()


class PlaneReader:
    """Reads what was written one after the other. Raises ValueError if bytes are missing."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        taken = self._data[self._position : self._position + count]
        if len(taken) < count:
            raise ValueError("the packed words are truncated")
        self._position += count
        return taken

    def bits(self, count: int) -> NDArray[np.int64]:
        """Return which of the next `count` bits are set."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(self.take(-(-count // 8)), np.uint8), count=count))

    def words(self) -> Words:
        """Return the words of `words_in_planes`."""
        count, planes = int.from_bytes(self.take(_COUNT_BYTES), "little"), self.take(1)[0]
        of_words = np.zeros((count, 8), np.uint8)
        of_words[:, :planes] = np.frombuffer(self.take(count * planes), np.uint8).reshape(planes, count).T
        return of_words.view("<u8").ravel().astype(np.uint64)
