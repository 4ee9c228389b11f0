"""Start the service: check the settings, migrate the database, then run uvicorn."""

import contextlib
import errno
import gc
import json
import math
import resource
import signal
import socket
import sys
import threading
import time
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI
from sqlalchemy.orm import Session

from foreshock.errors import ConfigurationError
from foreshock.retry import Backoff, retry
from foreshock_service.platform import audit, logs, process, request_guards, security, uploads
from foreshock_service.platform.database import engine, opening
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.settings import Settings, load_settings
from foreshock_service.platform.store.tokens import open_store
from foreshock_service.watch.notifications.sending import check_targets
from foreshock_service.watch.rules import rules_of_settings

KEEP_ALIVE_SECONDS = 30
"""Idle connections are closed after this time. httpx keeps one for less, so the client closes it first."""

_READY_POLL_SECONDS = 0.5

_PORT_SECONDS = 2.0
"""How long a taken port is waited for: the processes of a killed service end, and free its port, a moment later."""

_ANSWER_SECONDS = 60
"""One of several processes that does not answer for so long is replaced. With uvicorn's default of 5 s, processes on a
busy machine are killed again and again while they start."""


def print_settings() -> None:
    """Print each setting that would be served with, secrets masked."""
    print("\n".join(f"{name}={value}" for name, value in load_settings().printable().items()))


def serve() -> None:
    """Serve until interrupted.

    Raises ConfigurationError for settings that contradict each other, for an invalid file of rules or target of
    notifications, and for a database or a store that is not usable.
    """
    settings = load_settings()
    check_processes(settings)
    rules_of_settings(settings)
    check_targets(settings.notifications)
    # The port first: a service that cannot have it must not make a database or a folder.
    with bound_socket(settings.host, settings.port) as bound:
        port: int = bound.getsockname()[1]
        print(f"Foreshock {version('foreshock')} starts with {opening.shown(settings.database_url)}", flush=True)
        uploads.free_reserve(settings)
        opening.prepare_database(settings.database_url)
        uploads.make_reserve(settings)
        with opening.only_service(settings.database_url):
            check_store(settings)
            with audit.on_stderr(settings.log_format):
                prepare_keys(settings)
            bound.close()
            _run(settings, port)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address, so that no other program takes it; it does not listen.

    Waits a moment for a port that is taken. Raises ConfigurationError if another program keeps it, or if this machine
    or user cannot have the address.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        retry(
            lambda: bound.bind(address),
            Backoff(first_seconds=0.1, longest_seconds=0.2),
            is_retryable=lambda error: isinstance(error, OSError) and error.errno == errno.EADDRINUSE,
            deadline_seconds=_PORT_SECONDS,
        )
    except OSError as error:
        bound.close()
        raise _cannot_listen(host, port, error) from None
    return bound


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigurationError:
    help_of = {
        errno.EADDRINUSE: f"another program listens on port {port}, perhaps another service: stop it, or take another "
        "port with --port or FORESHOCK_PORT",
        errno.EACCES: "this user may not have this port: take one above 1023 with --port or FORESHOCK_PORT",
    }
    advice = help_of.get(error.errno or 0, f"{error.strerror}: FORESHOCK_HOST must be an address of this machine")
    return ConfigurationError(f"cannot listen on {host}:{port}: {advice}")


def _run(settings: Settings, port: int) -> None:
    """Run uvicorn until a signal ends it, and end this process with status 0."""
    # Each long poll is an open connection; the usual soft limit is 1024 open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.Thread(target=_report_listening, args=(settings.host, port), daemon=True).start()
    # uvicorn raises the signal again once it has stopped, for the previous handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    uvicorn.run(
        "foreshock_service.serving:application",
        factory=True,
        host=settings.host,
        port=port,
        workers=settings.processes,
        log_config=logs.log_configuration(settings.log_format, settings.log_level),
        access_log=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
        timeout_worker_healthcheck=_ANSWER_SECONDS,
        **HTTP_OPTIONS,
    )


HTTP_OPTIONS: dict[str, Any] = {
    "http": request_guards.BoundedProtocol,
    # A request for a WebSocket is served as HTTP, so it passes every check.
    "ws": "none",
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    "server_header": False,
}
"""The options of uvicorn that concern HTTP."""


def _report_listening(host: str, port: int) -> None:
    """Print the address once a process of the service answers, with what it still waits for, and when it is ready."""
    waited_for: list[str] | None = None
    while waited_for != []:
        connection = HTTPConnection(host, port, timeout=_ANSWER_SECONDS)
        with contextlib.suppress(OSError, HTTPException, ValueError), contextlib.closing(connection):
            # This name is always allowed.
            connection.request("GET", "/readyz", headers={"Host": "localhost"})
            checks = json.load(connection.getresponse())["checks"]
            waits = [f"{name.replace('_', ' ')}: {state}" for name, state in checks.items() if state != "ok"]
            if waited_for is None:
                said = f", not ready yet ({'; '.join(waits)})" if waits else ""
                print(f"Foreshock listens on http://{host}:{port}{said}", flush=True)
            elif not waits:
                print("Foreshock is ready", flush=True)
            waited_for = waits
        time.sleep(0.05 if waited_for is None else _READY_POLL_SECONDS)


def application() -> FastAPI:
    """Return the application for the environment's settings; each uvicorn process makes one."""
    # Garbage collections during the imports take a sixth of the CPU time of the start, and find nothing.
    gc.disable()
    # Imported only here: it takes a second, which a refused start and the supervisor of several processes save.
    from foreshock_service.app import create_app

    process.end_with_parent()
    made = create_app(load_settings())
    process.spare_collections()
    gc.enable()
    return made


def check_processes(settings: Settings) -> None:
    if settings.processes > 1 and engine.parse_database_url(settings.database_url).get_backend_name() == "sqlite":
        raise ConfigurationError(
            f"FORESHOCK_PROCESSES={settings.processes} needs PostgreSQL (FORESHOCK_DATABASE_URL=postgresql://…): "
            "SQLite has one writer"
        )


def check_store(settings: Settings) -> None:
    """Raise ConfigurationError if the token store cannot be written; a full one still serves reads and deletions."""
    store = open_store(settings)
    try:
        store.check_writable()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"the token store {settings.store_url} is full: uploads wait until there is room", file=sys.stderr)
            return
        raise ConfigurationError(
            f"the token store {settings.store_url} cannot be written ({error.strerror or error}): give this user write "
            "access to it, or set FORESHOCK_STORE_URL to another place"
        ) from None


def prepare_keys(settings: Settings) -> None:
    """Store the bootstrap key, if one is set; raises ConfigurationError if an open port has no key."""
    database = Database(settings.database_url)
    try:
        if settings.bootstrap_key is not None:
            secret = settings.bootstrap_key.get_secret_value()

            def make(session: Session) -> None:
                # A secret that was rotated away must not become a key again.
                if not security.was_ever_a_secret(session, secret):
                    key = security.create_key(session, secret, "bootstrap", None, {security.Scope.ADMIN})
                    audit.record(session, security.SERVICE, "key.create", key.id, after=security.describe(key))

            database.write(make)
        with database.read() as session:
            guarded = security.keys_exist(session)
    finally:
        database.close()
    if not guarded and not settings.binds_loopback_only:
        raise ConfigurationError(
            f"FORESHOCK_HOST={settings.host} is open to other machines and there is no API key: "
            "make a key first (`foreshock keys create NAME`), or set FORESHOCK_BOOTSTRAP_KEY, or bind 127.0.0.1"
        )
