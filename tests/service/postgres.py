"""A PostgreSQL cluster for tests and benchmarks, started from the machine's programs in a temporary folder."""

import getpass
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from psycopg import sql

_INSTALL = "PostgreSQL's programs (initdb, postgres) are missing: apt-get install postgresql"


class PostgresCluster:
    """A running cluster; `new_database()` gives the URL of a fresh database.

    It does not sync to the disk, unless it is `durable` as one in production: a benchmark needs that, a test does not.
    """

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        self._folder = folder
        self._account = _unprivileged_account()
        self._numbers = itertools.count(1)
        programs = find_programs()
        if self._account is not None:
            shutil.chown(folder, self._account)
        data = folder / "data"
        choices = ["-U", "foreshock", "--auth=trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        self._run([programs / "initdb", "-D", data, *choices])
        options = ["max_connections=200"]
        if not durable:
            options += ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        self._command: list[str | Path] = [programs / "postgres", "-D", data, "-k", folder, "-h", ""]
        for option in options:
            self._command += ["-c", option]
        self._log = (folder / "log").open("wb")
        self.start()

    def start(self) -> None:
        """Start the server, which does not run, and wait until it answers."""
        self._server = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, cwd=self._folder, user=self._account
        )
        self._wait()

    def url(self, name: str) -> str:
        """Return the URL of one of its databases, over the Unix socket."""
        return f"postgresql://foreshock@/{name}?host={self._folder}"

    def new_database(self) -> str:
        """Return the URL of a new, empty database."""
        name = f"foreshock_{next(self._numbers)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.url(name)

    def new_role(self, name: str, password: str) -> None:
        """Make a role that may only connect, with this password."""
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
            connection.execute(statement.format(sql.Identifier(name), sql.Literal(password)))
            rules = self._folder / "data" / "pg_hba.conf"
            # The first line that matches counts.
            rules.write_text(f"local all {name} scram-sha-256\n{rules.read_text()}")
            connection.execute("SELECT pg_reload_conf()")

    def empty(self, url: str, tables: Iterable[str]) -> None:
        """Delete every row; much faster than a new database for each test."""
        with psycopg.connect(url) as connection:
            # Without checks of foreign keys.
            connection.execute("SET session_replication_role = replica")
            deletions = [sql.SQL("DELETE FROM {}").format(sql.Identifier(table)) for table in tables]
            connection.execute(sql.SQL(";").join(deletions))

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop every process of the cluster without ending one, as a hanging disk does."""
        server = psutil.Process(self._server.pid)
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def crash(self) -> None:
        """End the server at once, as a crash does: it recovers from its log at the next start."""
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(timeout=120)

    def stop(self) -> None:
        """Stop the cluster without a checkpoint and remove its files."""
        self.crash()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, command: list[object]) -> None:
        done = subprocess.run(
            [str(part) for part in command], cwd=self._folder, user=self._account, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed: {done.stderr}")

    def _wait(self) -> None:
        deadline = time.monotonic() + 240
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                if self._server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.05)


def start_postgres() -> PostgresCluster:
    """Start a cluster; skip the test if PostgreSQL is not installed, fail in CI."""
    try:
        find_programs()
    except FileNotFoundError:
        if os.environ.get("CI"):
            pytest.fail(_INSTALL)
        pytest.skip(_INSTALL)
    # A short path: the name of a Unix socket has at most 107 bytes.
    return PostgresCluster(Path(tempfile.mkdtemp(prefix="fsk-pg-", dir="/tmp")))


def find_programs() -> Path:
    found = shutil.which("initdb")
    if found is not None and shutil.which("postgres") is not None:
        return Path(found).resolve().parent
    for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True):
        if (folder / "initdb").exists() and (folder / "postgres").exists():
            return folder
    raise FileNotFoundError(_INSTALL)


def _unprivileged_account() -> str | None:
    """Return the account to run it as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise RuntimeError(f"PostgreSQL refuses to run as {getpass.getuser()} and there is no other account")
