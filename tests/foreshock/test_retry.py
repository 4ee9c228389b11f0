"""Retry with backoff: bounds of the delays, and when it gives up."""

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreshock import retry as retry_module
from foreshock.errors import Rejected, ServiceUnavailable
from foreshock.retry import LONGEST_RETRY_AFTER_SECONDS, Backoff, retry, sleep_until_stopped

SECONDS = st.floats(1e-3, 1e3)


class Clock:
    """Time that only advances by waiting, in the place of the module's `time`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False

    def module(self) -> SimpleNamespace:
        return SimpleNamespace(monotonic=lambda: self.now, sleep=self.wait)


class Flaky:
    """Fails `failures` times with `error`, then returns 42."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or ServiceUnavailable("away")
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return 42


def is_unavailable(error: Exception) -> bool:
    return isinstance(error, ServiceUnavailable)


@given(first=SECONDS, longest=SECONDS, failures=st.integers(0, 5000), retry_after=st.none() | st.floats(-10, 1e6))
def test_delay_is_jittered_below_a_cap(first: float, longest: float, failures: int, retry_after: float | None) -> None:
    first, longest = sorted((first, longest))
    asked = min(max(retry_after or 0.0, 0.0), LONGEST_RETRY_AFTER_SECONDS)
    ceiling = min(longest, first * 2.0 ** min(failures, 60))
    for pick in (min, max):
        backoff = Backoff(first, longest, failures, uniform=pick)
        assert backoff.next_delay(retry_after) == asked + (0.0 if pick is min else ceiling)
        assert backoff.failures == failures + 1
    assert asked <= Backoff(first, longest, failures).next_delay(retry_after) <= asked + ceiling


def test_jitter_spreads_over_the_whole_interval() -> None:
    delays = [Backoff(1.0, 1.0).next_delay() for _ in range(1000)]
    assert min(delays) < 0.1
    assert max(delays) > 0.9


def test_reset_starts_again_at_the_first_delay() -> None:
    backoff = Backoff(1.0, 64.0, uniform=max)
    assert [backoff.next_delay() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 64, 64]
    backoff.reset()
    assert backoff.next_delay() == 1


@pytest.mark.parametrize(("first", "longest"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (float("nan"), 1.0)])
def test_invalid_backoff_is_refused(first: float, longest: float) -> None:
    with pytest.raises(ValueError, match="0 < first_seconds <= longest_seconds, got first_seconds="):
        Backoff(first, longest)


@given(failures=st.integers(0, 20), max_attempts=st.none() | st.integers(1, 20))
def test_result_comes_after_as_many_waits_as_failures(failures: int, max_attempts: int | None) -> None:
    clock, call = Clock(), Flaky(failures)
    retries: list[float] = []

    def run() -> int:
        return retry(
            call, Backoff(1.0, 4.0), is_retryable=is_unavailable, wait=clock.wait, max_attempts=max_attempts,
            on_retry=lambda error, delay: retries.append(delay),
        )  # fmt: skip

    if max_attempts is None or failures < max_attempts:
        assert run() == 42
        assert len(clock.waits) == failures
    else:
        with pytest.raises(ServiceUnavailable):
            run()
        assert call.calls == max_attempts
    assert retries == clock.waits


@given(deadline=st.floats(0, 100), retry_after=st.none() | st.floats(0, 30))
def test_waits_never_exceed_the_deadline(deadline: float, retry_after: float | None) -> None:
    clock, call = Clock(), Flaky(10_000, ServiceUnavailable("away", retry_after_seconds=retry_after))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retry_module, "time", clock.module())
        with pytest.raises(ServiceUnavailable):
            retry(call, Backoff(1.0, 8.0), is_retryable=is_unavailable, deadline_seconds=deadline)
    assert clock.now <= deadline
    assert all(wait >= (retry_after or 0.0) for wait in clock.waits)


def test_error_that_is_not_retryable_is_raised_at_once() -> None:
    clock, call = Clock(), Flaky(1, Rejected("no"))
    with pytest.raises(Rejected):
        retry(call, Backoff(1.0, 4.0), is_retryable=is_unavailable, wait=clock.wait)
    assert (call.calls, clock.waits) == (1, [])


def test_setting_the_event_ends_a_wait_with_the_last_error() -> None:
    stopped, call = threading.Event(), Flaky(10_000)
    threading.Timer(0.05, stopped.set).start()
    started = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="away"):
        retry(call, Backoff(60.0, 60.0, uniform=max), is_retryable=is_unavailable, wait=stopped.wait)
    assert time.monotonic() - started < 30
    assert call.calls == 1


def test_polled_flag_ends_a_wait() -> None:
    stopped = threading.Event()
    threading.Timer(0.05, stopped.set).start()
    started = time.monotonic()
    assert sleep_until_stopped(stopped.is_set)(60.0)
    assert time.monotonic() - started < 30
    assert not sleep_until_stopped(lambda: False)(0.01)
