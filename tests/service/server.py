"""A real uvicorn in a thread of the test process."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType

import uvicorn
from fastapi import FastAPI

from foreshock_service.serving import HTTP_OPTIONS

# A client makes one of its own else, and reads all certificates of the machine: 40 ms for each test.
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Server(uvicorn.Server):
    """A server that ends at once when it is told to, instead of looking ten times a second.

    Hundreds of tests end one.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def __init__(self, config: uvicorn.Config, begin_to_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._begin_to_stop = begin_to_stop
        self._told = asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        waiting = {asyncio.create_task(super().main_loop()), asyncio.create_task(self._told.wait())}
        _, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in others:
            task.cancel()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, without its pauses of a tenth of a second."""
        for server in self.servers:
            server.close()
        for listening in sockets or []:
            listening.close()
        # As the handler of signals does, which is for the main thread only.
        self._begin_to_stop()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        while self.server_state.connections or self.server_state.tasks:
            await asyncio.sleep(0.005)
        for server in self.servers:
            await server.wait_closed()
        await self.lifespan.shutdown()

    def end(self) -> None:
        """Begin to end; from any thread."""
        self.should_exit = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)


class RunningServer:
    """Server of an application on a loopback port (0: a free one), for the length of a `with` block."""

    def __init__(self, app: FastAPI, port: int = 0) -> None:
        self.app = app
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server = _Server(
            uvicorn.Config(app, log_level="warning", lifespan="on", **HTTP_OPTIONS), lambda: app.state.begin_to_stop()
        )
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]})

    def __enter__(self) -> RunningServer:
        self._thread.start()
        deadline = time.monotonic() + 240
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.end()
        self._thread.join()
        self._socket.close()
