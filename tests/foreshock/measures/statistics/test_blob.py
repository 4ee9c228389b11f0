"""Blobs: the header names each array as it is."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

from foreshock.measures.statistics.blob import pack, unpack


@pytest.mark.parametrize("dtype", ["<f8", "<i8", "<u8", "<i4", "<f4", ">f8"])
def test_header_names_the_stored_type_of_an_array(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    blob = pack("test", {"array": array})
    little = dtype.replace(">", "<")
    end = 8 + int.from_bytes(blob[4:8], "little")
    assert json.loads(blob[8:end])["arrays"] == {"array": [little, [2, 3]]}
    assert zlib.decompress(blob[end:]) == array.astype(little).tobytes()


def test_arrays_of_one_size_and_other_values_are_told_apart() -> None:
    expected = {"a": ("<f8", (3,)), "b": ("<i8", (None,))}
    for start in (0, 5):
        arrays = {"a": np.arange(3.0) + start, "b": np.arange(4) - start}
        found = unpack("test", pack("test", arrays), expected)
        assert all(np.array_equal(found[name], array) for name, array in arrays.items())
