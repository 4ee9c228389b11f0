"""Tests of the hand-over to the background: its bounds, its waits, and its end."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from foreshock.client.deliveries import Delivery, Registration
from foreshock.client.hand_over import HandOver, Work

DELIVERY = Delivery("register", Registration(run={"project": "p", "key": "k"}, attempt={"key": "a"}))


def work(size: int) -> Work:
    return Work("something", size, lambda: DELIVERY)


@given(
    max_items=st.integers(1, 5),
    max_bytes=st.integers(1, 100),
    actions=st.lists(st.one_of(st.integers(0, 60), st.just("get"), st.just("release")), max_size=40),
)
def test_reserved_room_stays_within_bounds(max_items: int, max_bytes: int, actions: list[int | str]) -> None:
    queue = HandOver(max_items=max_items, max_bytes=max_bytes)
    waiting: list[Work] = []
    taken: list[Work] = []
    for action in actions:
        held = [*waiting, *taken]
        if isinstance(action, int):
            fits = len(held) < max_items and sum(item.size for item in held) + action <= max_bytes
            assert queue.reserve(action) == (fits or not held)
            if fits or not held:
                waiting.append(work(action))
                queue.put(waiting[-1])
        elif action == "get" and waiting:
            assert queue.get() is waiting[0]
            taken.append(waiting.pop(0))
        elif action == "release" and taken:
            queue.release(taken.pop().size)
        assert len(queue) == len(waiting) + len(taken)


def test_needed_item_exceeds_bounds() -> None:
    queue = HandOver(max_items=1, max_bytes=10)
    assert queue.reserve(10)
    assert not queue.reserve(0)
    assert queue.reserve(0, needed=True)


def test_closed_queue_accepts_no_work_and_hands_out_the_rest() -> None:
    queue = HandOver(max_items=3, max_bytes=10)
    assert queue.reserve(1)
    assert queue.reserve(1)
    first = work(1)
    queue.put(first)
    queue.close()
    assert not queue.reserve(1, block=True)
    assert queue.get() is first
    queue.release(first.size)
    # One item is still being copied: the queue does not end before its `put`.
    late = work(1)
    threading.Timer(0.1, queue.put, (late,)).start()
    assert queue.get() is late
    queue.release(late.size)
    assert queue.get() is None
