"""Start the service on its embedded default. One demo runs per data folder."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from examples.demo.children import Child
from examples.demo.errors import DemoError
from examples.tiny_rl.tokenizer import write_tokenizer

HOST = "127.0.0.1"
USUAL_PORT = 8765
START_SECONDS = 120.0


@contextlib.contextmanager
def only_demo_of(data: Path) -> Iterator[None]:
    """Hold the data folder's lock. Raises DemoError if another demo holds it."""
    data.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_lock(data / "demo.lock"))
        except BlockingIOError as error:
            raise DemoError(
                f"another demo is running on {data}: end it with Ctrl-C, or give --data another folder"
            ) from error
        yield


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """Yield the usual port, or any free one if it is taken, also by a demo whose service is still starting."""
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_lock(Path(tempfile.gettempdir()) / f"foreshock-demo-{USUAL_PORT}.lock"))
        except OSError:  # held by another demo, or another user's file
            yield free_port(0)
        else:
            yield free_port(USUAL_PORT, 0)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the file's lock. Raises BlockingIOError if another process holds it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def tokenizers_of(data: Path) -> Path:
    """Return the folder of tokenizers in a demo's data."""
    return data / "tokenizers"


@contextlib.contextmanager
def running_service(data: Path) -> Iterator[tuple[Child, str]]:
    """Yield a ready service and its address. Raises DemoError with the end of its log if it does not start."""
    with own_port() as port:
        url = f"http://{HOST}:{port}"
        write_tokenizer(tokenizers_of(data))
        environment = {
            "FORESHOCK_HOST": HOST,
            "FORESHOCK_PORT": str(port),
            "FORESHOCK_DATABASE_URL": f"sqlite:///{data}/foreshock.db",
            "FORESHOCK_STORE_URL": str(data / "tokens"),
            "FORESHOCK_TOKENIZERS_FOLDER": str(tokenizers_of(data)),
            # The demo's steps are small, and compiling would take most of its first minute.
            "FORESHOCK_TOKEN_PASS": "numpy",
        }
        with Child("service", ["serve"], environment, data / "service.log") as child:
            _wait_until_ready(child, url)
            yield child, url


def free_port(*wanted: int) -> int:
    """Return the first free port of `wanted`; 0 stands for any."""
    for port in wanted:
        with socket.socket() as probe, contextlib.suppress(OSError):
            # The service binds with the same option: a port in TIME_WAIT is free for it.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return int(probe.getsockname()[1])
    raise DemoError(f"there is no free port on {HOST}")


def _wait_until_ready(child: Child, url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    answer = "nothing yet"
    while time.monotonic() < deadline:
        child.require_running()
        with contextlib.suppress(httpx.HTTPError):
            response = httpx.get(f"{url}/readyz", timeout=5.0)
            if response.is_success:
                return
            answer = response.text
        time.sleep(0.1)
    raise DemoError(f"the service at {url} is not ready after {START_SECONDS:.0f} s: {answer}{child.log_tail()}")
