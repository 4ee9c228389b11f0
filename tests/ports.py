"""Ports of the loopback for what tests start: free, and given to nobody else while the tests run."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port where nobody listens, and that nobody but who is told its number gets: connections to it are refused.

    It stays bound to the end of the process: a server that binds with SO_REUSEADDR, as all do, may listen on it, and
    the kernel gives it neither to whoever asks for any port nor to outgoing connections.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    holder.detach()
    return port
