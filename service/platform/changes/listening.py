"""Listen to the changes that other processes announce, on a PostgreSQL connection of this process's own.

PostgreSQL keeps no notification for a connection that is away, so after every connect any run may have changed. A
connection can be dead without an error (a machine that vanished, a pooler that drops LISTEN): the listener notifies
itself, and connects again if it does not hear that.
"""

from __future__ import annotations

import logging
import math
import secrets
import selectors
import socket
import threading
import time

import psycopg
from psycopg import sql
from sqlalchemy.engine import URL

from foreshock.retry import Backoff
from foreshock_service.platform.changes.announcing import CHANNEL, announce
from foreshock_service.platform.database.engine import parse_database_url

_CONNECT_SECONDS = 5
_HEARTBEAT_SECONDS = 15.0
_UNHEARD_SECONDS = 5.0
# How often the heartbeat is looked at.
_SLICE_SECONDS = 0.5
# How long `stop` waits for a thread that hangs.
_STOP_SECONDS = 1.0
_FIRST_RETRY_SECONDS = 0.2
_LONGEST_RETRY_SECONDS = 5.0

_logger = logging.getLogger(__name__)


class Listener:
    """A thread that announces in this process what the others announce; does nothing on SQLite, which has one process.

    `is_listening` tells whether notifications arrive; while they do not, the waiters read the state more often.
    """

    def __init__(self, database_url: str) -> None:
        self._url = parse_database_url(database_url)
        self._stopping = threading.Event()
        self._connects = 0
        # This process's own channel, for its heartbeats.
        self._own = f"{CHANNEL}_{secrets.token_hex(8)}"
        self._heard_at = -math.inf
        self._thread: threading.Thread | None = None
        # Closing it wakes the thread, which waits for its other end as for the database.
        self._waker: socket.socket | None = None

    @property
    def is_used(self) -> bool:
        """Return whether this database has other processes to listen to."""
        return self._url.get_backend_name() == "postgresql"

    @property
    def is_listening(self) -> bool:
        """Return whether notifications came through lately."""
        return time.monotonic() - self._heard_at < _HEARTBEAT_SECONDS + 2 * _UNHEARD_SECONDS

    @property
    def reconnects(self) -> int:
        """Return how often it connected again."""
        return max(0, self._connects - 1)

    def start(self) -> None:
        """Start the thread."""
        if self.is_used:
            self._waker, woken = socket.socketpair()
            self._thread = threading.Thread(target=self._loop, args=[woken], name="foreshock-listener", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; one that hangs on a frozen database is left behind."""
        self._stopping.set()
        if self._waker is not None:
            self._waker.close()
        if self._thread is not None:
            self._thread.join(timeout=_STOP_SECONDS)

    def _loop(self, woken: socket.socket) -> None:
        backoff = Backoff(_FIRST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS)
        with woken:
            while not self._stopping.is_set():
                self._connect(woken, backoff)
                self._heard_at = -math.inf
                self._stopping.wait(backoff.next_delay(None))

    def _connect(self, woken: socket.socket, backoff: Backoff) -> None:
        try:
            with (
                psycopg.connect(_conninfo(self._url), autocommit=True, connect_timeout=_CONNECT_SECONDS) as connection,
                selectors.DefaultSelector() as selector,
            ):
                selector.register(connection, selectors.EVENT_READ)
                selector.register(woken, selectors.EVENT_READ)
                self._listen(connection, selector, backoff)
        except (psycopg.Error, OSError) as error:
            if self.is_listening:
                _logger.warning("the connection that hears of changes ended (%s): connecting", type(error).__name__)

    def _listen(self, connection: psycopg.Connection, selector: selectors.BaseSelector, backoff: Backoff) -> None:
        for channel in (CHANNEL, self._own):
            connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._connects += 1
        announce(None)
        heard, sent_at = True, -math.inf
        while not self._stopping.is_set():
            now = time.monotonic()
            if not heard and now - sent_at > _UNHEARD_SECONDS:
                _logger.warning("changes of other processes are not heard: is there a pooler that drops LISTEN?")
                return
            if heard and now - sent_at >= _HEARTBEAT_SECONDS:
                connection.execute("SELECT pg_notify(%s, '')", (self._own,))
                heard, sent_at = False, now
            for notify in connection.notifies(timeout=0):
                if notify.channel == self._own:
                    heard, self._heard_at = True, time.monotonic()
                    backoff.reset()
                else:
                    # Also of this process's own changes, which are announced already: hearing one twice costs a query.
                    announce(notify.payload)
            selector.select(_SLICE_SECONDS)


def _conninfo(url: URL) -> str:
    """Return the libpq URL; a peer that vanished is noticed within half a minute."""
    options = {"keepalives_idle": "10", "keepalives_interval": "5", "keepalives_count": "3"}
    named = url.update_query_dict({"application_name": "foreshock-listener"} | options)
    return named.set(drivername="postgresql").render_as_string(hide_password=False)
