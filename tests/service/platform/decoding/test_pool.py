"""The pool of decoders survives the death of a decoder and reports it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from foreshock.errors import ConfigurationError
from foreshock.rollouts import decode_rollouts, encode_rollouts
from foreshock_service.platform.decoding.pool import DecoderDied, DecoderPool, DecodersBusy, Turns
from foreshock_service.platform.settings import Settings, load_settings
from foreshock_service.runs.shard_decoding import PRELOAD
from tests.service.platform.decoding.running import running_decoders
from tests.service.sending import make_batch
from tests.waiting import wait_until

Found = TypeVar("Found")
_MEBIBYTE = 1 << 20


def own_process() -> int:
    return os.getpid()


def die() -> None:
    """Kill this process, as the out-of-memory killer does."""
    os.kill(os.getpid(), signal.SIGKILL)


def allocate(size: int) -> int:
    return len(bytearray(size))


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def hang(seconds: float) -> None:
    time.sleep(seconds)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    """Two decoders with little memory and little time."""
    pool = DecoderPool(
        Settings(
            decode_processes=2, decode_memory_bytes=512 * _MEBIBYTE, decode_timeout_seconds=5.0, decode_queue=4,
            token_pass="numpy",
        ), PRELOAD)  # fmt: skip
    pool.warm_up()
    yield pool
    pool.close()


def test_decoders_import_no_web_framework_and_no_database() -> None:
    """Each would take half a second at every start of a decoder, and memory in each."""
    code = (
        "import importlib, sys; from foreshock_service.platform.decoding import worker;"
        f"[importlib.import_module(name) for name in {PRELOAD}];"
        "print(sorted({'fastapi', 'sqlalchemy', 'starlette', 'pydantic_settings'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert loaded.stdout == "[]\n"


def test_decoder_killed_while_it_starts_is_started_again() -> None:
    pool = DecoderPool(Settings(decode_processes=1, token_pass="numpy"), PRELOAD)
    try:
        pool.warm_up_in_background()
        started = wait_until(running_decoders)
        for process in started:
            process.kill()
        wait_until(lambda: pool.is_warm)
        assert pool.run(own_process) != os.getpid()
    finally:
        pool.close()


def test_other_bodies_are_decoded_when_a_body_kills_its_decoder(pool: DecoderPool) -> None:
    with ThreadPoolExecutor(4) as threads:
        killers = [threads.submit(pool.run, die) for _ in range(2)]
        others = [threads.submit(pool.run, allocate, 1000) for _ in range(2)]
        for killer in killers:
            with pytest.raises(DecoderDied) as caught:
                killer.result()
            assert caught.value.status == 413
        assert [other.result() for other in others] == [1000, 1000]


def test_memory_beyond_the_limit_is_refused_inside_the_decoder(pool: DecoderPool) -> None:
    assert pool.run(allocate, 64 * _MEBIBYTE) == 64 * _MEBIBYTE
    with pytest.raises(MemoryError):
        pool.run(allocate, 4096 * _MEBIBYTE)


@pytest.mark.slow
def test_hanging_task_is_killed_at_the_time_limit(pool: DecoderPool) -> None:
    started = time.monotonic()
    with pytest.raises(DecoderDied):
        pool.run(hang, 600.0)
    assert time.monotonic() - started < 60
    assert pool.run(own_process) != os.getpid()


def test_full_queue_is_answered_with_retry_after(tmp_path: Path) -> None:
    pool = DecoderPool(Settings(decode_processes=1, decode_queue=4, token_pass="numpy"), PRELOAD)
    may_end = tmp_path / "may end"

    def run() -> str:
        try:
            pool.run(wait_for_file, may_end)
        except DecodersBusy as error:
            # All other tasks are queued by now, and stay queued until this one was refused.
            may_end.touch()
            return f"busy, retry after {error.headers['Retry-After']}"
        return "done"

    try:
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(run) for _ in range(6)]
            outcomes = sorted(answer.result() for answer in answers)
    finally:
        may_end.touch()
        pool.close()
    assert outcomes == ["busy, retry after 1"] + ["done"] * 5


def count_tokens(body: bytes) -> int:
    return decode_rollouts(body).num_tokens


@pytest.mark.parametrize("mebibytes", [256, 1024])
def test_small_body_is_decoded_with_any_memory_that_may_be_set(mebibytes: int) -> None:
    batch = make_batch()
    pool = DecoderPool(Settings(decode_processes=1, decode_memory_bytes=mebibytes * _MEBIBYTE), PRELOAD)
    try:
        assert pool.run(count_tokens, encode_rollouts(batch)) == batch.num_tokens
    finally:
        pool.close()


def test_memory_that_no_table_fits_into_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK_DECODE_MEMORY_BYTES", str(128 * _MEBIBYTE))
    with pytest.raises(ConfigurationError, match=r"FORESHOCK_DECODE_MEMORY_BYTES.*268435456"):
        load_settings()


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


def test_whoever_waits_is_refused_once_it_is_closed() -> None:
    turns = Turns(["a decoder"])
    turns.take()
    threading.Timer(0.1, turns.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        turns.take("a")
