"""Decoders are given to keys in a fair order."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from foreshock_service.platform.decoding.turns import Turns


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def waiting(pool: ThreadPoolExecutor, turns: Turns[str], key: str | None) -> Future[str]:
    """Return the place that a thread will get, once it waits for it or has it."""
    before = len(turns._waiting)
    taken = pool.submit(turns.take, key)
    deadline = time.monotonic() + 60
    while not taken.done() and len(turns._waiting) == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.02)
    return taken


def test_key_that_used_least_is_next() -> None:
    turns = Turns(["a decoder"], Clock())
    turns.give(turns.take("heavy"), "heavy", 30.0)
    turns.give(turns.take("light"), "light", 0.1)
    place = turns.take("heavy")
    with ThreadPoolExecutor(4) as pool:
        heavy = [waiting(pool, turns, "heavy") for _ in range(2)]
        light = waiting(pool, turns, "light")
        turns.give(place, "heavy", 10.0)
        turns.give(light.result(60), "light", 0.1)
        turns.give(heavy[0].result(60), "heavy", 10.0)
        turns.give(heavy[1].result(60), "heavy", 10.0)


def test_last_decoder_is_left_to_the_other_key_that_is_active() -> None:
    turns = Turns(["first", "second"], clock := Clock())
    turns.give(turns.take("other"), "other", 0.1)
    place = turns.take("heavy")
    with ThreadPoolExecutor(4) as pool:
        heavy = waiting(pool, turns, "heavy")
        assert not heavy.done()
        turns.give(turns.take("other"), "other", 0.1)
        assert not heavy.done()
        turns.give(place, "heavy", 5.0)
        turns.give(heavy.result(60), "heavy", 5.0)
    # A key that is alone has every decoder, as before.
    clock.now = 1000.0
    assert {turns.take("heavy"), turns.take("heavy")} == {"first", "second"}


def test_old_use_is_forgotten() -> None:
    turns = Turns(["a decoder"], clock := Clock())
    turns.give(turns.take("a"), "a", 64.0)
    clock.now = 360.0
    assert turns._recent("a") == 1.0


def test_whoever_waits_is_refused_once_it_is_closed() -> None:
    turns = Turns(["a decoder"])
    turns.take()
    threading.Timer(0.1, turns.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        turns.take("a")
