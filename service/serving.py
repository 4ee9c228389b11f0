"""Start the service: print and check the settings, migrate the database, then run uvicorn."""

from __future__ import annotations

import errno
import math
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI
from sqlalchemy.orm import Session
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from foreshock.errors import ConfigurationError
from foreshock.retry import Backoff, retry
from foreshock_service.platform.audit.service import BY_SERVICE, record
from foreshock_service.platform.connections import PROTOCOL
from foreshock_service.platform.database.engine import parse_database_url
from foreshock_service.platform.database.only_service import only_service
from foreshock_service.platform.database.opening import prepare_database
from foreshock_service.platform.database.session import Database
from foreshock_service.platform.garbage_collection import spare_collections
from foreshock_service.platform.keys.service import Scope, create_key, describe, keys_exist, was_ever_a_secret
from foreshock_service.platform.logs.formatting import log_configuration
from foreshock_service.platform.parent_process import end_with_parent
from foreshock_service.platform.settings import Settings, load_settings
from foreshock_service.platform.start_names import name_this_start
from foreshock_service.platform.store.opening import open_store

_PORT_SECONDS = 2.0
"""The processes of a service that was killed end, and free its port, a moment after it."""


def serve() -> None:
    """Serve until interrupted.

    Raises ConfigurationError for settings that contradict each other, and for a database or a store that is not usable.
    """
    settings = load_settings()
    for name, value in settings.printable().items():
        print(f"{name}={value}")
    check_processes(settings)
    # First: a service that cannot have its port makes no database and no folder.
    with bound_socket(settings.host, settings.port) as bound:
        prepare_database(settings.database_url, upgrade_older=settings.upgrade_at_start)
        with only_service(settings.database_url):
            check_store(settings)
            prepare_keys(settings)
            name_this_start()
            print(f"Foreshock listens on http://{settings.host}:{settings.port}", flush=True)
            _run(settings, bound)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket for the address; it listens from when the application has started.

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
    bound.set_inheritable(True)
    return bound


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigurationError:
    help_of = {
        errno.EADDRINUSE: f"another program listens on port {port}, perhaps another service: stop it, or take another "
        "port with --port or FORESHOCK_PORT",
        errno.EACCES: "this user may not have this port: take one above 1023 with --port or FORESHOCK_PORT",
    }
    advice = help_of.get(error.errno or 0, f"{error.strerror}: FORESHOCK_HOST must be an address of this machine")
    return ConfigurationError(f"cannot listen on {host}:{port}: {advice}")


def _run(settings: Settings, bound: socket.socket) -> None:
    """Run uvicorn until a signal ends it, and end this process with status 0."""
    # uvicorn raises the signal again once it has stopped, for whoever handled it before.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit)
    config = uvicorn.Config(
        "foreshock_service.serving:application",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=settings.processes,
        http=PROTOCOL,
        log_config=log_configuration(settings.log_format, settings.log_level),
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_seconds),
    )
    if settings.processes > 1:
        _Processes(config, sockets=[bound]).run()
    else:
        server = uvicorn.Server(config)
        server.run(sockets=[bound])
        if not server.started:
            raise SystemExit(STARTUP_FAILURE)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


class _Processes(Multiprocess):
    """The service's processes. A second signal while they stop is passed on to them."""

    def join_all(self) -> None:
        """Wait until every process has ended."""
        self.signal_queue.clear()
        while any(each.process.is_alive() for each in self.processes):
            if self.signal_queue:
                self.signal_queue.clear()
                for each in self.processes:
                    if each.process.is_alive():
                        each.process.terminate()
            for each in self.processes:
                each.process.join(0.1)


def _make_bootstrap_key(session: Session, secret: str) -> None:
    # A secret that was rotated away must not become a key again.
    if not was_ever_a_secret(session, secret):
        key = create_key(session, secret, "bootstrap", None, {Scope.ADMIN})
        record(session, BY_SERVICE, "key.create", key.id, after=describe(key))


def application() -> FastAPI:
    """Return the application for the environment's settings; each uvicorn process makes one."""
    # Not before: a refused start, and the process that supervises several, do without its second of imports.
    from foreshock_service.app import create_app

    end_with_parent()
    made = create_app(load_settings())
    spare_collections()
    return made


def check_processes(settings: Settings) -> None:
    """Raise ConfigurationError if several processes would write to one SQLite file."""
    if settings.processes > 1 and parse_database_url(settings.database_url).get_backend_name() == "sqlite":
        raise ConfigurationError(
            f"FORESHOCK_PROCESSES={settings.processes} needs PostgreSQL (FORESHOCK_DATABASE_URL=postgresql://…): "
            "SQLite has one writer"
        )


def check_store(settings: Settings) -> None:
    """Raise ConfigurationError if no file can be written to the token store."""
    store = open_store(settings)
    try:
        store.check_writable()
    except OSError as error:
        raise ConfigurationError(
            f"the token store {settings.store_url} cannot be written ({error.strerror or error}): give this user write "
            "access to it, or set FORESHOCK_STORE_URL to another place"
        ) from None
    finally:
        store.close()


def prepare_keys(settings: Settings) -> None:
    """Store the bootstrap key, if one is set; raises ConfigurationError for an open port that no key guards."""
    database = Database(settings.database_url)
    try:
        if settings.bootstrap_key is not None:
            secret = settings.bootstrap_key.get_secret_value()
            database.write(lambda session: _make_bootstrap_key(session, secret))
        with database.read() as session:
            guarded = keys_exist(session)
    finally:
        database.close()
    if not guarded and not settings.binds_loopback_only:
        raise ConfigurationError(
            f"FORESHOCK_HOST={settings.host} is open to other machines and there is no API key: "
            "make a key first (`foreshock keys create NAME`), or set FORESHOCK_BOOTSTRAP_KEY, or bind 127.0.0.1"
        )
