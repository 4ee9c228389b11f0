"""Changes that other processes announce are heard over PostgreSQL, also after the connection was lost."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator

import psycopg
import pytest
from sqlalchemy.orm import Session

from foreshock_service.platform.changes.announcing import CHANNEL, add_receiver, remove_receiver, wake_after_commit
from foreshock_service.platform.changes.listening import Listener
from foreshock_service.platform.database.session import Database

pytestmark = pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)


@pytest.fixture
def heard() -> Iterator[queue.Queue[str | None]]:
    """What this process hears."""
    received: queue.Queue[str | None] = queue.Queue()
    add_receiver(received.put)
    yield received
    remove_receiver(received.put)


@pytest.fixture
def listener(database_url: str, heard: queue.Queue[str | None]) -> Iterator[Listener]:
    """A listener that is connected."""
    listener = Listener(database_url)
    listener.start()
    # After a connect any run may have changed.
    assert heard.get(timeout=60) is None
    wait_until(lambda: listener.is_listening)
    yield listener
    listener.stop()


def wait_until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.02)


def notify(url: str, run_id: str) -> None:
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("SELECT pg_notify(%s, %s)", (CHANNEL, run_id))


def test_announcement_of_another_process_is_heard(
    database_url: str, listener: Listener, heard: queue.Queue[str | None]
) -> None:
    notify(database_url, "run_a")
    assert heard.get(timeout=10) == "run_a"


def test_committed_change_is_announced_to_the_others_once_and_a_rolled_back_one_is_not(
    database_url: str, database: Database
) -> None:
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute(f"LISTEN {CHANNEL}")
        with pytest.raises(ValueError, match="rolled back"):
            database.write(fail_after_announcing)
        database.write(announce_thrice)
        assert [each.payload for each in other.notifies(timeout=1)] == ["run_b"]


def announce_thrice(session: Session) -> None:
    for _ in range(3):
        wake_after_commit(session, "run_b")


def fail_after_announcing(session: Session) -> None:
    wake_after_commit(session, "run_never")
    raise ValueError("rolled back")


def test_listener_connects_again_and_says_that_anything_may_have_changed(
    database_url: str, listener: Listener, heard: queue.Queue[str | None]
) -> None:
    with psycopg.connect(database_url, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
                      ("foreshock-listener",))  # fmt: skip
    assert heard.get(timeout=60) is None
    assert listener.reconnects == 1
    wait_until(lambda: listener.is_listening)
    notify(database_url, "run_c")
    assert heard.get(timeout=10) == "run_c"


def test_listener_that_hears_nothing_stops_at_once(database_url: str) -> None:
    # It has just heard its heartbeat and looks at it again after half a second. The shortest of three: load delays one.
    assert min(seconds_to_stop(database_url) for _ in range(3)) < 0.25


def seconds_to_stop(database_url: str) -> float:
    listener = Listener(database_url)
    listener.start()
    wait_until(lambda: listener.is_listening)
    started = time.monotonic()
    listener.stop()
    return time.monotonic() - started
