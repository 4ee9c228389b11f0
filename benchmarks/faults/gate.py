"""A gate in front of the service: open, closed, or letting requests in and no answers out."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

Mode = Literal["open", "closed", "no answers"]


class Gate:
    """A TCP port that forwards to another one; the mode may change at any time. Closed with `close`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._mode: Mode = "open"
        self._connections: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, mode: Mode) -> None:
        """Change the mode, also for the connections that are open."""
        self._mode = mode
        if mode == "closed":
            for connection in list(self._connections):
                _shut(connection)

    def close(self) -> None:
        """Accept nothing any more."""
        self.set("closed")
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                if self._mode == "closed":
                    connection.close()
                    continue
                with contextlib.suppress(OSError):
                    other = socket.create_connection(("127.0.0.1", self._target))
                    self._connections |= {connection, other}
                    for ends in ((connection, other, False), (other, connection, True)):
                        threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if answers and self._mode == "no answers":
                    break
                target.sendall(data)
        for end in (source, target):
            _shut(end)
            self._connections.discard(end)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
