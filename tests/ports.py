"""Free loopback ports for servers that tests start."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a free port, reserved for the caller; connections to it are refused until it is used.

    It stays bound until the process ends: a server that binds with SO_REUSEADDR may listen on it, and the kernel gives
    it to no other socket.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", 0))
    port = int(holder.getsockname()[1])
    holder.detach()
    return port
