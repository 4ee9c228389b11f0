"""Tests of the memory for copies: what is copied stays, and buffers are used again within their bound."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foreshock.client.copy_memory import CopyMemory


def test_copies_are_independent_of_the_arrays_and_of_each_other() -> None:
    buffer = CopyMemory(1 << 20).borrow(4096)
    arrays = [np.arange(7, dtype=np.uint8), np.arange(12.0).reshape(3, 4), np.arange(20)[::2], np.array(["a", None])]
    copies = [buffer.copy_of(array) for array in arrays]
    expected = [array.copy() for array in arrays]
    for array in arrays:
        array[...] = array.flat[0]
    for copy, wanted in zip(copies, expected, strict=True):
        assert copy.dtype == wanted.dtype
        assert np.array_equal(copy, wanted)


def test_array_beyond_the_capacity_is_copied_elsewhere() -> None:
    buffer = CopyMemory(1 << 20).borrow(100)
    small, large = buffer.copy_of(np.zeros(10)), buffer.copy_of(np.ones(1000))
    assert (small.sum(), large.sum()) == (0, 1000)


def test_prepared_buffer_is_borrowed_first_and_given_back() -> None:
    memory = CopyMemory(1 << 20)
    memory.prepare(5000)
    first, second = memory.borrow(4000), memory.borrow(4000)
    assert (first.capacity, second.capacity) == (5000, 5000)
    assert first is not second
    memory.give_back(first)
    assert memory.borrow(10) is first


@given(sizes=st.lists(st.integers(1, 60), max_size=20), bound=st.integers(0, 100))
def test_idle_memory_stays_within_its_bound(sizes: list[int], bound: int) -> None:
    memory = CopyMemory(bound)
    buffers = [memory.borrow(size) for size in sizes]
    for buffer in buffers:
        memory.give_back(buffer)
        assert sum(each.capacity for each in memory._idle) <= bound
